"""A served model as teacher: asks an OpenAI-compatible endpoint for one trajectory per problem, and keeps every answer at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from parallel_r1.config import OpenAITeacher
from parallel_r1.markup import CLOSE_PARALLEL, CLOSE_PATH, CLOSE_SUMMARY, FINAL_ANSWER, OPEN_PARALLEL, OPEN_PATH, OPEN_SUMMARY
from parallel_r1.problems import Problem

FIRST_PAUSE = 0.5
"""Seconds before the first retry; each further pause is twice as long, up to MAX_PAUSE, and jittered."""
MAX_PAUSE = 60.0

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


class _Shard:
    """Answers so far, one JSON line each. A line that a kill cut in half is dropped, and its problem asked again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        whole = self._file.read().rpartition(b"\n")[:2]
        self._file.truncate(len(b"".join(whole)))
        rows = [json.loads(line) for line in whole[0].splitlines()]
        self.answers: dict[str, str] = {row["key"]: row["text"] for row in rows}

    def add(self, key: str, text: str) -> None:
        """Keep an answer; a killed process doesn't lose it."""
        self.answers[key] = text
        self._file.write(json.dumps({"key": key, "text": text}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """No more answers."""
        self._file.close()


def ask_all(
    teacher: OpenAITeacher, problems: Sequence[Problem], seed: int, shard_dir: Path, on_progress: Callable[[int, int], None]
) -> list[str]:
    """The teacher's text for each problem, in order. What lies in `shard_dir` from an earlier attempt isn't asked again.

    Raises TeacherError where a request fails for good; what was answered until then is kept.
    """
    requests = [_Request(teacher, problem, f"{seed}/{index}") for index, problem in enumerate(problems)]
    shard = _Shard(shard_dir / "answers.jsonl")
    open_requests = {request.key: request for request in requests if request.key not in shard.answers}

    def keep(request: _Request, text: str) -> None:
        shard.add(request.key, text)
        del open_requests[request.key]
        on_progress(len(requests) - len(open_requests), len(requests))

    try:
        asyncio.run(_ask(teacher, list(open_requests.values()), keep))
    finally:
        shard.close()
    return [shard.answers[request.key] for request in requests]


class _Request:
    """One question. Its key covers all that decides the answer, so an answer is never reused for another question."""

    def __init__(self, teacher: OpenAITeacher, problem: Problem, seed: str) -> None:
        self.name = problem.id
        self.rng = random.Random(seed)
        self.body = {
            "model": teacher.model,
            "messages": [{"role": "user", "content": INSTRUCTION + problem.problem}],
            "temperature": teacher.temperature,
            "max_tokens": teacher.max_tokens,
            "seed": self.rng.getrandbits(31),
        }
        self.key = hashlib.sha256(json.dumps(self.body, sort_keys=True).encode()).hexdigest()


async def _ask(teacher: OpenAITeacher, requests: Sequence[_Request], keep: Callable[[_Request, str], None]) -> None:
    """Ask all, at most `concurrency` at once; the first final failure ends the others."""
    key = os.environ.get(teacher.api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=teacher.concurrency)
    waiting = iter(requests)

    async def work(client: httpx.AsyncClient) -> None:
        for request in waiting:
            keep(request, await _answer(client, teacher, request))

    async with httpx.AsyncClient(headers=headers, timeout=teacher.timeout_seconds, limits=limits) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(teacher.concurrency, len(requests))):
                    group.create_task(work(client))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures


async def _answer(client: httpx.AsyncClient, teacher: OpenAITeacher, request: _Request) -> str:
    """One answer. Transport errors, 429 and 5xx are tried again with growing pauses; anything else is final at once."""
    url = f"{teacher.base_url.rstrip('/')}/chat/completions"
    where = f"{url}: model {teacher.model}, problem {request.name}"
    for attempt in range(teacher.max_retries + 1):
        if attempt:
            await asyncio.sleep(min(MAX_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1)) * (0.5 + request.rng.random()))
        try:
            response = await client.post(url, json=request.body)
        except httpx.TransportError as error:
            failure = f"{type(error).__name__}: {error}"
            continue
        if response.status_code == 200:
            return _text_of(response, url)
        failure = f"status {response.status_code}: {response.text[:500]}"
        if response.status_code != 429 and response.status_code < 500:
            raise TeacherError(f"{where}: {failure}. The key is read from ${teacher.api_key_env}")
    raise TeacherError(
        f"{where}: {teacher.max_retries + 1} attempts failed, the last with {failure}. "
        "Is it up? Finished answers are kept: run again to go on, or raise max_retries"
    )


def _text_of(response: httpx.Response, url: str) -> str:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        raise TeacherError(f"{url}: the answer isn't a chat completion: {response.text[:500]}") from None
    return without_thinking(content or "")


def without_thinking(text: str) -> str:
    """The part after `</think>`; nothing where the thinking never ended."""
    before, mark, after = text.rpartition("</think>")
    if mark:
        return after.strip()
    return "" if "<think>" in after else after.strip()
