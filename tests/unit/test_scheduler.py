"""What the scheduler puts into batches, and what it makes of their tokens: one situation a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.batch import Batch, BatchRow, Emitted, EndedSequence, SampledId
from orchestrator.core.limits import KV_READ_TOKENS, SchedulerLimits
from orchestrator.core.scheduler import SHORT_BURST_STEPS, Scheduler
from orchestrator.core.sequence import RunId, Sequence, SequenceState
from shoal.errors import ContextExceeded, Overloaded
from shoal.types import FinishReason, NumericClass, SequenceId, SlotId
from tests.support.builders import (
    STOP_ID,
    TOKEN_ID,
    know_times,
    make_limits,
    make_sequence,
    sampled_ids,
    start_decoding,
)


def schedule_all(scheduler: Scheduler, now: float = 0.0) -> list[Batch]:
    batches = []
    while (batch := scheduler.schedule(now)) is not None:
        batches.append(batch)
        scheduler.check_invariants()
    return batches


def ids(batch: Batch) -> list[int]:
    """The runs of a batch: where none is preempted, they have the numbers of their sequences."""
    return [row.run_id for row in batch.rows]


def sizes(batches: list[Batch]) -> list[list[int]]:
    return [[row.num_tokens for row in batch.rows] for batch in batches]


def sequences(count: int, num_prompt: int = 8) -> list[Sequence]:
    return [make_sequence(key, num_prompt=num_prompt) for key in range(1, count + 1)]


def decoding(limits: SchedulerLimits, *numeric: NumericClass, max_tokens: int = 64) -> Scheduler:
    """A scheduler with sequences 1, 2, ... of these classes, all ready to decode."""
    scheduler = Scheduler(limits)
    start_decoding(
        scheduler, [make_sequence(key, numeric=one, max_tokens=max_tokens) for key, one in enumerate(numeric, start=1)]
    )
    scheduler.check_invariants()
    return scheduler


SHARED, SOLO = NumericClass.SHARED, NumericClass.SOLO


class TestAdmission:
    def test_an_idle_scheduler_has_no_batch(self) -> None:
        scheduler = Scheduler(make_limits())
        assert scheduler.schedule(0.0) is None
        assert not scheduler.has_work

    def test_a_request_that_can_never_be_served_is_refused_and_not_queued(self) -> None:
        scheduler = Scheduler(make_limits(context_tokens=100))
        with pytest.raises(ContextExceeded):
            scheduler.submit(make_sequence(num_prompt=100), 0.0)
        assert not scheduler.has_work

    def test_the_longest_possible_prompt_gets_an_answer_of_one_token(self) -> None:
        scheduler = Scheduler(make_limits(context_tokens=100))
        sequence = make_sequence(num_prompt=99, max_tokens=50)
        scheduler.submit(sequence, 0.0)
        assert sequence.max_tokens == 1

    def test_max_tokens_is_lowered_to_what_the_kv_memory_leaves(self) -> None:
        scheduler = Scheduler(make_limits(kv_tokens=40))
        sequence = make_sequence(num_prompt=20, max_tokens=50)
        scheduler.submit(sequence, 0.0)
        assert sequence.max_tokens == 12
        assert scheduler.schedule(0.0) is not None

    def test_a_full_queue_refuses_with_a_time_to_retry(self) -> None:
        scheduler = Scheduler(make_limits(max_waiting=2))
        for sequence in sequences(2):
            scheduler.submit(sequence, 0.0)
        with pytest.raises(Overloaded, match="2 requests wait") as refused:
            scheduler.submit(make_sequence(3), 0.0)
        assert refused.value.retry_after_s == 1.0
        assert scheduler.num_waiting == 2

    def test_the_time_to_retry_follows_the_pace_at_which_sequences_end(self) -> None:
        scheduler = Scheduler(make_limits(max_waiting=1))
        for second in range(60):
            scheduler.submit(make_sequence(second + 1), 4.0 * second)
            scheduler.abort(SequenceId(second + 1), FinishReason.CANCELLED, 4.0 * second)
        scheduler.submit(make_sequence(100), 240.0)
        with pytest.raises(Overloaded) as refused:
            scheduler.submit(make_sequence(101), 237.0)
        assert refused.value.retry_after_s == pytest.approx(3.0, abs=0.1)

    def test_the_first_in_the_queue_is_not_overtaken_by_one_that_would_fit(self) -> None:
        scheduler = Scheduler(make_limits(kv_tokens=64))
        for key, num_prompt in ((1, 30), (2, 30), (3, 4)):
            scheduler.submit(make_sequence(key, num_prompt=num_prompt, max_tokens=10), 0.0)
        assert [ids(batch) for batch in schedule_all(scheduler)] == [[1]]
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)

    def test_no_more_sequences_run_than_there_are_slots(self) -> None:
        scheduler = Scheduler(make_limits(num_slots=2))
        for sequence in sequences(3):
            scheduler.submit(sequence, 0.0)
        assert ids(schedule_all(scheduler)[0]) == [1, 2]

    def test_a_freed_slot_goes_to_the_next_in_the_queue(self) -> None:
        scheduler = Scheduler(make_limits(num_slots=1))
        for sequence in sequences(2):
            scheduler.submit(sequence, 0.0)
        (first,) = schedule_all(scheduler)
        scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
        (second,) = schedule_all(scheduler)
        assert (ids(first), ids(second)) == ([1], [2])
        assert second.rows[0].slot == first.rows[0].slot == 0

    def test_admission_and_first_token_are_timed_by_the_caller(self) -> None:
        scheduler, sequence = Scheduler(make_limits()), make_sequence(arrived_at=1.0)
        scheduler.submit(sequence, 1.0)
        batch = scheduler.schedule(2.0)
        assert batch is not None
        scheduler.commit(batch.step, sampled_ids(batch), 0, 3.0)
        assert (sequence.admitted_at, sequence.first_token_at) == (2.0, 3.0)


class TestPrefill:
    def test_a_short_prompt_is_one_chunk_that_starts_the_sequence_and_is_sampled(self) -> None:
        scheduler = Scheduler(make_limits())
        scheduler.submit(make_sequence(num_prompt=3), 0.0)
        (batch,) = schedule_all(scheduler)
        assert batch.rows == (BatchRow(RunId(1), SlotId(0), 0, 3, (100, 101, 102), True, True),)
        assert (batch.num_decode_rows, batch.burst_steps, batch.is_solo) == (0, 0, False)

    def test_chunks_of_a_long_prompt_are_in_flight_together_and_only_the_last_is_sampled(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        scheduler.submit(make_sequence(num_prompt=150), 0.0)
        rows = [batch.rows[0] for batch in schedule_all(scheduler)]
        assert [(row.position, row.num_tokens) for row in rows] == [(0, 64), (64, 64), (128, 22)]
        assert [row.is_sampled for row in rows] == [False, False, True]
        assert [row.is_start for row in rows] == [True, False, False]
        assert rows[1].token_ids == tuple(range(164, 228))

    def test_one_batch_more_than_stages_is_in_flight(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        scheduler.submit(make_sequence(num_prompt=400), 0.0)
        first, *others = schedule_all(scheduler)
        assert len(others) == 2
        scheduler.commit(first.step, [], 0, 0.0)
        assert sizes(schedule_all(scheduler)) == [[64]]

    def test_no_chunk_has_exactly_one_token(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        scheduler.submit(make_sequence(num_prompt=65), 0.0)
        assert sizes(schedule_all(scheduler)) == [[63], [2]]

    def test_a_prompt_of_one_token_is_a_chunk_of_one(self) -> None:
        scheduler = Scheduler(make_limits())
        scheduler.submit(make_sequence(num_prompt=1), 0.0)
        assert sizes(schedule_all(scheduler)) == [[1]]

    def test_what_a_prompt_leaves_of_the_budget_goes_to_the_next_one(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        for sequence in sequences(2, num_prompt=50):
            scheduler.submit(sequence, 0.0)
        assert sizes(schedule_all(scheduler)) == [[50, 14], [36]]

    def test_a_rest_of_the_budget_that_would_leave_one_token_is_not_used(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        for key, num_prompt in ((1, 62), (2, 3), (3, 2)):
            scheduler.submit(make_sequence(key, num_prompt=num_prompt), 0.0)
        assert [ids(batch) for batch in schedule_all(scheduler)] == [[1], [2, 3]]

    def test_a_sequence_decodes_only_after_its_last_chunk_was_sampled(self) -> None:
        scheduler, sequence = Scheduler(make_limits(num_stages=2)), make_sequence(num_prompt=100)
        scheduler.submit(sequence, 0.0)
        first, second = schedule_all(scheduler)
        scheduler.commit(first.step, [], 0, 0.0)
        assert scheduler.schedule(0.0) is None
        assert scheduler.commit(second.step, sampled_ids(second), 0, 0.0) == [Emitted(SequenceId(1), 0, TOKEN_ID, None)]
        assert sequence.state is SequenceState.DECODE
        (batch,) = schedule_all(scheduler)
        assert batch.rows == (BatchRow(RunId(1), SlotId(0), 100, 1, (TOKEN_ID,), True, False),)

    def test_a_chunk_reported_late_does_not_put_its_sequence_into_a_second_batch(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        scheduler.submit(make_sequence(num_prompt=100), 0.0)
        first, second = schedule_all(scheduler)
        scheduler.commit(second.step, sampled_ids(second), 0, 0.0)
        assert len(schedule_all(scheduler)) == 1
        scheduler.commit(first.step, [], 0, 0.0)
        assert scheduler.schedule(0.0) is None
        scheduler.check_invariants()


class TestWork:
    def test_tokens_far_into_a_slot_cost_more(self) -> None:
        limits = replace(make_limits(), attention_tokens=3000.0)
        assert limits.work_of(4, 0) == 4
        assert limits.work_of(4, 1500) == 4 + (4 + KV_READ_TOKENS) / 2
        assert make_limits().work_of(4, 1500) == 4

    @pytest.mark.parametrize("position", [0, 100, 3000])
    @pytest.mark.parametrize("attention_tokens", [0.0, 3000.0])
    def test_as_many_tokens_fit_as_cost_no_more(self, position: int, attention_tokens: float) -> None:
        limits = replace(make_limits(), attention_tokens=attention_tokens)
        num_tokens = limits.tokens_of(20.5, position)
        assert limits.work_of(num_tokens, position) <= 20.5 < limits.work_of(num_tokens + 1, position)
        assert limits.tokens_of(0.5, position) == 0

    def test_a_batch_costs_what_its_rows_do(self) -> None:
        limits = replace(make_limits(), attention_tokens=3000.0)
        old = BatchRow(RunId(1), SlotId(0), 1500, 1, (TOKEN_ID,), True, False)
        new = BatchRow(RunId(2), SlotId(1), 0, 8, (TOKEN_ID,) * 8, False, True)
        assert Batch(1, (old, new), 0, False, 1).work(limits) == limits.work_of(1, 1500) + 8


class TestDecode:
    def test_decode_rows_come_before_chunks_and_share_their_budget(self) -> None:
        scheduler = decoding(make_limits(), SHARED, SHARED)
        scheduler.submit(make_sequence(3, num_prompt=200), 0.0)
        batch = schedule_all(scheduler)[0]
        assert ids(batch) == [1, 2, 3]
        assert [row.num_tokens for row in batch.rows] == [1, 1, 62]
        assert batch.num_decode_rows == 2

    def test_a_sequence_is_in_one_batch_at_a_time(self) -> None:
        scheduler = decoding(make_limits(num_stages=3), SHARED)
        assert len(schedule_all(scheduler)) == 1

    def test_decoding_sequences_are_shared_out_evenly_over_as_many_batches_as_stages(self) -> None:
        scheduler = decoding(make_limits(num_stages=2, num_slots=16), *[SHARED] * 16)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [8, 8]

    def test_batches_are_not_made_smaller_than_min_rows(self) -> None:
        scheduler = decoding(make_limits(num_stages=2), *[SHARED] * 6)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [4, 2]

    def test_batches_are_smaller_where_stages_would_be_idle_but_not_of_one_row_for_it(self) -> None:
        scheduler = decoding(make_limits(num_stages=3), *[SHARED] * 6)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [2, 2, 2]
        scheduler = decoding(make_limits(num_stages=3), *[SHARED] * 3)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [2, 1]

    def test_a_batch_has_at_most_max_batch_decode_rows(self) -> None:
        scheduler = decoding(make_limits(max_batch=3), *[SHARED] * 8)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [3]

    def test_no_more_batches_with_decode_rows_than_stages_are_in_flight(self) -> None:
        scheduler = decoding(make_limits(num_stages=2, num_slots=9, max_batch=2), *[SHARED] * 8)
        assert len(schedule_all(scheduler)) == 2
        scheduler.submit(make_sequence(9), 0.0)
        (extra,) = schedule_all(scheduler)
        assert (ids(extra), extra.num_decode_rows) == ([9], 0)

    def test_those_that_wait_longest_go_first(self) -> None:
        scheduler = decoding(make_limits(max_batch=2, min_rows=1), *[SHARED] * 3)
        (first,) = schedule_all(scheduler)
        scheduler.commit(first.step, sampled_ids(first), 0, 0.0)
        (second,) = schedule_all(scheduler)
        assert (ids(first), ids(second)) == ([1, 2], [3, 1])

    def test_prefill_goes_on_when_decode_rows_alone_would_fill_the_budget(self) -> None:
        scheduler = decoding(make_limits(num_slots=9, chunk_tokens=8), *[SHARED] * 8)
        scheduler.submit(make_sequence(9, num_prompt=5), 0.0)
        batch = schedule_all(scheduler)[0]
        assert [row.num_tokens for row in batch.rows] == [1, 1, 1, 1, 3]


class TestSolo:
    def test_a_solo_sequence_decodes_alone(self) -> None:
        scheduler = decoding(make_limits(num_stages=3), SHARED, SOLO, SHARED)
        batches = schedule_all(scheduler)
        assert [(ids(batch), batch.is_solo) for batch in batches] == [([1, 3], False), ([2], True)]

    def test_no_chunk_joins_a_solo_row(self) -> None:
        scheduler = decoding(make_limits(), SOLO)
        scheduler.submit(make_sequence(2), 0.0)
        assert [ids(batch) for batch in schedule_all(scheduler)] == [[1], [2]]

    def test_chunks_of_solo_sequences_are_like_all_others(self) -> None:
        scheduler = Scheduler(make_limits())
        for key in (1, 2):
            scheduler.submit(make_sequence(key, numeric=SOLO), 0.0)
        (batch,) = schedule_all(scheduler)
        assert (ids(batch), batch.is_solo) == ([1, 2], False)

    def test_solo_and_shared_sequences_take_turns(self) -> None:
        scheduler = decoding(make_limits(), SHARED, SOLO)
        seen = []
        for _ in range(4):
            (batch,) = schedule_all(scheduler)
            seen += ids(batch)
            scheduler.commit(batch.step, sampled_ids(batch), 0, 0.0)
        assert seen == [1, 2, 1, 2]


class TestBurst:
    def test_a_lone_stream_gets_a_burst(self) -> None:
        scheduler = decoding(make_limits(burst_steps=16), SHARED)
        assert schedule_all(scheduler)[0].burst_steps == 15

    def test_a_burst_ends_before_the_answer_that_is_nearest_to_its_end(self) -> None:
        scheduler = Scheduler(make_limits(burst_steps=16))
        start_decoding(scheduler, [make_sequence(1, max_tokens=40), make_sequence(2, max_tokens=6)])
        assert schedule_all(scheduler)[0].burst_steps == 4

    def test_nobody_gets_a_burst_while_a_request_waits(self) -> None:
        scheduler = decoding(make_limits(burst_steps=16, num_slots=1), SHARED)
        scheduler.submit(make_sequence(9), 0.0)
        assert schedule_all(scheduler)[0].burst_steps == 0

    def test_nobody_gets_a_burst_while_a_prompt_is_being_computed(self) -> None:
        scheduler = decoding(make_limits(burst_steps=16, num_stages=2), SHARED)
        (burst,) = schedule_all(scheduler)
        scheduler.submit(make_sequence(2), 0.0)
        (prefill,) = schedule_all(scheduler)
        scheduler.commit(burst.step, sampled_ids(burst), 0, 0.0)
        assert ids(prefill) == [2]
        assert schedule_all(scheduler)[0].burst_steps == 0

    @pytest.mark.parametrize(("allowed", "burst_steps"), [(16, SHORT_BURST_STEPS - 1), (2, 1), (1, 0)])
    def test_more_than_two_streams_get_short_bursts(self, allowed: int, burst_steps: int) -> None:
        scheduler = decoding(make_limits(burst_steps=allowed), SHARED, SHARED, SHARED)
        assert schedule_all(scheduler)[0].burst_steps == burst_steps

    @pytest.mark.parametrize(("inter_token_s", "burst_steps"), [(None, 8), (0.1, SHORT_BURST_STEPS - 1)])
    def test_many_streams_get_longer_bursts_where_nobody_cares_for_gaps(
        self, inter_token_s: float | None, burst_steps: int
    ) -> None:
        scheduler = Scheduler(make_limits(burst_steps=16))
        start_decoding(scheduler, [make_sequence(key, inter_token_s=inter_token_s, max_tokens=64) for key in (1, 2, 3)])
        know_times(scheduler, base_s=0.02, token_s=0.005)
        assert schedule_all(scheduler)[0].burst_steps == burst_steps

    def test_tokens_of_a_burst_come_step_by_step_and_free_the_credit_at_the_end(self) -> None:
        scheduler = decoding(make_limits(burst_steps=3), SHARED)
        (batch,) = schedule_all(scheduler)
        indices = []
        for burst_left in (2, 1, 0):
            assert scheduler.schedule(0.0) is None
            indices += [one.index for one in scheduler.commit(batch.step, sampled_ids(batch), burst_left, 0.0)]
        assert indices == [1, 2, 3]
        (following,) = schedule_all(scheduler)
        assert following.rows[0].position == 8 + 3

    def test_a_burst_may_end_early(self) -> None:
        scheduler = decoding(make_limits(burst_steps=16), SHARED)
        (batch,) = schedule_all(scheduler)
        (emitted,) = scheduler.commit(batch.step, sampled_ids(batch, STOP_ID), 0, 0.0)
        assert emitted.finish is FinishReason.STOP
        assert not scheduler.has_work

    def test_the_others_of_a_burst_go_on_when_one_of_them_stops(self) -> None:
        scheduler = decoding(make_limits(burst_steps=16), SHARED, SHARED)
        (batch,) = schedule_all(scheduler)
        scheduler.commit(batch.step, [SampledId(RunId(1), STOP_ID), SampledId(RunId(2), TOKEN_ID)], 14, 0.0)
        late = [SampledId(RunId(1), TOKEN_ID), SampledId(RunId(2), TOKEN_ID)]
        assert [one.sequence_id for one in scheduler.commit(batch.step, late, 13, 0.0)] == [2]
        scheduler.check_invariants()


class TestEnd:
    def test_a_stop_token_is_emitted_with_its_finish_reason_and_frees_the_slot(self) -> None:
        scheduler = decoding(make_limits(), SHARED)
        (batch,) = schedule_all(scheduler)
        emitted = scheduler.commit(batch.step, sampled_ids(batch, STOP_ID), 0, 0.0)
        assert emitted == [Emitted(SequenceId(1), 1, STOP_ID, FinishReason.STOP)]
        assert (scheduler.used_slots, scheduler.used_kv_tokens) == (0, 0)
        assert scheduler.take_ended() == [EndedSequence(RunId(1), SlotId(0))]

    def test_an_answer_of_one_token_ends_with_its_prefill(self) -> None:
        scheduler, sequence = Scheduler(make_limits()), make_sequence(max_tokens=1)
        scheduler.submit(sequence, 0.0)
        (batch,) = schedule_all(scheduler)
        (emitted,) = scheduler.commit(batch.step, sampled_ids(batch), 0, 0.0)
        assert emitted.finish is sequence.finish_reason is FinishReason.LENGTH
        assert scheduler.schedule(0.0) is None

    def test_ended_sequences_are_told_once(self) -> None:
        scheduler = decoding(make_limits(), SHARED)
        scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
        assert len(scheduler.take_ended()) == 1
        assert scheduler.take_ended() == []

    def test_aborting_a_waiting_sequence_tells_no_stage(self) -> None:
        scheduler, sequence = Scheduler(make_limits()), make_sequence()
        scheduler.submit(sequence, 0.0)
        assert scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
        assert (sequence.state, sequence.finish_reason) == (SequenceState.FINISHED, FinishReason.CANCELLED)
        assert (scheduler.take_ended(), scheduler.has_work) == ([], False)

    def test_aborting_between_two_chunks_stops_the_prefill(self) -> None:
        scheduler = Scheduler(make_limits())
        scheduler.submit(make_sequence(num_prompt=300), 0.0)
        first, second = schedule_all(scheduler)
        scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
        for batch in (first, second):
            scheduler.commit(batch.step, [], 0, 0.0)
        assert scheduler.schedule(0.0) is None
        assert not scheduler.has_work

    def test_aborting_twice_is_noticed(self) -> None:
        scheduler = decoding(make_limits(), SHARED)
        assert scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
        assert not scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)

    def test_the_token_of_an_aborted_sequence_is_ignored_and_its_credit_freed(self) -> None:
        scheduler = decoding(make_limits(), SHARED)
        (batch,) = schedule_all(scheduler)
        scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 0.0)
        assert scheduler.has_work
        assert scheduler.commit(batch.step, sampled_ids(batch), 0, 0.0) == []
        assert not scheduler.has_work

    def test_a_token_for_a_sequence_that_is_not_in_the_batch_is_ignored(self) -> None:
        scheduler = decoding(make_limits(num_stages=2, max_batch=1), SHARED, SHARED)
        first, _ = schedule_all(scheduler)
        assert scheduler.commit(first.step, [SampledId(RunId(2), TOKEN_ID)], 1, 0.0) == []

    def test_an_unknown_step_is_ignored(self) -> None:
        scheduler = decoding(make_limits(), SHARED)
        (batch,) = schedule_all(scheduler)
        assert scheduler.commit(batch.step + 1, sampled_ids(batch), 0, 0.0) == []
        assert scheduler.fail_step(batch.step + 1, 0.0) == []
        assert scheduler.num_in_flight == 1

    def test_a_failed_step_ends_the_sequences_in_it_and_no_others(self) -> None:
        scheduler = decoding(make_limits(num_stages=2, max_batch=1), SHARED, SHARED)
        first, second = schedule_all(scheduler)
        assert scheduler.fail_step(first.step, 0.0) == [1]
        assert scheduler.take_ended() == [EndedSequence(RunId(1), SlotId(0))]
        scheduler.check_invariants()
        assert [one.sequence_id for one in scheduler.commit(second.step, sampled_ids(second), 0, 0.0)] == [2]

    def test_a_sequence_ended_by_an_error_has_no_finish_reason(self) -> None:
        scheduler, sequence = Scheduler(make_limits()), make_sequence()
        scheduler.submit(sequence, 0.0)
        (batch,) = schedule_all(scheduler)
        scheduler.fail_step(batch.step, 0.0)
        assert (sequence.state, sequence.finish_reason) == (SequenceState.FINISHED, None)

    def test_a_lost_pipeline_gives_up_the_running_and_the_waiting_and_tells_no_stage(self) -> None:
        scheduler = decoding(make_limits(num_slots=1), SHARED)
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

    def test_steps_keep_rising_after_a_lost_pipeline(self) -> None:
        scheduler = decoding(make_limits(), SHARED)
        (before,) = schedule_all(scheduler)
        scheduler.take_all(0.0)
        scheduler.submit(make_sequence(2), 0.0)
        (after,) = schedule_all(scheduler)
        assert after.step > before.step
