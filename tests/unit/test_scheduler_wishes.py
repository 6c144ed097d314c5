"""What clients wish and devices allow: pace, deadlines, moves to other pipelines, predictions; one situation a test."""

from __future__ import annotations

import pytest

from orchestrator.core.batch import EndedSequence
from orchestrator.core.limits import Pace
from orchestrator.core.qos import CLASSES, MAX_OVERDUE
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RunId, SequenceState
from shoal.errors import ContextExceeded, DeadlineUnmeetable
from shoal.types import FinishReason, SequenceId, SlotId
from tests.support.builders import (
    know_times,
    make_decoding,
    make_limits,
    make_sequence,
    make_sequences,
    run_step,
    sampled_ids,
    sequences_in,
)

LATENCY, BALANCED, THROUGHPUT = CLASSES


class TestPacing:
    def test_a_paced_row_waits_until_its_next_token_is_due(self) -> None:
        scheduler = make_decoding(make_limits(burst_steps=8), make_sequence(max_tokens_per_s=2.0, max_tokens=64))
        assert scheduler.schedule(0.49) is None
        assert scheduler.wake_at(0.49) == 0.5
        batch = scheduler.schedule(0.5)
        assert batch is not None
        assert batch.burst_steps == 0
        scheduler.commit(batch.step, sampled_ids(batch), 0, 0.6)
        assert scheduler.wake_at(0.6) == 1.0

    def test_nobody_gets_a_burst_beside_a_paced_row(self) -> None:
        scheduler = make_decoding(
            make_limits(burst_steps=8), make_sequence(1, max_tokens_per_s=2.0), make_sequence(2, max_tokens=64)
        )
        batch = scheduler.schedule(0.2)
        assert sequences_in(scheduler, batch) == [2]
        assert batch is not None
        assert batch.burst_steps == 0

    def test_what_is_known_is_computed_again_without_pacing(self) -> None:
        low = make_sequence(1, qos=THROUGHPUT, max_tokens_per_s=1.0, max_tokens=64)
        scheduler = make_decoding(make_limits(num_slots=1), low)
        run_step(scheduler, 1.0)
        scheduler.submit(make_sequence(2, qos=LATENCY, max_tokens=1), 1.5)
        run_step(scheduler, 1.5)
        assert [run_step(scheduler, 1.6) for _ in range(3)] == [[1], [1], []]
        assert scheduler.wake_at(1.6) == 2.0


class TestPace:
    def test_batches_have_no_more_rows_than_the_devices_allow(self) -> None:
        scheduler = make_decoding(make_limits(), *make_sequences(*[BALANCED] * 8))
        scheduler.set_pace(Pace(max_batch=3))
        assert scheduler.pace == Pace(max_batch=3)
        assert len(run_step(scheduler, 0.0)) == 3

    def test_more_than_the_limits_is_not_allowed_by_any_pace(self) -> None:
        scheduler = make_decoding(make_limits(max_batch=4), *make_sequences(*[BALANCED] * 8))
        scheduler.set_pace(Pace(max_batch=16))
        assert len(run_step(scheduler, 0.0)) == 4

    def test_chunks_shrink_with_the_batches_but_prompts_go_on(self) -> None:
        scheduler = Scheduler(make_limits(max_batch=16, chunk_tokens=64))
        scheduler.submit(make_sequence(num_prompt=200), 0.0)
        sizes = []
        for max_batch in (16, 8, 4, 1):
            scheduler.set_pace(Pace(max_batch))
            batch = scheduler.schedule(0.0)
            assert batch is not None
            sizes.append(batch.num_tokens)
            scheduler.commit(batch.step, [], 0, 0.0)
        assert sizes == [64, 32, 16, 8]

    def test_steps_are_spaced_and_the_time_of_the_next_is_told(self) -> None:
        scheduler = make_decoding(make_limits(burst_steps=8), *make_sequences(BALANCED))
        scheduler.set_pace(Pace(16, steps_per_s=4.0))
        batch = scheduler.schedule(10.0)
        assert batch is not None
        assert batch.burst_steps == 0
        scheduler.commit(batch.step, sampled_ids(batch), 0, 10.05)
        assert scheduler.schedule(10.05) is None
        assert scheduler.wake_at(10.05) == 10.25
        assert run_step(scheduler, 10.25) == [1]

    def test_a_chunk_counts_for_as_many_steps_as_it_has_eights_of_tokens(self) -> None:
        scheduler = Scheduler(make_limits())
        scheduler.set_pace(Pace(16, steps_per_s=4.0))
        scheduler.submit(make_sequence(num_prompt=40), 10.0)
        run_step(scheduler, 10.0)
        assert scheduler.wake_at(10.0) == 10.0 + 5 / 4.0

    def test_beside_running_rows_a_chunk_does_not_make_a_second_step(self) -> None:
        scheduler = make_decoding(make_limits(), *make_sequences(BALANCED, BALANCED))
        scheduler.set_pace(Pace(16, steps_per_s=4.0))
        scheduler.submit(make_sequence(3, num_prompt=40), 10.0)
        batch = scheduler.schedule(10.0)
        assert batch is not None
        assert [row.num_tokens for row in batch.rows] == [1, 1, 6]
        assert scheduler.wake_at(10.0) == 10.25

    def test_a_lifted_pace_is_felt_at_once(self) -> None:
        scheduler = make_decoding(make_limits(), *make_sequences(BALANCED))
        scheduler.set_pace(Pace(16, steps_per_s=0.5))
        run_step(scheduler, 10.0)
        scheduler.set_pace(Pace(16))
        assert run_step(scheduler, 10.1) == [1]


class TestDeadlines:
    def test_a_first_token_that_would_come_too_late_is_refused_with_the_numbers(self) -> None:
        scheduler = Scheduler(make_limits())
        know_times(scheduler, base_s=0.1, token_s=0.1)
        with pytest.raises(DeadlineUnmeetable, match=r"the first token would take 4\.\d+ s .* in 2\.00 s") as refused:
            scheduler.submit(make_sequence(num_prompt=40, deadline_at=12.0), 10.0)
        assert "allow more time" in refused.value.message
        assert refused.value.retry_after_s == 0, "coming again would not help"
        assert not scheduler.has_work
        scheduler.submit(make_sequence(num_prompt=40, deadline_at=16.0), 10.0)

    def test_those_who_wait_before_it_count(self) -> None:
        scheduler = Scheduler(make_limits(num_slots=1))
        know_times(scheduler, base_s=0.1, token_s=0.1)
        scheduler.submit(make_sequence(1, num_prompt=8, deadline_at=12.0), 10.0)
        for key in (2, 3, 4):
            scheduler.submit(make_sequence(key, num_prompt=40), 10.0)
        with pytest.raises(DeadlineUnmeetable) as refused:
            scheduler.submit(make_sequence(5, num_prompt=8, deadline_at=12.0), 10.0)
        assert refused.value.retry_after_s > 0, "it is the queue that is in the way"
        scheduler.submit(make_sequence(6, num_prompt=8, deadline_at=12.0, qos=LATENCY), 10.0)

    def test_an_answer_whose_length_is_certain_has_to_be_ready_as_a_whole(self) -> None:
        scheduler = Scheduler(make_limits())
        know_times(scheduler, base_s=0.1, token_s=0.1)
        with pytest.raises(DeadlineUnmeetable, match="all 100 tokens would take"):
            scheduler.submit(make_sequence(max_tokens=100, deadline_at=20.0, stop_ids=frozenset()), 10.0)
        scheduler.submit(make_sequence(max_tokens=100, deadline_at=20.0), 10.0)

    def test_an_answer_that_its_client_wants_slowly_takes_as_long(self) -> None:
        scheduler = Scheduler(make_limits())
        know_times(scheduler)
        fields = {"max_tokens": 30, "deadline_at": 20.0, "stop_ids": frozenset[int]()}
        with pytest.raises(DeadlineUnmeetable):
            scheduler.submit(make_sequence(1, max_tokens_per_s=2.0, **fields), 10.0)  # type: ignore[arg-type]
        scheduler.submit(make_sequence(2, **fields), 10.0)  # type: ignore[arg-type]

    def test_nobody_is_refused_before_times_are_known(self) -> None:
        scheduler = Scheduler(make_limits())
        scheduler.submit(make_sequence(num_prompt=400, deadline_at=10.1), 10.0)

    def test_what_the_client_itself_prescribes_counts_before_anything_is_known(self) -> None:
        scheduler = Scheduler(make_limits())
        with pytest.raises(DeadlineUnmeetable):
            scheduler.submit(
                make_sequence(max_tokens=30, max_tokens_per_s=1.0, deadline_at=30.0, stop_ids=frozenset()), 10.0
            )

    def test_a_deadline_that_has_passed_is_refused_in_any_case(self) -> None:
        with pytest.raises(DeadlineUnmeetable):
            Scheduler(make_limits()).submit(make_sequence(deadline_at=9.0), 10.0)

    def test_who_misses_a_deadline_ends_running_or_waiting(self) -> None:
        running = make_sequence(1, deadline_at=5.0)
        scheduler = make_decoding(make_limits(num_slots=1), running)
        scheduler.submit(make_sequence(2, deadline_at=6.0), 0.0)
        scheduler.submit(make_sequence(3), 0.0)
        scheduler.schedule(0.0)
        assert scheduler.wake_at(0.0) == 5.0
        assert scheduler.expire(4.9) == []
        assert [one.sequence_id for one in scheduler.expire(5.0)] == [1]
        assert (running.state, running.finish_reason) == (SequenceState.FINISHED, None)
        assert scheduler.take_ended() == [EndedSequence(RunId(1), SlotId(0))]
        assert [one.sequence_id for one in scheduler.expire(100.0)] == [2]
        scheduler.check_invariants()

    def test_a_deadline_is_forgotten_with_its_sequence(self) -> None:
        scheduler = Scheduler(make_limits())
        scheduler.submit(make_sequence(deadline_at=5.0), 0.0)
        scheduler.abort(SequenceId(1), FinishReason.CANCELLED, 1.0)
        assert scheduler.wake_at(1.0) is None
        assert scheduler.expire(9.0) == []


class TestMoving:
    def test_a_waiting_sequence_can_be_taken_elsewhere(self) -> None:
        scheduler, other = make_decoding(make_limits(num_slots=1), *make_sequences(BALANCED)), Scheduler(make_limits())
        scheduler.submit(make_sequence(2), 0.0)
        sequence = scheduler.withdraw(SequenceId(2), 3.0)
        assert sequence is not None
        assert sequence.queue_s == 3.0
        assert scheduler.num_waiting == 0
        other.submit(sequence, 3.0)
        assert run_step(other, 4.0) == [2]
        assert sequence.queue_s == 4.0

    def test_a_running_sequence_cannot_be_withdrawn(self) -> None:
        scheduler = make_decoding(make_limits(), *make_sequences(BALANCED))
        assert scheduler.withdraw(SequenceId(1), 1.0) is None
        assert scheduler.withdraw(SequenceId(9), 1.0) is None

    def test_the_overdue_are_those_who_never_had_a_slot_by_rank(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=1), *make_sequences(LATENCY))
        for key, qos in ((2, THROUGHPUT), (3, BALANCED), (4, LATENCY)):
            scheduler.submit(make_sequence(key, qos=qos), 0.0)
        scheduler.submit(make_sequence(5, arrived_at=0.9), 0.9)
        assert [one.sequence_id for one in scheduler.overdue(1.0, 0.2)] == [4, 3, 2]
        assert scheduler.overdue(0.1, 0.2) == []

    def test_no_more_than_a_few_overdue_are_named_at_once(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=1), *make_sequences(LATENCY))
        for key in range(2, 40):
            scheduler.submit(make_sequence(key), 0.0)
        assert len(scheduler.overdue(1.0, 0.2)) == MAX_OVERDUE

    def test_what_a_lost_pipeline_had_goes_on_in_another(self) -> None:
        scheduler, other = (
            make_decoding(make_limits(num_slots=2), *make_sequences(LATENCY, BALANCED)),
            Scheduler(make_limits()),
        )
        run_step(scheduler, 0.5)
        scheduler.submit(make_sequence(3), 0.5)
        moved = scheduler.take_all(1.0)
        assert [one.sequence_id for one in moved] == [1, 2, 3]
        assert [len(one.output_token_ids) for one in moved] == [2, 2, 0]
        for sequence in moved:
            other.submit(sequence, 1.0)
        for _ in range(4):
            run_step(other, 1.5)
        assert [len(one.output_token_ids) for one in moved] == [4, 4, 4]
        assert other.num_replay_mismatches == 0
        assert [one.num_preemptions for one in moved] == [0, 0, 0]

    def test_an_answer_that_does_not_fit_the_other_pipeline_is_refused(self) -> None:
        scheduler = make_decoding(make_limits(), make_sequence(num_prompt=40))
        run_step(scheduler, 0.5)
        (sequence,) = scheduler.take_all(1.0)
        with pytest.raises(ContextExceeded, match="room for 42 tokens of a sequence cannot go on with one of 42"):
            Scheduler(make_limits(context_tokens=42)).submit(sequence, 1.0)

    def test_who_had_a_slot_is_taken_in_though_the_queue_is_full(self) -> None:
        (sequence,) = make_decoding(make_limits(), *make_sequences(BALANCED)).take_all(1.0)
        scheduler = Scheduler(make_limits(max_waiting=1))
        scheduler.submit(make_sequence(2), 1.0)
        scheduler.submit(sequence, 1.0)
        assert scheduler.num_waiting == 2


class TestPrediction:
    def test_an_idle_pipeline_starts_at_once_and_takes_as_long_as_the_prompt(self) -> None:
        scheduler = Scheduler(make_limits())
        know_times(scheduler)
        prediction = scheduler.predict(64, BALANCED, 0.0)
        assert prediction.queue_s == 0.0
        assert prediction.first_token_s == pytest.approx(0.02 + 64 * 0.005, rel=0.01)
        assert prediction.inter_token_s == pytest.approx(0.025, rel=0.01)

    def test_waiting_prompts_of_lower_classes_do_not_count(self) -> None:
        scheduler = Scheduler(make_limits())
        scheduler.submit(make_sequence(1, num_prompt=200, qos=THROUGHPUT), 0.0)
        assert scheduler.predict(8, BALANCED, 0.0).queue_s == 0.0
        assert scheduler.predict(8, THROUGHPUT, 0.0).queue_s > 0.5

    def test_without_a_free_slot_the_next_end_has_to_be_waited_for(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=1), *make_sequences(BALANCED))
        assert scheduler.predict(8, BALANCED, 0.0).queue_s == 1.0
        assert scheduler.predict(8, LATENCY, 0.0).queue_s == 0.0

    def test_those_who_came_before_and_have_no_token_yet_will_share_the_steps(self) -> None:
        scheduler = Scheduler(make_limits(num_slots=16))
        know_times(scheduler)
        for key in range(1, 8):
            scheduler.submit(make_sequence(key, num_prompt=60), 0.0)
        assert scheduler.predict(8, BALANCED, 0.0).inter_token_s == pytest.approx(0.02 + 8 * 0.005, rel=0.01)

    def test_spared_devices_take_longer(self) -> None:
        scheduler = make_decoding(make_limits(), *make_sequences(BALANCED))
        scheduler.set_pace(Pace(16, steps_per_s=2.0))
        prediction = scheduler.predict(80, BALANCED, 0.0)
        assert prediction.inter_token_s == 0.5
        assert prediction.prefill_s > 4.0

    def test_classes_that_wait_or_run_are_known(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=1), *make_sequences(BALANCED))
        scheduler.submit(make_sequence(2, qos=THROUGHPUT), 0.0)
        assert [scheduler.has_class(qos) for qos in CLASSES] == [False, True, True]
