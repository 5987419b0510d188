"""Watch a model think in parallel.

    python -m parallel_r1.ask MODEL "PROBLEM" [--config CONFIG] [--set FIELD=VALUE ...] [--paths 3] [--seed 1] [--json]

MODEL: a checkpoint folder, an artifact's key or its beginning, or `latest`. In a terminal the response is drawn as it grows; elsewhere it
is printed as text at the end. `--json` prints one object for programs. Exit codes: 0 done, 2 can't be asked so, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from parallel_r1 import checkpoints, grading
from parallel_r1.checkpoints import Checkpoint
from parallel_r1.config import ConfigError, PromptStyle, RolloutConfig, load
from parallel_r1.rollout.engines import Engine, open_engine
from parallel_r1.rollout.machine import Rollout
from parallel_r1.rollout.records import Studio
from parallel_r1.rollout.transformers_engine import TransformersEngine
from parallel_r1.store import Store, StoreError
from parallel_r1.thinking import Thinking, draw

PROJECT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    options = _parse(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        return _ask(options)
    except (ConfigError, StoreError, checkpoints.NotFound, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m parallel_r1.ask", description="Watch a model think in parallel.")
    parser.add_argument("model", help="checkpoint folder, artifact key or its beginning, or latest")
    parser.add_argument("problem", nargs="?", default=os.environ.get("ASK_PROBLEM", ""), help="what to ask; by default $ASK_PROBLEM")
    parser.add_argument("--config", default="pipeline_config.yaml", help="whose store, prompt and rollout settings to use")
    parser.add_argument("--set", dest="overrides", nargs="*", action="extend", default=[], metavar="FIELD=VALUE", help="dotted overrides")
    parser.add_argument("--prompt", choices=("bare", "plain", "parallel"), help="by default that which the checkpoint was trained with")
    parser.add_argument("--paths", type=int, help="paths per block")
    parser.add_argument("--blocks", type=int, help="blocks at most")
    parser.add_argument("--max-tokens", type=int, help="tokens of the response at most")
    parser.add_argument("--temperature", type=float, help="sampling temperature")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another response")
    parser.add_argument("--pace", type=float, default=25, help="tokens per second of a thread, slow enough to read; 0: no bound")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not options.problem.strip():
        parser.error('no problem: make ask MODEL=latest PROBLEM="..."')
    return options


def _ask(options: argparse.Namespace) -> int:
    config = load(os.path.relpath(PROJECT / options.config), options.overrides)
    root = config.store if "://" in config.store else str(PROJECT / config.store)
    state = Path(os.environ.get("PARALLEL_R1_STATE", PROJECT / ".state"))
    checkpoint = checkpoints.find(options.model, Store(root), state / "downloads")
    settings, prompt = _settings(config.evaluate.rollout, config.evaluate.prompt, checkpoint, options)
    studio = Studio(AutoTokenizer.from_pretrained(checkpoint.folder), settings)
    prompt_ids = studio.prompt_ids(prompt, options.problem)
    if prompt_ids is None:
        raise ValueError(f"the problem is longer than {settings.max_prompt_tokens} tokens, rollout.max_prompt_tokens of {options.config}")
    engine = open_engine(checkpoint.folder, settings, options.seed)
    rollout = studio.rollout(prompt_ids, str(options.seed))
    console = Console()
    show: Callable[..., None] = _print_json if options.json else _print_live if console.is_terminal else _print_text
    show(options, checkpoint, engine, studio, rollout, console)
    return 0


def _settings(
    rollout: RolloutConfig, prompt: PromptStyle, checkpoint: Checkpoint, options: argparse.Namespace
) -> tuple[RolloutConfig, PromptStyle]:
    """The config's evaluation settings, with the attention and prompt of the checkpoint's training, and what the command line says."""
    trained = checkpoint.config.get("rollout", checkpoint.config)
    room = options.paths and rollout.max_response_tokens * max(1, options.paths // rollout.num_paths)  # more paths, more tokens
    chosen = {
        "num_paths": options.paths,
        "max_blocks": options.blocks,
        "max_response_tokens": options.max_tokens or room,
        "temperature": options.temperature,
        "attention": trained.get("attention"),
    }
    longest = AutoConfig.from_pretrained(checkpoint.folder).max_position_embeddings
    values = rollout.model_dump() | {name: value for name, value in chosen.items() if value is not None}
    values |= {"engine": "transformers", "endpoints": [], "max_prompt_tokens": min(rollout.max_prompt_tokens, longest // 2)}
    values["max_response_tokens"] = min(values["max_response_tokens"], longest - values["max_prompt_tokens"])
    return RolloutConfig.model_validate(values), options.prompt or checkpoint.config.get("prompt") or prompt


def _carry_out(engine: Engine, rollout: Rollout) -> float:
    """Seconds that the response took."""
    began = time.monotonic()
    list(engine.run([rollout]))
    return time.monotonic() - began


def _summary(rollout: Rollout, studio: Studio, seconds: float) -> dict[str, Any]:
    trajectory = rollout.trajectory
    return {
        "answer": grading.extract(studio.text(trajectory)),
        **studio.markup(rollout),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(trajectory.loss_mask) / seconds, 1),
    }


def _print_json(
    options: argparse.Namespace, checkpoint: Checkpoint, engine: Engine, studio: Studio, rollout: Rollout, console: Console
) -> None:
    seconds = _carry_out(engine, rollout)
    told = {"model": checkpoint.name, "engine": engine.name, "problem": options.problem, "seed": options.seed}
    print(json.dumps({**told, "text": studio.text(rollout.trajectory), **_summary(rollout, studio, seconds)}, ensure_ascii=False))


def _print_text(
    options: argparse.Namespace, checkpoint: Checkpoint, engine: Engine, studio: Studio, rollout: Rollout, console: Console
) -> None:
    seconds = _carry_out(engine, rollout)
    for part in draw(studio.segments(rollout.trajectory), console.width):
        console.print(part)
    console.print(_closing(_summary(rollout, studio, seconds)))


def _print_live(
    options: argparse.Namespace, checkpoint: Checkpoint, engine: Engine, studio: Studio, rollout: Rollout, console: Console
) -> None:
    assert isinstance(engine, TransformersEngine)
    told = {"title": checkpoint.name, "title_align": "left", "subtitle": engine.name, "subtitle_align": "right"}
    console.print(Panel(Text(options.problem.strip()), border_style="dim", **told))
    with Thinking(console, rollout, studio, options.pace) as thinking:
        engine.on_token = thinking.take
        seconds = _carry_out(engine, rollout)
        thinking.close()
    console.print(_closing(_summary(rollout, studio, seconds - thinking.paused)))


def _closing(summary: dict[str, Any]) -> Text:
    """Answer, tokens, critical path; and what is wrong with the response, where something is."""
    answer = summary["answer"]
    text = Text("\n")
    text.append(f"Answer: {answer}\n" if answer else "No final answer.\n", style="bold green" if answer else "bold red")
    blocks, tokens, longest = summary["blocks"], summary["tokens"], summary["critical_path_tokens"]
    saved = f", {1 - longest / tokens:.0%} shorter" if blocks else ""
    counted = f"{blocks} parallel block{'s' * (blocks != 1)}"
    text.append(f"{tokens} tokens, {longest} on the critical path{saved} · {counted} · {summary['seconds']:.1f} s", style="dim")
    if summary["finish"] == "length":
        text.append("\nCut: the response reached its token budget. Raise --max-tokens.", style="yellow")
    if summary["faults"]:
        text.append(f"\nFaulty markup: {', '.join(sorted(set(summary['faults'])))}", style="yellow")
    if not blocks:
        text.append("\nThe model thought in one line. Was it trained to open blocks? Another --seed may show some.", style="dim")
    return text


if __name__ == "__main__":
    sys.exit(main())
