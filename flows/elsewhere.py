"""Stages as runs of their own: the full flow hands what needs a model to the pool `gpu` and waits, holding no slot itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from uuid import UUID

from httpx import TransportError
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.states import State

from parallel_r1.store import ArtifactRef
from tasks.progress import say
from tasks.stage import GPU, Call
from tasks.supervise import StageFailed

POLL_SECONDS = 2.0


class Later(Protocol):
    """An artifact that is being made: a Prefect future, or a run elsewhere."""

    def result(self) -> ArtifactRef:
        """Wait for it. Raises what went wrong."""
        ...


class Elsewhere:
    """Starts deployments of single stages with the config of this run."""

    def __init__(self, recipe: str, overrides: list[str]) -> None:
        self.recipe = recipe
        self.overrides = overrides

    def start(self, call: Call, parameters: Mapping[str, Any], found: Callable[[], ArtifactRef]) -> Later:
        """Start the run that makes `call`'s artifact; `found` takes it from the store afterwards."""
        forced = bool(call.run.rebuild & {call.stage.name, call.title})
        child = run_deployment(
            f"{call.stage.name}/{GPU}",
            parameters={"recipe": self.recipe, "overrides": self.overrides, "force": forced, **parameters},
            timeout=0,
        )
        say(f"  {call.title:<26} waits for the pool {GPU}: run {child.name}")
        return _Child(call, child, found)


class _Child:
    def __init__(self, call: Call, child: FlowRun, found: Callable[[], ArtifactRef]) -> None:
        self.call, self.child, self.found = call, child, found

    def result(self) -> ArtifactRef:
        """Wait for the run, then take its artifact from the store. Raises StageFailed with the run's own error."""
        state = _last_state(self.child.id)
        if not state.is_completed():
            raise StageFailed(f"{self.call.title}: run {self.child.name} in the pool {GPU} ended as {state.name}: {state.message}")
        self.call.run.rebuilt.add(self.call.title)
        if self.call.load() is None:
            raise StageFailed(
                f"{self.call.title}: run {self.child.name} is Completed, but the store {self.call.run.store.root} has no "
                f"{self.call.stage.name}/{self.call.key}. Do the workers of the pool {GPU} see the same store and the same code?"
            )
        return self.found()


def _last_state(run: UUID) -> State[Any]:
    """The state in which a run ended, however long that takes. A server that is away for a while, as when it is restarted, is asked
    again: by polling, as events that were sent meanwhile would be missed."""
    while True:
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(run).state
        except TransportError:
            state = None
        if state is not None and state.is_final():
            return state
        time.sleep(POLL_SECONDS)
