"""How a checkpoint came about, from manifests alone: its stages, what it learned from, what was taken out of that, how it was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parallel_r1.checkpoints import STAGES
from parallel_r1.config import PipelineConfig
from parallel_r1.lineage import Inventory, Name, spelled
from parallel_r1.store import Manifest, StoreError, identity

LICENCES = {
    "openai/gsm8k": "mit",
    "BytedTsinghua-SIA/DAPO-Math-17k": "apache-2.0",
    "DigitalLearningGmbH/MATH-lighteval": "mit",
    "Qwen/Qwen3-4B-Base": "apache-2.0",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "mit",
}
"""As their pages on the hub state it; what isn't listed has to be looked up there."""
SETS = "sets."


@dataclass(frozen=True)
class TrainingSet:
    """A set of problems that was learned from, with what its stages say."""

    name: str
    source: dict[str, Any]
    """Config section of its source."""
    problems: int
    removed: dict[str, int]
    """Rows taken out, by reason."""


@dataclass(frozen=True)
class History:
    """The story of one checkpoint of a store."""

    inventory: Inventory
    name: Name

    @classmethod
    def of(cls, inventory: Inventory, artifact: str) -> History:
        """The story of the checkpoint called `artifact` (stage/key, or a beginning). Raises StoreError where it is none."""
        name = inventory.named(artifact)
        if name[0] not in STAGES:
            raise StoreError(f"{artifact!r}: {spelled(name)} holds no checkpoint; {', '.join(STAGES)} do. `make artifacts` lists them")
        return cls(inventory, name)

    @property
    def manifest(self) -> Manifest:
        """Of the checkpoint itself."""
        return self.inventory.artifacts[self.name]

    @cached_property
    def chain(self) -> list[tuple[Name, Manifest]]:
        """The stages that trained it, the base model first. Raises StoreError where one is no longer in the store."""
        found, name = [], self.name
        while name:
            found.append((name, self._manifest(name)))
            inputs = self.inventory.inputs(name)
            name = inputs.get("checkpoint") or inputs.get("base")
        return found[::-1]

    def _manifest(self, name: Name) -> Manifest:
        if name not in self.inventory.artifacts:
            raise StoreError(f"{spelled(self.name)} was made from {spelled(name)}, which is no longer in the store: its story isn't known")
        return self.inventory.artifacts[name]

    def label(self, name: Name) -> str:
        """What runs called an artifact, such as `rl hard`; else its stage."""
        labels = (
            label.removeprefix("stages.")
            for user in self.inventory.users.get(name, []) if user[0] == "report"
            for label, given in self.inventory.inputs(user).items() if given == name
        )  # fmt: skip
        return next(labels, name[0])

    def stage(self, stage: str) -> Manifest | None:
        """The teacher's (`generate`) or the filter's part in it; None where there was none."""
        found = [name for name in self._reached if name[0] == stage]
        return self._manifest(found[0]) if found else None

    @cached_property
    def _reached(self) -> list[Name]:
        return sorted(self.inventory.reached([self.name]))

    @cached_property
    def training_sets(self) -> list[TrainingSet]:
        """Every problem set that a stage read, by name."""
        found: dict[str, TrainingSet] = {}
        for name in self._reached:
            for label, given in self.inventory.inputs(name).items():
                if label.startswith(SETS):
                    called = label.removeprefix(SETS)
                    found[called] = self._set(called, given)
        return [found[called] for called in sorted(found)]

    def _set(self, called: str, name: Name) -> TrainingSet:
        manifest = self._manifest(name)
        removed: dict[str, int] = {}
        problems = manifest.metrics.get("problems", manifest.metrics.get("kept", 0))
        if manifest.stage == "decontaminate":
            removed["copies of test items"] = round(manifest.metrics["seen"] - manifest.metrics["kept"])
            manifest = self._manifest(self.inventory.inputs(name)["training"])
        dropped = {in_words(key, "dropped_"): round(count) for key, count in manifest.metrics.items() if key.startswith("dropped_")}
        counts = {reason: count for reason, count in (dropped | removed).items() if count}
        return TrainingSet(called, manifest.config, round(problems), counts)

    @cached_property
    def evaluation(self) -> tuple[Name, Manifest] | None:
        """The newest evaluation of exactly this checkpoint."""
        found = [
            (name, self.inventory.artifacts[name]) for name in self.inventory.users.get(self.name, [])
            if name[0] == "evaluate" and self.inventory.artifacts[name].inputs["checkpoint"]["digest"] == self.manifest.digest
        ]  # fmt: skip
        return max(found, key=lambda one: one[1].committed_at, default=None)

    @property
    def attention(self) -> str:
        """causal or structured."""
        return next((found for _, manifest in reversed(self.chain) if (found := _attention(manifest.config))), "causal")

    def prompt(self, config: PipelineConfig) -> Any:
        """The prompt it was trained with; one that lies in a file is taken from `config`. Raises StoreError where that has another."""
        theirs = self._prompt
        if theirs is None:
            return "bare" if self.chain[0][1].config.get("type") == "scratch" else "plain"
        ours = config.evaluate.prompt
        if isinstance(theirs, str) or identity(ours) == theirs:
            return theirs if isinstance(theirs, str) else ours
        raise StoreError(f"{spelled(self.name)} was trained with the prompt {theirs}: name the CONFIG whose evaluate.prompt that is")

    @property
    def _prompt(self) -> Any:
        """As the last manifest that has one tells it."""
        return next((found for _, manifest in reversed(self.chain) if (found := manifest.config.get("prompt"))), None)

    def recipe(self) -> dict[str, Any]:
        """Config of all stages that made it, as the manifests keep it: contents of files by their digests, endpoints without address."""
        stages = enumerate(self.chain)
        rl = [{"name": self._rl_name(name, index), **manifest.config} for index, (name, manifest) in stages if name[0] == "rl"]
        sft = next((manifest.config for name, manifest in self.chain if name[0] == "sft"), None)
        written, kept = self.stage("generate"), self.stage("filter")
        unmeasured = {"prompt": self._prompt or "parallel", "rollout": {"attention": self.attention}}
        measured = self.evaluation[1].config if self.evaluation else unmeasured
        return {
            "name": self.label(self.name).replace(" ", "_"),
            "seed": self.seed or 0,
            "attention": self.attention,
            "prepare": {"train": {one.name: one.source for one in self.training_sets}} | self._evaluation_sets(),
            "student": self.chain[0][1].config,
            "generate": written and {**written.config, "teacher": _without_address(written.config["teacher"])},
            **({"filter": kept.config} if kept else {}),
            "sft": sft,
            "rl": rl,
            "evaluate": measured,
        }

    @property
    def seed(self) -> int | None:
        """Of the run that made it, where one of its reports is still there."""
        reports = [self.inventory.artifacts[user] for user in self.inventory.users.get(self.name, []) if user[0] == "report"]
        return next((report.config["seed"] for report in reports), None)

    def _rl_name(self, name: Name, index: int) -> str:
        label = self.label(name)
        return label.removeprefix("rl ") if label.startswith("rl ") else f"stage_{index}"

    def _evaluation_sets(self) -> dict[str, Any]:
        if self.evaluation is None:
            return {}
        inputs = self.inventory.inputs(self.evaluation[0]).items()
        return {"evaluation": {label.removeprefix(SETS): self._manifest(given).config for label, given in inputs if label.startswith(SETS)}}

    def hub_names(self) -> Iterator[str]:
        """Data sets of the hub that it learned from."""
        written = self.stage("generate")
        sources = [*(one.source for one in self.training_sets), *([written.config["teacher"]] if written else [])]
        yield from dict.fromkeys(source["name"] for source in sources if source.get("type") == "hub")

    @property
    def base_model(self) -> str | None:
        """Hub id of the model that it began as; None for one made from scratch or from a folder."""
        student = self.chain[0][1].config
        name = student.get("name", "") if student.get("type") == "hub" else ""
        return name if name and not name.startswith("sha256:") else None


def in_words(key: str, beginning: str) -> str:
    """`dropped_no_answer` -> `no answer`"""
    return key.removeprefix(beginning).replace("_", " ")


def _without_address(teacher: dict[str, Any]) -> dict[str, Any]:
    """An exported checkpoint tells which model was asked, not where: that may be a machine of a private network."""
    return {name: value for name, value in teacher.items() if name not in ("base_url", "api_key_env")}


def _attention(config: dict[str, Any]) -> str | None:
    return config.get("attention") or config.get("rollout", {}).get("attention")
