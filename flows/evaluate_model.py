"""Measure any model on its own: a folder, a hub id, or a checkpoint of the store.

    python -m flows.evaluate_model MODEL --benchmarks AIME24 AMC23 [--data FOLDER] [--set FIELD=VALUE ...]

Settings are the paper's (16 samples, 3000 tokens; README) unless --set says otherwise. A model that knows the tags is measured with the
prompt it was trained with, or the parallel one; a model without tags generates plainly. --data takes the benchmarks from files instead of
the hub. Exit codes: 0 done, 1 a stage failed, 2 the request can't be met.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flows import server
from flows.command_line import carried_out, config_named, parser_of, quiet_server
from parallel_r1.checkpoints import Checkpoint, NotFound, in_folder, is_elsewhere, named
from parallel_r1.config import ConfigError, EvaluateConfig, PipelineConfig
from parallel_r1.jobs import RESULTS
from parallel_r1.markup import TAGS
from parallel_r1.report.card import RECIPE_FILE
from parallel_r1.store import Store

if TYPE_CHECKING:
    from parallel_r1.store import ArtifactRef

BENCHMARKS: dict[str, tuple[dict[str, Any], str]] = {
    "AIME24": ({"preset": "aime24"}, "aime24"),
    "AIME25": ({"preset": "aime25"}, "aime25"),
    "AMC23": ({"preset": "amc23"}, "amc23"),
    "MATH": ({"preset": "math500"}, "math500"),
    "GSM8K": ({"preset": "gsm8k", "split": "test"}, "gsm8k_test"),
}
"""Name: source on the hub, and how the name of its file begins."""
SUFFIXES = (".jsonl", ".parquet", ".csv")
Measured = tuple["ArtifactRef", PipelineConfig]


def sources(benchmarks: Sequence[str], data: str | None) -> dict[str, dict[str, Any]]:
    """`prepare.evaluation` of the benchmarks. Raises ConfigError for none, an unknown one, or one without a file in `data`."""
    if not benchmarks:
        raise ConfigError(f'BENCHMARKS: name some, such as BENCHMARKS="AIME24 AMC23"; there are: {", ".join(BENCHMARKS)}')
    found: dict[str, dict[str, Any]] = {}
    for name in benchmarks:
        if name not in BENCHMARKS:
            raise ConfigError(f"BENCHMARKS: no {name!r}; there are: {', '.join(BENCHMARKS)}")
        hub, beginning = BENCHMARKS[name]
        if not data:
            found[name] = {"type": "hub", **hub}
            continue
        files = sorted(path for path in Path(data).glob(f"{beginning}*") if path.suffix in SUFFIXES)
        if not files:
            raise ConfigError(f"DATA: no file {beginning}*{{{','.join(SUFFIXES)}}} for {name} in {Path(data).resolve()}")
        found[name] = {"type": "files", "path": str(files[0].resolve())}
    return found


def artifact_of(model: str, store: Store) -> ArtifactRef | None:
    """The checkpoint of the store that `model` names: stage/key, a key, the beginning of one, or latest. None for a folder or a hub id."""
    if Path(model).is_dir() or is_elsewhere(model):
        return None
    try:
        return named(model, store)
    except NotFound as missing:
        raise ConfigError(f"MODEL: {missing}") from None


def checkpoint_in(model: str) -> Checkpoint | None:
    """The checkpoint of the folder that `model` names; None where it names no folder. Raises ConfigError."""
    if not Path(model).is_dir():
        return None
    try:
        return in_folder(Path(model))
    except NotFound as missing:
        raise ConfigError(f"MODEL: {missing}") from None


def knows_tags(checkpoint: Path) -> bool:
    """Whether a checkpoint's own tokenizer has the six tags as tokens: in tokenizer.json, or added to one that has none."""
    known: set[str] = set()
    if (file := checkpoint / "tokenizer.json").exists():
        words = json.loads(file.read_text(encoding="utf-8"))
        known |= {token["content"] for token in words.get("added_tokens", ())}
        known |= {word if isinstance(word, str) else word[0] for word in words["model"].get("vocab", ())}  # of a Unigram model pairs
    if (file := checkpoint / "added_tokens.json").exists():
        known |= set(json.loads(file.read_text(encoding="utf-8")))
    return set(TAGS) <= known


def trained_as(model: str) -> dict[str, Any]:
    """Of a folder or a hub id: attention and prompt that trained it, by the artifact's manifest or by the recipe that `make export` writes;
    nothing where there is neither. Raises ConfigError."""
    found = checkpoint_in(model)
    if found is None:
        return _by_recipe(_of_the_hub(model))
    return found.config or _by_recipe(found.folder / RECIPE_FILE)


def _of_the_hub(model: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, RECIPE_FILE))
    except EntryNotFoundError:  # not there, or not in the cache of a machine without network
        return None


def _by_recipe(file: Path | None) -> dict[str, Any]:
    if file is None or not file.exists():
        return {}
    recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    last = [part for part in (recipe.get("sft"), *(recipe.get("rl") or ())) if part][-1:]
    return {"attention": recipe.get("attention")} | {"prompt": part.get("prompt") for part in last}


def longest_of(checkpoint: Path) -> int | None:
    """Tokens of the longest sequence that a checkpoint takes, where it says so."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config", {})
    return config.get("max_position_embeddings") or config.get("n_positions")


def settings(trained: Mapping[str, Any], tags: bool, longest: int | None = None, chosen: Sequence[str] = ()) -> list[str]:
    """Overrides that fit a checkpoint: attention and prompt of the section that trained it, budgets within its `longest` sequence; without
    tags plain generation. `chosen`: the user's own overrides, which come after. Raises ConfigError where the prompt isn't known."""
    found = [] if longest is None or any(one.startswith(BUDGETS) for one in chosen) else _budgets(longest)
    if not tags:
        return [*found, "evaluate.prompt=plain", "evaluate.base_prompt=plain", "evaluate.rollout.max_blocks=0"]
    prompt = trained.get("prompt") or "parallel"
    if not isinstance(prompt, str) and not any(one.startswith("evaluate.prompt") for one in chosen):
        raise ConfigError(
            f'MODEL: it was trained with a wording of its own, {prompt}; name its file: SET="evaluate.prompt={{type: file, path: ...}}"'
        )
    style = prompt if isinstance(prompt, str) else "parallel"
    attention = trained.get("attention") or trained.get("rollout", {}).get("attention") or "causal"
    return [*found, f"attention={attention}", f"evaluate.prompt={style}", f"evaluate.base_prompt={style}"]


BUDGETS = ("evaluate.rollout.max_prompt_tokens", "evaluate.rollout.max_response_tokens")


def _budgets(longest: int) -> list[str]:
    papers = EvaluateConfig().rollout
    if papers.max_prompt_tokens + papers.max_response_tokens <= longest:
        return []
    prompt = min(papers.max_prompt_tokens, longest // 4)
    response = min(papers.max_response_tokens, longest - prompt)
    return [f"{BUDGETS[0]}={prompt}", f"{BUDGETS[1]}={response}"]


def config_for(recipe: str, student: str, evaluation: dict[str, Any], fitting: Sequence[str], overrides: Sequence[str]) -> PipelineConfig:
    """The config of a run that evaluates only; store, seed and resources are the recipe's."""
    parts = {"prepare": {"train": {}, "evaluation": evaluation}, "student": {"type": "hub", "name": student}}
    papers = EvaluateConfig().model_dump(mode="json", exclude={"rollout": {"attention"}})
    parts |= {"generate": None, "sft": None, "rl": [], "evaluate": papers}
    whole = [f"{name}={json.dumps(value)}" for name, value in parts.items()]
    return config_named(recipe, [*whole, *fitting, *overrides])


def measure(model: str, recipe: str, benchmarks: Sequence[str], data: str | None, overrides: Sequence[str]) -> Measured:
    """Evaluate a model; the artifact, and the config it was made under."""
    from flows.steps import Steps  # imports prefect

    evaluation = sources(benchmarks, data)
    own = checkpoint_in(model)
    student = str(own.folder) if own else model
    steps = Steps(config_for(recipe, student, evaluation, [], overrides))
    if (checkpoint := artifact_of(model, steps.run.store)) is None:
        checkpoint = steps.keep_base(steps.base({}))
        trained = trained_as(model)
    else:
        trained = steps.run.store.manifest(checkpoint.stage, checkpoint.key).config
    local = steps.run.store.localise(checkpoint, steps.run.state / "cache") / "checkpoint"
    # tags that the stage base has just added teach a model nothing
    tags = checkpoint.metrics.get("new_tags", 0) == 0 and knows_tags(own.folder if own else local)
    config = config_for(recipe, student, evaluation, settings(trained, tags, longest_of(local), overrides), overrides)
    steps.config = config
    label = Path(model).name if checkpoint.stage == "base" else f"{checkpoint.stage} {checkpoint.key[:8]}"
    steps.measure(label, checkpoint, steps.held_out_sets())
    return steps.measured()[label], config


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = parser_of("flows.evaluate_model", __doc__)
    parser.add_argument("model", help="folder, hub id, stage/key or key of a checkpoint in the store, or latest")
    parser.add_argument("--benchmarks", nargs="*", default=[], help=", ".join(BENCHMARKS))
    parser.add_argument("--data", help="folder with the benchmarks as files; from the hub when left out")
    parser.add_argument("--config", default="pipeline_config.yaml", help="store, seed and resources come from here")
    options = parser.parse_args(arguments)
    try:
        config_for(options.config, options.model, sources(options.benchmarks, options.data), [], options.overrides)
        ui = quiet_server()
    except (ConfigError, server.ServerError) as error:
        print(error, file=sys.stderr)
        return 2
    return _run(options, ui)


def _run(options: argparse.Namespace, ui: str) -> int:
    from prefect import flow
    from prefect.task_runners import ThreadPoolTaskRunner

    from tasks.show import all_posted
    from tasks.supervise import programs_end_with_flow

    @flow(name="evaluate-model", flow_run_name=f"evaluate {options.model}", task_runner=ThreadPoolTaskRunner(max_workers=1))
    def evaluate_model() -> Measured:
        """Measure one model."""
        with programs_end_with_flow():
            measured = measure(options.model, options.config, options.benchmarks, options.data, options.overrides)
            all_posted()
            return measured

    measured, code = carried_out(evaluate_model, ui, kept="Finished problems are kept", refused=(ConfigError,))
    if measured is None:
        return code
    _print(options.model, *measured)
    return 0


def _print(model: str, ref: ArtifactRef, config: PipelineConfig) -> None:
    from parallel_r1.report import Evaluation, results_table
    from parallel_r1.report.tables import as_markdown, estimators
    from tasks.stage import Run

    run = Run.of(config)
    folder = run.store.localise(ref, run.state / "cache", RESULTS)
    evaluation = Evaluation(model, json.loads((folder / RESULTS).read_text(encoding="utf-8")))
    print(f"\n{results_table([evaluation])}\n\n{as_markdown(estimators([evaluation]))}")
    blocks = config.evaluate.rollout.max_blocks
    print(f"\nprompt     {config.evaluate.prompt}, {f'at most {blocks} blocks' if blocks else 'plain generation without blocks'}")
    print(f"results    {ref.uri}/{RESULTS}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
