"""The structured layout: building it over a per-token loop, and what it adds to a training step."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.plans import PATH, make_plans
from parallel_r1 import student
from parallel_r1.attention import Layout, Paths, structure_forward, structured_layout
from parallel_r1.config import ScratchStudent
from parallel_r1.markup import TagIds

BATCH, LENGTH = 8, 4096
STEP_BATCH, STEP_LENGTH = 16, 256
REPETITIONS = 11


def random_sequences(tags: TagIds, batch: int, length: int, seed: int = 0) -> Tensor:
    """Token ids with blocks of two to four paths."""
    rng = random.Random(seed)
    rows = []
    for _ in range(batch):
        ids: list[int] = []
        while len(ids) < length:
            ids += [10] * rng.randint(20, 200) + [tags.parallel]
            for _ in range(rng.randint(2, 4)):
                ids += [tags.path] + [10] * rng.randint(*PATH) + [tags.path_end]
            ids += [tags.parallel_end, tags.summary] + [10] * rng.randint(10, 40) + [tags.summary_end]
        rows.append(ids[:length])
    return torch.tensor(rows)


def layout_by_loop(ids: Tensor, tags: TagIds) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, hole starts and hole ends, token by token: how such layouts are mostly written."""
    positions, hole_start, hole_end = (torch.zeros_like(ids) for _ in range(3))
    for row in range(ids.shape[0]):
        position, block_start, path_start, fork, reach = 0, -1, -1, 0, 0
        for column in range(ids.shape[1]):
            token = ids[row, column].item()
            if token == tags.path:
                if block_start < 0:
                    block_start, fork, reach = column, position, position
                path_start, position = column, fork
            elif token == tags.parallel_end:
                block_start, path_start, position = -1, -1, reach
            positions[row, column] = position
            if block_start >= 0:
                hole_start[row, column] = block_start
                hole_end[row, column] = path_start
            position += 1
            reach = max(reach, position)
    return positions, hole_start, hole_end


def layout_vs_loop() -> dict[str, float]:
    """Times that the vectorised layout is faster on 8 x 4096; the loop's result must be the same."""
    torch.set_num_threads(1)
    tokenizer = student.train_tokenizer(["12+5=17."], 512)
    tags = TagIds.from_tokenizer(tokenizer)
    ids = random_sequences(tags, BATCH, LENGTH)
    everywhere = torch.ones_like(ids, dtype=torch.bool)

    def vectorised() -> Layout:
        return structured_layout(Paths.of_ids(ids, tags, everywhere), everywhere)

    layout, looped = vectorised(), layout_by_loop(ids, tags)
    for ours, theirs in zip((layout.positions, layout.hole_start, layout.hole_end), looped, strict=True):
        assert torch.equal(ours, theirs)
    fast, slow = _median_seconds(vectorised, 5 * REPETITIONS), _median_seconds(lambda: layout_by_loop(ids, tags), 3)
    print(f"  layout {1000 * fast:.2f} ms, loop {1000 * slow:.0f} ms", flush=True)
    return {"layout_vs_loop": slow / fast}


def structured_step_vs_causal() -> dict[str, float]:
    """Seconds of a supervised step (forward and backward) with the structured hook over those without, same tokens."""
    torch.set_num_threads(1)
    tokenizer = student.train_tokenizer(["12+5=17."], 512)
    tags = TagIds.from_tokenizer(tokenizer)
    plans = make_plans(1, 1, 2, tags, range(10, 200))
    ids = random_sequences(tags, STEP_BATCH, STEP_LENGTH)
    ids[:, : len(plans[0].prompt_ids)] = torch.tensor(plans[0].prompt_ids)
    labels = ids.clone()
    labels[:, : len(plans[0].prompt_ids)] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    models = {kind: student.scratch_model(ScratchStudent(problems={"any": 1.0}), tokenizer, seed=0) for kind in ("causal", "structured")}
    structure_forward(models["structured"], tags)

    def step(kind: str) -> float:
        began = time.perf_counter()
        models[kind](**batch).loss.backward()
        models[kind].zero_grad()
        return time.perf_counter() - began

    times = [(step("structured"), step("causal")) for _ in range(REPETITIONS + 2)][2:]
    structured, causal = (statistics.median(values) for values in zip(*times, strict=True))
    print(f"  structured {1000 * structured:.0f} ms, causal {1000 * causal:.0f} ms", flush=True)
    return {"structured_step_vs_causal": structured / causal}


def _median_seconds(work: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
