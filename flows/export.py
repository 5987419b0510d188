"""Write a checkpoint of the store as a Hugging Face folder with a model card, and upload it when told to.

    python -m flows.export ARTIFACT --to FOLDER | hub:OWNER/NAME [--config CONFIG] [--licence ID] [--overwrite]

ARTIFACT: stage/key of base, sft or rl, or a beginning of it. Nothing leaves this machine unless --to begins with `hub:`; the token is
then read from HF_TOKEN, and a repository that this makes is private. Exit codes: 0 done, 2 can't be exported so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from flows.command_line import config_named, parser_of
from parallel_r1.config import ConfigError, PipelineConfig
from parallel_r1.jobs import RESULTS, ROLLOUTS
from parallel_r1.lineage import Inventory, spelled
from parallel_r1.provenance import History
from parallel_r1.report.card import RECIPE_FILE, Facts, Measured, build
from parallel_r1.store import ArtifactRef, Store, StoreError
from tasks.places import PROJECT, state_folder, store_root

HUB = "hub:"
CARD = "README.md"


class ExportError(RuntimeError):
    """Can't be exported so: says why, and the way out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = parser_of("flows.export", __doc__)
    parser.add_argument("artifact", help="stage/key of a checkpoint, or a beginning of it")
    parser.add_argument("--to", required=True, help="a folder, or hub:owner/name")
    parser.add_argument("--config", default="pipeline_config.yaml", help="names the store, and the prompt where that lies in a file")
    parser.add_argument("--licence", help="licence of the weights, as the hub spells it, such as apache-2.0")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export there")
    options = parser.parse_args(arguments)
    if not options.artifact or not options.to:
        parser.error("make export ARTIFACT=stage/key TO=folder (or TO=hub:owner/name); `make artifacts` lists what there is")
    try:
        config = config_named(options.config, options.overrides)
        store = Store(store_root(config.store))
        history = History.of(Inventory.of(store), options.artifact)
        if options.to.startswith(HUB):
            _to_hub(store, history, config, options.to.removeprefix(HUB), options.licence, options.overwrite)
        else:
            _to_folder(store, history, config, Path(options.to), options.licence, options.overwrite)
    except (ConfigError, StoreError, ExportError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _to_folder(store: Store, history: History, config: PipelineConfig, target: Path, licence: str | None, overwrite: bool) -> None:
    _refuse_what_is_there(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        written = Path(beside) / "export"
        write(store, history, config, written, target.name, licence)
        shutil.rmtree(target, ignore_errors=True)
        written.replace(target)
    print(f'{spelled(history.name)} is in {target}: read {target / CARD}\nAsk it:  make ask MODEL={target} PROBLEM="..."')


def _refuse_what_is_there(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / RECIPE_FILE).exists() or not (target / CARD).exists():
        raise ExportError(f"{target}: is there already and is no earlier export: choose another folder")
    if not overwrite:
        raise ExportError(f"{target}: an earlier export is there: OVERWRITE=1 replaces it, or choose another folder")


def _to_hub(store: Store, history: History, config: PipelineConfig, repository: str, licence: str | None, overwrite: bool) -> None:
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise ExportError(f"{HUB}{repository}: HF_TOKEN is not set: make one with write access at https://huggingface.co/settings/tokens")
    api = HfApi(token=token)
    try:
        if api.repo_exists(repository) and not overwrite:
            raise ExportError(f"{HUB}{repository}: is there already: OVERWRITE=1 adds a commit to it, or choose another name")
        with tempfile.TemporaryDirectory(prefix="export-") as beside:
            written = Path(beside) / "export"
            write(store, history, config, written, repository.rpartition("/")[2], licence)
            api.create_repo(repository, private=True, exist_ok=True)
            commit = api.upload_folder(repo_id=repository, folder_path=written, commit_message=f"Export of {spelled(history.name)}")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ExportError(f"{HUB}{repository}: the hub said no: {error}") from error
    print(f"{spelled(history.name)} is uploaded: {commit.repo_url}, private if this made it")


def write(store: Store, history: History, config: PipelineConfig, folder: Path, name: str, licence: str | None) -> None:
    """Fill a new folder: the checkpoint, its card, its recipe. Raises ExportError where it doesn't load by itself."""
    prompt = history.prompt(config)
    cache = state_folder() / "cache"
    source = store.localise(_ref(store, history.name), cache) / "checkpoint"
    shutil.copytree(source, folder)
    recipe = yaml.safe_dump(history.recipe(), sort_keys=False, allow_unicode=True, width=120)
    title = f"# How {spelled(history.name)} was made. Contents of files are named by their digest.\n"
    (folder / RECIPE_FILE).write_text(title + recipe, encoding="utf-8")
    facts = _facts(folder, name, licence, config, history)
    measured = _measured(store, history, cache)
    (folder / CARD).write_text(build(history, prompt, measured, facts), encoding="utf-8")


def _ref(store: Store, name: tuple[str, str]) -> ArtifactRef:
    ref = store.load(*name)
    if ref is None:
        raise StoreError(f"{store.uri_of(*name)} is not whole: run the pipeline again, it is rebuilt")
    return ref


def _measured(store: Store, history: History, cache: Path) -> Measured | None:
    if history.evaluation is None:
        return None
    found = store.localise(_ref(store, history.evaluation[0]), cache, RESULTS, ROLLOUTS)
    return Measured(json.loads((found / RESULTS).read_text(encoding="utf-8")), found / ROLLOUTS)


def _facts(folder: Path, name: str, licence: str | None, config: PipelineConfig, history: History) -> Facts:
    """What the folder is, as it loads in the worker environment."""
    command = [str(PROJECT / config.resources.worker_python), "-W", "ignore", "-m", "parallel_r1.exported", str(folder.resolve())]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(config.resources.threads)}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ExportError(f"{spelled(history.name)} does not load by itself:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    own_template = "chat_template.jinja" in os.listdir(folder) and history.chain[0][1].config.get("type") == "hub"
    return Facts(name, found["parameters"], found["architecture"], own_template, licence)


if __name__ == "__main__":
    sys.exit(main())
