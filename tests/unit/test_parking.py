"""Who waits for a pipeline: for how long, and in what order."""

from __future__ import annotations

from orchestrator.core.parking import MAX_PARKED_S, PARKED_S, Parking
from shoal.errors import WorkerLost
from shoal.types import SequenceId
from tests.support.builders import make_sequence

LOST = WorkerLost("w0 is gone")


def make_parking(*sequence_ids: int, now: float = 0.0, deadline_at: float | None = None) -> Parking:
    parking = Parking()
    for sequence_id in sequence_ids:
        sequence = make_sequence(sequence_id)
        sequence.deadline_at = deadline_at
        parking.add(sequence, LOST, now)
    parking.check_invariants()
    return parking


def test_they_wait_in_the_order_in_which_they_came() -> None:
    assert [one.sequence_id for one in make_parking(3, 1, 2).sequences()] == [3, 1, 2]


def test_who_has_waited_too_long_is_given_its_error_and_nobody_before() -> None:
    parking = make_parking(1)

    assert parking.wake_at() == PARKED_S
    assert parking.take_late(PARKED_S - 0.1) == []
    ((sequence, error),) = parking.take_late(PARKED_S)

    assert (sequence.sequence_id, error) == (1, LOST)
    assert sequence.queue_s == PARKED_S
    assert (len(parking), parking.wake_at()) == (0, None)


def test_while_a_pipeline_is_being_built_they_wait_on_but_not_for_ever() -> None:
    parking = make_parking(1)
    for second in range(int(MAX_PARKED_S)):
        parking.hold(float(second))
        assert parking.take_late(float(second)) == []
        parking.check_invariants()

    assert parking.wake_at() == MAX_PARKED_S
    assert len(parking.take_late(MAX_PARKED_S)) == 1


def test_a_deadline_ends_the_wait_without_that_error() -> None:
    parking = make_parking(1, deadline_at=2.0)

    ((_, error),) = parking.take_late(2.0)

    assert error is None


def test_who_is_taken_out_is_not_given_up() -> None:
    parking = make_parking(1, 2)

    assert parking.remove(SequenceId(1), 1.0)
    assert not parking.remove(SequenceId(1), 1.0)
    assert SequenceId(1) not in parking
    assert [one.sequence_id for one, _ in parking.take_late(PARKED_S)] == [2]
