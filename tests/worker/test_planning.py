"""Plans against real models: parameters exactly, memory of real steps within a bound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from parallel_r1 import student
from parallel_r1.config import ScratchStudent
from parallel_r1.planning import KNOWN, Architecture, Training, training_memory

ROOT = Path(__file__).parents[2]
STUDENT = ScratchStudent(
    problems={"any": 1.0}, hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=1024, max_position=512
)


def shaped(model: Architecture) -> Qwen3ForCausalLM:
    """The real model of a shape, without weights."""
    config = Qwen3Config(
        vocab_size=model.vocabulary, hidden_size=model.hidden, num_hidden_layers=model.layers, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, head_dim=model.head_dim, intermediate_size=model.intermediate, tie_word_embeddings=model.tied,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    assert KNOWN[name].parameters == shaped(KNOWN[name]).num_parameters()


def test_a_checkpoint_is_read_from_its_folder(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert Architecture.of_folder(tiny).parameters == AutoModelForCausalLM.from_pretrained(tiny).num_parameters()


def test_a_scratch_student_has_at_most_the_planned_parameters() -> None:
    tokenizer = student.train_tokenizer(["Tom has 12 apples."] * 3, STUDENT.vocab_size)
    real, planned = student.scratch_model(STUDENT, tokenizer, 0).num_parameters(), Architecture.of_scratch(STUDENT).with_tags.parameters
    assert 0 <= planned - real <= STUDENT.hidden_size * STUDENT.vocab_size


@pytest.mark.parametrize(("sequences", "length", "masked"), [(8, 256, False), (4, 256, True)], ids=["sft", "rl"])
def test_the_plan_holds_for_real_steps_on_the_cpu(sequences: int, length: int, masked: bool) -> None:
    """A plan is never below the real peak, and at most a quarter above it: it adds gradients and activations, which take turns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-m", "tests.worker.step_memory", STUDENT.model_dump_json(), str(sequences), str(length), str(masked)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    real = int(done.stdout.split()[-1])
    planned = sum(training_memory(Architecture.of_scratch(STUDENT), Training(sequences, sequences, length, masked), on_gpu=False).values())
    assert 1.0 <= planned / real <= 1.25, f"planned {planned / 1e6:.0f} MB, real {real / 1e6:.0f} MB"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_keeps_for_the_backward_pass_what_the_plan_says(checkpointing: bool) -> None:
    """In bfloat16 autocast, as on a GPU: the bytes per token that one more layer keeps, within 15 %."""
    small, large = (_kept(layers, checkpointing) for layers in (2, 4))
    model = Architecture.of_scratch(STUDENT)
    plan = 4 * model.hidden if checkpointing else 28 * model.hidden + 8 * model.intermediate + 10 * (model.query + model.key)
    assert (large - small) / 2 == pytest.approx(plan, rel=0.15)


def _kept(layers: int, checkpointing: bool, sequences: int = 16, length: int = 256) -> float:
    """Bytes per token that autograd keeps, weights and their bfloat16 copies apart."""
    torch.manual_seed(0)
    tokenizer = student.train_tokenizer(["Tom has 12 apples."], 300)
    model = student.scratch_model(STUDENT.model_copy(update={"num_layers": layers}), tokenizer, 0).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sizes = {parameter.numel() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() not in sizes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(0, 200, (sequences, length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        output = model.model(input_ids=ids, use_cache=False).last_hidden_state
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert output.requires_grad
    return total / ids.numel()
