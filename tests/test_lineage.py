"""What is in a store, what was made from what, what may go: on a local folder and on S3."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from flows.artifacts import main
from parallel_r1.lineage import Inventory
from parallel_r1.store import MANIFEST, ArtifactRef, Store, StoreError
from tasks.uploads import FOLDER
from tests.conftest import PROJECT

A_DAY = timedelta(days=1)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "local":
        yield Store(tmp_path / "store")
        return
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    store = Store(f"s3://lineage-{port}/prefix")
    store.filesystem.mkdir(f"lineage-{port}")
    yield store
    server.stop()


class Shelf:
    """Puts small artifacts of chosen age into a store."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder = store, folder

    def put(self, stage: str, key: str, days: int, run: str = "", **inputs: ArtifactRef) -> ArtifactRef:
        out = self.folder / "out"
        out.mkdir(exist_ok=True)
        (out / "data.json").write_text(json.dumps([stage, key]))
        ref = self.store.commit(stage, key, out, inputs=inputs, config={"name": run})
        path = f"{self.store.path}/{stage}/{key}/{MANIFEST}"
        content = json.loads(self.store.filesystem.cat_file(path))
        content["committed_at"] = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
        self.store.filesystem.pipe_file(path, json.dumps(content).encode())
        return ref


@pytest.fixture
def shelf(store: Store, tmp_path: Path) -> Shelf:
    """Two runs named `a`, an old and a new one that share `shared`, and things of nobody."""
    shelf = Shelf(store, tmp_path)
    shared = shelf.put("prepare", "shared", 9)
    old = shelf.put("sft", "old", 8, base=shared)
    new = shelf.put("sft", "new", 5, base=shared)
    shelf.put("report", "before", 8, "a", **{"stages.sft": old})
    shelf.put("report", "after", 4, "a", **{"stages.sft": new})
    orphan = shelf.put("generate", "orphan", 7)
    shelf.put("filter", "orphan", 7, trajectories=orphan)
    shelf.put("rl", "atwork", 0, checkpoint=shelf.put("sft", "older", 9))
    return shelf


def test_garbage_is_what_no_kept_run_reaches(shelf: Shelf) -> None:
    inventory = Inventory.of(shelf.store)
    assert inventory.kept_runs() == {"a": ("report", "after")}
    gone = [("filter", "orphan"), ("generate", "orphan"), ("report", "before"), ("sft", "old")]
    assert inventory.garbage([], A_DAY) == gone, "what a young artifact was made from stays: a run may be at work"
    assert inventory.garbage([], timedelta(0)) == sorted([*gone, ("rl", "atwork"), ("sft", "older")])
    assert inventory.garbage(["report/before"], A_DAY) == gone[:2], "a run that is named stays whole"
    assert inventory.garbage(["filter/orphan"], A_DAY) == gone[2:]


def test_a_page_of_experiments_keeps_what_its_rows_were_made_from(shelf: Shelf) -> None:
    old = Inventory.of(shelf.store).artifacts["sft", "old"]
    ref = shelf.store.load(old.stage, old.key)
    shelf.put("experiments", "page", 6, "base sft_seen", **{"rows.sft_seen/0/rl hard": ref})
    inventory = Inventory.of(shelf.store)
    assert inventory.kept_runs() == {"a": ("report", "after"), "base sft_seen": ("experiments", "page")}
    assert ("sft", "old") not in inventory.garbage([], A_DAY)


def test_gc_is_dry_until_told_otherwise(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--set", f"store={shelf.store.root}"]
    before = set(Inventory.of(shelf.store).artifacts)
    assert main(["gc", *here]) == 0
    said = capsys.readouterr().out
    assert "would remove sft/old" in said and "4 of 9 artifacts" in said and "APPLY=1" in said
    assert set(Inventory.of(shelf.store).artifacts) == before
    assert main(["gc", *here, "--apply"]) == 0
    left = Inventory.of(shelf.store)
    assert before - set(left.artifacts) == {("filter", "orphan"), ("generate", "orphan"), ("report", "before"), ("sft", "old")}
    assert not shelf.store.filesystem.exists(f"{shelf.store.path}/sft/old/data.json")
    assert all(shelf.store.load(*name) for name in left.artifacts), "what stays is whole"
    assert main(["gc", *here, "--keep", "nothing/like-this"]) == 2


def test_gc_removes_checkpoints_of_trainings_that_were_given_up(shelf: Shelf, tmp_path: Path) -> None:
    uploaded = Shelf(Store(f"{shelf.store.root}/{FOLDER}"), tmp_path)
    uploaded.put("rl", "givenup-00000010", 3)
    uploaded.put("rl", "running-00000010", 0)
    uploaded.put("rl", "atwork-00000100", 3)  # of an artifact that stays: kept to be looked at
    assert main(["gc", "--set", f"store={shelf.store.root}", "--apply"]) == 0
    assert sorted(manifest.key for manifest in uploaded.store.manifests()) == ["atwork-00000100", "running-00000010"]


def test_lineage_is_a_tree(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lineage", "report/after", "--set", f"store={shelf.store.root}"]) == 0
    lines = [line.split("  digest")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["report/after", "  stages.sft: sft/new", "    base: prepare/shared"]
    shelf.store.remove("prepare", "shared")
    assert list(Inventory.of(shelf.store).tree(("sft", "new")))[1] == "  base: prepare/shared  (no longer in the store)"
    with pytest.raises(StoreError, match="2 artifacts"):
        Inventory.of(shelf.store).named("orphan")
    assert Inventory.of(shelf.store).named(f"{shelf.store.root}/sft/new") == ("sft", "new"), "a URI names an artifact too"


def test_the_list_shows_users_and_a_deep_one_finds_flipped_bits(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--set", f"store={shelf.store.root}"]
    assert main(["list", *here]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("prepare/shared")]
    assert "used by sft" in line and "9 d" in line and " B " in line
    shelf.store.filesystem.pipe_file(f"{shelf.store.path}/sft/new/data.json", b'["sft", "neW"]')
    assert main(["list", *here]) == 0, "same size: a look at the sizes finds nothing"
    assert main(["list", *here, "--deep"]) == 1
    assert "damaged" in capsys.readouterr().out
    assert shelf.store.load("sft", "new") is None


def test_make_has_the_commands(tmp_path: Path) -> None:
    Shelf(Store(tmp_path / "store"), tmp_path).put("sft", "one", 2)
    for target, expected in [("artifacts", "sft/one"), ("gc", "would remove sft/one"), ("lineage ARTIFACT=sft/one", "sft/one")]:
        command = ["make", "--silent", *target.split(), f"SET=store={tmp_path / 'store'}"]
        done = subprocess.run(command, cwd=PROJECT, env=os.environ, capture_output=True, text=True)
        assert expected in done.stdout, f"{target}: {done.stdout}{done.stderr}"
