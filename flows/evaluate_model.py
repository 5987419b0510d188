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
from parallel_r1.checkpoints import NotFound, is_elsewhere, named
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
        manifest = named(model, store)
    except NotFound as missing:
        raise ConfigError(f"MODEL: {missing}") from None
    if (ref := store.load(manifest.stage, manifest.key)) is None:
        raise ConfigError(f"MODEL: {store.uri_of(manifest.stage, manifest.key)} is not whole; the run that made it builds it again")
    return ref


def knows_tags(checkpoint: Path) -> bool:
    """Whether a checkpoint's own tokenizer has the six tags as tokens."""
    words = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    known = {token["content"] for token in words.get("added_tokens", ())} | set(words["model"].get("vocab", ()))
    return set(TAGS) <= known


def settings(trained: Mapping[str, Any], tags: bool, longest: int | None = None) -> list[str]:
    """Overrides that fit a checkpoint: attention and prompt of the section that trained it, budgets within its `longest` sequence; without
    tags plain generation."""
    found = _budgets(longest) if longest else []
    if not tags:
        return [*found, "evaluate.prompt=plain", "evaluate.base_prompt=plain", "evaluate.rollout.max_blocks=0"]
    prompt = trained.get("prompt")
    style = prompt if isinstance(prompt, str) else "parallel"
    attention = trained.get("attention") or trained.get("rollout", {}).get("attention") or "causal"
    return [*found, f"attention={attention}", f"evaluate.prompt={style}", f"evaluate.base_prompt={style}"]


def _budgets(longest: int) -> list[str]:
    papers = EvaluateConfig().rollout
    if papers.max_prompt_tokens + papers.max_response_tokens <= longest:
        return []
    prompt = min(papers.max_prompt_tokens, longest // 4)
    response = min(papers.max_response_tokens, longest - prompt)
    return [f"evaluate.rollout.max_prompt_tokens={prompt}", f"evaluate.rollout.max_response_tokens={response}"]


def trained_as(folder: Path) -> dict[str, Any]:
    """Attention and prompt that the recipe beside an exported checkpoint names; nothing where there is none."""
    file = folder / RECIPE_FILE
    if not file.exists():
        return {}
    recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    last = [part for part in (recipe.get("sft"), *(recipe.get("rl") or ())) if part][-1:]
    return {"attention": recipe.get("attention")} | {"prompt": part.get("prompt") for part in last}


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
    first = config_for(recipe, model, evaluation, [], overrides)
    steps = Steps(first)
    if (checkpoint := artifact_of(model, steps.run.store)) is None:
        checkpoint = steps.keep_base(steps.base({}))
    own = Path(model) if Path(model).is_dir() else None
    folder = own or steps.run.store.localise(checkpoint, steps.run.state / "cache") / "checkpoint"
    tags = checkpoint.metrics.get("new_tags", 0) == 0 and knows_tags(folder)
    trained = trained_as(own) if own else steps.run.store.manifest(checkpoint.stage, checkpoint.key).config
    config = config_for(recipe, model, evaluation, settings(trained, tags, longest_of(folder)), overrides)
    steps.config = config
    label = Path(model).name if checkpoint.stage == "base" else f"{checkpoint.stage} {checkpoint.key[:8]}"
    steps.measure(label, checkpoint, steps.held_out_sets())
    return steps.measured()[label], config


def longest_of(folder: Path) -> int | None:
    """Tokens of the longest sequence that a checkpoint takes, where it says so."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")


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
    from parallel_r1.published import row_for
    from parallel_r1.report import Evaluation, results_table
    from parallel_r1.report.tables import as_markdown, estimators, paper
    from tasks.stage import Run

    run = Run.of(config)
    folder = run.store.localise(ref, run.state / "cache", RESULTS)
    evaluation = Evaluation(model, json.loads((folder / RESULTS).read_text(encoding="utf-8")))
    print(f"\n{results_table([evaluation])}\n\n{as_markdown(estimators([evaluation]))}")
    if row_for(model, last=True, config=config) and (beside := paper([evaluation], config)):
        print(f"\n{as_markdown(beside)}")
    blocks = config.evaluate.rollout.max_blocks
    print(f"\nprompt     {config.evaluate.prompt}, {f'at most {blocks} blocks' if blocks else 'plain generation without blocks'}")
    print(f"results    {ref.uri}/{RESULTS}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
