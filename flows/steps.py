"""The steps of a run: each one a stage with its part of the config and what it reads. Flows put them in order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from prefect.futures import PrefectFuture

from parallel_r1.config import ConfigError, PipelineConfig, ProceduralSource, ReasoningGymSource, RlConfig, ScratchStudent
from parallel_r1.store import ArtifactRef
from tasks.base import make_base
from tasks.decontaminate import collect_overlap, decontaminate
from tasks.evaluate import evaluate
from tasks.filter import filter_trajectories
from tasks.generate import write_trajectories
from tasks.prepare import prepare_problems
from tasks.report import write_report
from tasks.rl import reinforce
from tasks.sft import cold_start
from tasks.stage import Run

Sets = dict[str, ArtifactRef]
MadeUp = ProceduralSource | ReasoningGymSource
"""Sources whose held-out problems no training set holds: by the split of the same source, and because they are published nowhere."""


class Steps:
    """The stages of one run. `built` collects every artifact by title, in the order in which a reader wants them."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self.run = Run.of(config)
        self.built: dict[str, ArtifactRef] = {}
        self._evaluations: dict[str, PrefectFuture[ArtifactRef]] = {}
        self._compared: Sets = {}

    def training_sets(self) -> Sets:
        """The problem sets to learn from, without copies of what is measured on."""
        prepared = {name: self._prepared(f"train {name}", source) for name, source in self.config.prepare.train.items()}
        real = {name for name, source in self.config.prepare.train.items() if not isinstance(source, MadeUp)}
        return {name: self._decontaminated(f"train {name}", ref) if name in real else ref for name, ref in prepared.items()}

    def held_out_sets(self) -> Sets:
        """The problem sets to be measured on."""
        return self._held_out

    @cached_property
    def _held_out(self) -> Sets:
        chosen = self.config.evaluate.sets or list(self.config.prepare.evaluation)
        return {name: self._prepared(f"evaluation {name}", self.config.prepare.evaluation[name]) for name in chosen}

    def _decontaminated(self, label: str, training: ArtifactRef) -> ArtifactRef:
        """Compared with every evaluation set that lies anywhere; made-up ones are in nobody's training set."""
        config, sources = self.config.prepare.decontaminate, self.config.prepare.evaluation
        if config is None or all(isinstance(sources[name], MadeUp) for name in self._held_out):
            return training
        tests = {name: ref for name, ref in self._held_out.items() if not isinstance(sources[name], MadeUp)}
        self._compared[label] = self._keep(f"decontaminate {label}", decontaminate(self.run, config, label, training=training, tests=tests))
        return self._compared[label]

    @cached_property
    def _overlap(self) -> Sets:
        """The test items that anything in this run gives away; nothing where nothing was compared."""
        if not self._compared:
            return {}
        return {"items": self._keep("overlap", collect_overlap(self.run, None, training=self._compared, tests=self._held_out))}

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
        written = self.written(sets)
        if self.config.generate.teacher.type in ("files", "hub"):
            written = self._decontaminated("trajectories", written)
        return self._keep("filter", filter_trajectories(self.run, self.config.filter, trajectories=written))

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
        self._evaluations[label] = evaluate.submit(self.run, config, label, checkpoint=checkpoint, sets=sets, overlap=self._overlap)

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
