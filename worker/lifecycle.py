"""The states of a worker as a member of a fleet, and what may follow what. Pure; `agent` moves it, heartbeats show it."""

from __future__ import annotations

from enum import Enum

from shoal.errors import InternalError


class WorkerState(Enum):
    DIALING = "dialing"
    ATTACHED = "attached"
    LOADING = "loading"
    LOADED = "loaded"
    SERVING = "serving"
    STOPPED = "stopped"


# state -> the states that may follow
TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.DIALING: frozenset({WorkerState.ATTACHED, WorkerState.STOPPED}),
    WorkerState.ATTACHED: frozenset({WorkerState.LOADING, WorkerState.DIALING, WorkerState.STOPPED}),
    WorkerState.LOADING: frozenset(
        {WorkerState.LOADING, WorkerState.LOADED, WorkerState.ATTACHED, WorkerState.DIALING, WorkerState.STOPPED}
    ),
    WorkerState.LOADED: frozenset(
        {WorkerState.LOADING, WorkerState.SERVING, WorkerState.ATTACHED, WorkerState.DIALING, WorkerState.STOPPED}
    ),
    WorkerState.SERVING: frozenset(
        {WorkerState.LOADING, WorkerState.ATTACHED, WorkerState.DIALING, WorkerState.STOPPED}
    ),
    WorkerState.STOPPED: frozenset(),
}


class Lifecycle:
    """Where a worker stands; every change is in the table, and remembered for the error that an illegal one raises."""

    __slots__ = ("_story", "state")

    def __init__(self) -> None:
        self.state = WorkerState.DIALING
        self._story = [self.state]

    def move_to(self, state: WorkerState) -> None:
        """Change state; raises InternalError with the last states on a change that is not in the table."""
        if state not in TRANSITIONS[self.state]:
            story = " -> ".join(step.value for step in [*self._story[-6:], state])
            raise InternalError(f"worker may not go {story}")
        self.state = state
        self._story = [*self._story[-6:], state]
