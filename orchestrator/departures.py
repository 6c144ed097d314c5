"""Devices that are gone, and why, as long as somebody may still ask where they are.

A value of its own, without a clock: `monitors` says who comes and goes. Read by `status`.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.worker_session import LEFT
from shoal.types import WorkerId

# Whoever looks later than that finds it in the log.
KEPT_S = 600.0
# Each device that is started anew under another name is one of them.
MAX_KEPT = 100


@dataclass(frozen=True, slots=True)
class Departure:
    """A device that is gone. why: as in "no heartbeat for 5 s"."""

    worker_id: WorkerId
    why: str
    at: float

    @property
    def is_orderly(self) -> bool:
        """Whether it wanted to go."""
        return self.why == LEFT


class Departures:
    """Invariant: at most MAX_KEPT, each of another device, those that went first in front."""

    def __init__(self) -> None:
        self._departures: dict[WorkerId, Departure] = {}

    def gone(self, worker_id: WorkerId, why: str, now: float) -> None:
        self._departures.pop(worker_id, None)
        self._departures[worker_id] = Departure(worker_id, why, now)
        if len(self._departures) > MAX_KEPT:
            del self._departures[next(iter(self._departures))]

    def back(self, worker_id: WorkerId) -> None:
        self._departures.pop(worker_id, None)

    def recent(self, now: float) -> tuple[Departure, ...]:
        """Those of the last KEPT_S, the latest first."""
        return tuple(one for one in reversed(self._departures.values()) if now - one.at < KEPT_S)
