"""The steps of a run: each one a stage with its part of the config and what it reads. Flows put them in order."""

from __future__ import annotations

from collections.abc import Mapping

from prefect.futures import PrefectFuture

from parallel_r1.config import ConfigError, PipelineConfig, RlConfig, ScratchStudent
from parallel_r1.store import ArtifactRef
from tasks.base import make_base
from tasks.evaluate import evaluate
from tasks.filter import filter_trajectories
from tasks.generate import write_trajectories
from tasks.prepare import prepare_problems
from tasks.report import write_report
from tasks.rl import reinforce
from tasks.sft import cold_start
from tasks.stage import Run

Sets = dict[str, ArtifactRef]


class Steps:
    """The stages of one run. `built` collects every artifact by title, in the order in which a reader wants them."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self.run = Run.of(config)
        self.built: dict[str, ArtifactRef] = {}
        self._evaluations: dict[str, PrefectFuture[ArtifactRef]] = {}

    def training_sets(self) -> Sets:
        """The problem sets to learn from."""
        return {name: self._prepared(f"train {name}", source) for name, source in self.config.prepare.train.items()}

    def held_out_sets(self) -> Sets:
        """The problem sets to be measured on."""
        chosen = self.config.evaluate.sets or list(self.config.prepare.evaluation)
        return {name: self._prepared(f"evaluation {name}", self.config.prepare.evaluation[name]) for name in chosen}

    def _prepared(self, label: str, source: object) -> ArtifactRef:
        return self._keep(f"prepare {label}", prepare_problems(self.run, source, label))

    def base(self, sets: Sets) -> PrefectFuture[ArtifactRef]:
        """The base model, made beside what the flow does next."""
        student = self.config.student
        wanted = _part(sets, student.problems) if isinstance(student, ScratchStudent) else {}
        return make_base.submit(self.run, student, sets=wanted)

    def written(self, sets: Sets) -> ArtifactRef:
        """What the teacher wrote."""
        config = self.config.generate
        if config is None:
            raise ConfigError("generate: null: this recipe has no teacher and no cold start")
        wanted = _part(sets, config.problems) if config.teacher.type in ("scripted", "openai") else {}
        return self._keep("generate", write_trajectories(self.run, config, sets=wanted))

    def trajectories(self, sets: Sets) -> ArtifactRef:
        """Of what the teacher wrote, what the student learns from."""
        return self._keep("filter", filter_trajectories(self.run, self.config.filter, trajectories=self.written(sets)))

    def cold_start(self, base: ArtifactRef, trajectories: ArtifactRef) -> ArtifactRef:
        """The student after sft."""
        return self._keep("sft", cold_start(self.run, self.config.sft, base=base, trajectories=trajectories))

    def reinforce(self, stage: RlConfig, checkpoint: ArtifactRef, sets: Sets) -> ArtifactRef:
        """The student after one more stage of rl."""
        wanted = _part(sets, stage.problems)
        return self._keep(f"rl {stage.name}", reinforce(self.run, stage, stage.name, checkpoint=checkpoint, sets=wanted))

    def measure(self, label: str, checkpoint: ArtifactRef, sets: Sets) -> None:
        """Evaluate a checkpoint beside what the flow does next."""
        config = self.config.evaluate
        if label == "base":
            config = config.model_copy(update={"prompt": config.base_prompt})
        self._evaluations[label] = evaluate.submit(self.run, config, label, checkpoint=checkpoint, sets=sets)

    def measured(self) -> dict[str, ArtifactRef]:
        """The evaluations, all finished, by checkpoint."""
        return {label: self._keep(f"evaluate {label}", future.result()) for label, future in self._evaluations.items()}

    def report(self) -> ArtifactRef:
        """The page about everything built so far."""
        return write_report(self.run, self.config, stages=self.built)

    def keep_base(self, future: PrefectFuture[ArtifactRef]) -> ArtifactRef:
        """The base model, once it is there."""
        return self._keep("base", future.result())

    def _keep(self, title: str, ref: ArtifactRef) -> ArtifactRef:
        self.built[title] = ref
        return ref


def _part(sets: Sets, wanted: Mapping[str, float]) -> Sets:
    """The sets of a mixture: a stage depends on what it reads, not on the others."""
    return {name: sets[name] for name in wanted}
