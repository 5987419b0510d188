"""Fixtures of the worker environment: one tiny checkpoint, and each engine loaded once for the whole session (vLLM takes long to load)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import AutoTokenizer

from parallel_r1 import student
from parallel_r1.config import Attention, RolloutConfig, ScratchStudent
from parallel_r1.markup import TAGS, TagIds
from parallel_r1.rollout.engines import Engine, open_engine

ROLLOUT = RolloutConfig(
    max_blocks=2, max_prompt_tokens=64, max_response_tokens=256, max_path_tokens=24, max_summary_tokens=16, max_in_flight=64
)


def make_tiny(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 that opens and closes blocks often: its tags' output rows lean towards the mean hidden state."""
    torch.manual_seed(seed)
    config = ScratchStudent(problems={"any": 1.0}, hidden_size=64, intermediate_size=128, num_heads=2, vocab_size=300, max_position=512)
    tokenizer = student.train_tokenizer(["Tom has 12 apples. He buys 5. How many apples now?", "In order. 12+5=17."], 300)
    model = student.scratch_model(config, tokenizer, seed)
    table = model.get_input_embeddings().weight.data
    for tag, scale in zip(TAGS, (3.0, 0.5, 0.5, 2.5, 0.5, 2.5), strict=True):
        table[tokenizer.convert_tokens_to_ids(tag)] *= scale
    student.save(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny checkpoint."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_tags(tiny: Path) -> TagIds:
    """The tags' ids in the tiny checkpoint."""
    return TagIds.from_tokenizer(AutoTokenizer.from_pretrained(tiny))


EngineOf = Callable[[str, Attention], Engine]
SHARE_ENGINES = ("test_exactness.py", "test_vllm_structured.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the shared engines first: vLLM ends the process groups of every engine in a process when one of them is freed."""
    items.sort(key=lambda item: SHARE_ENGINES.index(item.path.name) if item.path.name in SHARE_ENGINES else len(SHARE_ENGINES))


@pytest.fixture(scope="session")
def engine_of(tiny: Path) -> EngineOf:
    """The engine of a kind and an attention on the tiny checkpoint, loaded when it is first asked for."""

    @cache
    def load(kind: str, attention: Attention) -> Engine:
        return open_engine(tiny, ROLLOUT.model_copy(update={"engine": kind, "attention": attention}), seed=0)

    return load
