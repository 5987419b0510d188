"""The manifest store, on a local folder and on an S3 server on loopback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from parallel_r1.config import IN_KEY_WHEN_SET, NOT_IN_KEY, FilesSource, HubStudent, LoraConfig, RlConfig, Section, SftConfig
from parallel_r1.store import MANIFEST, ArtifactRef, Store, StoreError, digest_of, identity, key_of, open_filesystem
from pydantic import Field


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "local":
        return Store(tmp_path / "store")
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = "bucket-" + tmp_path.name.replace("_", "-").lower()[-40:].strip("-")
    store = Store(f"s3://{bucket}/some/prefix")
    store.filesystem.mkdir(bucket)
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    (out / "checkpoint").mkdir(parents=True)
    (out / "checkpoint" / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (out / "results.json").write_text('{"a": 1}')
    (out / "log.txt").write_text("12:00:01 hello")
    return out


def commit(store: Store, folder: Path, key: str = "k1") -> ArtifactRef:
    return store.commit("sft", key, folder, config={"steps": 3}, metrics={"loss": 0.5}, seconds=1.25, versions={"python": "3.11"})


def test_a_committed_artifact_is_found_whole_and_readable(store: Store, folder: Path, tmp_path: Path) -> None:
    assert store.load("sft", "k1") is None
    ref = commit(store, folder)
    assert store.load("sft", "k1") == ref
    assert store.check(ref, deep=True) is None
    local = store.localise(ref, tmp_path / "cache")
    assert (local / "checkpoint" / "model.safetensors").read_bytes() == (folder / "checkpoint" / "model.safetensors").read_bytes()
    manifest = store.manifest("sft", "k1")
    assert manifest and set(manifest.files) == {"checkpoint/model.safetensors", "results.json", "log.txt"}
    assert (manifest.config, manifest.metrics, manifest.seconds) == ({"steps": 3}, {"loss": 0.5}, 1.25)


def test_the_digest_is_the_content_without_clocks(store: Store, folder: Path) -> None:
    first = commit(store, folder)
    (folder / "log.txt").write_text("12:34:56 hello, later")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1.host").write_text("clocks too")
    assert commit(store, folder, "k2").digest == first.digest, "log and TensorBoard files have clocks inside"
    (folder / "results.json").write_text('{"a": 2}')
    assert commit(store, folder, "k3").digest != first.digest


@pytest.mark.parametrize("damage, found, reason", [
    ("remove", "shallow", "a file is gone"),
    ("truncate", "shallow", "a file is shorter than the manifest says"),
    ("flip", "deep", "same size, other bytes: only hashing shows it"),
    ("manifest", "shallow", "the commit mark can't be understood"),
    ("digest", "shallow", "the manifest was edited: its digest is not that of its files"),
    ("invalidate", "shallow", "the commit mark was taken away"),
])  # fmt: skip
def test_damage_is_found(store: Store, folder: Path, tmp_path: Path, damage: str, found: str, reason: str) -> None:
    ref = commit(store, folder)
    path, manifest = f"{store.path}/sft/k1/results.json", f"{store.path}/sft/k1/{MANIFEST}"
    if damage == "remove":
        store.filesystem.rm_file(path)
    elif damage == "truncate":
        store.filesystem.pipe_file(path, b"{")
    elif damage == "flip":
        store.filesystem.pipe_file(path, b'{"a": 7}')
    elif damage == "manifest":
        store.filesystem.pipe_file(manifest, b'{"format": 1, "sta')
    elif damage == "digest":
        content = json.loads(store.filesystem.cat_file(manifest))
        content["files"]["results.json"]["sha256"] = "0" * 64
        store.filesystem.pipe_file(manifest, json.dumps(content).encode())
    else:
        store.invalidate("sft", "k1")
    assert store.check(ref, deep=True), reason
    if found == "shallow":
        assert store.load("sft", "k1") is None, reason
        with pytest.raises(StoreError):
            store.localise(ref, tmp_path / "cache")
    elif not store.is_local:
        with pytest.raises(StoreError, match="not what was committed"):
            store.localise(ref, tmp_path / "cache")
    commit(store, folder)
    assert store.check(ref, deep=True) is None, "a rebuild repairs it"


def test_another_artifact_at_the_key_is_not_taken_for_the_one_asked_for(store: Store, folder: Path) -> None:
    ref = commit(store, folder)
    (folder / "results.json").write_text('{"a": 2}')
    commit(store, folder)
    assert "not" in (store.check(ref) or "")


def test_files_without_manifest_are_no_artifact(store: Store) -> None:
    store.filesystem.makedirs(f"{store.path}/sft/k9", exist_ok=True)
    store.filesystem.pipe_file(f"{store.path}/sft/k9/results.json", b"{}")
    assert store.load("sft", "k9") is None


@pytest.mark.parametrize("name, reason", [
    ("../escape", "climbs out"),
    ("a/../../escape", "climbs out from below"),
    ("/etc/passwd", "absolute"),
    ("a\\b", "another system's separator"),
    ("./a", "a second spelling of a name"),
    ("", "no name"),
])  # fmt: skip
def test_a_manifest_with_a_name_that_leaves_the_store_is_no_manifest(store: Store, folder: Path, name: str, reason: str) -> None:
    commit(store, folder)
    path = f"{store.path}/sft/k1/{MANIFEST}"
    content = json.loads(store.filesystem.cat_file(path))
    content["files"][name] = {"size": 1, "sha256": "0" * 64}
    store.filesystem.pipe_file(path, json.dumps(content).encode())
    assert store.manifest("sft", "k1") is None, reason


@pytest.mark.parametrize("stage, key", [("..", "k"), ("sft", "../k"), ("a/b", "k"), ("", "k"), ("sft", ".staging")])
def test_stage_and_key_can_not_leave_the_store(store: Store, folder: Path, stage: str, key: str) -> None:
    with pytest.raises(StoreError):
        store.uri_of(stage, key)
    with pytest.raises(StoreError):
        store.commit(stage, key, folder)


def test_links_are_refused(store: Store, folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match="no links"):
        commit(store, folder)


def test_an_empty_folder_and_a_foreign_mark_are_refused(store: Store, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="no files"):
        commit(store, tmp_path / "empty")
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(StoreError, match="commit mark"):
        commit(store, folder)


def test_what_is_written_into_the_folder_later_does_not_reach_the_store(store: Store, folder: Path) -> None:
    ref = commit(store, folder)
    (folder / "results.json").write_text('{"a": 3}')
    assert store.check(ref, deep=True) is None


class Inner(Section):
    path: str = "a"
    shown_as: str = Field("x", json_schema_extra=NOT_IN_KEY)


class Outer(Section):
    steps: int = 1
    inner: Inner = Field(default_factory=Inner)
    many: dict[str, Inner] = Field(default_factory=lambda: {"one": Inner()})
    workers: int = Field(1, json_schema_extra=NOT_IN_KEY)
    later: Inner | None = Field(None, json_schema_extra=IN_KEY_WHEN_SET)


@pytest.mark.parametrize("other, same, reason", [
    (Outer(), True, "equal"),
    (Outer(steps=2), False, "a field that decides the outcome"),
    (Outer(workers=5), True, "marked: how to run"),
    (Outer(inner=Inner(shown_as="y")), True, "marked, deep inside"),
    (Outer(later=Inner()), False, "a field that came later, set"),
    (Outer(many={"one": Inner(path="b")}), False, "inside a mapping"),
    (Outer(many={"two": Inner()}), False, "a name in a mapping"),
])  # fmt: skip
def test_identity(other: Outer, same: bool, reason: str) -> None:
    assert (identity(other) == identity(Outer())) is same, reason


def test_names_and_pace_of_a_stage_do_not_change_its_key() -> None:
    assert identity(RlConfig(name="a", checkpoint_every=1)) == identity(RlConfig(name="b", checkpoint_every=2))


def test_a_field_that_came_later_leaves_old_keys_alone() -> None:
    assert "later" not in identity(Outer()) and "lora" not in identity(SftConfig()) and "lora" not in identity(RlConfig())
    assert identity(SftConfig(lora=LoraConfig(r=8)))["lora"]["r"] == 8


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    for name, text in [("a.jsonl", "1"), ("b.jsonl", "1"), ("c.jsonl", "2")]:
        (tmp_path / name).write_text(text)
    a, b, c = (identity(FilesSource(path=str(tmp_path / name))) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert a == b != c
    assert str(tmp_path) not in json.dumps(a)
    with pytest.raises(StoreError, match="missing.jsonl"):
        identity(FilesSource(path=str(tmp_path / "missing.jsonl")))


@pytest.mark.parametrize("change", [
    {"stage": "rl"}, {"version": 2}, {"config": {"x": 2}}, {"seed": 1}, {"inputs": {"a": "2"}}, {"inputs": {"b": "1"}},
])  # fmt: skip
def test_everything_that_decides_the_outcome_is_in_the_key(change: dict) -> None:
    question = {"stage": "sft", "version": 1, "config": {"x": 1}, "seed": 0, "inputs": {"a": "1"}}
    assert key_of(**question) == key_of(**question) != key_of(**{**question, **change})


def test_the_digest_does_not_depend_on_the_order_of_files(store: Store, folder: Path) -> None:
    commit(store, folder)
    manifest = store.manifest("sft", "k1")
    assert manifest and digest_of(dict(reversed(manifest.files.items()))) == manifest.digest


def test_the_endpoint_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    assert open_filesystem("s3://bucket/x")[0].storage_options["endpoint_url"] == "http://127.0.0.1:2"
    assert not os.path.exists("s3:")


def test_a_local_checkpoint_is_known_by_its_content_and_a_hub_one_by_its_name(tmp_path: Path) -> None:
    first, moved, other = (tmp_path / name for name in ("first", "moved", "other"))
    for folder, weights in ((first, "w1"), (moved, "w1"), (other, "w2")):
        folder.mkdir()
        (folder / "model.safetensors").write_text(weights)
    known = {folder.name: identity(HubStudent(name=str(folder)))["name"] for folder in (first, moved, other)}
    assert known["first"] == known["moved"] != known["other"]
    assert identity(HubStudent(name="Qwen/Qwen3-4B-Base"))["name"] == "Qwen/Qwen3-4B-Base"
