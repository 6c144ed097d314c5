"""Who is let in, who waits, and what a refusal says: one situation a test."""

from __future__ import annotations

import pytest

from orchestrator.core.scheduler import Scheduler
from shoal.errors import ContextExceeded, Overloaded
from shoal.types import FinishReason, QosClass, SequenceId
from tests.support.builders import make_limits, make_sequence, make_sequences, run_ids, sampled_ids, schedule_all


def test_an_idle_scheduler_has_no_batch() -> None:
    scheduler = Scheduler(make_limits())
    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_work


def test_a_request_that_can_never_be_served_is_refused_and_not_queued() -> None:
    scheduler = Scheduler(make_limits(context_tokens=100))
    with pytest.raises(ContextExceeded):
        scheduler.submit(make_sequence(num_prompt=100), 0.0)
    assert not scheduler.has_work


def test_the_longest_possible_prompt_gets_an_answer_of_one_token() -> None:
    scheduler = Scheduler(make_limits(context_tokens=100))
    sequence = make_sequence(num_prompt=99, max_tokens=50)
    scheduler.submit(sequence, 0.0)
    assert sequence.max_tokens == 1


def test_max_tokens_is_lowered_to_what_the_kv_memory_leaves() -> None:
    scheduler = Scheduler(make_limits(kv_tokens=40))
    sequence = make_sequence(num_prompt=20, max_tokens=50)
    scheduler.submit(sequence, 0.0)
    assert sequence.max_tokens == 12
    assert scheduler.schedule(0.0) is not None


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    scheduler = Scheduler(make_limits(max_waiting=2))
    for sequence in make_sequences(*[QosClass.BALANCED] * 2):
        scheduler.submit(sequence, 0.0)
    with pytest.raises(Overloaded, match="2 requests wait") as refused:
        scheduler.submit(make_sequence(3), 0.0)
    assert refused.value.retry_after_s == 1.0
    assert scheduler.num_waiting == 2


def test_the_time_to_retry_follows_the_pace_at_which_sequences_end() -> None:
    scheduler = Scheduler(make_limits(max_waiting=1))
    for second in range(60):
        scheduler.submit(make_sequence(second + 1), 4.0 * second)
        scheduler.abort(SequenceId(second + 1), FinishReason.CANCELLED, 4.0 * second)
    scheduler.submit(make_sequence(100), 240.0)
    with pytest.raises(Overloaded) as refused:
        scheduler.submit(make_sequence(101), 237.0)
    assert refused.value.retry_after_s == pytest.approx(3.0, abs=0.1)


def test_the_first_in_the_queue_is_not_overtaken_by_one_that_would_fit() -> None:
    scheduler = Scheduler(make_limits(kv_tokens=64))
    for key, num_prompt in ((1, 30), (2, 30), (3, 4)):
        scheduler.submit(make_sequence(key, num_prompt=num_prompt, max_tokens=10), 0.0)
    assert [run_ids(batch) for batch in schedule_all(scheduler)] == [[1]]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_no_more_sequences_run_than_there_are_slots() -> None:
    scheduler = Scheduler(make_limits(num_slots=2))
    for sequence in make_sequences(*[QosClass.BALANCED] * 3):
        scheduler.submit(sequence, 0.0)
    assert run_ids(schedule_all(scheduler)[0]) == [1, 2]


def test_a_freed_slot_goes_to_the_next_in_the_queue() -> None:
    scheduler = Scheduler(make_limits(num_slots=1))
    for sequence in make_sequences(*[QosClass.BALANCED] * 2):
        scheduler.submit(sequence, 0.0)
    (first,) = schedule_all(scheduler)
    scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
    (second,) = schedule_all(scheduler)
    assert (run_ids(first), run_ids(second)) == ([1], [2])
    assert second.rows[0].slot == first.rows[0].slot == 0


def test_admission_and_first_token_are_timed_by_the_caller() -> None:
    scheduler, sequence = Scheduler(make_limits()), make_sequence(arrived_at=1.0)
    scheduler.submit(sequence, 1.0)
    batch = scheduler.schedule(2.0)
    assert batch is not None
    scheduler.commit(batch.step, sampled_ids(batch), 0, 3.0)
    assert (sequence.admitted_at, sequence.first_token_at) == (2.0, 3.0)
