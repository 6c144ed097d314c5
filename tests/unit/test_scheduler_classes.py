"""Which class goes first, who loses a slot to whom, and what others may borrow: one situation a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.admission import MAX_PREEMPTIONS
from orchestrator.core.batch import MAX_SOLO_STEPS, EndedSequence
from orchestrator.core.decoding import BORROWED_ROWS
from orchestrator.core.limits import Pace
from orchestrator.core.qos import CLASSES, PATIENCE_S
from orchestrator.core.scheduler import BORROWED_CHUNK_TOKENS, Scheduler
from orchestrator.core.sequence import RunId, SequenceState
from shoal.errors import Overloaded
from shoal.types import DeviceMode, FinishReason, NumericClass, QosClass, SequenceId, SlotId
from tests.support.builders import (
    TOKEN_ID,
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


class TestWaiting:
    def test_a_higher_class_goes_first_however_late_it_comes(self) -> None:
        scheduler = Scheduler(make_limits(num_slots=1))
        for sequence in make_sequences(THROUGHPUT, BALANCED, LATENCY):
            scheduler.submit(sequence, 0.0)
        assert sequences_in(scheduler, scheduler.schedule(0.0)) == [3]

    def test_a_class_that_has_waited_for_its_patience_has_one_turn(self) -> None:
        scheduler = Scheduler(make_limits(num_slots=8, chunk_tokens=8))
        for key, qos, arrived_at in (
            (1, THROUGHPUT, 0.0),
            (2, THROUGHPUT, 0.0),
            (3, LATENCY, 11.0),
            (4, LATENCY, 11.0),
        ):
            scheduler.submit(make_sequence(key, qos=qos, arrived_at=arrived_at), arrived_at)
        order = [sequences_in(scheduler, scheduler.schedule(11.0)) for _ in range(2)]
        assert order == [[1], [3]]

    @pytest.mark.parametrize(("ttft_s", "order"), [(1.0, [1, 2]), (None, [2, 1])])
    @pytest.mark.parametrize("is_under_way", [False, True])
    def test_a_time_asked_for_the_first_token_decides_who_goes_first(
        self, ttft_s: float | None, order: list[int], is_under_way: bool
    ) -> None:
        scheduler = Scheduler(make_limits(num_slots=8, chunk_tokens=8))
        low = make_sequence(1, num_prompt=16, qos=THROUGHPUT)
        low.targets = replace(low.targets, ttft_s=ttft_s)
        scheduler.submit(low, 0.0)
        if is_under_way:
            run_step(scheduler, 0.0)
        scheduler.submit(make_sequence(2, num_prompt=8, qos=LATENCY, arrived_at=1.5), 1.5)
        first = run_step(scheduler, 1.5)
        assert first == order[:1]

    def test_no_class_waits_forever_while_higher_ones_keep_coming(self) -> None:
        """Each turn is a second in which one request of each higher class comes and one is served."""
        scheduler = Scheduler(make_limits(num_slots=8, chunk_tokens=8, max_waiting=1000))
        low = make_sequence(1, qos=THROUGHPUT, max_tokens=1)
        scheduler.submit(low, 0.0)
        turns = 0
        while low.admitted_at is None:
            turns += 1
            for qos in (LATENCY, BALANCED):
                key = 2 * turns + (qos is LATENCY)
                scheduler.submit(make_sequence(key, qos=qos, arrived_at=float(turns), max_tokens=1), float(turns))
            run_step(scheduler, float(turns))
        assert PATIENCE_S[THROUGHPUT] < turns <= PATIENCE_S[THROUGHPUT] + 5

    def test_two_tenants_take_turns_however_many_requests_one_has(self) -> None:
        scheduler = Scheduler(make_limits(num_slots=1))
        for key in range(1, 5):
            scheduler.submit(make_sequence(key, tenant="busy", max_tokens=1), 0.0)
        scheduler.submit(make_sequence(9, tenant="calm", max_tokens=1), 0.0)
        assert [run_step(scheduler, 0.0) for _ in range(3)] == [[1], [9], [2]]

    def test_a_tenant_may_have_so_many_waiting_and_others_may_still_come(self) -> None:
        scheduler = Scheduler(make_limits(max_waiting=2))
        for key in (1, 2):
            scheduler.submit(make_sequence(key, tenant="busy"), 0.0)
        with pytest.raises(Overloaded, match=r"2 requests wait already, the most allowed for one tenant \(busy\)"):
            scheduler.submit(make_sequence(3, tenant="busy"), 0.0)
        scheduler.submit(make_sequence(4, tenant="calm"), 0.0)

    def test_all_tenants_together_may_have_so_many_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("orchestrator.core.admission.MAX_WAITING_TOTAL", 2)
        scheduler = Scheduler(make_limits())
        for key in (1, 2):
            scheduler.submit(make_sequence(key, tenant=str(key)), 0.0)
        with pytest.raises(Overloaded, match="2 requests wait already, the most allowed; try again") as refused:
            scheduler.submit(make_sequence(3, tenant="3"), 0.0)
        assert refused.value.retry_after_s > 0

    def test_a_prompt_of_a_higher_class_goes_before_one_that_is_under_way(self) -> None:
        scheduler = Scheduler(make_limits(num_stages=2))
        scheduler.submit(make_sequence(1, num_prompt=300, qos=THROUGHPUT), 0.0)
        assert sequences_in(scheduler, scheduler.schedule(0.0)) == [1]
        scheduler.submit(make_sequence(2, num_prompt=40, qos=LATENCY, arrived_at=1.0), 1.0)
        batch = scheduler.schedule(1.0)
        assert sequences_in(scheduler, batch) == [2, 1]


class TestPreemption:
    def test_a_higher_class_takes_the_slot_of_a_lower_one(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=2), *make_sequences(BALANCED, THROUGHPUT))
        low = scheduler.get(SequenceId(2))
        scheduler.submit(make_sequence(3, qos=LATENCY), 1.0)
        assert run_step(scheduler, 1.0) == [1, 3]
        assert scheduler.take_ended() == [EndedSequence(RunId(2), SlotId(1), will_resume=True)]
        assert low is not None
        assert (low.state, low.num_preemptions, low.output_token_ids) == (SequenceState.WAITING, 1, [TOKEN_ID])
        assert [(one.what, one.detail) for one in low.events][-1] == ("preempted", "by a request of class latency")

    def test_a_preempted_answer_is_computed_again_token_by_token_and_goes_on(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=1, burst_steps=8), *make_sequences(THROUGHPUT))
        low = scheduler.get(SequenceId(1))
        assert low is not None
        run_step(scheduler, 0.5)
        scheduler.submit(make_sequence(2, qos=LATENCY, max_tokens=1), 1.0)
        run_step(scheduler, 1.0)
        num_known, emitted, fed, bursts = len(low.output_token_ids), [], [], []
        for _ in range(num_known + 1):
            batch = scheduler.schedule(2.0)
            assert batch is not None
            fed.append((batch.rows[0].position, batch.rows[0].token_ids))
            bursts.append(batch.burst_steps)
            emitted += scheduler.commit(batch.step, sampled_ids(batch), 0, 2.0)
        assert fed == [(0, low.prompt_token_ids), (8, (TOKEN_ID,)), (9, (TOKEN_ID,))]
        assert [one.index for one in emitted] == [num_known]
        assert bursts == [0, 0, 7]
        assert scheduler.num_replay_mismatches == 0

    def test_a_replay_that_draws_another_token_is_counted_and_the_text_stays(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=1), *make_sequences(THROUGHPUT))
        low = scheduler.get(SequenceId(1))
        assert low is not None
        scheduler.submit(make_sequence(2, qos=LATENCY, max_tokens=1), 1.0)
        run_step(scheduler, 1.0)
        batch = scheduler.schedule(2.0)
        assert batch is not None
        assert scheduler.commit(batch.step, sampled_ids(batch, TOKEN_ID + 1), 0, 2.0) == []
        assert scheduler.num_replay_mismatches == 1
        assert low.output_token_ids == [TOKEN_ID]

    def test_results_of_an_earlier_run_are_not_taken_for_those_of_the_new_one(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=1, num_stages=2), *make_sequences(THROUGHPUT))
        low = scheduler.get(SequenceId(1))
        assert low is not None
        stale = scheduler.schedule(0.5)
        scheduler.submit(make_sequence(2, qos=LATENCY, max_tokens=1), 1.0)
        run_step(scheduler, 1.0)
        again = scheduler.schedule(2.0)
        assert stale is not None
        assert again is not None
        assert low.run_id == again.rows[0].run_id != stale.rows[0].run_id
        assert scheduler.commit(stale.step, sampled_ids(stale, 99), 0, 2.0) == []
        scheduler.check_invariants()
        assert low.output_token_ids == [TOKEN_ID]

    def test_the_same_class_is_not_preempted(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=2), *make_sequences(BALANCED, LATENCY))
        scheduler.submit(make_sequence(3, qos=BALANCED), 1.0)
        scheduler.submit(make_sequence(4, qos=THROUGHPUT), 1.0)
        assert run_step(scheduler, 1.0) == [2, 1]
        assert scheduler.take_ended() == []

    def test_the_lowest_class_is_taken_first_and_in_it_who_loses_least(self) -> None:
        low, *others = make_sequences(THROUGHPUT, THROUGHPUT, BALANCED)
        low.prompt_token_ids = tuple(range(100, 140))
        scheduler = make_decoding(make_limits(num_slots=3), low, *others)
        scheduler.submit(make_sequence(4, qos=LATENCY), 1.0)
        run_step(scheduler, 1.0)
        assert [one.num_preemptions for one in (low, *others)] == [0, 1, 0]

    def test_no_more_slots_are_taken_than_are_needed(self) -> None:
        """Three small reservations and a large one; the large one is enough."""
        small = make_sequences(THROUGHPUT, THROUGHPUT, max_tokens=8)
        large = make_sequence(3, num_prompt=100, max_tokens=28, qos=THROUGHPUT)
        scheduler = make_decoding(make_limits(num_slots=4, kv_tokens=160), *small, large)
        scheduler.submit(make_sequence(4, num_prompt=64, max_tokens=64, qos=LATENCY), 1.0)
        run_step(scheduler, 1.0)
        assert [one.num_preemptions for one in (*small, large)] == [0, 0, 1]

    def test_nobody_is_preempted_where_that_would_not_make_enough_room(self) -> None:
        low, high = make_sequence(1, max_tokens=8, qos=THROUGHPUT), make_sequence(2, num_prompt=60, qos=LATENCY)
        scheduler = make_decoding(make_limits(num_slots=2, kv_tokens=96), low, high)
        scheduler.submit(make_sequence(3, num_prompt=64, max_tokens=16, qos=LATENCY), 1.0)
        assert run_step(scheduler, 1.0) == [2, 1]
        assert low.num_preemptions == 0

    def test_who_was_preempted_twice_keeps_its_slot(self) -> None:
        scheduler = Scheduler(make_limits(num_slots=1))
        (low,) = make_sequences(THROUGHPUT)
        scheduler.submit(low, 0.0)
        for key in range(2, 12):
            run_step(scheduler, float(key))
            scheduler.submit(make_sequence(key, qos=LATENCY, max_tokens=1, arrived_at=key + 0.5), key + 0.5)
            run_step(scheduler, key + 0.5)
        assert low.num_preemptions == MAX_PREEMPTIONS
        assert low.state is not SequenceState.WAITING

    def test_a_row_whose_slot_is_taken_is_not_in_the_batch_that_takes_it(self) -> None:
        scheduler = make_decoding(make_limits(num_slots=1), *make_sequences(THROUGHPUT))
        scheduler.submit(make_sequence(2, qos=LATENCY), 1.0)
        batch = scheduler.schedule(1.0)
        assert batch is not None
        assert (sequences_in(scheduler, batch), batch.num_decode_rows) == ([2], 0)
        assert batch.rows[0].slot == 0

    def test_a_prompt_whose_slot_is_taken_is_not_in_the_batch_that_takes_it(self) -> None:
        """Its class had its turn, so its last chunk was in the batch before the higher class came to its own turn."""
        scheduler = Scheduler(make_limits(num_slots=1, chunk_tokens=8))
        scheduler.submit(make_sequence(1, num_prompt=14, qos=THROUGHPUT), 0.0)
        run_step(scheduler, 0.0)
        scheduler.submit(make_sequence(2, num_prompt=2, qos=LATENCY, arrived_at=11.0), 11.0)
        batch = scheduler.schedule(11.0)
        assert batch is not None
        assert [row.num_tokens for row in batch.rows] == [2]
        assert [ended.run_id for ended in scheduler.take_ended()] == [1]

    def test_who_is_due_and_finds_no_room_is_overtaken_only_while_somebody_could_be_preempted(self) -> None:
        low, large = make_sequence(1, max_tokens=8, qos=BALANCED), make_sequence(2, num_prompt=100, qos=THROUGHPUT)
        scheduler = make_decoding(make_limits(kv_tokens=128), low, make_sequence(3, max_tokens=8, qos=LATENCY))
        scheduler.submit(large, 0.0)
        scheduler.submit(make_sequence(4, qos=LATENCY, max_tokens=8, arrived_at=20.0), 20.0)
        assert 4 in run_step(scheduler, 20.0)
        scheduler.abort(low.sequence_id, FinishReason.CANCELLED, 20.5)
        scheduler.submit(make_sequence(5, qos=LATENCY, max_tokens=8, arrived_at=21.0), 21.0)
        assert 5 not in run_step(scheduler, 21.0)
        for key in (3, 4):
            scheduler.abort(SequenceId(key), FinishReason.CANCELLED, 21.5)
        assert run_step(scheduler, 22.0)[0] == large.sequence_id

    def test_preemption_is_fair_to_the_tenant_that_suffers_it(self) -> None:
        """It is charged for what it was given, not for what it lost."""
        scheduler = make_decoding(make_limits(num_slots=1), *make_sequences(THROUGHPUT, max_tokens=100))
        scheduler.submit(make_sequence(2, qos=LATENCY, max_tokens=1, tenant="other"), 1.0)
        run_step(scheduler, 1.0)
        assert scheduler._admission._ledger.counter("default") == 8 + 2 * 1


class TestRows:
    def test_where_steps_are_rationed_classes_go_before_turns(self) -> None:
        """Three steps a second and two rows a batch: a round of nine takes longer than anybody's patience."""
        urgent, *others = make_sequences(LATENCY, *[THROUGHPUT] * 8)
        urgent.numeric = NumericClass.SOLO
        scheduler = make_decoding(make_limits(num_slots=9), urgent, *others)
        scheduler.set_pace(Pace(2, steps_per_s=3.0))
        turns = [run_step(scheduler, 1.0 + number * 0.34, took_s=0.3) for number in range(24)]

        assert all(turns), "a step was left out"
        assert sum(1 in turn for turn in turns) >= 12
        served = {one for turn in turns for one in turn}
        assert served == set(range(1, 10)), "somebody starves"

    def test_where_steps_are_rationed_a_prompt_without_room_does_not_keep_a_row_that_goes_alone(self) -> None:
        scheduler = make_decoding(
            make_limits(num_slots=1), make_sequence(1, qos=LATENCY, numeric=NumericClass.SOLO, max_tokens=64)
        )
        scheduler.set_pace(Pace(2, steps_per_s=3.0))
        scheduler.submit(make_sequence(2, qos=LATENCY, arrived_at=1.0), 1.0)
        assert [run_step(scheduler, 1.0 + number * 0.34, took_s=0.3) for number in range(6)] == [[1]] * 6

    @pytest.mark.parametrize(("qos", "num_before"), [(LATENCY, 1), (BALANCED, MAX_SOLO_STEPS)])
    def test_where_steps_are_rationed_a_prompt_goes_between_rows_that_go_alone(
        self, qos: QosClass, num_before: int
    ) -> None:
        alone = make_sequence(1, qos=LATENCY, numeric=NumericClass.SOLO, max_tokens=64)
        scheduler = make_decoding(make_limits(num_slots=2), alone)
        scheduler.set_pace(Pace(2, steps_per_s=3.0))
        scheduler.submit(make_sequence(2, qos=qos, arrived_at=1.0), 1.0)

        turns = [run_step(scheduler, 1.0 + number * 0.34, took_s=0.3) for number in range(num_before + 1)]

        assert turns == [[1]] * num_before + [[2]]

    def test_higher_classes_come_first_in_a_batch(self) -> None:
        scheduler = make_decoding(make_limits(max_batch=3), *make_sequences(THROUGHPUT, BALANCED, THROUGHPUT, LATENCY))
        assert run_step(scheduler, 0.1) == [4, 2, 1]

    def test_a_row_that_was_passed_over_for_its_patience_comes_first(self) -> None:
        scheduler = make_decoding(make_limits(max_batch=1, min_rows=1), *make_sequences(THROUGHPUT, LATENCY))
        turns = [run_step(scheduler, now, took_s=0.1) for now in (0.1, 0.3, 0.6, 1.2, 1.4, 1.6)]
        assert turns == [[2], [2], [2], [2], [1], [2]]

    def test_a_row_is_held_for_others_no_longer_than_its_own_target_allows(self) -> None:
        """The target of the higher class is out of reach; the one of the lower class is not given up for it."""
        high, *low = make_sequences(LATENCY, BALANCED, BALANCED, BALANCED)
        high.targets = make_sequence(inter_token_s=0.001).targets
        for one in low:
            one.targets = make_sequence(inter_token_s=0.1).targets
        scheduler = make_decoding(make_limits(), high, *low)
        know_times(scheduler)
        assert run_step(scheduler, 0.05) == [1, 2]
        assert {3, 4} <= set(run_step(scheduler, 0.11))

    def test_lower_classes_join_as_far_as_the_target_of_the_higher_allows(self) -> None:
        """20 ms and 5 ms a row: within 50 ms there is room for six."""
        high, *low = make_sequences(LATENCY, *[THROUGHPUT] * 7)
        high.targets = make_sequence(inter_token_s=0.0505).targets
        scheduler = make_decoding(make_limits(), high, *low)
        know_times(scheduler)
        assert run_step(scheduler, 0.1) == [1, 2, 3, 4, 5, 6]

    def test_the_own_class_always_joins(self) -> None:
        high = make_sequences(*[LATENCY] * 8)
        high[0].targets = make_sequence(inter_token_s=0.03).targets
        scheduler = make_decoding(make_limits(), *high)
        know_times(scheduler)
        assert len(run_step(scheduler, 0.1)) == 8

    def test_where_the_target_is_out_of_reach_others_may_slow_a_row_down_a_little(self) -> None:
        """One row takes 25 ms; a third more than that is room for two rows, though the target is 1 ms."""
        high, *low = make_sequences(LATENCY, *[THROUGHPUT] * 7)
        high.targets = make_sequence(inter_token_s=0.001).targets
        scheduler = make_decoding(make_limits(), high, *low)
        know_times(scheduler)
        assert run_step(scheduler, 0.1) == [1, 2]

    def test_before_times_are_known_everybody_joins(self) -> None:
        high, *low = make_sequences(LATENCY, *[THROUGHPUT] * 7)
        high.targets = make_sequence(inter_token_s=0.001).targets
        assert len(run_step(make_decoding(make_limits(), high, *low), 0.1)) == 8

    def test_a_prompt_gets_on_by_two_tokens_a_step_where_no_time_is_left_for_it(self) -> None:
        """The last three stay together: a token that is alone is rounded differently."""
        low, high = make_sequence(2, num_prompt=7, max_tokens=1), make_sequence(1, inter_token_s=0.001, max_tokens=64)
        scheduler = make_decoding(make_limits(), high)
        know_times(scheduler)
        scheduler.submit(low, 0.1)
        sizes = []
        for _ in range(4):
            batch = scheduler.schedule(0.1)
            assert batch is not None
            sizes.append([row.num_tokens for row in batch.rows])
            scheduler.commit(batch.step, sampled_ids(batch), 0, 0.1)
        assert sizes == [[1, 2], [1, 2], [1, 3], [1]]

    def test_a_solo_row_of_a_high_class_and_a_batch_of_a_low_one_take_turns_while_the_target_allows(self) -> None:
        high = make_sequence(1, numeric=NumericClass.SOLO, qos=LATENCY, inter_token_s=0.1, max_tokens=64)
        scheduler = make_decoding(make_limits(), high, make_sequence(2, qos=THROUGHPUT, max_tokens=64))
        know_times(scheduler)
        assert [run_step(scheduler, 0.1) for _ in range(4)] == [[1], [2], [1], [2]]
        high.targets = make_sequence(inter_token_s=0.01).targets

    def test_a_solo_row_keeps_its_turn_where_the_target_does_not_allow_others(self) -> None:
        high = make_sequence(1, numeric=NumericClass.SOLO, qos=LATENCY, inter_token_s=0.01, max_tokens=64)
        scheduler = make_decoding(make_limits(), high, make_sequence(2, qos=THROUGHPUT, max_tokens=64))
        know_times(scheduler)
        assert [run_step(scheduler, 0.1) for _ in range(3)] == [[1], [1], [1]]


class TestLatencyPipeline:
    LIMITS = make_limits(mode=DeviceMode.LATENCY)

    def test_others_borrow_a_few_rows_while_no_latency_request_is_there(self) -> None:
        scheduler = make_decoding(self.LIMITS, *make_sequences(*[BALANCED] * 4))
        assert [len(run_step(scheduler, 0.1)) for _ in range(2)] == [BORROWED_ROWS] * 2

    def test_prompts_of_others_go_in_small_chunks(self) -> None:
        scheduler = Scheduler(self.LIMITS)
        scheduler.submit(make_sequence(1, num_prompt=100, qos=THROUGHPUT), 0.0)
        batch = scheduler.schedule(0.0)
        assert batch is not None
        assert batch.rows[0].num_tokens == BORROWED_CHUNK_TOKENS

    def test_rows_and_prompts_of_others_are_held_while_a_latency_request_runs(self) -> None:
        scheduler = make_decoding(self.LIMITS, *make_sequences(BALANCED, LATENCY))
        scheduler.submit(make_sequence(3, qos=THROUGHPUT, arrived_at=1.0), 1.0)
        assert [run_step(scheduler, 1.0) for _ in range(3)] == [[2]] * 3

    def test_what_is_held_goes_when_its_patience_is_at_its_end(self) -> None:
        scheduler = make_decoding(self.LIMITS, *make_sequences(BALANCED, LATENCY))
        assert sorted(run_step(scheduler, PATIENCE_S[BALANCED] + 0.1)) == [1, 2]

    def test_a_prompt_that_is_held_goes_when_its_patience_is_at_its_end(self) -> None:
        scheduler = make_decoding(self.LIMITS, *make_sequences(LATENCY))
        scheduler.submit(make_sequence(2, qos=BALANCED, arrived_at=1.0), 1.0)
        assert run_step(scheduler, 1.5) == [1]
        assert scheduler.wake_at(1.5) == 1.0 + PATIENCE_S[BALANCED]
        assert run_step(scheduler, 1.0 + PATIENCE_S[BALANCED]) == [1, 2]

    def test_all_rows_of_class_latency_are_in_one_batch(self) -> None:
        scheduler = make_decoding(self.LIMITS, *make_sequences(*[LATENCY] * 5))
        assert len(run_step(scheduler, 0.1)) == 5

    def test_time_is_asked_for_while_something_is_held(self) -> None:
        scheduler = make_decoding(self.LIMITS, *make_sequences(BALANCED, LATENCY))
        scheduler.get(SequenceId(2)).max_tokens_per_s = 0.0  # type: ignore[union-attr]
        assert scheduler.schedule(0.5) is not None
        assert scheduler.wake_at(0.5) == PATIENCE_S[BALANCED]
