"""Runs that begin with blocks which stages keep: who asks, who waits, what is computed, who pays; one situation a test."""

from __future__ import annotations

import pytest

from orchestrator.core.batch import EndedSequence
from orchestrator.core.forecast import FETCH_SHARE, UNKNOWN_BLOCK_S, UNKNOWN_FETCH_S
from orchestrator.core.restores import Restore
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RestoredPrefix, RunId, SequenceState
from shoal.types import FinishReason, KVReuse, NumericClass, QosClass, SlotId
from tests.support.builders import (
    know_times,
    make_limits,
    make_sequence,
    run_ids,
    run_step,
    sampled_ids,
    sequences_in,
    start_decoding,
)
from tests.support.model_stages import answer_of
from tests.support.restoring import RUN, ask, make_prompt, make_scheduler, next_batch
from tests.support.simulated_pipeline import SimulatedPipeline, StageSpeed

LATENCY, BALANCED, THROUGHPUT = QosClass.LATENCY, QosClass.BALANCED, QosClass.THROUGHPUT


# Who asks


def test_a_prompt_of_which_nothing_is_known_is_computed_without_asking() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_prompt(), 0.0)

    assert next_batch(scheduler).rows[0].is_start
    assert scheduler.take_restores() == []


def test_a_run_asks_for_the_leading_blocks_that_are_believed_to_be_there() -> None:
    sequence = make_prompt()

    restore = ask(make_scheduler(known=2), sequence)

    timeout_s = UNKNOWN_FETCH_S + 2 * UNKNOWN_BLOCK_S
    assert restore == Restore(RUN, SlotId(0), sequence.block_hashes[:2], False, timeout_s)
    assert sequence.is_restoring
    assert sequence.state is SequenceState.PREFILL
    assert sequence.events[-1].what == "restoring"


def test_a_run_asks_for_what_redis_is_said_to_hold_beyond_what_is_known() -> None:
    assert len(ask(make_scheduler(known=1), make_prompt(num_stored=3)).block_hashes) == 3


@pytest.mark.parametrize(("num_prompt", "num_blocks"), [(65, 0), (66, 1), (129, 1), (130, 2), (194, 3)])
def test_at_least_two_tokens_of_a_prompt_are_always_computed(num_prompt: int, num_blocks: int) -> None:
    scheduler, sequence = make_scheduler(known=10), make_prompt(num_prompt=num_prompt, num_stored=10)
    scheduler.submit(sequence, 0.0)
    scheduler.schedule(0.0)

    assert sequence.num_blocks_asked == num_blocks


def test_who_wants_only_exact_blocks_asks_for_such_and_who_wants_none_asks_for_none() -> None:
    exact, none = make_prompt(1), make_prompt(2)
    exact.kv_reuse, none.kv_reuse = KVReuse.EXACT, KVReuse.NONE
    scheduler = make_scheduler(known=3)

    assert ask(scheduler, exact).is_exact_only
    scheduler.submit(none, 0.0)
    assert run_ids(next_batch(scheduler)) == [2]
    assert scheduler.take_restores() == []


def test_nothing_is_asked_of_stages_that_keep_nothing() -> None:
    scheduler = make_scheduler(make_limits(keeps_blocks=False), known=3)
    scheduler.submit(make_prompt(num_stored=3), 0.0)

    assert run_ids(next_batch(scheduler)) == [1]
    assert scheduler.take_restores() == []
    assert scheduler.take_prefetches(0.0) == []


def test_nothing_is_fetched_beforehand_or_believed_where_stages_keep_nothing() -> None:
    scheduler = make_scheduler(make_limits(num_slots=1, keeps_blocks=False))
    scheduler.submit(make_prompt(1, num_prompt=64), 0.0)
    scheduler.submit(make_prompt(2, num_stored=3), 0.0)
    batch = next_batch(scheduler)

    assert scheduler.take_prefetches(0.0) == []
    scheduler.commit(batch.step, sampled_ids(batch), 0, 0.0)
    assert len(scheduler.restores.index) == 0


def test_fetching_may_take_a_share_of_the_time_that_computing_would() -> None:
    scheduler = make_scheduler(known=2)
    know_times(scheduler)

    restore = ask(scheduler, make_prompt())

    # Two chunks of 64, each 20 ms and 5 ms a token.
    assert restore.timeout_s == pytest.approx(FETCH_SHARE * 2 * 0.34, rel=0.05)


# What comes


def test_a_restored_run_is_computed_from_behind_its_blocks_to_the_end() -> None:
    scheduler, sequence = make_scheduler(known=2), make_prompt(num_prompt=140)
    ask(scheduler, sequence)

    scheduler.restored(RUN, RestoredPrefix(2, 1, "int8", is_exact=False), 1.0)

    (row,) = next_batch(scheduler, 1.0).rows
    assert (row.position, row.num_tokens, row.is_start, row.is_sampled) == (128, 12, True, True)
    assert row.token_ids == sequence.prompt_token_ids[128:]
    assert sequence.restored == RestoredPrefix(2, 1, "int8", is_exact=False)
    assert not sequence.is_kv_exact
    assert sequence.events[-1].detail == "128 of 128 tokens, 1 of its blocks from Redis"


def test_only_the_first_row_of_a_restored_run_starts_it() -> None:
    scheduler = make_scheduler(known=1)
    ask(scheduler, make_prompt())
    scheduler.restored(RUN, RestoredPrefix(1), 0.0)

    rows = [next_batch(scheduler).rows[0] for _ in range(2)]

    assert [(row.position, row.is_start) for row in rows] == [(64, True), (128, False)]


def test_a_run_of_which_nothing_came_is_computed_from_its_first_token() -> None:
    scheduler, sequence = make_scheduler(known=2), make_prompt()
    ask(scheduler, sequence)

    scheduler.restored(RUN, RestoredPrefix(0, is_exact=False), 0.0)

    (row,) = next_batch(scheduler).rows
    assert (row.position, row.is_start) == (0, True)
    assert sequence.is_kv_exact


@pytest.mark.parametrize("num_blocks", [3, 1000])
def test_no_more_counts_than_was_asked_for_whatever_a_stage_says(num_blocks: int) -> None:
    scheduler, sequence = make_scheduler(known=2), make_prompt()
    ask(scheduler, sequence)

    scheduler.restored(RUN, RestoredPrefix(num_blocks, num_blocks), 0.0)

    assert sequence.restored == RestoredPrefix(2, 2)
    assert next_batch(scheduler).rows[0].position == 128


def test_an_answer_that_nobody_awaits_is_ignored() -> None:
    scheduler, sequence = make_scheduler(known=2), make_prompt()
    scheduler.submit(sequence, 0.0)
    scheduler.schedule(0.0)
    scheduler.restored(RUN, RestoredPrefix(2), 0.0)
    assert sequence.is_restoring, "it was not asked for yet"
    scheduler.take_restores()
    scheduler.restored(RunId(7), RestoredPrefix(1), 0.0)
    assert sequence.is_restoring

    scheduler.restored(RUN, RestoredPrefix(2), 0.0)
    scheduler.restored(RUN, RestoredPrefix(1), 0.0)

    assert sequence.num_dispatched == 128


# What is learned


def test_blocks_are_known_once_the_rows_that_complete_them_came_back() -> None:
    scheduler, sequence = make_scheduler(), make_prompt(num_prompt=140)
    scheduler.submit(sequence, 0.0)
    batches = [next_batch(scheduler), next_batch(scheduler)]
    index = scheduler.restores.index
    assert index.match(sequence.block_hashes) == 0

    scheduler.commit(batches[0].step, [], 0, 0.0)
    assert index.match(sequence.block_hashes) == 1
    scheduler.commit(batches[1].step, [], 0, 0.0)
    assert index.match(sequence.block_hashes) == 2


def test_blocks_of_an_answer_that_ends_with_its_prompt_are_known() -> None:
    scheduler, sequence = make_scheduler(), make_prompt(num_prompt=64, max_tokens=1)
    scheduler.submit(sequence, 0.0)

    run_step(scheduler, 0.0)

    assert sequence.state is SequenceState.FINISHED
    assert scheduler.restores.index.match(sequence.block_hashes) == 1


def test_nothing_is_learned_of_a_run_that_was_over_before_its_rows_came_back() -> None:
    scheduler, sequence = make_scheduler(), make_prompt()
    scheduler.submit(sequence, 0.0)
    batch = next_batch(scheduler)
    scheduler.abort(sequence.sequence_id, FinishReason.CANCELLED, 0.0)

    scheduler.commit(batch.step, [], 0, 0.0)

    assert len(scheduler.restores.index) == 0


def test_what_did_not_come_is_believed_no_more() -> None:
    scheduler, sequence = make_scheduler(known=3), make_prompt(num_stored=3)
    ask(scheduler, sequence)

    scheduler.restored(RUN, RestoredPrefix(2), 0.0)

    assert scheduler.restores.index.match(sequence.block_hashes) == 2
    assert sequence.num_stored_blocks == 2


def test_what_came_from_redis_is_known_to_be_there() -> None:
    scheduler, sequence = make_scheduler(), make_prompt(num_stored=2)
    ask(scheduler, sequence)

    scheduler.restored(RUN, RestoredPrefix(2, 2), 0.0)

    assert scheduler.restores.index.match(sequence.block_hashes) == 2


# Others meanwhile


def test_several_runs_await_their_blocks_at_once_while_another_is_computed() -> None:
    scheduler = make_scheduler(known=2)
    plain = make_sequence(4, num_prompt=80)
    for sequence in (*(make_prompt(key) for key in (1, 2, 3)), plain):
        scheduler.submit(sequence, 0.0)

    batch = next_batch(scheduler)

    assert [one.run_id for one in scheduler.take_restores()] == [1, 2, 3]
    assert run_ids(batch) == [4]


def test_prompts_go_on_in_the_order_in_which_they_got_their_slots() -> None:
    scheduler = make_scheduler(known=2)
    for sequence in (make_prompt(1), make_prompt(2), make_sequence(3, num_prompt=300)):
        scheduler.submit(sequence, 0.0)
    assert run_ids(next_batch(scheduler)) == [3]
    scheduler.take_restores()

    scheduler.restored(RunId(2), RestoredPrefix(2), 0.0)
    assert run_ids(next_batch(scheduler)) == [2]
    scheduler.restored(RunId(1), RestoredPrefix(2), 0.0)
    scheduler.fail_step(1, 0.0)

    # What is left of the first, before what is left of the second.
    assert run_ids(next_batch(scheduler))[0] == 1


def test_a_class_that_asks_for_many_restores_leaves_slots_to_a_higher_one() -> None:
    scheduler = make_scheduler(make_limits(num_slots=4), known=2)
    for key in range(1, 9):
        scheduler.submit(make_prompt(key, qos=THROUGHPUT), 0.0)
    # Its patience is at its end, so it comes before a higher class, but for one turn only.
    for key in (9, 10):
        newcomer = make_prompt(key, qos=LATENCY)
        newcomer.arrived_at = 20.0
        scheduler.submit(newcomer, 20.0)
    scheduler.schedule(20.0)

    restored = [scheduler.sequence_of(one.run_id) for one in scheduler.take_restores()]

    assert {9, 10} <= {one.sequence_id for one in restored if one is not None}


def test_decoding_goes_on_while_a_run_awaits_its_blocks() -> None:
    scheduler = make_scheduler(known=2)
    scheduler.submit(make_sequence(7), 0.0)
    run_step(scheduler, 0.0)
    scheduler.submit(make_prompt(), 0.0)

    assert [run_step(scheduler, 0.0) for _ in range(3)] == [[7], [7], [7]]


def test_no_room_is_kept_for_the_prompt_of_a_run_that_awaits_its_blocks() -> None:
    scheduler = make_scheduler(make_limits(num_slots=9, chunk_tokens=8, max_batch=8), known=2)
    start_decoding(scheduler, [make_sequence(key, num_prompt=4, max_tokens=90) for key in range(2, 10)])
    scheduler.submit(make_prompt(1), 0.0)
    assert len(run_step(scheduler, 0.0)) == 4, "room is kept for a prompt that waits"
    assert len(scheduler.take_restores()) == 1

    assert len(run_step(scheduler, 0.0)) == 8


# Ends


def test_a_run_that_is_aborted_while_it_awaits_blocks_is_cancelled_and_a_late_answer_ignored() -> None:
    scheduler, sequence = make_scheduler(known=2), make_prompt()
    restore = ask(scheduler, sequence)

    scheduler.abort(sequence.sequence_id, FinishReason.CANCELLED, 1.0)
    assert scheduler.take_ended() == [EndedSequence(RUN, restore.slot)]
    scheduler.restored(RUN, RestoredPrefix(2), 1.0)

    scheduler.check_invariants()
    assert not scheduler.has_work
    assert (scheduler.used_slots, scheduler.used_kv_tokens) == (0, 0)


def test_a_run_that_ends_before_its_restore_was_sent_is_none_of_the_stages_business() -> None:
    scheduler, sequence = make_scheduler(known=2), make_prompt()
    scheduler.submit(sequence, 0.0)
    scheduler.schedule(0.0)

    scheduler.abort(sequence.sequence_id, FinishReason.CANCELLED, 0.0)

    assert scheduler.take_restores() == []
    assert scheduler.take_ended() == []


def test_a_run_whose_deadline_passes_while_it_awaits_blocks_ends() -> None:
    scheduler, sequence = make_scheduler(known=2), make_prompt()
    sequence.deadline_at = 5.0
    ask(scheduler, sequence)
    assert scheduler.wake_at(1.0) == 5.0

    assert scheduler.expire(5.0) == [sequence]

    scheduler.check_invariants()
    assert len(scheduler.take_ended()) == 1


def test_a_higher_class_takes_the_slot_of_a_run_that_awaits_blocks_which_asks_again_later() -> None:
    scheduler, sequence = make_scheduler(make_limits(num_slots=1), known=2), make_prompt(qos=THROUGHPUT)
    first = ask(scheduler, sequence)
    winner = make_sequence(2, max_tokens=1, qos=LATENCY)
    scheduler.submit(winner, 1.0)

    batch = next_batch(scheduler, 1.0)
    assert sequences_in(scheduler, batch) == [2]
    assert scheduler.take_ended() == [EndedSequence(RUN, first.slot, will_resume=True)]
    scheduler.restored(RUN, RestoredPrefix(2), 1.0)
    assert sequence.state is SequenceState.WAITING
    scheduler.commit(batch.step, sampled_ids(batch), 0, 1.0)
    assert scheduler.schedule(1.0) is None

    (again,) = scheduler.take_restores()
    assert (again.run_id, again.block_hashes) == (RunId(3), first.block_hashes)


def test_a_run_that_has_least_to_lose_counts_what_it_would_get_back_for_nothing() -> None:
    scheduler = make_scheduler(make_limits(num_slots=2), known=2)
    ask(scheduler, make_prompt(1, num_prompt=140, qos=THROUGHPUT))
    scheduler.restored(RUN, RestoredPrefix(2), 0.0)
    scheduler.submit(make_sequence(2, num_prompt=150, qos=THROUGHPUT), 0.0)
    while scheduler.schedule(0.0) is not None:
        pass

    scheduler.submit(make_prompt(3, qos=LATENCY), 1.0)
    for step in (1, 2):
        scheduler.commit(step, [], 0, 1.0)
    scheduler.schedule(1.0)

    # Of its 140 tokens 12 were computed, of the other's 150 some 110.
    assert [one.run_id for one in scheduler.take_ended()] == [1]


def test_a_preempted_answer_restores_its_prompt_and_replays_what_it_had() -> None:
    pipeline = SimulatedPipeline(Scheduler(make_limits(num_slots=1)), [StageSpeed(0.02, 0.005)])
    loser = make_prompt(qos=THROUGHPUT, max_tokens=40)
    loser.stop_ids = frozenset()
    pipeline.submit(loser, 0.0)
    pipeline.submit(make_sequence(2, num_prompt=20, max_tokens=4, qos=LATENCY, numeric=NumericClass.SOLO), 1.5)

    pipeline.run(30.0)

    assert loser.num_preemptions == 1
    assert [len(one.block_hashes) for _, one in pipeline.restores] == [3]
    assert [token.token_id for token in pipeline.tokens[loser.sequence_id]] == answer_of(loser)
    assert pipeline.scheduler.num_replay_mismatches == 0


def test_a_lost_pipeline_gives_up_runs_that_await_blocks_and_another_one_is_asked_anew() -> None:
    scheduler, sequence = make_scheduler(known=2), make_prompt(num_stored=1)
    ask(scheduler, sequence)

    assert scheduler.take_all(1.0) == [sequence]
    assert not scheduler.has_work
    assert (sequence.state, sequence.is_restoring) == (SequenceState.WAITING, False)

    assert len(ask(make_scheduler(), sequence, 2.0).block_hashes) == 1
