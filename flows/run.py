"""Run the whole pipeline from the command line.

    python -m flows.run pipeline_config.yaml --set rl.0.steps=5 store=s3://bucket/prefix

Starts a local Prefect server if none answers, shows how far every stage is, and prints the results and where everything lies.
Exit codes: 0 done, 1 a stage failed, 2 the config can't be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows import server
from parallel_r1.config import ConfigError, PipelineConfig, load
from tasks.places import PROJECT

if TYPE_CHECKING:
    from parallel_r1.store import ArtifactRef


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.run", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipe", nargs="?", default="pipeline_config.yaml", help="config file: pipeline_config.yaml or recipes/*.yaml")
    parser.add_argument("--set", dest="overrides", nargs="*", action="extend", default=[], metavar="FIELD=VALUE", help="dotted overrides")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        config = load(os.path.relpath(PROJECT / options.recipe), options.overrides)
        url = server.ensure()
    except (ConfigError, server.ServerError) as error:
        print(error, file=sys.stderr)
        return 2
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # we say ourselves how far it is; the UI has every line
    print(f"{config.name}: {options.recipe} {' '.join(options.overrides)}".rstrip(), flush=True)
    return _run(options.recipe, options.overrides, config, url.removesuffix("/api"), start)


def _run(recipe: str, overrides: list[str], config: PipelineConfig, ui: str, start: float) -> int:
    from flows.pipeline import pipeline  # imports prefect, which reads its environment then

    try:
        built = pipeline(recipe, overrides)
    except KeyboardInterrupt:
        print("\nInterrupted. Finished stages are kept, and a stage goes on from its last checkpoint: run again.", file=sys.stderr)
        return 130
    except Exception as error:  # the traceback is in the UI's log; a person at the terminal needs the reason
        print(f"\n{type(error).__name__}: {error}\n\nRun again to go on from here. UI: {ui}", file=sys.stderr)
        return 1
    _print_results(built["report"], config, ui, time.monotonic() - start)
    return 0


def _print_results(report: ArtifactRef, config: PipelineConfig, ui: str, seconds: float) -> None:
    from tasks.report import PAGE, TABLE
    from tasks.stage import Run

    run = Run.of(config)
    table = run.store.localise(report, run.state / "cache", TABLE) / TABLE
    print(f"\n{table.read_text(encoding='utf-8')}\n")
    print(f"report     {report.uri}/{PAGE}")
    print(f"artifacts  {run.store.root}")
    print(f"UI         {ui}")
    print(f"{seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
