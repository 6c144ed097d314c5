"""Sequences whose pipeline was lost and that nobody else can take now: how long they wait for another, in what order.

Their clients' streams stay open meanwhile. It neither knows pipelines nor why one was lost: the engine, its only caller,
puts them in, offers them to every pipeline that comes up, and ends those that have waited too long.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.sequence import Sequence
from shoal.errors import ShoalError
from shoal.types import SequenceId

# For a device that comes back, or layers that load elsewhere: longer than either takes in a local network.
PARKED_S = 10.0
# However long somebody goes on building a pipeline: weights over a slow link take that long, and no client waits longer.
MAX_PARKED_S = 60.0


@dataclass(slots=True)
class _Parked:
    """error: what to end it with."""

    sequence: Sequence
    error: ShoalError
    parked_at: float
    give_up_at: float

    @property
    def last_at(self) -> float:
        """When it has waited too long whatever happens."""
        return self.parked_at + MAX_PARKED_S


class Parking:
    """In the order in which they came: who ran first before who waited.

    Invariants: a sequence is in here once, and waits without a slot; none is given up later than MAX_PARKED_S after it came.
    """

    def __init__(self) -> None:
        self._parked: dict[SequenceId, _Parked] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._parked

    def sequences(self) -> list[Sequence]:
        return [one.sequence for one in self._parked.values()]

    def add(self, sequence: Sequence, error: ShoalError, now: float, wait_s: float | None = None) -> None:
        """Let a sequence wait for a pipeline, PARKED_S if nothing else is said, and end with this error if none comes."""
        assert sequence.sequence_id not in self._parked, sequence.story()
        self._parked[sequence.sequence_id] = _Parked(
            sequence, error, parked_at=now, give_up_at=now + (PARKED_S if wait_s is None else wait_s)
        )

    def remove(self, sequence_id: SequenceId, now: float) -> bool:
        """Take one out that is taken, or that nobody wants any more; False if it is not in here."""
        parked = self._parked.pop(sequence_id, None)
        if parked is not None:
            parked.sequence.queue_s += now - parked.parked_at
        return parked is not None

    def hold(self, now: float) -> None:
        """Wait on: a pipeline is being built."""
        for one in self._parked.values():
            one.give_up_at = min(max(one.give_up_at, now + PARKED_S), one.last_at)

    def take_late(self, now: float) -> list[tuple[Sequence, ShoalError | None]]:
        """Take out those who have waited too long, with their errors, and those whose deadline has passed, with None."""
        late: list[tuple[Sequence, ShoalError | None]] = []
        for one in list(self._parked.values()):
            is_past = _deadline_at(one.sequence) <= now
            if is_past or one.give_up_at <= now:
                self.remove(one.sequence.sequence_id, now)
                late.append((one.sequence, None if is_past else one.error))
        return late

    def wake_at(self) -> float | None:
        """When take_late() will have something to give; None while nobody is in here."""
        return min((min(one.give_up_at, _deadline_at(one.sequence)) for one in self._parked.values()), default=None)

    def check_invariants(self) -> None:
        for sequence_id, one in self._parked.items():
            assert sequence_id == one.sequence.sequence_id
            assert one.sequence.slot is None, one.sequence.story()
            assert one.give_up_at <= one.last_at, one.sequence.story()


def _deadline_at(sequence: Sequence) -> float:
    return float("inf") if sequence.deadline_at is None else sequence.deadline_at
