"""A model as teacher: asks an OpenAI-compatible endpoint, again until an answer is well-formed and right, and keeps every answer at once.

What was bought is never bought again: answers lie in a folder that all stages share, and an answer is looked up there by all that decides
it. Money has a limit: a request reserves the most it can cost before it is sent, and pays what its answer came to. What an endpoint bills
for answers that got lost on the way isn't seen.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from parallel_r1 import prompts
from parallel_r1.config import AskedTeacher, FilterConfig, OpenAITeacher
from parallel_r1.filtering import faults_of
from parallel_r1.grading import grade
from parallel_r1.jobs import append_lines, read_lines, write_lines
from parallel_r1.markup import CLOSE_PARALLEL, CLOSE_PATH, CLOSE_SUMMARY, FINAL_ANSWER, OPEN_PARALLEL, OPEN_PATH, OPEN_SUMMARY
from parallel_r1.problems import Problem

FIRST_PAUSE = 0.5
"""Seconds before the first retry; each further pause is twice as long, up to MAX_PAUSE, and jittered."""
MAX_PAUSE = 60.0
MAX_RETRY_AFTER = 600.0
"""Seconds that a server's Retry-After can ask for; then it is asked again."""
TEMPLATE_TOKENS = 64
"""Room for what a chat template puts around a prompt, when the highest price of a request is reckoned."""
ACCEPTED = FilterConfig()
"""What an answer must pass not to be asked for again: well-formed and right."""

INSTRUCTION = f"""\
Solve the mathematics problem below, and think in parallel where it helps.

Work step by step in plain text. At a point where the problem can be attacked from several sides, or where a check is worth its price, \
open a block in exactly this form:

{OPEN_PARALLEL}{OPEN_PATH}
one line of thought
{CLOSE_PATH}{OPEN_PATH}
another line of thought
{CLOSE_PATH}{CLOSE_PARALLEL}
{OPEN_SUMMARY}
what the paths found, whether they agree, and what follows
{CLOSE_SUMMARY}

A block has two or more paths. Each path stands alone: it doesn't know the others, doesn't refer to them, and could be read first. \
Nothing stands between paths, and only the summary follows a block. Then go on from what the summary says. Use a block once or more, \
never one inside another, and write the tags exactly as shown.

End with one line, and write these words nowhere else:
{FINAL_ANSWER} (the answer alone)

Problem:
"""
"""Our own wording of the zero-shot prompt (paper, section 3.1 and appendix)."""


class TeacherError(RuntimeError):
    """The endpoint can't be used: names it, what it said, and the way out."""


@dataclass(frozen=True)
class Endpoint:
    """Where a teacher is asked, and what may be asked of it."""

    url: str
    model: str
    api_key_env: str = ""
    seeded: bool = True
    """Whether requests carry a seed."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    prompt_price: float = 0.0
    completion_price: float = 0.0
    max_cost: float | None = None
    filed_as: str = ""
    """What answers are filed under in place of the URL, where that is another one each time."""

    @classmethod
    def of(cls, teacher: OpenAITeacher) -> Endpoint:
        """The endpoint that a config section names."""
        limits = ("requests_per_minute", "tokens_per_minute", "prompt_price", "completion_price", "max_cost")
        return cls(teacher.base_url, teacher.model, teacher.api_key_env, **{name: getattr(teacher, name) for name in limits})

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """In the currency of the prices."""
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6


# --- requests and answers ---------------------------------------------------------------------------------------------------


class Request:
    """One question, one attempt. Its key covers all that decides the answer, so an answer is never reused for another question."""

    def __init__(self, teacher: AskedTeacher, endpoint: Endpoint, problem: Problem, seed: str) -> None:
        self.name = problem.id
        self.rng = random.Random(seed)
        number = self.rng.getrandbits(31)
        asked = INSTRUCTION + problem.problem if teacher.prompt == "teacher" else prompts.render(teacher.prompt, problem.problem)
        self.body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": teacher.temperature,
            "max_tokens": teacher.max_tokens,
        }
        self.body |= {"n": teacher.samples} if teacher.samples > 1 else {}
        self.body |= {"seed": number} if endpoint.seeded else {}
        self.key = hashlib.sha256(json.dumps([endpoint.filed_as or endpoint.url, number, self.body], sort_keys=True).encode()).hexdigest()
        self.highest_cost = endpoint.cost(len(asked.encode()) + TEMPLATE_TOKENS, teacher.samples * teacher.max_tokens)


@dataclass
class Reply:
    """The answers to one request."""

    texts: list[str]
    prompt_tokens: int
    completion_tokens: int
    cost: float


class Book:
    """Answers so far, one JSON line per request, in a file of this stage's own; those of other stages are read too."""

    def __init__(self, folder: Path, own: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{own}.jsonl"
        ours = read_lines(self._file)
        write_lines(self._file, ours)  # without a line that a kill cut in half
        theirs = [row for file in sorted(folder.glob("*.jsonl")) if file != self._file for row in read_lines(file)]
        self._replies = {row.pop("key"): Reply(**row) for row in [*theirs, *map(dict, ours)]}
        self.spent = sum(row["cost"] for row in ours)
        """What this stage has bought, in this attempt and in earlier ones."""

    def find(self, request: Request) -> Reply | None:
        """The answers to a request, where somebody has asked already."""
        return self._replies.get(request.key)

    def add(self, request: Request, reply: Reply) -> None:
        """Keep answers; a killed process doesn't lose them."""
        self._replies[request.key] = reply
        self.spent += reply.cost
        append_lines(self._file, [{"key": request.key, **vars(reply)}])


# --- limits -----------------------------------------------------------------------------------------------------------------


class _Pace:
    """At most so many units per minute, on average: what was used is charged, and paid for by waiting."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds = 60 / per_minute if per_minute else 0.0
        self._free_at = 0.0

    def charge(self, units: float) -> None:
        self.hold(max(0.0, self._free_at - time.monotonic()) + units * self._seconds)

    def hold(self, seconds: float) -> None:
        """Nobody goes on before so many seconds are over."""
        self._free_at = max(self._free_at, time.monotonic() + seconds)

    async def wait(self) -> None:
        while (pause := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(pause)


class _Purse:
    """What may still be spent."""

    def __init__(self, limit: float | None, spent: float) -> None:
        self._limit = limit
        self._spent = spent
        self._reserved: list[float] = []
        self._change = asyncio.Condition()

    async def reserve(self, cost: float) -> bool:
        """Set money aside; False where there is not enough, and no request in flight that could give any back."""
        async with self._change:
            while self._limit is not None and self._spent + sum(self._reserved) + cost > self._limit:
                if not self._reserved:
                    return False
                await self._change.wait()
            self._reserved.append(cost)
            return True

    async def settle(self, reserved: float, cost: float) -> None:
        """Pay what it came to."""
        async with self._change:
            self._reserved.remove(reserved)
            self._spent += cost
            self._change.notify_all()


# --- asking -----------------------------------------------------------------------------------------------------------------


@dataclass
class Written:
    """What the teacher wrote for one problem: the first accepted answer, or an answer with faults where none was."""

    text: str = ""
    accepted: bool = False
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Every answer: {"attempt", "sample", "faults": [{"code", "message"}]}."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def take(self, reply: Reply, judged: Sequence[list[dict[str, str]]], attempt: int) -> None:
        """Add the answers to one more request, with their faults."""
        self.answers += [{"attempt": attempt, "sample": sample, "faults": faults} for sample, faults in enumerate(judged)]
        best = min(range(len(judged)), key=lambda sample: bool(judged[sample]))
        self.text, self.accepted = reply.texts[best], not judged[best]
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        self.cost += reply.cost


@dataclass(frozen=True)
class Asked:
    """What came of asking for every problem; None for one that the money did not reach."""

    written: list[Written | None]
    tokens_per_second: float
    """Answer tokens that were sampled now, per second; 0 where everything was answered before."""


def ask_all(
    teacher: AskedTeacher, endpoint: Endpoint, problems: Sequence[Problem], seed: int, book: Book, on_progress: Callable[[int, int], None]
) -> Asked:
    """Ask for each problem, in order. What stands in `book` isn't asked again.

    Raises TeacherError where a request fails for good; what was answered until then is kept.
    """
    return asyncio.run(_ask_all(teacher, endpoint, problems, seed, book, on_progress))


async def _ask_all(
    teacher: AskedTeacher, endpoint: Endpoint, problems: Sequence[Problem], seed: int, book: Book, on_progress: Callable[[int, int], None]
) -> Asked:
    key = os.environ.get(endpoint.api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    waiting = iter(enumerate(problems))
    written: list[Written | None] = [None] * len(problems)
    finished, began = 0, time.monotonic()

    async def work(asker: _Asker) -> None:
        nonlocal finished
        for index, problem in waiting:
            written[index] = await asker.write(problem, f"{seed}/{index}")
            finished += 1
            on_progress(finished, len(problems))

    limits = httpx.Limits(max_connections=teacher.concurrency)
    async with httpx.AsyncClient(headers=headers, timeout=teacher.timeout_seconds, limits=limits) as client:
        asker = _Asker(client, teacher, endpoint, book)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(teacher.concurrency, len(problems))):
                    group.create_task(work(asker))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
    return Asked(written, asker.sampled_tokens / (time.monotonic() - began))


class _Asker:
    """Asks one endpoint, within its limits."""

    def __init__(self, client: httpx.AsyncClient, teacher: AskedTeacher, endpoint: Endpoint, book: Book) -> None:
        self._client, self._teacher, self._endpoint, self._book = client, teacher, endpoint, book
        self._requests, self._tokens = _Pace(endpoint.requests_per_minute), _Pace(endpoint.tokens_per_minute)
        self._purse = _Purse(endpoint.max_cost, book.spent)
        self._url = f"{endpoint.url.rstrip('/')}/chat/completions"
        self.sampled_tokens = 0

    async def write(self, problem: Problem, seed: str) -> Written | None:
        """Ask until an answer is accepted, the attempts are used up, or the money is; None where not even one request was paid."""
        written = Written()
        for attempt in range(1, self._teacher.attempts + 1):
            request = Request(self._teacher, self._endpoint, problem, seed if attempt == 1 else f"{seed}/{attempt}")
            reply = self._book.find(request) or await self._buy(request)
            if reply is None:
                break
            written.take(reply, [await asyncio.to_thread(_faults, text, problem.answer) for text in reply.texts], attempt)
            if written.accepted:
                break
        return written if written.answers else None

    async def _buy(self, request: Request) -> Reply | None:
        if not await self._purse.reserve(request.highest_cost):
            return None
        cost = 0.0
        try:
            reply = await self._reply(request)
            cost = reply.cost
            self._book.add(request, reply)
        finally:
            await self._purse.settle(request.highest_cost, cost)
        self.sampled_tokens += reply.completion_tokens
        self._tokens.charge(reply.prompt_tokens + reply.completion_tokens)
        return reply

    async def _reply(self, request: Request) -> Reply:
        """Transport errors, torn answers, 429 and 5xx are tried again with growing pauses; anything else is final at once."""
        where = f"{self._url}: model {self._endpoint.model}, problem {request.name}"
        for attempt in range(self._teacher.max_retries + 1):
            if attempt:
                await asyncio.sleep(min(MAX_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1)) * (0.5 + request.rng.random()))
            await self._turn()
            try:
                response = await self._client.post(self._url, json=request.body)
                if response.status_code == 200:
                    return self._reply_of(response.json())
            except (httpx.TransportError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            failure = f"status {response.status_code}: {response.text[:500]}"
            if response.status_code != 429 and response.status_code < 500:
                raise TeacherError(f"{where}: {failure}. The key is read from ${self._endpoint.api_key_env}")
            self._requests.hold(_retry_after(response))
        raise TeacherError(
            f"{where}: {self._teacher.max_retries + 1} attempts failed, the last with {failure}. "
            "Is it up? Finished answers are kept: run again to go on, or raise max_retries"
        )

    async def _turn(self) -> None:
        await self._tokens.wait()
        await self._requests.wait()
        self._requests.charge(1)

    def _reply_of(self, answer: Any) -> Reply:
        try:
            texts = [without_thinking(choice["message"]["content"] or "") for choice in answer["choices"]]
            usage = answer.get("usage") or {}
            if not texts:
                raise LookupError
        except (LookupError, TypeError, AttributeError):
            raise TeacherError(f"{self._url}: the answer isn't a chat completion: {json.dumps(answer)[:500]}") from None
        prompt, completion = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        if not (prompt and completion) and (self._endpoint.prompt_price or self._endpoint.completion_price):
            raise TeacherError(
                f"{self._url}: answers don't say how many tokens they took (`usage`): they can't be priced; set the prices to 0"
            )
        return Reply(texts, prompt, completion, self._endpoint.cost(prompt, completion))


def _faults(text: str, answer: str) -> list[dict[str, str]]:
    return [{"code": fault.code, "message": fault.message} for fault in faults_of(text, grade(text, answer), ACCEPTED)]


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait, given as a number or as a date."""
    asked = response.headers.get("retry-after", "")
    try:
        seconds = float(asked)
    except ValueError:
        parsed = email.utils.parsedate_tz(asked)
        seconds = email.utils.mktime_tz(parsed) - time.time() if parsed else 0.0
    return min(max(0.0, seconds), MAX_RETRY_AFTER)


def without_thinking(text: str) -> str:
    """The part after `</think>`; nothing where the thinking never ended."""
    before, mark, after = text.rpartition("</think>")
    if mark:
        return after.strip()
    return "" if "<think>" in after else after.strip()


def totals(written: Iterable[Written | None]) -> dict[str, float]:
    """Headline numbers of what was asked."""
    rows = list(written)
    found = [row for row in rows if row]
    answers = [answer for row in found for answer in row.answers]
    return {
        "unasked": len(rows) - len(found),
        "accepted": sum(row.accepted for row in found),
        "answers": len(answers),
        "answers_accepted": sum(not answer["faults"] for answer in answers),
        "prompt_tokens": sum(row.prompt_tokens for row in found),
        "completion_tokens": sum(row.completion_tokens for row in found),
        "cost": sum(row.cost for row in found),
    }
