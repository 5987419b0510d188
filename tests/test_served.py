"""The served teacher against a real HTTP server on the loopback that speaks chat completions: faults, retries, bounds, resume."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from parallel_r1 import served
from parallel_r1.config import OpenAITeacher
from parallel_r1.markup import validate
from parallel_r1.problems import Problem
from parallel_r1.served import INSTRUCTION, TeacherError, ask_all, without_thinking

PROBLEMS = [Problem(f"p{n}", f"What is 2+{n}?", str(2 + n), "test") for n in range(8)]


class Endpoint(ThreadingHTTPServer):
    """Answers `The sum. Final Answer: ...` after some thinking; `before(problem)` may name a status to answer with instead."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.before: Callable[[str], int | None] = lambda problem: None
        self.pause = 0.0

    @property
    def asked(self) -> list[str]:
        return [body["messages"][0]["content"].rsplit("\n", 1)[1] for body in self.bodies]


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        problem = body["messages"][0]["content"].rsplit("\n", 1)[1]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers["Authorization"])
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
            status = self.server.before(problem) if self.path == "/v1/chat/completions" else 404
        time.sleep(self.server.pause)
        with self.server.lock:
            self.server.in_flight -= 1
        if status == -1:
            self.close_connection = True
            return
        content = f"<think>Final Answer: 0</think>\n\nThe sum of {problem}\nFinal Answer: 5"
        answer = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        reply = answer if status is None else {"error": {"message": "no luck"}}
        self.send_response(status or 200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(served, "FIRST_PAUSE", 0.01)
    server = Endpoint()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def teacher(endpoint: Endpoint, **changes: object) -> OpenAITeacher:
    host, port = endpoint.server_address[:2]
    return OpenAITeacher(base_url=f"http://{host}:{port}/v1", model="m", **changes)


def ask(endpoint: Endpoint, folder: Path, problems: list[Problem] = PROBLEMS, **changes: object) -> tuple[list[str], list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    return ask_all(teacher(endpoint, **changes), problems, 0, folder, lambda done, of: progress.append((done, of))), progress


def test_answers_come_in_order_without_their_thinking(endpoint: Endpoint, tmp_path: Path) -> None:
    texts, progress = ask(endpoint, tmp_path)
    assert texts == [f"The sum of {p.problem}\nFinal Answer: 5" for p in PROBLEMS]
    assert progress == [(n, 8) for n in range(1, 9)]
    body = endpoint.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.6, 8192)
    assert len({body["seed"] for body in endpoint.bodies}) == 8, "a problem that is drawn twice gets two answers"


def test_concurrency_is_bounded_and_used(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.pause = 0.1
    ask(endpoint, tmp_path, concurrency=3)
    assert endpoint.most_in_flight == 3


@pytest.mark.parametrize("key, expected", [("secret-1", "Bearer secret-1"), (None, None)])
def test_the_key_comes_from_the_named_variable(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if key:
        monkeypatch.setenv("MY_KEY", key)
    ask(endpoint, tmp_path, PROBLEMS[:1], api_key_env="MY_KEY")
    assert endpoint.keys == [expected]
    assert "secret" not in (tmp_path / "answers.jsonl").read_text()


@pytest.mark.parametrize(
    "status, reason", [(500, "a server error"), (503, "a server that starts"), (429, "too many requests"), (-1, "a dropped connection")]
)
def test_passing_faults_are_tried_again(endpoint: Endpoint, tmp_path: Path, status: int, reason: str) -> None:
    endpoint.before = lambda problem: status if endpoint.asked.count(problem) <= 2 else None
    texts, _ = ask(endpoint, tmp_path, PROBLEMS[:2])
    assert len(texts) == 2 and len(endpoint.bodies) == 6, reason


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_final_faults_are_not(endpoint: Endpoint, tmp_path: Path, status: int) -> None:
    endpoint.before = lambda problem: status
    with pytest.raises(TeacherError, match=rf"/v1/chat/completions: model m, problem p0: status {status}: .*no luck.*\$OPENAI_API_KEY"):
        ask(endpoint, tmp_path, PROBLEMS[:1])
    assert len(endpoint.bodies) == 1


def test_retries_end(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.before = lambda problem: 500
    with pytest.raises(TeacherError, match="problem p0: 3 attempts failed, the last with status 500"):
        ask(endpoint, tmp_path, PROBLEMS[:1], max_retries=2)


def test_nobody_there(tmp_path: Path) -> None:
    dead = OpenAITeacher(base_url="http://127.0.0.1:9/v1", max_retries=0)
    with pytest.raises(TeacherError, match="127.0.0.1:9/v1/chat/completions.*1 attempts failed, the last with ConnectError"):
        ask_all(dead, PROBLEMS[:1], 0, tmp_path, lambda done, of: None)


def test_finished_answers_survive_a_failure(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.before = lambda problem: 400 if problem == "What is 2+5?" else None
    with pytest.raises(TeacherError):
        ask(endpoint, tmp_path, concurrency=1)
    assert len(endpoint.bodies) == 6
    endpoint.before = lambda problem: None
    texts, progress = ask(endpoint, tmp_path, concurrency=1)
    assert len(texts) == 8 and progress == [(6, 8), (7, 8), (8, 8)]
    assert endpoint.asked[6:] == [p.problem for p in PROBLEMS[5:]], "only what was missing is asked"


def test_a_line_cut_by_a_kill_is_asked_again(endpoint: Endpoint, tmp_path: Path) -> None:
    first, _ = ask(endpoint, tmp_path)
    shard = tmp_path / "answers.jsonl"
    shard.write_bytes(shard.read_bytes()[:-20])
    second, _ = ask(endpoint, tmp_path)
    assert second == first and len(endpoint.bodies) == 9
    assert ask(endpoint, tmp_path)[0] == first and len(endpoint.bodies) == 9


def test_another_model_is_asked_anew(endpoint: Endpoint, tmp_path: Path) -> None:
    ask(endpoint, tmp_path)
    ask(endpoint, tmp_path, temperature=1.0)
    assert len(endpoint.bodies) == 16


@pytest.mark.parametrize(
    "text, expected, reason",
    [
        ("<think>a</think>\n\nb\nc ", "b\nc", "the usual form"),
        ("a</think> b", "b", "a template that opens the thinking in the prompt"),
        ("<think>a</think>b<think>c</think>d", "d", "thinking twice"),
        ("<think>never ends", "", "cut in the thinking: no answer"),
        ("b", "b", "no thinking"),
    ],
)
def test_without_thinking(text: str, expected: str, reason: str) -> None:
    assert without_thinking(text) == expected, reason


def test_the_instruction_shows_a_valid_block() -> None:
    shown = INSTRUCTION[INSTRUCTION.index("<Parallel>") :]
    assert validate(shown) == []
