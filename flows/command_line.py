"""What the commands of this folder share: options, the config that they name, the server, and what a failed run says."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from flows import server
from parallel_r1.config import PipelineConfig, load
from tasks.places import PROJECT

Told = TypeVar("Told")
STAGES_ARE_KEPT = "Finished stages are kept, and a stage goes on from its last checkpoint"


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m module`, described by the first line of its docstring; knows --set."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--set", dest="overrides", nargs="*", action="extend", default=[], metavar="FIELD=VALUE", help="dotted overrides")
    return parser


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """One config file, by default the embedded one."""
    parser.add_argument("recipe", nargs="?", default="pipeline_config.yaml", help="config file: pipeline_config.yaml or recipes/*.yaml")


def config_named(recipe: str, overrides: list[str]) -> PipelineConfig:
    """The config of a recipe, relative to the project. Raises ConfigError."""
    return load(os.path.relpath(PROJECT / recipe), overrides)


def quiet_server() -> str:
    """Start a Prefect server if none answers; gives the UI's address. Raises ServerError. To be called before prefect is imported."""
    ui = server.ensure().removesuffix("/api")
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # we say ourselves how far it is; the UI has every line
    return ui


def carried_out(
    flow: Callable[[], Told], ui: str, kept: str = STAGES_ARE_KEPT, refused: tuple[type[Exception], ...] = ()
) -> tuple[Told | None, int]:
    """What a flow gives, and exit code 0. Else nothing, with the reason on stderr: 130 interrupted, 2 one of `refused`, 1 failed."""
    try:
        return flow(), 0
    except KeyboardInterrupt:
        print(f"\nInterrupted. {kept}: run again.", file=sys.stderr)
        return None, 130
    except refused as error:
        print(error, file=sys.stderr)
        return None, 2
    except Exception as error:  # the traceback is in the UI's log; a person at the terminal needs the reason
        print(f"\n{type(error).__name__}: {error}\n\nRun again to go on from here. UI: {ui}", file=sys.stderr)
        return None, 1
