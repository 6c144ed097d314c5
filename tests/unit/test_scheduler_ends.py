"""How sequences end, by themselves or not, and what is told to whom: one situation a test."""

from __future__ import annotations

from orchestrator.core.batch import Emitted, EndedSequence, SampledId
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RunId, SequenceState
from shoal.types import FinishReason, NumericClass, SequenceId, SlotId
from tests.support.builders import (
    STOP_ID,
    TOKEN_ID,
    make_decoding_as,
    make_limits,
    make_sequence,
    sampled_ids,
    schedule_all,
)

SHARED = NumericClass.SHARED


def test_a_stop_token_is_emitted_with_its_finish_reason_and_frees_the_slot() -> None:
    scheduler = make_decoding_as(make_limits(), SHARED)
    (batch,) = schedule_all(scheduler)
    emitted = scheduler.commit(batch.step, sampled_ids(batch, STOP_ID), 0, 0.0)
    assert emitted == [Emitted(SequenceId(1), 1, STOP_ID, FinishReason.STOP)]
    assert (scheduler.used_slots, scheduler.used_kv_tokens) == (0, 0)
    assert scheduler.take_ended() == [EndedSequence(RunId(1), SlotId(0))]


def test_an_answer_of_one_token_ends_with_its_prefill() -> None:
    scheduler, sequence = Scheduler(make_limits()), make_sequence(max_tokens=1)
    scheduler.submit(sequence, 0.0)
    (batch,) = schedule_all(scheduler)
    (emitted,) = scheduler.commit(batch.step, sampled_ids(batch), 0, 0.0)
    assert emitted.finish is sequence.finish_reason is FinishReason.LENGTH
    assert scheduler.schedule(0.0) is None


def test_ended_sequences_are_told_once() -> None:
    scheduler = make_decoding_as(make_limits(), SHARED)
    scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
    assert len(scheduler.take_ended()) == 1
    assert scheduler.take_ended() == []


def test_aborting_a_waiting_sequence_tells_no_stage() -> None:
    scheduler, sequence = Scheduler(make_limits()), make_sequence()
    scheduler.submit(sequence, 0.0)
    assert scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
    assert (sequence.state, sequence.finish_reason) == (SequenceState.FINISHED, FinishReason.CANCELLED)
    assert (scheduler.take_ended(), scheduler.has_work) == ([], False)


def test_aborting_between_two_chunks_stops_the_prefill() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_sequence(num_prompt=300), 0.0)
    first, second = schedule_all(scheduler)
    scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
    for batch in (first, second):
        scheduler.commit(batch.step, [], 0, 0.0)
    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_work


def test_aborting_twice_is_noticed() -> None:
    scheduler = make_decoding_as(make_limits(), SHARED)
    assert scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
    assert not scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)


def test_the_token_of_an_aborted_sequence_is_ignored_and_its_credit_freed() -> None:
    scheduler = make_decoding_as(make_limits(), SHARED)
    (batch,) = schedule_all(scheduler)
    scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
    assert scheduler.has_work
    assert scheduler.commit(batch.step, sampled_ids(batch), 0, 0.0) == []
    assert not scheduler.has_work


def test_a_token_for_a_sequence_that_is_not_in_the_batch_is_ignored() -> None:
    scheduler = make_decoding_as(make_limits(num_stages=2, max_batch=1), SHARED, SHARED)
    first, _ = schedule_all(scheduler)
    assert scheduler.commit(first.step, [SampledId(RunId(2), TOKEN_ID)], 1, 0.0) == []


def test_an_unknown_step_is_ignored() -> None:
    scheduler = make_decoding_as(make_limits(), SHARED)
    (batch,) = schedule_all(scheduler)
    assert scheduler.commit(batch.step + 1, sampled_ids(batch), 0, 0.0) == []
    assert scheduler.fail_step(batch.step + 1, 0.0) == []
    assert scheduler.num_in_flight == 1


def test_a_failed_step_ends_the_sequences_in_it_and_no_others() -> None:
    scheduler = make_decoding_as(make_limits(num_stages=2, max_batch=1), SHARED, SHARED)
    first, second = schedule_all(scheduler)
    assert scheduler.fail_step(first.step, 0.0) == [1]
    assert scheduler.take_ended() == [EndedSequence(RunId(1), SlotId(0))]
    scheduler.check_invariants()
    assert [one.sequence_id for one in scheduler.commit(second.step, sampled_ids(second), 0, 0.0)] == [2]


def test_a_sequence_ended_by_an_error_has_no_finish_reason() -> None:
    scheduler, sequence = Scheduler(make_limits()), make_sequence()
    scheduler.submit(sequence, 0.0)
    (batch,) = schedule_all(scheduler)
    scheduler.fail_step(batch.step, 0.0)
    assert (sequence.state, sequence.finish_reason) == (SequenceState.FINISHED, None)


def test_a_lost_pipeline_gives_up_the_running_and_the_waiting_and_tells_no_stage() -> None:
    scheduler = make_decoding_as(make_limits(num_slots=1), SHARED)
    (batch,) = schedule_all(scheduler)
    scheduler.submit(make_sequence(2), 0.0)
    lost = scheduler.take_all(5.0)
    scheduler.check_invariants()
    assert [(one.sequence_id, one.state, one.num_preemptions) for one in lost] == [
        (1, SequenceState.WAITING, 0),
        (2, SequenceState.WAITING, 0),
    ]
    assert (scheduler.has_work, scheduler.used_kv_tokens, scheduler.take_ended()) == (False, 0, [])
    assert scheduler.commit(batch.step, sampled_ids(batch), 0, 5.0) == []


def test_steps_keep_rising_after_a_lost_pipeline() -> None:
    scheduler = make_decoding_as(make_limits(), SHARED)
    (before,) = schedule_all(scheduler)
    scheduler.take_all(0.0)
    scheduler.submit(make_sequence(2), 0.0)
    (after,) = schedule_all(scheduler)
    assert after.step > before.step
