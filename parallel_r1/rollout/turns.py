"""A trainer and an engine that take turns: wake - sync - generate - sleep, and no other order.

Beside a trainer on the same GPU an engine sleeps while the trainer works: its weights are given up, its cache is freed. Were it asked in
another order it would sample from weights that are not the trainer's, or use memory that isn't there. So the first thing after a start or
a resume is a push of the trainer's weights, whatever the engine was started with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from parallel_r1.rollout.engines import Engine
from parallel_r1.rollout.machine import Rollout

State = Literal["asleep", "awake", "in sync", "generated"]


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give up its memory for a while."""

    def sleep(self) -> None:
        """Give up weights and cache; the weights are not kept."""

    def wake_for_weights(self) -> None:
        """Have memory for weights again, with nothing in it that counts."""

    def wake_for_requests(self) -> None:
        """Have memory for the cache again; the weights are there."""


class OutOfTurn(RuntimeError):
    """An engine was asked for something that it isn't ready for."""


class Turns:
    """Keeps an engine to the order. `step` is the trainer's: rollouts of a step are made with that step's weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state: State = "in sync"
        self._step: int | None = None
        """The step whose weights the engine has."""
        self.sleep()

    def wake(self) -> None:
        """Ready for weights."""
        self._expect("asleep", "wake")
        if isinstance(self._engine, Sleeper):
            self._engine.wake_for_weights()
        self._state = "awake"

    def sync(self, step: int, push: Callable[[], None]) -> None:
        """`push` gives the engine the trainer's weights of this step; ready for requests."""
        self._expect("awake", "sync")
        push()
        if isinstance(self._engine, Sleeper):
            self._engine.wake_for_requests()
        self._step, self._state = step, "in sync"

    def generate(self, step: int, rollouts: list[Rollout]) -> None:
        """Carry all rollouts to their end."""
        self._expect("in sync", "generate")
        if step != self._step:
            raise OutOfTurn(f"generate for step {step}: the engine has the weights of step {self._step}")
        for _ in self._engine.run(rollouts):
            pass
        self._state = "generated"

    def sleep(self) -> None:
        """The trainer's turn."""
        if self._state not in ("generated", "in sync"):
            raise OutOfTurn(f"sleep: the engine is {self._state}")
        if isinstance(self._engine, Sleeper):
            self._engine.sleep()
        self._state = "asleep"

    def _expect(self, state: State, what: str) -> None:
        if self._state != state:
            raise OutOfTurn(f"{what}: the engine is {self._state}, not {state}; the order is wake - sync - generate - sleep")
