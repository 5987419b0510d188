"""The stage generate with a teacher over HTTP: what it shows, what it spends, and that nothing is bought twice by any run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_r1.store import Manifest
from tasks.generate import acceptance, expense
from tests.conftest import Project
from tests.test_served import PRICED, Endpoint

COUNTED = {
    "trajectories": 3, "unasked": 0, "accepted": 2, "answers": 8, "prompt_tokens": 1234, "completion_tokens": 56789, "cost": 0.123456,
    "tokens_per_second": 78.9,
}  # fmt: skip


def test_acceptance_counts_every_answer_by_fault_with_an_example() -> None:
    near, wrong = {"code": "near_miss_tag", "message": "nearly <Path>"}, {"code": "wrong_answer", "message": "5 is not 6"}
    answers = [[near, near, wrong], [wrong], [], []]
    rows = [{"id": "p0", "text": "", "answers": [{"faults": faults} for faults in answers]}]
    assert list(acceptance(rows)) == [
        {"fault": "accepted", "answers": 2, "share": "50.0%", "example": ""},
        {"fault": "wrong_answer", "answers": 2, "share": "50.0%", "example": "p0: 5 is not 6"},
        {"fault": "near_miss_tag", "answers": 1, "share": "25.0%", "example": "p0: nearly <Path>"},
    ]


def test_what_a_teacher_took_in_words() -> None:
    spent = "Accepted: 2 of 3 (66.7%), from 8 answers; 1,234 prompt tokens, 56,789 answer tokens, 79 tokens/s, cost 0.1235"
    assert expense(COUNTED) == spent
    assert "**Stopped at the spend limit: 7 of 10 problems were not asked**" in expense(COUNTED | {"unasked": 7})
    assert "a script or a file" in expense({"trajectories": 3, "mean_characters": 9})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """Answers `Final Answer: 0` to everything: well-formed and wrong, as no problem of tier 1 has that answer."""
    server = Endpoint()
    server.write = lambda problem, sample: "Final Answer: 0"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def shown(project: Project, key: str) -> dict[str, Any]:
    """The newest artifact of a key: tests share the server."""
    newest = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 1}
    return project.ask("artifacts/filter", newest)[0]


def test_money_ends_cleanly_and_a_raised_limit_buys_the_rest_only(project: Project, endpoint: Endpoint) -> None:
    teacher = {"type": "openai", "base_url": f"http://127.0.0.1:{endpoint.server_port}/v1", "model": "m", **PRICED, "concurrency": 2}

    def generate(limit: float) -> Manifest:
        project.run("generate", "generate.count=6", f"generate.teacher={json.dumps({**teacher, 'max_cost': limit})}")
        newest = max(project.store.glob("generate/*/MANIFEST.json"), key=lambda path: path.stat().st_mtime)
        return Manifest.model_validate_json(Path(newest).read_text())

    first = generate(6.0)
    bought = len(endpoint.bodies)
    assert 0 < bought < 6 and first.metrics["trajectories"] == bought and first.metrics["unasked"] == 6 - bought
    assert first.metrics["cost"] == pytest.approx(1.01 * bought) and first.metrics["cost"] <= 6.0
    table = shown(project, "generate")
    assert "Stopped at the spend limit" in table["description"] and "Accepted: 0 of" in table["description"]
    faults = shown(project, "generate-acceptance")
    assert "wrong_answer" in json.dumps(faults["data"]) and f'"answers": {bought}' in json.dumps(json.loads(faults["data"]))

    second = generate(100.0)
    assert second.metrics["trajectories"] == 6 and second.metrics["unasked"] == 0
    assert len(endpoint.bodies) == 6, "what was bought is not bought again"
    assert second.metrics["cost"] == pytest.approx(1.01 * 6), "the artifact says what its answers cost, whoever bought them"
