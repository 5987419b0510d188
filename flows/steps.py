"""The steps of a run: each one a stage with its part of the config and what it reads. Flows put them in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from flows.elsewhere import Elsewhere, Later
from flows.forms import LATEST
from parallel_r1.config import ConfigError, PipelineConfig, ProceduralSource, ReasoningGymSource, RlConfig, ScratchStudent
from parallel_r1.store import ArtifactRef
from tasks.analysis import analyse_run
from tasks.base import make_base
from tasks.decontaminate import collect_overlap, decontaminate
from tasks.evaluate import evaluate
from tasks.filter import filter_trajectories
from tasks.generate import write_trajectories
from tasks.prepare import prepare_problems
from tasks.report import write_report
from tasks.rl import reinforce
from tasks.sft import cold_start
from tasks.stage import Run, Stage

Sets = dict[str, ArtifactRef]
MadeUp = ProceduralSource | ReasoningGymSource
"""Sources whose held-out problems no training set holds: by the split of the same source, and because they are published nowhere."""


class Steps:
    """The stages of one run. `built` collects every artifact by title, in the order in which a reader wants them. `rebuild` names
    what is made anew; with `elsewhere`, stages that need a model are runs of their own."""

    def __init__(self, config: PipelineConfig, rebuild: Iterable[str] = (), elsewhere: Elsewhere | None = None) -> None:
        self.config = config
        self.run = Run.of(config, rebuild)
        self.built: dict[str, ArtifactRef] = {}
        self._elsewhere = elsewhere
        self._evaluations: dict[str, Later] = {}
        self._compared: Sets = {}

    def chosen(self, choice: str) -> ArtifactRef | None:
        """The artifact that a form's `upstream` names as stage/key; None for `latest`, which the recipe leads to."""
        if choice == LATEST:
            return None
        stage, key = choice.split("/")
        found = self.run.store.find(stage, key)
        if len(found) != 1:
            store = self.run.store.root
            raise ConfigError(f"upstream = {choice!r}: {len(found)} whole artifacts in {store} begin like this; see `make artifacts`")
        return self._keep(f"{stage} {found[0].key[:8]}", found[0])

    def training_sets(self) -> Sets:
        """The problem sets to learn from, without copies of what is measured on."""
        return self._training

    @cached_property
    def _training(self) -> Sets:
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
        self._compared[label] = self._make(f"decontaminate {label}", decontaminate, config, label, training=training, tests=tests)
        return self._compared[label]

    @cached_property
    def _overlap(self) -> Sets:
        """The test items that anything in this run gives away; nothing where nothing was compared."""
        if not self._compared:
            return {}
        return {"items": self._make("overlap", collect_overlap, None, training=self._compared, tests=self._held_out)}

    def _prepared(self, label: str, source: object) -> ArtifactRef:
        return self._make(f"prepare {label}", prepare_problems, source, label)

    def base(self, sets: Sets) -> Later:
        """The base model, made beside what the flow does next."""
        student = self.config.student
        wanted = _part(sets, student.problems) if isinstance(student, ScratchStudent) else {}
        return self._start(make_base, student, "", {}, sets=wanted)

    def written(self, sets: Sets) -> ArtifactRef:
        """What the teacher wrote."""
        config = self.config.generate
        if config is None:
            raise ConfigError("generate: null: this recipe has no teacher and no cold start")
        wanted = _part(sets, config.problems) if config.teacher.type not in ("files", "hub") else {}
        return self._make("generate", write_trajectories, config, sets=wanted)

    def trajectories(self, sets: Sets) -> ArtifactRef:
        """Of what the teacher wrote, what the student learns from."""
        written = self.written(sets)
        if self.config.generate.teacher.type in ("files", "hub"):
            written = self._decontaminated("trajectories", written)
        return self.filtered(written)

    def filtered(self, written: ArtifactRef) -> ArtifactRef:
        """The trajectories that pass the filter."""
        return self._make("filter", filter_trajectories, self.config.filter, trajectories=written)

    def cold_start(self, base: ArtifactRef, trajectories: ArtifactRef) -> ArtifactRef:
        """The student after sft."""
        chosen = {"upstream": {"base": _choice(base), "filter": _choice(trajectories)}}
        return self._keep("sft", self._start(cold_start, self.config.sft, "", chosen, base=base, trajectories=trajectories).result())

    def reinforce(self, stage: RlConfig, checkpoint: ArtifactRef, sets: Sets) -> ArtifactRef:
        """The student after one more stage of rl."""
        wanted = _part(sets, stage.problems)
        chosen = {"upstream": {"checkpoint": _choice(checkpoint)}, "stages": self.config.rl.index(stage) + 1}
        begun = self._start(reinforce, stage, stage.name, chosen, checkpoint=checkpoint, sets=wanted)
        return self._keep(f"rl {stage.name}", begun.result())

    def measure(self, label: str, checkpoint: ArtifactRef, sets: Sets) -> None:
        """Evaluate a checkpoint beside what the flow does next."""
        config = self.config.evaluate
        if checkpoint.stage == "base":
            config = config.model_copy(update={"prompt": config.base_prompt})
        inputs = {"checkpoint": checkpoint, "sets": sets, "overlap": self._overlap}
        self._evaluations[label] = self._start(evaluate, config, label, {"upstream": {"checkpoint": _choice(checkpoint)}}, **inputs)

    def measured(self) -> dict[str, ArtifactRef]:
        """The evaluations, all finished, by checkpoint."""
        return {label: self._keep(f"evaluate {label}", future.result()) for label, future in self._evaluations.items()}

    def analyse(self, evaluations: Mapping[str, ArtifactRef]) -> ArtifactRef:
        """What the blocks of this run are good for."""
        training = {title: ref for title, ref in self.built.items() if ref.stage == "rl"}
        return self._make("analysis", analyse_run, self.config.analysis, training=training, evaluations=evaluations)

    def report(self) -> ArtifactRef:
        """The page about everything built so far."""
        return self._make("report", write_report, self.config, stages=dict(self.built))

    def keep_base(self, future: Later) -> ArtifactRef:
        """The base model, once it is there."""
        return self._keep("base", future.result())

    def _make(self, title: str, stage: Stage, config: Any, label: str = "", **inputs: ArtifactRef | Sets) -> ArtifactRef:
        """A stage carried out now."""
        return self._keep(title, stage(self.run, config, label, **inputs))

    def _start(self, stage: Stage, config: Any, label: str, chosen: Mapping[str, Any], **inputs: ArtifactRef | Sets) -> Later:
        """A stage that needs a model, begun. `chosen`: how the form of its own deployment asks for the same artifact."""
        call = stage.call(self.run, config, label, **inputs)
        if self._elsewhere and call.load() is None:
            return self._elsewhere.start(call, chosen, lambda: stage(self.run, config, label, **inputs))
        return stage.submit(self.run, config, label, **inputs)

    def _keep(self, title: str, ref: ArtifactRef) -> ArtifactRef:
        self.built[title] = ref
        return ref


def _part(sets: Sets, wanted: Mapping[str, float]) -> Sets:
    """The sets of a mixture: a stage depends on what it reads, not on the others."""
    return {name: sets[name] for name in wanted}


def _choice(ref: ArtifactRef) -> str:
    return f"{ref.stage}/{ref.key}"
