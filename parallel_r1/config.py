"""The schema of a run: one class per stage; the defaults are the paper's values (arXiv 2509.07980), each field names its source.

`load(path, overrides)` reads a YAML file that holds what differs from these defaults, or from the file that it `extends`; `rl_defaults`
holds what all of its rl stages share. `${NAME}` in a value is replaced from the environment. Whatever is wrong with a file is raised as one
`ConfigError` that names the file, the field, the value and the way out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

FileContent = Annotated[str, "file content"]
"""A path or URL whose *content* identifies it: cache keys hold the digest of what lies there, never the path."""

LocalOrHub = Annotated[str, "local folder or hub id"]
"""A local folder, identified by its content, or the name of something on the hub, identified by name and revision."""

NOT_IN_KEY = {"in_key": False}
"""`json_schema_extra` of fields that say how to run, not what comes out: they never change a cache key."""

IN_KEY_WHEN_SET = {"in_key": "when set"}
"""`json_schema_extra` of fields that came later than artifacts did: part of a cache key only where they differ from their default."""

Share = Annotated[float, Field(ge=0, le=1)]
Mixture = Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)]


class Section(BaseModel):
    """A part of the config. Unknown keys are errors; values are never coerced from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


# --- problems -------------------------------------------------------------------------------------------------------------


class ProceduralSource(Section):
    """Integer-answer word problems made from a seed; `parallel_r1/procedural.py` documents what each tier demands."""

    type: Literal["procedural"] = "procedural"
    tier: int = Field(ge=1, le=3, description="difficulty: 1 small numbers, 2 one carry at least, 3 two carries at least")
    split: Literal["train", "heldout"] = Field("train", description="the two never share a combination of numbers, at any seed")
    count: int = Field(ge=1, le=100_000, description="problems to make")


class RowsSource(Section):
    """What every source of raw rows has in common: where problem and answer stand, and what is dropped (`parallel_r1/cleaning.py`)."""

    problem_column: str = Field("problem", description="column with the problem's text; a.0.b reaches into lists and structs")
    answer_column: str = Field("answer", description="column with the answer, or with a solution ending in '#### 5' or a box")
    template: str | None = Field(
        None, pattern=r"\{problem\}", description="text around every problem, {problem} in its place: taken off; verl's own are known"
    )
    script: Literal["any", "latin"] = Field("any", description="latin: drops problems of which more than a tenth is in another script")
    max_chars: int | None = Field(None, ge=1, description="drops longer problems; no bound when left out")
    limit: int | None = Field(None, ge=1, description="clean problems to take from the top; all when left out")


class FilesSource(RowsSource):
    """Problems that lie in a file, one per row: jsonl, parquet or csv; local, or s3:// and other fsspec URLs."""

    type: Literal["files"] = "files"
    path: FileContent = Field(description="file to read; ${NAME} is replaced from the environment")


PRESETS: dict[str, dict[str, str]] = {
    "gsm8k": {"name": "openai/gsm8k", "config": "main", "problem_column": "question"},
    "dapo": {
        "name": "BytedTsinghua-SIA/DAPO-Math-17k",
        "problem_column": "prompt.0.content",
        "answer_column": "reward_model.ground_truth",
    },
    "dapo_processed": {
        "name": "open-r1/DAPO-Math-17k-Processed",
        "config": "en",
        "problem_column": "prompt",
        "answer_column": "solution",
    },
    "math_train": {"name": "DigitalLearningGmbH/MATH-lighteval", "answer_column": "solution"},
    "math500": {"name": "HuggingFaceH4/MATH-500", "split": "test"},
    "amc23": {"name": "math-ai/amc23", "split": "test", "problem_column": "question"},
    "aime24": {"name": "HuggingFaceH4/aime_2024"},
    "aime25": {"name": "math-ai/aime25", "split": "test"},
}
"""Known data sets of the hub and their columns. `dapo` is the layout of verl (a chat message with a template around the problem),
`dapo_processed` the one without."""


class HubSource(RowsSource):
    """A data set on the Hugging Face hub (datasets.load_dataset), or a local folder in a hub layout."""

    type: Literal["hub"] = "hub"
    preset: Literal["gsm8k", "dapo", "dapo_processed", "math_train", "math500", "amc23", "aime24", "aime25"] | None = Field(
        None, description="a known data set: fills whatever of name, config, split and columns is left out"
    )
    name: str = Field(description="data set id, such as openai/gsm8k")
    config: str | None = Field(None, description="configuration of the data set")
    split: str = Field("train", description="split of the data set")
    revision: str | None = Field(None, description="commit to pin; the newest when left out")

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, raw: Any) -> Any:
        known = PRESETS.get(raw["preset"]) if isinstance(raw, dict) and isinstance(raw.get("preset"), str) else None
        return {**known, **raw} if known else raw


class ReasoningGymSource(Section):
    """Problems made by the package reasoning_gym (`make reasoning-gym` installs it): one of its data sets at one level."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(description="name of the data set, such as chain_sum, gcd or leg_counting")
    level: int | None = Field(None, ge=0, description="level of its curriculum, 0 the easiest; its own defaults when left out")
    parameters: dict[str, int | float | bool | str] = Field(default_factory=dict, description="further settings of the data set")
    split: Literal["train", "heldout"] = Field("train", description="the two never share a question, at any seed")
    count: int = Field(ge=1, le=100_000, description="problems to make")
    answers: Literal["integer", "short"] = Field("integer", description="answers to keep: whole numbers, or all of one short line")


Source = Annotated[ProceduralSource | FilesSource | HubSource | ReasoningGymSource, Field(discriminator="type")]


class DecontaminateConfig(Section):
    """Training problems that are a test item, or nearly (`parallel_r1/decontamination.py`): 23 of the 40 AMC23 problems lie in DAPO."""

    ngram: int = Field(13, ge=3, description="words in a row that count as a piece of a test item")
    threshold: float = Field(0.5, gt=0, le=1, description="share of a test item's pieces found in one training item that makes it a copy")
    remove: bool = Field(True, description="take copies out of the training sets; off: only report them")


class PrepareConfig(Section):
    """Named problem sets. Every set is an artifact of its own, so a change of one reruns only what reads it."""

    train: dict[str, Source] = Field(
        default_factory=lambda: {"gsm8k": HubSource(preset="gsm8k"), "dapo": HubSource(preset="dapo")},
        description="sets to learn from (paper section 4.1: GSM8K is easy, DAPO is hard)",
    )
    evaluation: dict[str, Source] = Field(
        default_factory=lambda: {
            "AIME25": HubSource(preset="aime25"),
            "AIME24": HubSource(preset="aime24"),
            "AMC23": HubSource(preset="amc23"),
            "MATH": HubSource(preset="math500"),
        },
        description="sets to be measured on (paper section 4.1)",
    )
    decontaminate: DecontaminateConfig | None = Field(
        default_factory=DecontaminateConfig,
        description="compare what is learned from with every evaluation set of the run; null: don't. Made-up sets need no comparing",
    )


# --- student --------------------------------------------------------------------------------------------------------------

PromptStyle = Literal["bare", "plain", "parallel"]
PROMPT = (
    "bare: the problem alone; plain: asks for a final answer; parallel: explains parallel thinking too, in our own words; "
    "{type: file} or {type: rows}: the wording of a published checkpoint"
)


class FilePrompt(Section):
    """A prompt's wording from a text file."""

    type: Literal["file"] = "file"
    path: FileContent = Field(description="text with {problem} where the problem stands; ${NAME} is replaced from the environment")


class RowsPrompt(Section):
    """A prompt's wording as a data set has it: what is left of its prompts when the problem is taken out."""

    type: Literal["rows"] = "rows"
    path: FileContent = Field(description="jsonl, parquet or csv; a path, or a URL such as s3:// or hf://datasets/owner/name/file.parquet")
    prompt_column: str = Field("prompt.0.content", description="column with the whole prompt; a.0.b reaches into lists and structs")
    problem_column: str = Field("problem", description="column with the problem alone")


def _kind_of_prompt(prompt: Any) -> str | None:
    return "style" if isinstance(prompt, str) else prompt.get("type") if isinstance(prompt, dict) else getattr(prompt, "type", None)


Prompt = Annotated[
    Annotated[PromptStyle, Tag("style")] | Annotated[FilePrompt, Tag("file")] | Annotated[RowsPrompt, Tag("rows")],
    Discriminator(_kind_of_prompt),
]


class OptimizerConfig(Section):
    """AdamW with a schedule (paper, appendix: hyper-parameters)."""

    learning_rate: float = Field(1e-5, gt=0, le=1, description="peak learning rate; paper: 1e-5 for sft")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay; released code: 0.01")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1; released code: 0.9")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta 2; released code: 0.95")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient norm clip; released code: 1.0")
    schedule: Literal["constant", "cosine"] = Field("cosine", description="after warm-up: flat, or a cosine to min_lr_ratio")
    warmup_ratio: Share = Field(0.1, description="share of the steps that warm up linearly; released code: 0.1")
    min_lr_ratio: Share = Field(0.0, description="the cosine ends at this share of the peak")


class ScratchStudent(Section):
    """A small Qwen3-architecture model with its own tokenizer, trained on sequential solutions: a base model without blocks.

    Sizes and rates: measured on one CPU core (README, 'The embedded default').
    """

    type: Literal["scratch"] = "scratch"
    hidden_size: int = Field(128, ge=32, multiple_of=8, description="width of the residual stream")
    num_layers: int = Field(2, ge=1, description="transformer blocks")
    num_heads: int = Field(4, ge=1, description="attention heads")
    num_kv_heads: int = Field(1, ge=1, description="key / value heads")
    head_dim: Literal[32, 64, 128] = Field(32, description="width of a head; vLLM's CPU attention takes 32, 64 or 128")
    intermediate_size: int = Field(512, ge=32, description="width of the MLP")
    max_position: int = Field(4096, ge=256, description="longest sequence in tokens")
    init_std: float = Field(0.1, gt=0, description="standard deviation of the starting weights")
    vocab_size: int = Field(512, ge=300, description="upper bound of the byte-level BPE vocabulary, tags not counted")
    problems: Mixture = Field(description="training sets and their weights")
    examples: int = Field(13_600, ge=1, description="sequential solutions to train on, one pass")
    batch_size: int = Field(16, ge=1, description="solutions per step")
    optimizer: OptimizerConfig = Field(
        default_factory=lambda: OptimizerConfig(learning_rate=4e-3, weight_decay=0, beta2=0.98, warmup_ratio=0.07, min_lr_ratio=0.1)
    )
    checkpoint_every: int = Field(200, ge=1, description="steps between checkpoints", json_schema_extra=NOT_IN_KEY)

    @property
    def steps(self) -> int:
        """Optimiser steps: one pass over `examples`."""
        return max(1, self.examples // self.batch_size)


class HubStudent(Section):
    """Any causal checkpoint: a hub id or a local folder. The six tags are added as plain single tokens."""

    type: Literal["hub"] = "hub"
    name: LocalOrHub = Field("Qwen/Qwen3-4B-Base", description="hub id or folder (paper: Qwen3-4B-Base)")
    revision: str | None = Field(None, description="commit to pin; the newest when left out")
    trust_remote_code: bool = Field(False, description="run model code that comes with the checkpoint: off unless you trust it")


Student = Annotated[ScratchStudent | HubStudent, Field(discriminator="type")]


# --- teacher --------------------------------------------------------------------------------------------------------------


class ScriptedTeacher(Section):
    """A program that solves procedural problems by two right methods and makes realistic faults at set rates.

    It stands in for a strong model where none can be reached; it is not one, and every artifact says so.
    """

    type: Literal["scripted"] = "scripted"
    parallel_share: Share = Field(0.95, description="share of trajectories with a block")
    lead_share: Share = Field(0.4, description="share that writes a line before the block")
    slip_rate: Share = Field(0.05, description="chance per path of one arithmetic slip, carried on")
    fault_rate: Share = Field(0.15, description="share with broken markup, a wrong answer or a cut: each kind equally often")


class FilesTeacher(Section):
    """Trajectories that exist already: jsonl or parquet (local or fsspec URL) with problem, answer and text."""

    type: Literal["files"] = "files"
    path: FileContent = Field(description="file to read; ${NAME} is replaced from the environment")
    problem_column: str = Field("problem", description="column with the problem's text; a.0.b reaches into lists and structs")
    answer_column: str = Field("answer", description="column with the right answer")
    text_column: str = Field("text", description="column with the teacher's trajectory")


class HubTeacher(Section):
    """Trajectories that exist already as a hub data set, such as the published cold-start set."""

    type: Literal["hub"] = "hub"
    name: str = Field(description="data set id")
    split: str = Field("train", description="split of the data set")
    revision: str | None = Field(None, description="commit to pin; the newest when left out")
    problem_column: str = Field("problem", description="column with the problem's text; a.0.b reaches into lists and structs")
    answer_column: str = Field("answer", description="column with the right answer")
    text_column: str = Field("text", description="column with the teacher's trajectory")


TeacherPrompt = Annotated[
    Annotated[Literal["teacher", PromptStyle], Tag("style")] | Annotated[FilePrompt, Tag("file")] | Annotated[RowsPrompt, Tag("rows")],
    Discriminator(_kind_of_prompt),
]


class AskedTeacher(Section):
    """A model that writes over HTTP. The thinking part of an answer is dropped (paper section 3.1)."""

    prompt: TeacherPrompt = Field(
        "teacher",
        description="teacher: asks a strong model for the form, zero-shot (paper section 3.1); or a student's prompt, if a teacher knows "
        "the form: bare, plain, parallel, a file, rows",
        json_schema_extra=IN_KEY_WHEN_SET,
    )
    temperature: float = Field(0.6, ge=0, le=2, description="sampling temperature; the model's card advises 0.6")
    max_tokens: int = Field(8192, ge=16, description="tokens per answer, thinking included")
    samples: int = Field(
        1, ge=1, le=64, description="answers per request; the first that is accepted is kept (paper: 1)", json_schema_extra=IN_KEY_WHEN_SET
    )
    attempts: int = Field(
        1,
        ge=1,
        description="requests per problem, until an answer is well-formed and right; the last stays if none is (paper: 1)",
        json_schema_extra=IN_KEY_WHEN_SET,
    )
    concurrency: int = Field(64, ge=1, description="requests in flight", json_schema_extra=NOT_IN_KEY)
    timeout_seconds: float = Field(600, gt=0, description="per request", json_schema_extra=NOT_IN_KEY)
    max_retries: int = Field(5, ge=0, description="per request, with backoff", json_schema_extra=NOT_IN_KEY)


class OpenAITeacher(AskedTeacher):
    """Any OpenAI-compatible endpoint, e.g. a vLLM server that runs already."""

    type: Literal["openai"] = "openai"
    base_url: str = Field("http://127.0.0.1:8000/v1", description="endpoint, ending in /v1")
    model: str = Field("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", description="model to ask (paper section 3.1)")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key; unset means no key")
    requests_per_minute: float | None = Field(None, gt=0, description="sent at most; no bound when left out", json_schema_extra=NOT_IN_KEY)
    tokens_per_minute: float | None = Field(
        None, gt=0, description="prompt and answer tokens at most, on average; no bound when left out", json_schema_extra=NOT_IN_KEY
    )
    prompt_price: float = Field(0.0, ge=0, description="price of a million prompt tokens, any currency", json_schema_extra=IN_KEY_WHEN_SET)
    completion_price: float = Field(0.0, ge=0, description="price of a million answer tokens", json_schema_extra=IN_KEY_WHEN_SET)
    max_cost: float | None = Field(
        None,
        gt=0,
        description="asks no more before new answers cost more than that; what was bought is kept",
        json_schema_extra=IN_KEY_WHEN_SET,
    )

    @model_validator(mode="after")
    def _limit_has_prices(self) -> OpenAITeacher:
        if self.max_cost is not None and not (self.prompt_price or self.completion_price):
            raise ValueError(f"max_cost {self.max_cost}: nothing is known of prices; set prompt_price and completion_price too")
        return self


class ServedTeacher(AskedTeacher):
    """A checkpoint that the stage serves itself: it starts a vLLM server in the worker environment, asks it, and ends it."""

    type: Literal["served"] = "served"
    model: LocalOrHub = Field("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", description="hub id or folder (paper section 3.1)")
    revision: str | None = Field(None, description="commit to pin; the newest when left out")
    max_prompt_tokens: int = Field(2000, ge=1, description="room for the prompt beside max_tokens")


Teacher = Annotated[ScriptedTeacher | FilesTeacher | HubTeacher | OpenAITeacher | ServedTeacher, Field(discriminator="type")]


class GenerateConfig(Section):
    """The teacher writes one trajectory per problem (paper section 3.1)."""

    problems: Mixture = Field(
        default_factory=lambda: {"gsm8k": 1.0}, description="training sets and their weights; unused by files and hub"
    )
    count: int | None = Field(None, ge=1, description="problems to draw; every problem of the sets when left out (paper: 7,473)")
    teacher: Teacher = Field(default_factory=OpenAITeacher, description="who writes")


class FilterConfig(Section):
    """What of the teacher's work the student learns from (paper section 3.1, Algorithm 1)."""

    markup: bool = Field(True, description="drop trajectories with faulty markup (paper: on)")
    answer: bool = Field(True, description="drop trajectories with a wrong final answer (released code: off)")
    max_chars: int | None = Field(None, ge=1, description="drop longer trajectories; no bound when left out")


# --- training -------------------------------------------------------------------------------------------------------------


class LaunchConfig(Section):
    """How a training stage is started (docs/distributed.md). Part of no cache key: processes share the work of the same batch, and the
    losses are those of one process up to the order of float sums."""

    processes: int = Field(1, ge=1, description="training processes over all machines, one per GPU; more than one: accelerate launch")
    strategy: Literal["ddp", "fsdp2", "zero3"] = Field(
        "ddp", description="ddp: every GPU holds the model; fsdp2, zero3: GPUs share weights, gradients and optimiser's state"
    )
    machines: int = Field(1, ge=1, description="machines with equally many processes; they share the state folder")
    main_address: str | None = Field(None, description="of several machines: host name or address of the one where they meet")
    main_port: int = Field(29500, ge=1024, le=65535, description="of several machines: port where they meet")
    prefix: list[str] = Field(
        default_factory=list, description="what runs the same command on every machine, such as [srun, --nodes=2, --ntasks-per-node=1]"
    )
    collective_minutes: float = Field(
        10, gt=0, description="processes that wait so long for another one fail; more than their rollouts can differ in time"
    )

    @model_validator(mode="after")
    def _machines_can_meet(self) -> LaunchConfig:
        if self.processes % self.machines:
            raise ValueError(f"processes {self.processes} can't be shared equally by machines {self.machines}")
        if self.machines > 1 and not (self.main_address and self.prefix):
            raise ValueError(f"machines {self.machines} need main_address, where they meet, and prefix, which starts the command on each")
        return self


class CheckpointConfig(Section):
    """Which checkpoints are kept while a stage trains. The newest always is, and one that is being uploaded."""

    keep_last: int = Field(2, ge=1, description="the newest so many")
    keep_every: int | None = Field(None, ge=1, description="and those of every so many steps, to be looked at; none when left out")
    keep_best: str | None = Field(None, description="and the one with the best value of this metric, such as reward; none when left out")
    best: Literal["highest", "lowest"] = Field("highest", description="which value of keep_best is the best")
    upload: Literal["remote", "always", "never"] = Field(
        "remote",
        description="copies in the store, made while training goes on, to go on elsewhere: where the store is remote, always, "
        "or never. Those of keep_every and keep_best stay there when the stage is done",
    )


class LoraConfig(Section):
    """Low-rank adapters in place of full fine-tuning (peft), merged into the checkpoint at the end of the stage. The rows of the six tags
    are trained themselves."""

    r: int = Field(16, ge=1, description="rank of the adapters; TRL's default")
    alpha: int = Field(32, ge=1, description="an adapter's output is scaled by alpha / r; TRL's default")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapters; rl takes 0 alone, as it trains what it samples")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="names of the layers that get one, such as [q_proj, v_proj]; all-linear: each but the output table"
    )


LORA = "train low-rank adapters and merge them at the end of the stage; null: train all weights (paper)"


Attention = Literal["causal", "structured"]
LAUNCH = "processes of this stage; what is left out is as in `launch` at the top of the file"
ATTENTION = (
    "causal (Seen): a plain model; structured (Unseen): paths can't see each other and share positions. Set it at the top of the file"
)


class SftConfig(Section):
    """Cold start: the student learns the form from the filtered trajectories (paper section 3.2)."""

    attention: Attention = Field("causal", description=ATTENTION)
    prompt: Prompt = Field("parallel", description=PROMPT)
    epochs: float = Field(1.0, gt=0, description="passes over the trajectories; paper: 1 for Seen, 5 for Unseen")
    max_steps: int | None = Field(None, ge=1, description="ends earlier than the epochs would; no bound when left out")
    batch_size: int = Field(128, ge=1, description="trajectories per step; paper: 128")
    micro_batch_size: int = Field(16, ge=1, description="trajectories per forward pass")
    max_tokens: int = Field(4096, ge=16, description="longer trajectories are left out and counted; released code: 4096")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lora: LoraConfig | None = Field(None, description=LORA, json_schema_extra=IN_KEY_WHEN_SET)
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints", json_schema_extra=NOT_IN_KEY)
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description=LAUNCH, json_schema_extra=NOT_IN_KEY)
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig, description="which are kept", json_schema_extra=NOT_IN_KEY)

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> SftConfig:
        return _check_micro_batch(self, self.batch_size)


Engine = Literal["auto", "vllm", "transformers", "http"]


class RolloutConfig(Section):
    """How the student thinks in parallel while it generates (paper section 3.2)."""

    attention: Attention = Field("causal", description=ATTENTION)
    engine: Engine = Field(
        "auto",
        description="auto takes vLLM where it is installed; http: servers that run already, named in endpoints; the result names it",
    )
    endpoints: list[Annotated[str, Field(pattern=r"^https?://[^/]+/?$")]] = Field(
        default_factory=list,
        description="of engine http: vLLM servers, such as http://127.0.0.1:8000; each runs max_in_flight requests at once",
        json_schema_extra=NOT_IN_KEY,
    )
    push: Literal["auto", "nccl", "disk"] = Field(
        "auto",
        description="of engine http in rl: how new weights reach the servers; auto: nccl from a GPU, else through a folder that all see",
        json_schema_extra=NOT_IN_KEY,
    )
    num_paths: int = Field(2, ge=2, le=16, description="paths per block; the paper and its code use 2")
    max_blocks: int = Field(4, ge=0, description="blocks per response; the main thread still finishes after the last one")
    max_prompt_tokens: int = Field(2000, ge=1, description="longer prompts are left out and counted; paper: 2000")
    max_response_tokens: int = Field(3000, ge=16, description="all tokens of a response: main, paths, summaries and tags; paper: 3000")
    max_path_tokens: int | None = Field(
        None, ge=2, description="tokens of one path; when left out, an equal share of what the response still allows"
    )
    max_summary_tokens: int = Field(512, ge=2, description="tokens of one summary")
    temperature: float = Field(1.0, gt=0, le=2, description="sampling temperature; paper: 1.0")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; paper: 1.0")
    max_in_flight: int = Field(256, ge=1, description="requests that the engine works on at once", json_schema_extra=NOT_IN_KEY)

    @model_validator(mode="after")
    def _endpoints_of_http(self) -> RolloutConfig:
        if self.engine == "http" and not self.endpoints:
            raise ValueError("engine: http needs endpoints: the servers' addresses, such as endpoints: [http://127.0.0.1:8000]")
        if self.engine != "http" and self.endpoints:
            raise ValueError(f"endpoints are used by engine: http alone, not by engine: {self.engine}; set engine: http or leave them out")
        return self


Reward = Literal[
    "accuracy", "accuracy_and_parallel", "alternating", "parallel_only", "emphasis", "accuracy_plus_parallel", "efficiency", "diversity"
]


class RlConfig(Section):
    """One GRPO stage of the curriculum (paper sections 3.3 and 3.4)."""

    name: str = Field("hard", pattern=r"^[a-z0-9_]+$", description="what this stage is called in tables", json_schema_extra=NOT_IN_KEY)
    problems: Mixture = Field(default_factory=lambda: {"dapo": 1.0}, description="training sets and their weights")
    prompt: Prompt = Field("parallel", description=PROMPT)
    reward: Reward = Field("accuracy", description="parallel_r1/rewards.py; paper section 3.4")
    alternating_window: int = Field(10, ge=2, description="steps per window of the alternating reward; paper: 10")
    alternating_bonus_steps: int = Field(2, ge=1, description="last steps of a window that pay the bonus; paper: 2")
    steps: int = Field(300, ge=1, description="optimiser steps; paper: 35 easy, 300 hard")
    prompts_per_step: int = Field(512, ge=1, description="problems per step; paper: 1024 easy, 512 hard")
    rollouts_per_prompt: int = Field(8, ge=2, description="GRPO group size; paper: 5 easy, 8 hard")
    micro_batch_size: int = Field(8, ge=1, description="rollouts per forward pass")
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(learning_rate=1e-6, schedule="constant", warmup_ratio=0))
    lora: LoraConfig | None = Field(None, description=LORA, json_schema_extra=IN_KEY_WHEN_SET)
    clip_low: float = Field(0.2, gt=0, lt=1, description="ratio clip below; paper: 0.2")
    clip_high: float = Field(0.2, gt=0, description="ratio clip above; paper: 0.2, the S2 script 0.28")
    kl_coefficient: float = Field(0.0, ge=0, description="weight of the KL to the start; released code: 0")
    importance_correction: Literal["none", "token"] = Field(
        "none",
        description="none: old log-probs are the trainer's own, right where scoring is exact (rollout_gap shows it); "
        "token: the sampler's log-probs are the old policy, with the ratio clip per token, for engines of lower precision",
    )
    scoring: Literal["exact", "published"] = Field(
        "exact",
        description="exact: paths >= 2 in the context in which they were sampled; published: in the joined sequence (released code)",
    )
    max_rollout_gap: float | None = Field(
        None,
        gt=0,
        description="bound on |log p_train - log p_sampled| at the first step; when left out, 1e-3 in float32 and 0.5 in bfloat16",
        json_schema_extra=NOT_IN_KEY,
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints", json_schema_extra=NOT_IN_KEY)
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description=LAUNCH, json_schema_extra=NOT_IN_KEY)
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig, description="which are kept", json_schema_extra=NOT_IN_KEY)
    sample_rollouts: int = Field(8, ge=0, description="rollouts kept per step to be looked at")

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> RlConfig:
        return _check_micro_batch(self, self.prompts_per_step * self.rollouts_per_prompt)

    @model_validator(mode="after")
    def _samples_from_the_policy(self) -> RlConfig:
        if self.rollout.temperature != 1 or self.rollout.top_p != 1:
            raise ValueError(
                f"rollout.temperature {self.rollout.temperature}, rollout.top_p {self.rollout.top_p}: rl trains what it samples, "
                "and the sampler's log-probs are those of temperature 1 and top_p 1 (paper: both 1); set both to 1"
            )
        if self.lora and self.lora.dropout:
            raise ValueError(f"lora.dropout {self.lora.dropout}: rl trains what it samples, and nothing is dropped in sampling; set 0")
        return self


def _check_micro_batch(section: Any, batch: int) -> Any:
    if batch % section.micro_batch_size:
        raise ValueError(f"micro_batch_size {section.micro_batch_size} does not divide the batch of {batch}")
    if section.lora and section.launch.strategy == "zero3" and section.launch.processes > 1:
        raise ValueError(
            "launch.strategy zero3 splits adapters, which can't be merged then; set launch.strategy: fsdp2 or ddp, or lora: null"
        )
    micro, processes = section.micro_batch_size, section.launch.processes
    if batch % (micro * processes):
        fitting = [size for size in range(1, micro) if batch % (size * processes) == 0]
        way_out = f"set micro_batch_size: {fitting[-1]}" if fitting else f"{batch} can't be shared by {processes} processes"
        raise ValueError(f"micro_batch_size {micro} x launch.processes {processes} does not divide the batch of {batch}; {way_out}")
    return section


# --- evaluation, report ---------------------------------------------------------------------------------------------------


class EvaluateConfig(Section):
    """Every checkpoint on every evaluation set (paper section 4.1)."""

    sets: list[str] | None = Field(None, min_length=1, description="evaluation sets; all of prepare.evaluation when left out")
    samples: int | dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=lambda: {"MATH": 1, "default": 16}, description="rollouts per problem, for all sets or by set; paper: 16, MATH 1"
    )
    limit: int | None = Field(None, ge=1, description="problems per set, from the top; all when left out")
    prompt: Prompt = Field("parallel", description=PROMPT)
    base_prompt: Prompt = Field("plain", description="prompt of the base model, which has never seen a block")
    other_prompt: bool = Field(
        False,
        description="measure checkpoints with another prompt than they were trained with: refused unless set",
        json_schema_extra=NOT_IN_KEY,
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    bootstrap: int = Field(2000, ge=100, description="resamples of the 95 % intervals")

    def samples_of(self, name: str) -> int:
        """Rollouts per problem of the set `name`."""
        if isinstance(self.samples, int):
            return self.samples
        return self.samples.get(name, self.samples.get("default", 16))


class AnalysisConfig(Section):
    """What the blocks of a run are good for (paper section 5)."""

    windows: int = Field(
        12, ge=2, le=100, description="points of a curve over all rl steps; each has an interval over its steps, at least 3"
    )
    samples: int = Field(2, ge=0, description="rollouts of the first and of the last step of each rl stage, side by side")


class ReportConfig(Section):
    """The page a person reads."""

    sample_rollouts: int = Field(6, ge=0, description="rollouts laid out side by side, per checkpoint")


class MachineConfig(Section):
    """The machine that `make plan` reckons with; when the section is left out, the one it runs on."""

    gpu: Literal["A100", "H100", "H200", "B200", "L40S"] | None = Field(
        None, description="a known GPU: fills what of memory and speeds is left out; for others memory_gb, tflops, bandwidth_tb say it"
    )
    gpus: int = Field(1, ge=0, description="GPUs in all; 0: the CPU")
    memory_gb: float | None = Field(None, gt=0, description="memory of one GPU, or of the CPU, in 10^9 bytes")
    tflops: float | None = Field(None, gt=0, description="peak of one GPU in dense bfloat16, in TFLOP/s; without it no hours")
    bandwidth_tb: float | None = Field(None, gt=0, description="speed of a GPU's memory in TB/s; without it no hours for sampling")
    mfu: float = Field(
        0.15,
        gt=0,
        le=1,
        description="share of the peak that training reaches; assumed: stock transformers was measured at 0.12 and 0.17 (docs/gpu.md)",
    )
    price_per_hour: float = Field(0.0, ge=0, description="price of one GPU, or of the CPU machine, for an hour, in any currency")


Tracking = Literal["none", "trackio", "wandb"]


class Resources(Section):
    """How to run, not what comes out: nothing here is part of a cache key."""

    worker_python: str = Field(".venv/worker/bin/python", description="interpreter of the worker environment, relative to the project")
    threads: int = Field(1, ge=1, description="CPU threads of a stage process")
    processes: int = Field(2, ge=1, le=2, description="stage processes at once: 2 measures one checkpoint while the next is trained")
    hang_minutes: float = Field(10, gt=0, description="a stage process that prints nothing for so long has failed")
    tracking: Tracking = Field(
        "none", description="where training curves go beside TensorBoard files: trackio (local) or wandb (sends them)"
    )


class PipelineConfig(Section):
    """A whole run."""

    name: str = Field("parallel_r1", pattern=r"^[A-Za-z0-9_.-]+$", description="what the run is called in tables and in the UI")
    seed: int = Field(0, ge=0, description="seeds every stage")
    attention: Attention = Field(
        "causal", description="of every stage: causal (the paper's Seen) or structured (Unseen); paper section 3.2"
    )
    store: str = Field(
        ".state/artifacts", description="where artifacts are kept: a folder or s3://bucket/prefix", json_schema_extra=NOT_IN_KEY
    )
    resources: Resources = Field(default_factory=Resources, json_schema_extra=NOT_IN_KEY)
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description="of every training stage", json_schema_extra=NOT_IN_KEY)
    prepare: PrepareConfig = Field(default_factory=PrepareConfig)
    student: Student = Field(default_factory=HubStudent)
    generate: GenerateConfig | None = Field(default_factory=GenerateConfig, description="null: no cold start")
    filter: FilterConfig = Field(default_factory=FilterConfig)
    sft: SftConfig | None = Field(default_factory=SftConfig, description="null: no cold start")
    rl: list[RlConfig] = Field(default_factory=lambda: [RlConfig()], description="the curriculum, in order")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    analysis: AnalysisConfig = Field(default_factory=AnalysisConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)
    machine: MachineConfig | None = Field(
        None, description="what `make plan` reckons with; null: this machine", json_schema_extra=NOT_IN_KEY
    )

    @model_validator(mode="before")
    @classmethod
    def _student_of_the_hub(cls, raw: Any) -> Any:
        """Where nothing says what the student is, it is the default kind: `student.name=Qwen/Qwen3-0.6B-Base` is enough."""
        student = raw.get("student") if isinstance(raw, dict) else None
        return {**raw, "student": {"type": "hub", **student}} if isinstance(student, dict) and "type" not in student else raw

    @model_validator(mode="before")
    @classmethod
    def _one_attention(cls, raw: Any) -> Any:
        """Give every section the run's attention; a checkpoint of one kind is never sampled or trained as the other."""
        if not isinstance(raw, dict) or raw.get("attention", "causal") == "causal":
            return raw
        default = {"attention": raw["attention"]}

        def fill(section: Any) -> Any:
            return {**default, **section} if isinstance(section, dict) else section

        def fill_rollout(section: Any) -> Any:
            return {**section, "rollout": fill(section.get("rollout", {}))} if isinstance(section, dict) else section

        stages = raw.get("rl", [{}])
        return {
            **raw,
            "sft": fill(raw.get("sft", {})),
            "rl": [fill_rollout(stage) for stage in stages] if isinstance(stages, list) else stages,
            "evaluate": fill_rollout(raw.get("evaluate", {})),
        }

    @model_validator(mode="before")
    @classmethod
    def _one_launch(cls, raw: Any) -> Any:
        """Give the training stages what of `launch` they don't say themselves."""
        if not isinstance(raw, dict) or not isinstance(raw.get("launch"), dict) or not _is_valid(LaunchConfig, raw["launch"]):
            return raw  # what is wrong with it is said once

        def fill(section: Any) -> Any:
            own = section.get("launch", {}) if isinstance(section, dict) else None
            return {**section, "launch": {**raw["launch"], **own}} if isinstance(own, dict) else section

        stages = raw.get("rl", [{}])
        return {**raw, "sft": fill(raw.get("sft", {})), "rl": [fill(stage) for stage in stages] if isinstance(stages, list) else stages}

    @model_validator(mode="after")
    def _attention_agrees(self) -> PipelineConfig:
        parts = {"sft": self.sft, "evaluate.rollout": self.evaluate.rollout} | {f"rl.{i}.rollout": s.rollout for i, s in enumerate(self.rl)}
        for field, section in parts.items():
            if section is not None and section.attention != self.attention:
                raise ValueError(
                    f"{field}.attention = {section.attention!r}, but attention = {self.attention!r}: set `attention` at the top"
                )
        return self

    @model_validator(mode="after")
    def _prompts_agree(self) -> PipelineConfig:
        trained = {"sft": self.sft} | {f"rl.{i}": stage for i, stage in enumerate(self.rl)}
        for field, section in trained.items():
            if section is not None and section.prompt != self.evaluate.prompt and not self.evaluate.other_prompt:
                raise ValueError(
                    f"{field}.prompt = {section.prompt!r}, but evaluate.prompt = {self.evaluate.prompt!r}: a checkpoint is measured with "
                    "the prompt it was trained with. Make them equal, or set evaluate.other_prompt: true"
                )
        return self

    @model_validator(mode="after")
    def _names_exist(self) -> PipelineConfig:
        _check_known("evaluate.sets", self.evaluate.sets or [], "prepare.evaluation", self.prepare.evaluation)
        mixtures = {f"rl.{i}.problems": stage.problems for i, stage in enumerate(self.rl)}
        if isinstance(self.student, ScratchStudent):
            mixtures["student.problems"] = self.student.problems
        if self.generate and not isinstance(self.generate.teacher, FilesTeacher | HubTeacher):
            mixtures["generate.problems"] = self.generate.problems
        for field, mixture in mixtures.items():
            _check_known(field, mixture, "prepare.train", self.prepare.train)
        if len({stage.name for stage in self.rl}) < len(self.rl):
            raise ValueError("rl: two stages have the same name; give each its own rl.N.name")
        if (self.sft is None) != (self.generate is None):
            raise ValueError("sft and generate: the cold start needs both, or null for both")
        return self


def _is_valid(section: type[Section], raw: Any) -> bool:
    try:
        section.model_validate(raw)
    except ValidationError:
        return False
    return True


def _check_known(field: str, names: Iterable[str], where: str, known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{field}: no set '{name}' in {where}; there are: {', '.join(known) or 'none'}")


# --- reading --------------------------------------------------------------------------------------------------------------


class ConfigError(ValueError):
    """A config that can't be used: names the file, the field, the value and the way out."""


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> PipelineConfig:
    """Read a YAML config and apply dotted overrides such as `rl.0.steps=5`.

    Raises ConfigError with one line per fault.
    """
    path = Path(path)
    raw = resolved(path)
    for override in overrides:
        _apply(raw, override)
    return parse(raw, str(path))


def resolved(path: Path) -> dict[str, Any]:
    """A file with all that it extends, as plain data, not checked against the schema. Raises ConfigError where it can't be read."""
    return _fill_stages(_read(path), path)


EXTENDS = "extends"
"""Top-level key of a file that holds only what differs from another one, named relative to it."""


RL_DEFAULTS = "rl_defaults"
"""Top-level key of a file: what every entry of its `rl` says unless it says otherwise. Lists are replaced whole by the file that extends
another, so what all stages of all recipes share stands here."""


def _fill_stages(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    defaults, stages = raw.pop(RL_DEFAULTS, {}), raw.get("rl")
    if not isinstance(defaults, dict):
        raise ConfigError(f"{path}: {RL_DEFAULTS} = {defaults!r}: a mapping of fields of an rl stage")
    if not defaults or not isinstance(stages, list):
        return raw
    return {**raw, "rl": [_merge(defaults, stage) if isinstance(stage, dict) else stage for stage in stages]}


def _read(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = f"named by `{EXTENDS}` in {extending[-1]}" if extending else "Shipped configs: pipeline_config.yaml and recipes/*.yaml"
        raise ConfigError(f"{path}: no such file. {hint}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: can't be read as YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, this is {type(raw).__name__}")
    raw = _expand(raw, path)
    if EXTENDS not in raw:
        return raw
    base = raw.pop(EXTENDS)
    if not isinstance(base, str):
        raise ConfigError(f"{path}: {EXTENDS} = {base!r}: name one file, relative to this one")
    chain = (*extending, path)
    if any((path.parent / base).resolve() == seen.resolve() for seen in chain):
        raise ConfigError(f"{path}: {EXTENDS} = {base!r}: goes round in a circle: {' -> '.join(map(str, chain))} -> {base}")
    return _merge(_read(Path(os.path.normpath(path.parent / base)), chain), raw)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`: mappings are merged, unless they are of another `type`; everything else, lists too, is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both and value.get("type", old.get("type")) == old.get("type") else value
    return merged


def parse(raw: dict[str, Any], origin: str = "config") -> PipelineConfig:
    """Check a mapping against the schema; `origin` names it in errors."""
    try:
        return PipelineConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(origin, fault) for fault in error.errors())) from None


WAYS_OUT = {"num_paths": ". For a run without blocks set rollout.max_blocks: 0"}
"""What to do instead, where a bound alone doesn't say it; by field."""


def _explain(origin: str, fault: dict[str, Any]) -> str:
    unions = {"procedural", "files", "hub", "reasoning_gym", "scripted", "openai", "served", "scratch", "style", "file", "rows"}
    where = ".".join(str(part) for part in fault["loc"] if part not in unions)
    if fault["type"] == "extra_forbidden":
        return f"{origin}: {where}: unknown key. Allowed beside it: {', '.join(_siblings(fault['loc']))}"
    value = "" if fault["type"] in ("missing", "value_error") else f" = {fault['input']!r}"
    hint = WAYS_OUT.get(where.rsplit(".", 1)[-1], "")
    return f"{origin}: {where}{value}: {fault['msg'].removeprefix('Value error, ')}{hint}".replace(": : ", ": ")


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    schema = PipelineConfig.model_json_schema()
    node: Any = schema
    for part in location[:-1]:
        node = _step(schema, node, part)
    return sorted(_resolve(schema, node).get("properties", {}))


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        return schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    for option in node.get("anyOf", []):
        if "$ref" in option:
            return _resolve(schema, option)
    return node


def _step(schema: dict[str, Any], node: dict[str, Any], part: int | str) -> dict[str, Any]:
    node = _resolve(schema, node)
    mapping = node.get("discriminator", {}).get("mapping", {})
    if part in mapping:
        return {"$ref": mapping[part]}
    for member in node.get("oneOf", []):
        if _resolve(schema, member).get("properties", {}).get("type", {}).get("const") == part:
            return member
    if "properties" in node:
        return node["properties"].get(part, {})
    inner = node.get("items") or node.get("additionalProperties") or {}
    return inner if isinstance(inner, dict) else {}


def _expand(value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, path) for item in value]
    if not isinstance(value, str):
        return value

    def lookup(match: re.Match[str]) -> str:
        name = match[1]
        if not os.environ.get(name):
            raise ConfigError(f"{path}: {match[0]} in {value!r}: {name} is not set; pass it, such as `make demo {name}=...`")
        return os.environ[name]

    return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", lookup, value)


def _apply(raw: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"SET {override!r}: write dotted.field=value, such as rl.0.steps=5")
    *parents, last = dotted.split(".")
    node: Any = raw
    for part in parents:
        node = _child(node, part, override)
        if node is None:
            raise ConfigError(f"SET {override!r}: the file has no such list entry: {part}")
    value = yaml.safe_load(text)
    if isinstance(node, list):
        _child(node, last, override)
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"SET {override!r}: {'.'.join(parents)} holds {node!r}, no fields")


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        if not part.isdigit() or int(part) >= len(node):
            raise ConfigError(f"SET {override!r}: {part} is no entry of a list of {len(node)}; entries count from 0")
        return node[int(part)]
    if not isinstance(node, dict):
        raise ConfigError(f"SET {override!r}: {part} lies under the value {node!r}, which has no fields")
    if node.get(part) is None:
        node[part] = {}
    return node[part]
