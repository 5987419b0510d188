"""A finished rollout, graded and laid out for rewards, results and readers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from parallel_r1 import prompts
from parallel_r1.config import Prompt, RolloutConfig
from parallel_r1.diversity import path_similarity
from parallel_r1.grading import grade_many
from parallel_r1.markup import TagIds, validate_ids
from parallel_r1.problems import Problem
from parallel_r1.rollout.machine import Rollout
from parallel_r1.trajectory import Trajectory


class Studio:
    """Makes rollouts for one tokenizer and turns finished ones into records."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.tags = TagIds.from_tokenizer(tokenizer)

    @cached_property
    def _newline(self) -> list[int]:
        return self.tokenizer.encode("\n", add_special_tokens=False)

    def prompt_ids(self, prompt: Prompt, problem: str) -> list[int] | None:
        """Token ids of a problem's prompt; None where it is longer than the config allows."""
        ids = prompts.encode(self.tokenizer, prompts.render(prompt, problem))
        return ids if len(ids) <= self.config.max_prompt_tokens else None

    def rollout(self, prompt_ids: list[int], seed: str) -> Rollout:
        """A rollout to be carried out by an engine; `seed` names it, such as `0/tier1/tier1-heldout-0003/2`."""
        return Rollout(prompt_ids, self.config, self.tags, self._newline, seed)

    def text(self, trajectory: Trajectory) -> str:
        """The response as text, tags included, without its end-of-sequence token."""
        ids = trajectory.completion_ids
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.tags.eos else ids, skip_special_tokens=False)

    def records(self, rollouts: Sequence[Rollout], problems: Sequence[Problem], name: str, samples: Sequence[int]) -> list[dict[str, Any]]:
        """One JSON-ready row per rollout (parallel_r1/report reads them): text, verdict, markup faults, budgets used, layout."""
        texts = [self.text(rollout.trajectory) for rollout in rollouts]
        grades = grade_many([(text, problem.answer) for text, problem in zip(texts, problems, strict=True)])
        return [
            {"set": name, "problem_id": problem.id, "problem": problem.problem, "answer": problem.answer, "sample": sample, "text": text}
            | {"correct": grade.correct, "extracted": grade.extracted}
            | self.markup(rollout)
            for rollout, problem, sample, text, grade in zip(rollouts, problems, samples, texts, grades, strict=True)
        ]

    def markup(self, rollout: Rollout) -> dict[str, Any]:
        """Faults, budgets used and segments: what of a row needs no answer to compare with."""
        trajectory = rollout.trajectory
        faults = [fault.code for fault in validate_ids(trajectory.completion_ids, self.tags, self.config.num_paths)]
        faults += ["stray_tag"] * rollout.stray_tags
        segments = self.segments(trajectory)
        return {
            "blocks": trajectory.blocks,
            "well_formed": not faults,
            "faults": faults,
            "finish": trajectory.finish,
            "tokens": len(trajectory.completion_ids),
            "sampled_tokens": sum(trajectory.loss_mask),
            "critical_path_tokens": trajectory.critical_path_tokens,
            "position": trajectory.relative_position,
            "path_similarity": path_similarity(_paths(segments)),
            "segments": segments,
        }

    def segments(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        """The response's parts as text without tags: {"kind", "block", "path", "text"}; forced ones left out."""
        spans = [span for span in trajectory.spans if span.kind != "forced"]
        texts = [self.plain(trajectory.completion_ids[span.start : span.end]) for span in spans]
        return [
            {"kind": span.kind, "block": span.block, "path": span.path, "text": text}
            for span, text in zip(spans, texts, strict=True)
            if text
        ]

    def plain(self, ids: Sequence[int]) -> str:
        """Text of a part, without the tags and the end of sequence that close it."""
        structural = {self.tags.parallel, self.tags.path, self.tags.path_end, self.tags.summary_end, *self.tags.eos}
        return self.tokenizer.decode([token for token in ids if token not in structural], skip_special_tokens=False)


def _paths(segments: list[dict[str, Any]]) -> list[list[str]]:
    """The texts of the paths, block by block."""
    blocks: dict[int, list[str]] = {}
    for segment in segments:
        if segment["kind"] == "path":
            blocks.setdefault(segment["block"], []).append(segment["text"])
    return list(blocks.values())
