"""Decides which planned request is to be sent when: open loop, closed loop, and turns that wait for the ones before them.

Pure: `now_s` (seconds after the start of the run) is an argument. Knows neither targets nor tasks. Called by `runner`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass

from loadtest.plan import Plan, PlannedRequest


@dataclass(frozen=True, slots=True)
class Due:
    """A request that is to be sent now, and since when (see Record.due_s)."""

    request: PlannedRequest
    due_s: float


class Dispatch:
    """The requests of a plan that are still to come.

    A request is ripe from the latest of: its due_s, the end of the one it comes `after`, and, where it has no due_s of its
    own, the end that made a place free for it. With a concurrency, ripe requests wait for a place, the earliest first; one
    with a due_s counts as due all the while, so that a slow server does not hide their waiting.

    Invariants: each request is handed out once; never more than `concurrency` (if not 0) are handed out and not ended; none
    is handed out before it is ripe.
    """

    __slots__ = ("_concurrency", "_freed_at_s", "_ripe", "_successors", "_timed", "_unended")

    def __init__(self, plan: Plan) -> None:
        numbers = {request.number for request in plan.requests}
        if len(numbers) < len(plan.requests):
            raise ValueError("two requests of a plan have one number")
        self._concurrency = plan.concurrency
        # When each free place became free, the earliest first.
        self._freed_at_s = deque([0.0] * plan.concurrency)
        self._unended = numbers
        self._successors: dict[int, list[PlannedRequest]] = defaultdict(list)
        # Heaps; their second entries differ, so that the third ones are never compared.
        self._timed: list[tuple[float, int, Due]] = []
        self._ripe: list[tuple[float, int, Due]] = []
        for request in plan.requests:
            self._add(request)

    def _add(self, request: PlannedRequest) -> None:
        if request.after is None:
            self._release(request, 0.0)
        elif request.after in self._unended and request.after < request.number:
            self._successors[request.after].append(request)
        else:
            raise ValueError(f"request {request.number} comes after {request.after}, which is none before it")

    def _release(self, request: PlannedRequest, at_s: float) -> None:
        """Nothing but time and room keeps this one back any more."""
        if request.due_s is None:
            # By number, whenever it was released: so does a closed loop go through a plan.
            heapq.heappush(self._ripe, (0.0, request.number, Due(request, at_s)))
        else:
            due_s = max(request.due_s, at_s)
            heapq.heappush(self._timed, (due_s, request.number, Due(request, due_s)))

    @property
    def num_left(self) -> int:
        """Requests not handed out yet."""
        waiting = sum(len(requests) for requests in self._successors.values())
        return len(self._timed) + len(self._ripe) + waiting

    @property
    def is_done(self) -> bool:
        return not self._unended

    def next_at_s(self) -> float | None:
        """When take() could give more though none ends; None if never."""
        return self._timed[0][0] if self._timed else None

    def take(self, now_s: float) -> list[Due]:
        """Hand out what is to be sent now."""
        while self._timed and self._timed[0][0] <= now_s:
            heapq.heappush(self._ripe, heapq.heappop(self._timed))
        taken = []
        while self._ripe and (self._freed_at_s or not self._concurrency):
            _, _, due = heapq.heappop(self._ripe)
            freed_at_s = self._freed_at_s.popleft() if self._concurrency else 0.0
            taken.append(due if due.request.due_s is not None else Due(due.request, max(due.due_s, freed_at_s)))
        return taken

    def end(self, number: int, now_s: float) -> None:
        """A request that was handed out has ended, well or not."""
        self._unended.remove(number)
        if self._concurrency:
            self._freed_at_s.append(now_s)
        for request in self._successors.pop(number, ()):
            self._release(request, now_s)

    def check_invariants(self) -> None:
        num_running = len(self._unended) - self.num_left
        assert num_running >= 0
        assert not self._concurrency or num_running + len(self._freed_at_s) == self._concurrency
