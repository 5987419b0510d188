"""Run the whole pipeline from the command line.

    python -m flows.run pipeline_config.yaml --set rl.0.steps=5 store=s3://bucket/prefix

Starts a local Prefect server if none answers, shows how far every stage is, and prints the results and where everything lies.
Exit codes: 0 done, 1 a stage failed, 2 the config can't be used, 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows import server
from flows.command_line import add_recipe, carried_out, config_named, parser_of, quiet_server
from parallel_r1.config import ConfigError, PipelineConfig

if TYPE_CHECKING:
    from parallel_r1.store import ArtifactRef


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = parser_of("flows.run", __doc__)
    add_recipe(parser)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        config = config_named(options.recipe, options.overrides)
        ui = quiet_server()
    except (ConfigError, server.ServerError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{config.name}: {options.recipe} {' '.join(options.overrides)}".rstrip(), flush=True)
    return _run(options.recipe, options.overrides, config, ui, start)


def _run(recipe: str, overrides: list[str], config: PipelineConfig, ui: str, start: float) -> int:
    from flows.pipeline import pipeline  # imports prefect, which reads its environment then

    built, code = carried_out(lambda: pipeline(recipe, overrides), ui)
    if built is None:
        return code
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
