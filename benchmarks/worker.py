"""Benchmarks that need torch or vLLM, in the worker environment: `python -m benchmarks.worker GROUP`.

The last line of stdout is a JSON object {name: number}; the lines before it are for people. `benchmarks.run` starts this program.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks import layouts


def main() -> None:
    """Run one group."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker")
    parser.add_argument("group", choices=("in_process", "over_http", "table", "layout", "step"))
    group = parser.parse_args().group
    print(json.dumps(_measure(group)), flush=True)


def _measure(group: str) -> dict[str, float]:
    if group == "layout":
        return layouts.layout_vs_loop()
    if group == "step":
        return layouts.structured_step_vs_causal()
    from benchmarks import rollouts  # loads vLLM

    if group == "table":
        return rollouts.table("make bench", datetime.now(UTC).isoformat(timespec="minutes"))
    return rollouts.in_process() if group == "in_process" else rollouts.over_http()


if __name__ == "__main__":
    main()
