"""What a run needs, before anything runs: parameters, memory per GPU, tokens, hours, disk. Pure arithmetic, no torch.

Memory is the worst case (every sequence at its bound); hours are an expectation (EXPECTED_*). How the trainers hold things
(training/runs.py): weights in float32, trained under bfloat16 autocast with gradient checkpointing on a GPU; float32 throughout, without
checkpointing, on the CPU. TRL's loss head never holds more logits than one tile, whatever the vocabulary. Bytes per token of a layer were
measured with saved-tensor hooks on Qwen3 (transformers 5.17); tests/worker/test_planning.py compares the whole with real steps.

Peak speeds are the makers' (dense bfloat16); the share of them that is reached (MFU) is assumed: `machine.mfu`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parallel_r1.config import (
    EvaluateConfig,
    HubSource,
    MachineConfig,
    PipelineConfig,
    RlConfig,
    RolloutConfig,
    ScratchStudent,
    ServedTeacher,
    SftConfig,
    Source,
)
from parallel_r1.markup import TAGS

GB = 1e9
EXPECTED_RESPONSE = 0.5
"""Share of the response budget that a rollout is expected to take."""
EXPECTED_EXAMPLE = 0.25
"""Share of sft.max_tokens that an example is expected to have."""
EXPECTED_PROMPT = 256
DECODING_BANDWIDTH = 0.5
"""Share of the memory's speed that sampling reaches."""
ENGINE_SHARE = 0.5
"""Share of a GPU that vLLM beside the trainer takes (rollout/vllm_engine.py)."""
SERVER_SHARE = 0.9
"""Share of a GPU that vLLM takes where it is alone: its own default."""
ENGINE_OVERHEAD = 2 * GB
"""Activations and CUDA graphs of vLLM."""
CPU_KV_CACHE = 1.074 * GB
"""VLLM_CPU_KVCACHE_SPACE=1, in GiB."""
CONTEXT = 1.5 * GB
"""CUDA context, NCCL buffers and libraries of a process."""
SAFE = 0.95
"""Share of the memory that may be planned for: the allocator's blocks don't fit together perfectly."""
LOSS_TILE = (4096, 32_768)
"""Tokens and vocabulary of one tile of TRL's loss head (trl/kernels/chunked_logprob.py)."""
LORA_RANK = 16
"""Rank of the adapters that a plan advises: the config's default."""
ROWS = {
    "gsm8k": 7473, "dapo": 17_398, "dapo_processed": 14_116, "math_train": 7500, "math500": 500, "amc23": 40, "aime24": 30, "aime25": 30,
}  # fmt: skip
"""Problems of the known data sets, before cleaning; `dapo` as it is unique."""


class PlanError(ValueError):
    """A plan can't be made: says what is missing and how to give it."""


# --- the model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A dense decoder of the Qwen3 or Llama kind."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool
    query_norm: bool = True
    bias: bool = False
    tokens: int = 0
    """Tokens of the tokenizer without the six tags; rows beyond them are spare."""

    @classmethod
    def of_folder(cls, folder: Path) -> Architecture:
        """From a checkpoint's config.json."""
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if (kind := raw.get("model_type")) not in ("qwen3", "qwen2", "llama"):
            raise PlanError(f"{folder}/config.json: model_type {kind!r}: plans know qwen3, qwen2 and llama")
        return cls(
            vocabulary=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            intermediate=raw["intermediate_size"],
            tied=raw.get("tie_word_embeddings", False),
            query_norm=kind == "qwen3",
            bias=kind == "qwen2",
            tokens=_tokens(folder / "tokenizer.json"),
        )

    @classmethod
    def of_scratch(cls, student: ScratchStudent) -> Architecture:
        """The small Qwen3 of `student: {type: scratch}`; its vocabulary is an upper bound."""
        return cls(
            student.vocab_size, student.hidden_size, student.num_layers, student.num_heads, student.num_kv_heads, student.head_dim,
            student.intermediate_size, tied=True, tokens=student.vocab_size,
        )  # fmt: skip

    @property
    def with_tags(self) -> Architecture:
        """The same with rows for the tags, as parallel_r1/student.py adds them: spare rows are used first."""
        return replace(self, vocabulary=max(self.vocabulary, self.tokens + len(TAGS)))

    @property
    def query(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * (self.query + self.key)
        biases = (self.query + 2 * self.key) * self.bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.query_norm
        return attention + biases + norms + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All parameters, exactly."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.layers * self.layer_parameters + self.hidden

    def adapter_parameters(self, rank: int, layers: str | Sequence[str] = "all-linear") -> int:
        """Parameters of LoRA adapters on the named linear layers, and of the tags' trained rows."""
        attention, mlp = ("q_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
        widths = dict.fromkeys(attention, self.hidden + self.query) | dict.fromkeys(("k_proj", "v_proj"), self.hidden + self.key)
        widths |= dict.fromkeys(mlp, self.hidden + self.intermediate)
        adapted = sum(width for name, width in widths.items() if layers == "all-linear" or name in layers)
        return self.layers * rank * adapted + len(TAGS) * self.hidden * (1 if self.tied else 2)

    @property
    def kv_per_token(self) -> int:
        """Values in the key-value cache per token."""
        return 2 * self.layers * self.key

    def forward_flops(self, length: float) -> float:
        """Of one token in a sequence of so many: matrices, and attention to half of the sequence."""
        matrices = self.layers * self.layer_parameters + self.vocabulary * self.hidden
        return 2 * matrices + 2 * self.layers * self.query * length


def _tokens(tokenizer: Path) -> int:
    """Tokens of a tokenizer, the six tags not counted; 0 where there is none of this format."""
    if not tokenizer.exists():
        return 0
    raw = json.loads(tokenizer.read_text(encoding="utf-8"))
    words = set(raw["model"].get("vocab", ())) | {token["content"] for token in raw.get("added_tokens", ())}
    return len(words - set(TAGS))


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> Architecture:
    return Architecture(151_936, hidden, layers, heads, 8, 128, intermediate, tied, tokens=151_669)


KNOWN = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12_288, False),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": _qwen3(4096, 36, 32, 12_288, False),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17_408, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25_600, False),
}
"""Shapes of the dense Qwen3 models (their config.json); `-Base`, `-Instruct-2507` and so on have the same."""


def architecture_of(config: PipelineConfig) -> Architecture:
    """The student's, with the tags. Raises PlanError for a hub model of unknown shape."""
    if isinstance(config.student, ScratchStudent):
        return Architecture.of_scratch(config.student).with_tags
    name = config.student.name
    if found := shape_of(name):
        return found.with_tags
    known = ", ".join(KNOWN)
    raise PlanError(f"student.name = {name!r}: no folder with a config.json, and not one of {known}. Download it, or name a folder")


def shape_of(name: str) -> Architecture | None:
    """Of a folder, or of a known model of the hub; None for others."""
    if (Path(name) / "config.json").exists():
        return Architecture.of_folder(Path(name))
    return next((shape for known, shape in KNOWN.items() if name == known or name.startswith(f"{known}-")), None)


# --- the machine ----------------------------------------------------------------------------------------------------------

GPUS = {
    "A100": (85.5, 312, 2.04), "H100": (85.5, 989, 3.35), "H200": (150.7, 989, 4.8), "B200": (192.2, 2250, 8.0), "L40S": (48.3, 362, 0.864),
}  # fmt: skip
"""Memory in GB as nvidia-smi shows it (80 "GB" are GiB), peak in TFLOP/s (dense bfloat16) and memory speed in TB/s: NVIDIA's data sheets,
SXM with 80 GB where there are several."""


@dataclass(frozen=True)
class Machine:
    """What there is to run on."""

    gpus: int
    """0: the CPU."""
    memory: float
    """Bytes per GPU, or of the CPU."""
    tflops: float | None = None
    bandwidth: float | None = None
    price_per_hour: float = 0.0
    """Of the whole machine."""
    mfu: float = MachineConfig.model_fields["mfu"].default

    @classmethod
    def of(cls, config: MachineConfig) -> Machine:
        """As the config says."""
        memory, tflops, bandwidth = GPUS[config.gpu] if config.gpu else (None, None, None)
        memory = config.memory_gb or memory
        if memory is None:
            raise PlanError(f"machine: memory_gb is missing; or name the gpu: {', '.join(GPUS)}")
        price = config.price_per_hour * max(1, config.gpus)
        return cls(config.gpus, memory * GB, config.tflops or tflops, config.bandwidth_tb or bandwidth, price, config.mfu)

    @property
    def on_gpu(self) -> bool:
        """Whether it has any."""
        return self.gpus > 0

    @property
    def unit(self) -> str:
        """What memory is counted by."""
        return "GPU" if self.on_gpu else "machine"


# --- a stage --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StagePlan:
    """What one stage needs."""

    title: str
    processes: int
    trained: int
    """Parameters that learn; 0 where nothing does."""
    moments: dict[str, dict[str, float]]
    """By moment (`training`, `sampling`): bytes per GPU, by what holds them."""
    tokens_per_step: float | None = None
    steps: int | None = None
    seconds: float | None = None
    disk: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def peak(self) -> float:
        """Bytes per GPU at the worst moment."""
        return max((sum(parts.values()) for parts in self.moments.values()), default=0.0)


@dataclass(frozen=True)
class Training:
    """How a stage trains: what memory depends on."""

    batch: int
    """Sequences per step over all processes."""
    micro_batch: int
    length: int
    """Tokens of the longest sequence as it is scored."""
    masked: bool
    """Whether attention gets a mask of its own."""
    processes: int = 1
    strategy: str = "ddp"
    adapters: int | None = None
    """Parameters of LoRA adapters; None: all weights are trained."""
    reference: bool = False
    """Whether a second model stays beside the trained one."""
    checkpoints: int = 0
    """How many there are at most, one that is being written among them."""

    @property
    def shards(self) -> int:
        """Among how many GPUs weights, gradients and optimiser are shared."""
        return 1 if self.strategy == "ddp" else self.processes


def training_memory(model: Architecture, training: Training, on_gpu: bool) -> dict[str, float]:
    """Bytes per process at the worst moment of a step, by what holds them."""
    weights = 4 * model.parameters
    trained = 4 * _trained_parameters(model, training)
    tokens = training.micro_batch * training.length
    frozen = weights * ((training.adapters is not None) + training.reference)
    parts = {
        "weights": (frozen + trained) / training.shards,
        "gradients": trained / training.shards,
        "optimiser": 2 * trained / training.shards,
        "activations": _activations(model, tokens, training, on_gpu),
        "loss head": _loss_head(model, tokens, on_gpu),
    }
    return parts | ({"bfloat16 copies": _copies(model, training), "CUDA, NCCL": CONTEXT} if on_gpu else {})


def _trained_parameters(model: Architecture, training: Training) -> int:
    return model.parameters if training.adapters is None else training.adapters


def _copies(model: Architecture, training: Training) -> float:
    """Of all weights while autocast is entered; where they are shared, of the layers and tables that are gathered just now."""
    if training.shards == 1:
        return 2 * model.parameters
    return 2 * (2 * model.layer_parameters + model.vocabulary * model.hidden)


def _activations(model: Architecture, tokens: int, training: Training, on_gpu: bool) -> float:
    """Of a forward pass, kept for the backward pass; with checkpointing the inputs of the layers, and all of one layer at a time."""
    mask = tokens * training.length * (3 if on_gpu else 1) if training.masked else 0
    repeated = 4 * (model.query - model.key) * training.masked  # keys and values of every head, where the mask forbids grouped ones
    if on_gpu:
        layer = 28 * model.hidden + 8 * model.intermediate + 10 * (model.query + model.key) + repeated
        working = 12 * model.intermediate + 8 * model.hidden  # gradients inside the layer
        return mask + tokens * (4 * model.hidden * model.layers + layer + working + 8 * model.hidden)
    layer = 28 * model.hidden + 16 * model.intermediate + 16 * (model.query + model.key) + 2 * repeated
    return mask + tokens * (layer * model.layers + 12 * model.intermediate + 16 * model.hidden)


def _loss_head(model: Architecture, tokens: int, on_gpu: bool) -> float:
    rows, columns = min(tokens, LOSS_TILE[0]), min(model.vocabulary, LOSS_TILE[1])
    tile = rows * columns * (2 if on_gpu else 4 * 5)  # without Triton, softmax and gradient are tensors of their own
    return tile + 4 * model.vocabulary * model.hidden + 12 * tokens * model.hidden


def sampling_memory(model: Architecture, rollout: RolloutConfig, machine: Machine) -> tuple[dict[str, float], int]:
    """Bytes of the engine in process, and how many tokens its key-value cache holds."""
    if rollout.engine == "http":
        return {}, 0
    size = 2 if machine.on_gpu else 4
    weights, per_token = float(size * model.parameters), size * model.kv_per_token
    if rollout.engine == "transformers":  # its cache grows with what is sampled
        tokens = rollout.max_in_flight * (rollout.max_prompt_tokens + rollout.max_response_tokens)
        return {"engine weights": weights, "KV cache": float(tokens * per_token)}, tokens
    if not machine.on_gpu:
        return {"engine weights": weights, "KV cache": CPU_KV_CACHE}, int(CPU_KV_CACHE / per_token)
    cache = max(0.0, ENGINE_SHARE * machine.memory - weights - ENGINE_OVERHEAD)
    return {"engine weights": weights, "KV cache": cache, "engine activations": ENGINE_OVERHEAD}, int(cache / per_token)


# --- time -----------------------------------------------------------------------------------------------------------------


def training_seconds(model: Architecture, tokens: float, length: float, gpus: int, machine: Machine) -> float | None:
    """Forward and backward over so many tokens on so many GPUs."""
    if machine.tflops is None:
        return None
    return 3 * tokens * model.forward_flops(length) / (machine.tflops * 1e12 * machine.mfu * gpus)


def sampling_seconds(
    model: Architecture, responses: int, length: float, rollout: RolloutConfig, gpus: int, machine: Machine
) -> float | None:
    """Sampling so many responses of so many tokens: each step reads the weights and the cache of those in flight."""
    if machine.bandwidth is None or rollout.engine == "http":
        return None
    _, cached = sampling_memory(model, rollout, machine)
    context = EXPECTED_PROMPT + length / 2
    in_flight = max(1.0, min(rollout.max_in_flight, cached / context, responses / gpus))
    step = (2 * model.parameters + in_flight * context * 2 * model.kv_per_token) / (machine.bandwidth * 1e12 * DECODING_BANDWIDTH)
    return responses * length / gpus / in_flight * step


def _sum(*seconds: float | None) -> float | None:
    return None if None in seconds else math.fsum(value for value in seconds if value is not None)


# --- the stages of a run --------------------------------------------------------------------------------------------------


def plan(config: PipelineConfig, machine: Machine) -> list[StagePlan]:
    """Every stage of a run that needs a model, in order. Raises PlanError."""
    model = architecture_of(config)
    stages = [_base(model, config, machine), *_generate(config, machine)]
    if config.sft:
        stages.append(_sft(model, config, config.sft, machine))
    stages += [_rl(model, stage, index, machine) for index, stage in enumerate(config.rl)]
    return [*stages, _evaluate(model, config, machine)]


def _base(model: Architecture, config: PipelineConfig, machine: Machine) -> StagePlan:
    student = config.student
    if not isinstance(student, ScratchStudent):
        loaded = {"loading": {"weights": (2.0 if machine.on_gpu else 4.0) * model.parameters}}
        return StagePlan("base", 1, 0, loaded, disk=2 * model.parameters)
    length = min(student.max_position, 128)  # what procedural problems and their solutions take
    training = Training(student.batch_size, student.batch_size, length, masked=False, checkpoints=3)
    return _trained("base", "student", model, training, length, student.steps, None, machine)


def _generate(config: PipelineConfig, machine: Machine) -> Iterator[StagePlan]:
    """The server of a teacher that the stage serves itself, where its shape is known."""
    teacher = config.generate.teacher if config.generate else None
    if not isinstance(teacher, ServedTeacher) or (model := shape_of(teacher.model)) is None:
        return
    weights, room = (2.0 if machine.on_gpu else 4.0) * model.parameters, SERVER_SHARE * machine.memory
    cache = max(0.0, room - weights) if machine.on_gpu else CPU_KV_CACHE
    fault = f"generate.teacher: weights of {weights / GB:.1f} GB. It would fit with type: openai and a server elsewhere"
    moments = {"serving": {"engine weights": weights, "KV cache": cache}}
    yield StagePlan("generate", 1, 0, moments, faults=[fault] if weights > room else [])


def _sft(model: Architecture, config: PipelineConfig, stage: SftConfig, machine: Machine) -> StagePlan:
    examples = trajectories(config)
    steps = math.ceil(stage.epochs * examples / stage.batch_size) if examples else None
    if stage.max_steps:
        steps = min(steps or stage.max_steps, stage.max_steps)
    structured = stage.attention == "structured"
    training = Training(stage.batch_size, stage.micro_batch_size, stage.max_tokens, structured, **_shared(model, stage, steps or 0))
    return _trained("sft", "sft", model, training, EXPECTED_EXAMPLE * stage.max_tokens, steps, None, machine)


def _rl(model: Architecture, stage: RlConfig, index: int, machine: Machine) -> StagePlan:
    rollout = stage.rollout
    batch = stage.prompts_per_step * stage.rollouts_per_prompt
    again = _scored_again(stage)
    longest = rollout.max_prompt_tokens + math.ceil(rollout.max_response_tokens * (1 + again))
    expected = EXPECTED_PROMPT + EXPECTED_RESPONSE * rollout.max_response_tokens * (1 + again / 2)
    training = Training(
        batch, stage.micro_batch_size, longest, True, **_shared(model, stage, stage.steps),
        reference=stage.kl_coefficient > 0 and stage.lora is None,
    )  # fmt: skip
    return _trained(f"rl {stage.name}", f"rl.{index}", model, training, expected, stage.steps, rollout, machine)


def _scored_again(stage: RlConfig) -> float:
    """Share of a response that may be scored in a copy of its own: the second and later paths of causal rollouts (attention.py)."""
    rollout = stage.rollout
    copies = rollout.attention == "causal" and rollout.max_blocks > 0 and stage.scoring == "exact"
    return (rollout.num_paths - 1) / rollout.num_paths if copies else 0.0


def _shared(model: Architecture, stage: SftConfig | RlConfig, steps: int) -> dict[str, Any]:
    """Of a stage's Training, what sft and rl say alike."""
    kept, lora = stage.checkpoints, stage.lora
    adapters = model.adapter_parameters(lora.r, lora.target_modules) if lora else None
    count = kept.keep_last + 1 + (steps // kept.keep_every if kept.keep_every else 0) + (kept.keep_best is not None)
    return {"processes": stage.launch.processes, "strategy": stage.launch.strategy, "adapters": adapters, "checkpoints": count}


def _trained(
    title: str, where: str, model: Architecture, training: Training, expected: float, steps: int | None, rollout: RolloutConfig | None,
    machine: Machine,
) -> StagePlan:  # fmt: skip
    """A stage that trains; with `rollout` one that samples in between."""
    moments = _moments(model, training, rollout, machine)
    tokens = training.batch * expected
    seconds = training_seconds(model, tokens, expected, training.processes, machine)
    if rollout:
        length = EXPECTED_RESPONSE * rollout.max_response_tokens
        seconds = _sum(seconds, sampling_seconds(model, training.batch, length, rollout, training.processes, machine))
    trained = _trained_parameters(model, training)
    return StagePlan(
        title, training.processes, trained, moments, tokens, steps, seconds * steps if seconds is not None and steps else None,
        disk=training.checkpoints * 12 * trained + 4 * model.parameters,
        faults=_faults(where, model, training, rollout, machine),
    )  # fmt: skip


def _moments(model: Architecture, training: Training, rollout: RolloutConfig | None, machine: Machine) -> dict[str, dict[str, float]]:
    """What a process holds while it trains, and while it samples. The trainer's state stays where it is meanwhile."""
    state = training_memory(model, training, machine.on_gpu)
    if rollout is None:
        return {"training": state}
    engine, _ = sampling_memory(model, rollout, machine)
    waiting = {name: value for name, value in state.items() if name in ("weights", "optimiser", "CUDA, NCCL")}
    asleep = engine if not machine.on_gpu else {}
    return {"training": state | asleep, "sampling": waiting | engine}


def _evaluate(model: Architecture, config: PipelineConfig, machine: Machine) -> StagePlan:
    stage = config.evaluate
    engine, cached = sampling_memory(model, stage.rollout, machine)
    responses = _evaluated(config, stage)
    length = EXPECTED_RESPONSE * stage.rollout.max_response_tokens
    seconds = sampling_seconds(model, responses, length, stage.rollout, 1, machine) if responses else None
    checkpoints = 1 + (config.sft is not None) + len(config.rl)
    moments = {"sampling": engine | ({"CUDA, NCCL": CONTEXT} if machine.on_gpu and engine else {})}
    total = None if seconds is None else seconds * checkpoints
    faults = [*_too_small_a_cache("evaluate.rollout", stage.rollout, engine, cached, machine)]
    return StagePlan(f"evaluate x{checkpoints}", 1, 0, moments, seconds=total, faults=faults)


def _evaluated(config: PipelineConfig, stage: EvaluateConfig) -> int | None:
    counts = {name: rows(config.prepare.evaluation[name]) for name in stage.sets or config.prepare.evaluation}
    if None in counts.values():
        return None
    return sum(min(count, stage.limit or count) * stage.samples_of(name) for name, count in counts.items() if count)


def rows(source: Source) -> int | None:
    """Problems of a source; None where only reading it would tell."""
    known = ROWS.get(source.preset or "") if isinstance(source, HubSource) else getattr(source, "count", None)
    limit = getattr(source, "limit", None)
    return min(known, limit) if known and limit else known or limit


def trajectories(config: PipelineConfig) -> int | None:
    """Trajectories that the teacher writes: at most so many examples for sft."""
    generate = config.generate
    if generate is None or generate.teacher.type in ("files", "hub"):
        return None
    counts = [rows(config.prepare.train[name]) for name in generate.problems]
    return generate.count or (None if None in counts else sum(count for count in counts if count))


# --- what can't fit, and what would ---------------------------------------------------------------------------------------


def _faults(where: str, model: Architecture, training: Training, rollout: RolloutConfig | None, machine: Machine) -> list[str]:
    faults = []
    if machine.on_gpu and training.processes > machine.gpus:
        faults.append(f"{where}.launch.processes = {training.processes}, but there are {machine.gpus} GPUs")
    if rollout:
        faults += _too_small_a_cache(f"{where}.rollout", rollout, *sampling_memory(model, rollout, machine), machine)
    need = _peak(model, training, rollout, machine)
    if need > SAFE * machine.memory:
        out = "; or ".join(_ways_out(where, model, training, rollout, machine)) or "no setting known here would: take a smaller model"
        there = f"of {machine.memory / GB:.1f} GB {SAFE:.0%} can be planned for"
        faults.append(f"{where}: needs {need / GB:.1f} GB per {machine.unit}, and {there}. It would fit with {out}")
    return faults


def _peak(model: Architecture, training: Training, rollout: RolloutConfig | None, machine: Machine) -> float:
    return max(sum(parts.values()) for parts in _moments(model, training, rollout, machine).values())


def _ways_out(where: str, model: Architecture, training: Training, rollout: RolloutConfig | None, machine: Machine) -> Iterator[str]:
    """Settings that would fit, the least change first."""

    def fits(change: Mapping[str, Any]) -> bool:
        changed = replace(training, **change)
        shared = changed.batch % (changed.micro_batch * changed.processes) == 0
        return shared and _peak(model, changed, rollout, machine) <= SAFE * machine.memory

    halvings = range(1, training.micro_batch.bit_length())
    smaller: list[dict[str, Any]] = [{"micro_batch": training.micro_batch >> times} for times in halvings]
    here: list[dict[str, Any]] = [{"processes": count, "strategy": "fsdp2"} for count in (machine.gpus,) if count > 1]
    more: list[dict[str, Any]] = [{"processes": count, "strategy": "fsdp2"} for count in (2, 4, 8, 16, 32, 64) if count > machine.gpus > 0]
    if found := next(filter(fits, smaller), None):
        yield _said(where, found)
    if training.strategy == "ddp" and (found := next(filter(fits, (a | b for a in here for b in ({}, *smaller))), None)):
        yield _said(where, found)
    if training.adapters is None and where != "student":
        adapters: dict[str, Any] = {"adapters": model.adapter_parameters(LORA_RANK), "reference": False}
        if found := next(filter(fits, (adapters | change for change in ({}, *smaller))), None):
            yield _said(where, found)
    if found := next(filter(fits, (a | b for a in more for b in ({}, *smaller))), None):
        yield f"{found['processes']} GPUs like this one: {_said(where, found)}"


def _said(where: str, change: Mapping[str, Any]) -> str:
    names = {"micro_batch": "micro_batch_size", "processes": "launch.processes", "strategy": "launch.strategy"}
    adapters = [f"{where}.lora.r={LORA_RANK}"] if "adapters" in change else []
    return " ".join([*adapters, *(f"{where}.{names[name]}={value}" for name, value in change.items() if name in names)])


def _too_small_a_cache(where: str, rollout: RolloutConfig, engine: Mapping[str, float], cached: int, machine: Machine) -> Iterator[str]:
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if engine and cached < longest:
        share = f"half of {machine.memory / GB:.0f} GB" if machine.on_gpu else f"{CPU_KV_CACHE / GB:.1f} GB"
        yield (
            f"{where}: vLLM's key-value cache, in {share} beside its weights, holds {cached} tokens, fewer than one sequence of {longest}. "
            f"It would fit with engine: http and a server of its own, a lower {where}.max_response_tokens, or GPUs with more memory"
        )
