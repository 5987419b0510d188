"""The served teacher against a real HTTP server on the loopback that speaks chat completions: faults, retries, bounds, resume."""

import email.utils
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
from parallel_r1.served import INSTRUCTION, Asked, Book, TeacherError, ask_all, totals, without_thinking

PROBLEMS = [Problem(f"p{n}", f"What is 2+{n}?", str(2 + n), "test") for n in range(8)]


DROPPED, TORN, ODD = -1, -2, -3
"""Not HTTP statuses: a connection that is dropped, one that breaks in the middle of an answer, and an answer that is none."""


class Endpoint(ThreadingHTTPServer):
    """Answers `The sum. Final Answer: ...`, right, after some thinking; `before(problem)` may name a status to answer with instead, and
    `write(problem, sample)` other texts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.before: Callable[[str], int | None] = lambda problem: None
        self.write: Callable[[str, int], str] = lambda problem, sample: right(problem)
        self.headers: dict[str, str] = {}
        self.times: list[float] = []
        self.pause = 0.0
        self.counts = True

    @property
    def asked(self) -> list[str]:
        return [body["messages"][0]["content"].rsplit("\n", 1)[1] for body in self.bodies]


def right(problem: str) -> str:
    """A well-formed, right answer to `What is 2+3?`."""
    return f"The sum of {problem}\nFinal Answer: {2 + int(problem[10:-1])}"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        problem = body["messages"][0]["content"].rsplit("\n", 1)[1]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.times.append(time.monotonic())
            self.server.keys.append(self.headers["Authorization"])
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
            status = self.server.before(problem) if self.path == "/v1/chat/completions" else 404
        time.sleep(self.server.pause)
        with self.server.lock:
            self.server.in_flight -= 1
        self.answer(problem, body, status)

    def answer(self, problem: str, body: dict, status: int | None) -> None:
        if status == DROPPED:
            self.close_connection = True
            return
        texts = [self.server.write(problem, sample) for sample in range(body.get("n", 1))]
        choices = [{"message": {"role": "assistant", "content": f"<think>Final Answer: 0</think>\n\n{text}"}} for text in texts]
        usage = {"usage": {"prompt_tokens": 10, "completion_tokens": 100 * len(texts)}} if self.server.counts else {}
        answer = {"choices": choices} | usage
        reply = json.dumps(answer if status in (None, TORN) else {"error": {"message": "no luck"}}).encode()
        self.send_response(200 if status in (None, TORN, ODD) else status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply[: len(reply) // 2] if status == TORN else reply)
        self.close_connection = status == TORN

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


def ask(endpoint: Endpoint, folder: Path, problems: list[Problem] = PROBLEMS, own: str = "own", **changes: object) -> Asked:
    config = teacher(endpoint, **changes)
    return ask_all(config, served.Endpoint.of(config), problems, 0, Book(folder, own), lambda done, of: None)


def texts(asked: Asked) -> list[str | None]:
    return [written and written.text for written in asked.written]


def test_answers_come_in_order_without_their_thinking(endpoint: Endpoint, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    config = teacher(endpoint)
    asked = ask_all(config, served.Endpoint.of(config), PROBLEMS, 0, Book(tmp_path, "own"), lambda done, of: progress.append((done, of)))
    assert texts(asked) == [f"The sum of {p.problem}\nFinal Answer: {p.answer}" for p in PROBLEMS]
    assert progress == [(n, 8) for n in range(1, 9)]
    body = endpoint.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"], "n" in body) == ("m", 0.6, 8192, False)
    assert len({body["seed"] for body in endpoint.bodies}) == 8, "a problem that is drawn twice gets two answers"
    assert totals(asked.written) == {
        "unasked": 0, "accepted": 8, "answers": 8, "answers_accepted": 8, "prompt_tokens": 80, "completion_tokens": 800, "cost": 0,
    }  # fmt: skip
    assert asked.tokens_per_second > 0


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
    assert "secret" not in (tmp_path / "own.jsonl").read_text()


@pytest.mark.parametrize("status, reason", [
    (500, "a server error"),
    (503, "a server that starts"),
    (429, "too many requests"),
    (DROPPED, "a dropped connection"),
    (TORN, "an answer that breaks off"),
])  # fmt: skip
def test_passing_faults_are_tried_again(endpoint: Endpoint, tmp_path: Path, status: int, reason: str) -> None:
    endpoint.before = lambda problem: status if endpoint.asked.count(problem) <= 2 else None
    assert len(texts(ask(endpoint, tmp_path, PROBLEMS[:2]))) == 2 and len(endpoint.bodies) == 6, reason


def test_a_slow_answer_is_asked_for_again(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.pause = 0.5
    with pytest.raises(TeacherError, match="3 attempts failed, the last with ReadTimeout"):
        ask(endpoint, tmp_path, PROBLEMS[:1], timeout_seconds=0.1, max_retries=2)
    assert len(endpoint.bodies) == 3


@pytest.mark.parametrize("said", ["1", "date"])
def test_nobody_asks_before_retry_after(endpoint: Endpoint, tmp_path: Path, said: str) -> None:
    endpoint.headers = {"Retry-After": said if said == "1" else email.utils.formatdate(time.time() + 2, usegmt=True)}
    endpoint.before = lambda problem: 429 if len(endpoint.bodies) == 1 else None
    ask(endpoint, tmp_path, PROBLEMS[:3], concurrency=1)
    first, second, third, _ = endpoint.times
    assert second - first > 0.9, "a date counts in whole seconds"
    assert third - second < 0.9, "once"


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


def test_an_answer_that_is_none_is_final(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.before = lambda problem: ODD
    with pytest.raises(TeacherError, match="isn't a chat completion: .*no luck"):
        ask(endpoint, tmp_path, PROBLEMS[:1])
    assert len(endpoint.bodies) == 1


def test_nobody_there(tmp_path: Path) -> None:
    dead = OpenAITeacher(base_url="http://127.0.0.1:9/v1", max_retries=0)
    with pytest.raises(TeacherError, match="127.0.0.1:9/v1/chat/completions.*1 attempts failed, the last with ConnectError"):
        ask_all(dead, served.Endpoint.of(dead), PROBLEMS[:1], 0, Book(tmp_path, "own"), lambda done, of: None)


def test_finished_answers_survive_a_failure(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.before = lambda problem: 400 if problem == "What is 2+5?" else None
    with pytest.raises(TeacherError):
        ask(endpoint, tmp_path, concurrency=1)
    assert len(endpoint.bodies) == 6
    endpoint.before = lambda problem: None
    assert None not in texts(ask(endpoint, tmp_path, concurrency=1))
    assert endpoint.asked[6:] == [p.problem for p in PROBLEMS[5:]], "only what was missing is asked"


def test_a_line_cut_by_a_kill_is_asked_again(endpoint: Endpoint, tmp_path: Path) -> None:
    first = ask(endpoint, tmp_path).written
    shard = tmp_path / "own.jsonl"
    shard.write_bytes(shard.read_bytes()[:-20])
    assert ask(endpoint, tmp_path).written == first and len(endpoint.bodies) == 9
    again = ask(endpoint, tmp_path)
    assert again.written == first and len(endpoint.bodies) == 9 and again.tokens_per_second == 0


def test_what_another_stage_bought_is_not_bought_again(endpoint: Endpoint, tmp_path: Path) -> None:
    ask(endpoint, tmp_path, PROBLEMS[:5], own="one")
    ask(endpoint, tmp_path, PROBLEMS, own="two")
    assert sorted(endpoint.asked[5:]) == [p.problem for p in PROBLEMS[5:]], "several are asked at once"


# --- samples, attempts, limits ----------------------------------------------------------------------------------------------


def test_the_first_accepted_of_several_samples_is_kept(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.write = lambda problem, sample: right(problem) if sample == 2 else "<Path>Final Answer: 0"
    (written,) = ask(endpoint, tmp_path, PROBLEMS[:1], samples=4).written
    assert endpoint.bodies[0]["n"] == 4
    assert written.accepted and written.text == right(PROBLEMS[0].problem)
    assert [bool(answer["faults"]) for answer in written.answers] == [True, True, False, True]
    codes = [fault["code"] for fault in written.answers[0]["faults"]]
    assert "wrong_answer" in codes and len(codes) > 1, "each answer by markup and by result"
    assert written.completion_tokens == 400


@pytest.mark.parametrize("attempts, accepted, asked, reason", [
    (1, False, 1, "no second attempt: the answer stays, with its faults, for the filter to judge (paper)"),
    (2, False, 2, "attempts used up"),
    (3, True, 3, "right in the third"),
    (9, True, 3, "and not asked further"),
])  # fmt: skip
def test_asks_again_until_right_or_the_attempts_are_used_up(
    endpoint: Endpoint, tmp_path: Path, attempts: int, accepted: bool, asked: int, reason: str
) -> None:
    endpoint.write = lambda problem, sample: right(problem) if len(endpoint.bodies) == 3 else "Final Answer: 0"
    (written,) = ask(endpoint, tmp_path, PROBLEMS[:1], attempts=attempts).written
    assert (written.accepted, len(endpoint.bodies)) == (accepted, asked), reason
    assert [answer["attempt"] for answer in written.answers] == list(range(1, asked + 1))
    assert len({body["seed"] for body in endpoint.bodies}) == asked, "another attempt, another seed"
    assert written.prompt_tokens == 10 * asked
    again = ask(endpoint, tmp_path, PROBLEMS[:1], attempts=attempts)
    assert again.written == [written] and len(endpoint.bodies) == asked, "all attempts are kept"


PRICED = {"prompt_price": 1000, "completion_price": 10_000, "max_tokens": 100}
"""An answer of the endpoint costs 1.01; a request reserves a little more, as a prompt's tokens are not known before."""


def test_money_has_a_limit_that_is_never_passed(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.pause = 0.02
    highest = served.Request(teacher(endpoint, **PRICED), served.Endpoint.of(teacher(endpoint, **PRICED)), PROBLEMS[0], "0").highest_cost
    assert 1.01 < highest < 4
    asked = ask(endpoint, tmp_path, max_cost=3 * 1.01 + highest, **PRICED)
    spent = totals(asked.written)
    assert spent["unasked"] == 4 and spent["cost"] == pytest.approx(4 * 1.01), "asks while one more is surely paid"
    assert len(endpoint.bodies) == 4
    assert endpoint.most_in_flight <= 3, "what is in flight is reserved"
    again = ask(endpoint, tmp_path, max_cost=3 * 1.01 + highest, **PRICED)
    assert again.written == asked.written and len(endpoint.bodies) == 4, "nor by a rerun"
    more = ask(endpoint, tmp_path, own="raised", max_cost=100, **PRICED)
    assert None not in more.written and len(endpoint.bodies) == 8, "a raised limit goes on from what was bought"


def test_a_price_needs_counted_tokens(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.counts = False
    with pytest.raises(TeacherError, match="can't be priced"):
        ask(endpoint, tmp_path, PROBLEMS[:1], **PRICED)
    assert None not in texts(ask(endpoint, tmp_path, PROBLEMS[:1]))


@pytest.mark.parametrize("limit, reason", [
    ({"requests_per_minute": 600}, "a tenth of a second for each request"),
    ({"tokens_per_minute": 66_000}, "110 tokens in a tenth of a second"),
])  # fmt: skip
def test_the_pace_is_kept(endpoint: Endpoint, tmp_path: Path, limit: dict, reason: str) -> None:
    ask(endpoint, tmp_path, PROBLEMS[:5], concurrency=1, **limit)
    assert endpoint.times[-1] - endpoint.times[0] > 0.3, reason


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
