"""Run a table of experiments from the command line.

    python -m flows.run_experiments recipes/tiny/*.yaml --seeds 3 --set store=s3://bucket/prefix

Starts a local Prefect server if none answers, shows how far every stage is, and prints the table and where the page lies.
Exit codes: 0 done, 1 a row failed, 2 a config can't be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flows import server
from flows.command_line import carried_out, config_named, parser_of, quiet_server
from parallel_r1.config import ConfigError
from parallel_r1.jobs import RESULTS
from tasks.places import PROJECT


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = parser_of("flows.run_experiments", __doc__)
    parser.add_argument("recipes", nargs="+", help="config files, one per row of the table, such as recipes/tiny/*.yaml")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of every recipe")
    parser.add_argument("--ready", action="store_true", help="only rows that are finished, while another run is still at work")
    parser.add_argument("--copy-to", metavar="FOLDER", help="copy the page there, as report.html and README.md, with how it was made")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"SEEDS={options.seeds}: one seed at least, and two for an interval over seeds")
    start = time.monotonic()
    recipes = [os.path.relpath(PROJECT / recipe, PROJECT) for recipe in options.recipes]
    try:
        for recipe in recipes:
            config_named(recipe, options.overrides)
        ui = quiet_server()
    except (ConfigError, server.ServerError) as error:
        print(error, file=sys.stderr)
        return 2
    page, code = carried_out(lambda: _run(recipes, options.seeds, options.overrides, options.ready), ui, refused=(ConfigError,))
    if page is None:
        return code
    if options.copy_to:
        copy(page, Path(options.copy_to), _asked(recipes, options))
    print(f"UI         {ui}\n{time.monotonic() - start:.0f} s", flush=True)
    return 0


def _run(recipes: list[str], seeds: int, overrides: list[str], ready: bool) -> Path:
    """The folder of the page, once its table was printed."""
    from flows.experiments import experiments  # imports prefect, which reads its environment then
    from parallel_r1.report.combined import as_text
    from tasks.report import PAGE
    from tasks.stage import Run

    page = experiments(recipes, seeds, overrides, ready)
    run = Run.of(config_named(recipes[0], overrides))
    folder = run.store.localise(page, run.state / "cache")
    print(f"\n{as_text(json.loads((folder / RESULTS).read_text(encoding='utf-8')))}\n\nreport     {page.uri}/{PAGE}")
    return folder


def copy(page: Path, to: Path, arguments: str) -> None:
    """The page and its Markdown twin, each with a line on how it was made: the page itself holds no clocks, so equal runs are equal."""
    from tasks.report import PAGE, TEXT

    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, capture_output=True, text=True)
    commit = asked.stdout.strip() or "unknown"
    today = datetime.now(UTC).date().isoformat()
    made = f"Made by `make experiments {arguments}` at commit {commit}, {today}, on {os.cpu_count()} CPU cores."
    to.mkdir(parents=True, exist_ok=True)
    text = (page / PAGE).read_text(encoding="utf-8")
    (to / PAGE).write_text(text.replace("</header>", f'<p class="note">{html.escape(made)}</p>\n</header>', 1), encoding="utf-8")
    title, rest = (page / TEXT).read_text(encoding="utf-8").split("\n", 1)
    (to / "README.md").write_text(f"{title}\n\n{made} The same with figures: [{PAGE}]({PAGE}).\n{rest}", encoding="utf-8")


def _asked(recipes: list[str], options: argparse.Namespace) -> str:
    """What `make experiments` was told, without where things lie and how they are run: neither changes a number."""
    changes = [override for override in options.overrides if not override.startswith(("store=", "resources."))]
    told = f'RECIPES="{_shortly(recipes)}" SEEDS={options.seeds}{" READY=1" * options.ready}'
    return told + (f' SET="{" ".join(changes)}"' if changes else "")


def _shortly(recipes: list[str]) -> str:
    """`recipes/tiny/*.yaml` where these are all that lie there."""
    folder = os.path.dirname(recipes[0])
    everything = sorted(path.relative_to(PROJECT).as_posix() for path in (PROJECT / folder).glob("*.yaml"))
    return f"{folder}/*.yaml" if sorted(recipes) == everything else " ".join(recipes)


if __name__ == "__main__":
    sys.exit(main())
