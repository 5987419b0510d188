"""Plans: shapes, published figures, every recipe, and what can't fit is refused with the way out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.plan import machine_of, main, no_room
from parallel_r1.config import HubStudent, MachineConfig, PipelineConfig, load
from parallel_r1.planning import GB, KNOWN, Architecture, Machine, PlanError, Training, architecture_of, plan, training_memory

ROOT = Path(__file__).parents[1]
SHIPPED = [ROOT / "pipeline_config.yaml", *sorted(ROOT.glob("recipes/**/*.yaml"))]
NODE = ["machine.gpu=H100", "machine.gpus=8", "machine.price_per_hour=2.5"]
CPU = ["machine.gpus=0", "machine.memory_gb=16"]
SHARED = ["launch.processes=8", "launch.strategy=fsdp2"]


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
    ],
)
def test_parameters_are_exact(model: str, parameters: int) -> None:
    """As transformers counts them (tests/worker/test_planning.py makes the models)."""
    assert KNOWN[model].parameters == parameters
    assert KNOWN[model].with_tags.parameters == parameters, "the tags take spare rows of the table"


A100, H20 = 85.9, 102.6
TRINITY = [
    # Qwen3-, GPUs, GB of each, tokens of the longest sequence, whether that was possible without offload or sequence parallelism
    ("4B", 1, A100, 4096, False),
    ("4B", 2, A100, 4096, True),
    ("4B", 2, A100, 12_288, True),
    ("4B", 2, A100, 20_480, False),
    ("4B", 4, A100, 20_480, True),
    ("4B", 6, A100, 20_480, True),
    ("4B", 6, A100, 28_672, False),
    ("4B", 1, H20, 8192, True),
    ("4B", 1, H20, 12_288, False),
    ("8B", 1, A100, 4096, False),
    ("8B", 4, A100, 8192, True),
    ("8B", 4, A100, 16_384, False),
    ("14B", 2, A100, 4096, False),
    ("14B", 6, A100, 8192, True),
    ("1.7B", 1, A100, 16_384, True),
    ("1.7B", 1, A100, 20_480, False),
    ("0.6B", 1, A100, 20_480, True),
    ("0.6B", 1, A100, 28_672, False),
]
"""Measured by the authors of Trinity-RFT (GPU Configuration Guide, docs/sphinx_doc/source/tutorial/trinity_gpu_configs.md): GRPO by verl's
FSDP trainer, float32 state, bfloat16 passes, gradient checkpointing, two sequences of full length per pass, rollouts on other GPUs."""


@pytest.mark.parametrize(("size", "gpus", "memory", "length", "possible"), TRINITY)
def test_memory_agrees_with_published_measurements(size: str, gpus: int, memory: float, length: int, possible: bool) -> None:
    """Within 12 %. That trainer holds all logits, ours a tile: they are added here, in bfloat16 and float32."""
    model = KNOWN[f"Qwen/Qwen3-{size}"]
    training = Training(128, 2, length, masked=False, processes=gpus, strategy="fsdp2" if gpus > 1 else "ddp")
    need = sum(training_memory(model, training, on_gpu=True).values()) + 2 * length * model.vocabulary * (2 + 4)
    assert need <= 1.12 * memory * GB if possible else need >= 0.93 * memory * GB, f"{need / GB:.1f} GB"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_has_a_plan(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny ones for two cores and 16 GB, the paper's for eight H100: everything fits."""
    for name in re.findall(r"\$\{(\w+)\}", path.read_text()):
        monkeypatch.setenv(name, "/some/folder")
    tiny = load(path).student.type == "scratch"
    here = CPU if tiny else [*NODE, *SHARED]
    code = main([str(path.relative_to(ROOT)), "--set", *here])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "parameters" in said and "GB per " in said and "disk:" in said
    assert tiny or ("hours" in said and "to pay" in said)


def test_a_plan_says_what_a_step_costs() -> None:
    config = load(ROOT / "recipes/parallel_r1_seen.yaml", [*NODE, *SHARED])
    stages = {stage.title: stage for stage in plan(config, Machine.of(config.machine))}
    assert list(stages) == ["base", "sft", "rl easy", "rl hard", "evaluate x4"]
    assert stages["sft"].steps == 59, "7,473 trajectories in batches of 128; the paper: 58 steps"
    assert stages["rl hard"].processes == 8 and set(stages["rl hard"].moments) == {"training", "sampling"}
    state = stages["sft"].moments["training"]
    assert state["optimiser"] == pytest.approx(8 * 4_022_468_096 / 8), "AdamW, shared by eight"
    cost = sum(stage.seconds for stage in stages.values() if stage.seconds) / 3600 * 8 * 2.5
    assert 200 < cost < 20_000, "a few days of a node"


REFUSED = [
    (["machine.gpu=H100"], ["sft: needs", "sft.lora.r=16", "2 GPUs like this one: sft.launch.processes=2 sft.launch.strategy=fsdp2"]),
    ([*NODE, "launch.processes=8"], ["sft: needs", "sft.launch.processes=8 sft.launch.strategy=fsdp2"]),
    ([*NODE, *SHARED, "sft.micro_batch_size=16", "sft.max_tokens=32768"], ["sft: needs", "sft.micro_batch_size=2"]),
    ([*NODE, *SHARED, "launch.processes=16", "sft.micro_batch_size=8"], ["sft.launch.processes = 16, but there are 8 GPUs"]),
    (["machine.memory_gb=12", "machine.gpus=8", *SHARED], ["key-value cache", "engine: http"]),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED)
def test_what_cannot_fit_is_refused_with_the_setting_that_would(
    overrides: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes/parallel_r1_seen.yaml", "--set", *overrides]) == 1
    said = capsys.readouterr().out
    assert "DOES NOT FIT" in said
    assert [part for part in parts if part not in said] == [], said


def test_the_named_setting_does_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Followed to the letter, every refusal's first advice leads to a plan that fits."""
    assert main(["recipes/parallel_r1_seen.yaml", "--set", *NODE, "launch.processes=8"]) == 1
    advice = [line.split("It would fit with ")[1].split("; or ")[0] for line in capsys.readouterr().out.splitlines() if "needs" in line]
    assert len(advice) == 3, "sft and two stages of rl"
    changes = [change for line in advice for change in line.split()]
    assert main(["recipes/parallel_r1_seen.yaml", "--set", *NODE, "launch.processes=8", *changes]) == 0, capsys.readouterr().out


def test_adapters_need_less(capsys: pytest.CaptureFixture[str]) -> None:
    def optimiser(*overrides: str) -> float:
        config = load(ROOT / "recipes/sft_seen.yaml", [*NODE, *overrides])
        return plan(config, Machine.of(config.machine))[1].moments["training"]["optimiser"]

    assert optimiser("sft.lora.r=16") < 0.02 * optimiser()


def test_a_teacher_that_is_served_here_is_planned_for() -> None:
    config = load(ROOT / "recipes/sft_seen.yaml", ["generate.teacher={type: served}"])
    fits, not_at_all = (plan(config, Machine(gpus=1, memory=memory * GB))[1] for memory in (80, 16))
    assert (fits.title, fits.faults) == ("generate", [])
    assert fits.moments["serving"]["engine weights"] == 2 * 8_190_735_360
    assert "type: openai and a server elsewhere" in not_at_all.faults[0]


def test_a_model_of_unknown_shape_is_asked_for(tmp_path: Path) -> None:
    config = PipelineConfig(student=HubStudent(name="someone/model"))
    with pytest.raises(PlanError, match="student.name = 'someone/model': no folder with a config.json"):
        architecture_of(config)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(PlanError, match="model_type 'mamba': plans know qwen3, qwen2 and llama"):
        Architecture.of_folder(tmp_path)


@pytest.mark.parametrize(("tokens", "rows"), [(300, 306), (297, 303), (290, 300)])
def test_a_checkpoint_without_spare_rows_gets_some_for_the_tags(tokens: int, rows: int, tmp_path: Path) -> None:
    """As SmolLM2, whose table ends with its vocabulary."""
    shape = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True, **shape}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(n): n for n in range(tokens)}}, "added_tokens": []}))
    model = Architecture.of_folder(tmp_path)
    assert model.with_tags.vocabulary == rows
    assert model.with_tags.parameters - model.parameters == (rows - 300) * 64


def test_nvidia_smi_is_read() -> None:
    """Lines as `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits` prints them."""
    machine = machine_of(["NVIDIA H100 80GB HBM3, 81559"] * 8)
    assert (machine.gpus, round(machine.memory / GB, 1), machine.tflops) == (8, 85.5, 989)
    unknown = machine_of(["Some GPU, 16384"])
    assert (unknown.gpus, unknown.tflops) == (1, None)


def test_memory_or_a_known_gpu_must_be_named() -> None:
    with pytest.raises(PlanError, match="memory_gb is missing; or name the gpu: A100"):
        Machine.of(MachineConfig(gpus=8))


def test_too_little_disk_is_said(tmp_path: Path) -> None:
    config = load(ROOT / "recipes/sft_seen.yaml", NODE)
    stages = plan(config, Machine.of(config.machine))
    assert stages[1].disk > 100 * GB, "three checkpoints of 48 GB, and the artifact"
    huge = [stages[1].__class__(**{**vars(stages[1]), "disk": 1e18})]
    assert "GB free, a stage needs" in (no_room(huge, tmp_path / "not" / "there") or "")


def test_the_command_works_where_nothing_is_installed_but_the_orchestrator() -> None:
    command = [sys.executable, "-m", "flows.plan", "pipeline_config.yaml", "--set", *CPU]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "demo: at most 542,208 parameters, 518 rows" in done.stdout
