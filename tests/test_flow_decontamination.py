"""Decontamination as stages: what is removed, what evaluations depend on, and that made-up sets stay cheap."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import Project

ITEMS = [
    f"A train with {n} wagons leaves the station at noon and meets {n + 3} others; how many wheels are there in all?" for n in range(12)
]
OTHERS = [f"Let f({n}) be the number of ways to tile a board of {n} squares." for n in range(20)]


def write(path: Path, texts: list[str]) -> str:
    rows = [{"id": f"{path.stem}-{n}", "problem": text, "answer": str(n)} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ask_for(train: str, test: str) -> list[str]:
    return [
        f"prepare.train.real={{type: files, path: {train}}}",
        f"prepare.evaluation.bench={{type: files, path: {test}}}",
    ]


def manifest(project: Project, stage: str) -> dict:
    [key] = project.keys(stage)
    return json.loads((project.store / stage / key / "MANIFEST.json").read_text())


def test_copies_go_and_made_up_sets_are_left_alone(project: Project, tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", [*OTHERS, ITEMS[3].upper()]), write(tmp_path / "test.jsonl", ITEMS[:8])
    outcomes = project.run("prepare", *ask_for(train, test))
    assert [title for title in outcomes if title.startswith("decontaminate")] == ["decontaminate train real"]
    made = manifest(project, "decontaminate")
    assert set(made["inputs"]) == {"training", "tests.bench"}, "the made-up set takes no part"
    assert (made["metrics"]["seen"], made["metrics"]["copies"], made["metrics"]["kept"]) == (21, 1, 20)
    folder = project.store / "decontaminate" / made["key"]
    assert len((folder / "problems.jsonl").read_text().splitlines()) == 20
    [copy] = map(json.loads, (folder / "copies.jsonl").read_text().splitlines())
    assert copy == {"train_id": "train-20", "set": "bench", "test_id": "test-3", "share": 1.0, "exact": True}

    assert set(project.run("prepare", *ask_for(train, test)).values()) == {"cached"}
    off = project.run("prepare", *ask_for(train, test), "prepare.decontaminate=null")
    assert not [title for title in off if title.startswith("decontaminate")] and set(off.values()) == {"cached"}
    kept = project.run("prepare", *ask_for(train, test), "prepare.decontaminate.remove=false")
    assert kept["decontaminate train real"] == "built"
