"""What the scheduler puts into batches: chunks, decode rows and bursts; one situation a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.batch import Batch, BatchRow, Emitted, SampledId
from orchestrator.core.decoding import SHORT_BURST_STEPS
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RunId, SequenceState
from shoal.types import FinishReason, NumericClass, QosClass, SequenceId, SlotId
from tests.support.builders import (
    STOP_ID,
    TOKEN_ID,
    know_times,
    make_decoding,
    make_decoding_as,
    make_limits,
    make_sequence,
    make_sequences,
    run_ids,
    sampled_ids,
    schedule_all,
)

SHARED, SOLO = NumericClass.SHARED, NumericClass.SOLO


def sizes(batches: list[Batch]) -> list[list[int]]:
    return [[row.num_tokens for row in batch.rows] for batch in batches]


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

    def test_chunks_end_at_borders_even_if_one_token_is_left_behind_the_last(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2, chunk_border=32))
        scheduler.submit(make_sequence(num_prompt=65), 0.0)
        batches = schedule_all(scheduler)
        assert sizes(batches) == [[32], [32], [1]]
        assert [batch.rows[0].is_sampled for batch in batches] == [False, False, True]
        assert [batch.num_decode_rows for batch in batches] == [0, 0, 0]

    def test_a_prompt_of_one_token_is_a_chunk_of_one(self) -> None:
        scheduler = Scheduler(make_limits())
        scheduler.submit(make_sequence(num_prompt=1), 0.0)
        assert sizes(schedule_all(scheduler)) == [[1]]

    def test_what_a_prompt_leaves_of_the_budget_goes_to_the_next_one(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        for sequence in make_sequences(*[QosClass.BALANCED] * 2, num_prompt=50):
            scheduler.submit(sequence, 0.0)
        assert sizes(schedule_all(scheduler)) == [[50, 14], [36]]

    def test_a_rest_of_the_budget_that_would_leave_one_token_is_not_used(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        for key, num_prompt in ((1, 62), (2, 3), (3, 2)):
            scheduler.submit(make_sequence(key, num_prompt=num_prompt), 0.0)
        assert [run_ids(batch) for batch in schedule_all(scheduler)] == [[1], [2, 3]]

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


class TestDecode:
    def test_decode_rows_come_before_chunks_and_share_their_budget(self) -> None:
        scheduler = make_decoding_as(make_limits(), SHARED, SHARED)
        scheduler.submit(make_sequence(3, num_prompt=200), 0.0)
        batch = schedule_all(scheduler)[0]
        assert run_ids(batch) == [1, 2, 3]
        assert [row.num_tokens for row in batch.rows] == [1, 1, 62]
        assert batch.num_decode_rows == 2

    def test_a_batch_costs_what_its_rows_do(self) -> None:
        limits = replace(make_limits(), attention_tokens=3000.0)
        scheduler = make_decoding(limits, make_sequence(1, num_prompt=300))
        scheduler.submit(make_sequence(2), 0.0)
        (batch,) = schedule_all(scheduler)
        assert batch.work == limits.work_of(1, 300) + 8

    def test_a_sequence_is_in_one_batch_at_a_time(self) -> None:
        scheduler = make_decoding_as(make_limits(num_stages=3), SHARED)
        assert len(schedule_all(scheduler)) == 1

    def test_decoding_sequences_are_shared_out_evenly_over_as_many_batches_as_stages(self) -> None:
        scheduler = make_decoding_as(make_limits(num_stages=2, num_slots=16), *[SHARED] * 16)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [8, 8]

    def test_batches_are_not_made_smaller_than_min_rows(self) -> None:
        scheduler = make_decoding_as(make_limits(num_stages=2), *[SHARED] * 6)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [4, 2]

    def test_batches_are_smaller_where_stages_would_be_idle_but_not_of_one_row_for_it(self) -> None:
        scheduler = make_decoding_as(make_limits(num_stages=3), *[SHARED] * 6)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [2, 2, 2]
        scheduler = make_decoding_as(make_limits(num_stages=3), *[SHARED] * 3)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [2, 1]

    def test_a_batch_has_at_most_max_batch_decode_rows(self) -> None:
        scheduler = make_decoding_as(make_limits(max_batch=3), *[SHARED] * 8)
        assert [len(batch.rows) for batch in schedule_all(scheduler)] == [3]

    def test_no_more_batches_with_decode_rows_than_stages_are_in_flight(self) -> None:
        scheduler = make_decoding_as(make_limits(num_stages=2, num_slots=9, max_batch=2), *[SHARED] * 8)
        assert len(schedule_all(scheduler)) == 2
        scheduler.submit(make_sequence(9), 0.0)
        (extra,) = schedule_all(scheduler)
        assert (run_ids(extra), extra.num_decode_rows) == ([9], 0)

    def test_those_that_wait_longest_go_first(self) -> None:
        scheduler = make_decoding_as(make_limits(max_batch=2, min_rows=1), *[SHARED] * 3)
        (first,) = schedule_all(scheduler)
        scheduler.commit(first.step, sampled_ids(first), 0, 0.0)
        (second,) = schedule_all(scheduler)
        assert (run_ids(first), run_ids(second)) == ([1, 2], [3, 1])

    def test_prefill_goes_on_when_decode_rows_alone_would_fill_the_budget(self) -> None:
        scheduler = make_decoding_as(make_limits(num_slots=9, chunk_tokens=8), *[SHARED] * 8)
        scheduler.submit(make_sequence(9, num_prompt=5), 0.0)
        batch = schedule_all(scheduler)[0]
        assert [row.num_tokens for row in batch.rows] == [1, 1, 1, 1, 3]


class TestSolo:
    def test_a_solo_sequence_decodes_alone(self) -> None:
        scheduler = make_decoding_as(make_limits(num_stages=3), SHARED, SOLO, SHARED)
        batches = schedule_all(scheduler)
        assert [(run_ids(batch), batch.is_solo) for batch in batches] == [([1, 3], False), ([2], True)]

    def test_no_chunk_joins_a_solo_row(self) -> None:
        scheduler = make_decoding_as(make_limits(), SOLO)
        scheduler.submit(make_sequence(2), 0.0)
        assert [run_ids(batch) for batch in schedule_all(scheduler)] == [[1], [2]]

    def test_chunks_of_solo_sequences_are_like_all_others(self) -> None:
        scheduler = Scheduler(make_limits())
        for key in (1, 2):
            scheduler.submit(make_sequence(key, numeric=SOLO), 0.0)
        (batch,) = schedule_all(scheduler)
        assert (run_ids(batch), batch.is_solo) == ([1, 2], False)

    def test_solo_and_shared_sequences_take_turns(self) -> None:
        scheduler = make_decoding_as(make_limits(), SHARED, SOLO)
        seen = []
        for _ in range(4):
            (batch,) = schedule_all(scheduler)
            seen += run_ids(batch)
            scheduler.commit(batch.step, sampled_ids(batch), 0, 0.0)
        assert seen == [1, 2, 1, 2]


class TestBurst:
    def test_a_lone_stream_gets_a_burst(self) -> None:
        scheduler = make_decoding_as(make_limits(burst_steps=16), SHARED)
        assert schedule_all(scheduler)[0].burst_steps == 15

    def test_a_burst_ends_before_the_answer_that_is_nearest_to_its_end(self) -> None:
        scheduler = make_decoding(
            make_limits(burst_steps=16), make_sequence(1, max_tokens=40), make_sequence(2, max_tokens=6)
        )
        assert schedule_all(scheduler)[0].burst_steps == 4

    def test_nobody_gets_a_burst_while_a_request_waits(self) -> None:
        scheduler = make_decoding_as(make_limits(burst_steps=16, num_slots=1), SHARED)
        scheduler.submit(make_sequence(9), 0.0)
        assert schedule_all(scheduler)[0].burst_steps == 0

    def test_nobody_gets_a_burst_while_a_prompt_is_being_computed(self) -> None:
        scheduler = make_decoding_as(make_limits(burst_steps=16, num_stages=2), SHARED)
        (burst,) = schedule_all(scheduler)
        scheduler.submit(make_sequence(2), 0.0)
        (prefill,) = schedule_all(scheduler)
        scheduler.commit(burst.step, sampled_ids(burst), 0, 0.0)
        assert run_ids(prefill) == [2]
        assert schedule_all(scheduler)[0].burst_steps == 0

    @pytest.mark.parametrize(("allowed", "burst_steps"), [(16, SHORT_BURST_STEPS - 1), (2, 1), (1, 0)])
    def test_more_than_two_streams_get_short_bursts(self, allowed: int, burst_steps: int) -> None:
        scheduler = make_decoding_as(make_limits(burst_steps=allowed), SHARED, SHARED, SHARED)
        assert schedule_all(scheduler)[0].burst_steps == burst_steps

    @pytest.mark.parametrize(("pass_s", "burst_steps"), [(0.01, 15), (0.03, 10), (0.3, SHORT_BURST_STEPS - 1)])
    def test_a_long_burst_of_slow_passes_ends_before_a_prompt_would_wait_too_long(
        self, pass_s: float, burst_steps: int
    ) -> None:
        scheduler = make_decoding_as(make_limits(burst_steps=16), SHARED)
        know_times(scheduler, base_s=pass_s, token_s=0.0)
        assert schedule_all(scheduler)[0].burst_steps == burst_steps

    def test_tokens_of_a_burst_come_step_by_step_and_free_the_credit_at_the_end(self) -> None:
        scheduler = make_decoding_as(make_limits(burst_steps=3), SHARED)
        (batch,) = schedule_all(scheduler)
        indices = []
        for burst_left in (2, 1, 0):
            assert scheduler.schedule(0.0) is None
            indices += [one.index for one in scheduler.commit(batch.step, sampled_ids(batch), burst_left, 0.0)]
        assert indices == [1, 2, 3]
        (following,) = schedule_all(scheduler)
        assert following.rows[0].position == 8 + 3

    def test_a_burst_may_end_early(self) -> None:
        scheduler = make_decoding_as(make_limits(burst_steps=16), SHARED)
        (batch,) = schedule_all(scheduler)
        (emitted,) = scheduler.commit(batch.step, sampled_ids(batch, STOP_ID), 0, 0.0)
        assert emitted.finish is FinishReason.STOP
        assert not scheduler.has_work

    def test_the_others_of_a_burst_go_on_when_one_of_them_stops(self) -> None:
        scheduler = make_decoding_as(make_limits(burst_steps=16), SHARED, SHARED)
        (batch,) = schedule_all(scheduler)
        scheduler.commit(batch.step, [SampledId(RunId(1), STOP_ID), SampledId(RunId(2), TOKEN_ID)], 14, 0.0)
        late = [SampledId(RunId(1), TOKEN_ID), SampledId(RunId(2), TOKEN_ID)]
        assert [one.sequence_id for one in scheduler.commit(batch.step, late, 13, 0.0)] == [2]
        scheduler.check_invariants()
