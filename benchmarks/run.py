"""Measure speeds into benchmarks/results.json: {name: {value, unit, better, command, at}}.

    python -m benchmarks.run [CONFIG] [--set FIELD=VALUE ...] [--only NAME ...]

What is not measured this time keeps its last value.
"""

from __future__ import annotations

import argparse
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import cached, grading, in_worker

RESULTS = Path(__file__).with_name("results.json")


BENCHMARKS = {**cached.BENCHMARKS, **grading.BENCHMARKS, **in_worker.BENCHMARKS}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run")
    parser.add_argument("recipe", nargs="?", default="pipeline_config.yaml")
    parser.add_argument("--set", dest="overrides", nargs="*", action="extend", default=[])
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.only:
        measured = BENCHMARKS[name]([options.recipe, "--set", *options.overrides])
        command = shlex.join(["make", "bench", f"CONFIG={options.recipe}", f"SET={' '.join(options.overrides)}"])
        results[name] = {**measured._asdict(), "command": command, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {measured.value:g} {measured.unit} ({measured.better} is better)")


if __name__ == "__main__":
    main()
