"""Runs that go on with an answer from what stages still have of it: what is asked for, and from where they go on."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.batch import SampledId
from orchestrator.core.forecast import LEAST_TRAIL_S, MOST_TRAIL_S
from orchestrator.core.restores import ANSWER_S, Restore
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RestoredPrefix, RunId, Sequence, SequenceState
from shoal.types import KVReuse, SlotId
from tests.support.builders import TOKEN_ID, make_limits
from tests.support.restoring import BALANCED, RUN, ask, make_prompt, next_batch

TRAIL = b"0123456789abcdef"


def make_answered(num_prompt: int = 200, num_answer: int = 5, *, max_tokens: int = 16) -> Sequence:
    """A sequence that ran elsewhere, in slot 3, and has a part of its answer."""
    sequence = make_prompt(num_prompt=num_prompt, max_tokens=max_tokens)
    sequence.trail_id = TRAIL
    sequence.begin_run(RunId(99), SlotId(3), 0.0)
    for _ in range(num_answer):
        sequence.append(TOKEN_ID, 0.0)
    sequence.stop_run(0.0)
    return sequence


def resume(sequence: Sequence, restored: RestoredPrefix, **limits: Any) -> tuple[Scheduler, Restore]:
    scheduler = Scheduler(make_limits(**limits))
    restore = ask(scheduler, sequence)
    scheduler.restored(RUN, restored, 0.0)
    scheduler.check_invariants()
    return scheduler, restore


def test_all_known_tokens_but_the_newest_are_asked_for_with_every_block_and_nothing_lossy() -> None:
    restore = ask(Scheduler(make_limits()), sequence := make_answered())

    assert restore.block_hashes == sequence.block_hashes[:3]
    assert (restore.trail_id, restore.num_tokens, restore.is_exact_only) == (TRAIL, 204, True)
    assert restore.timeout_s > LEAST_TRAIL_S


@pytest.mark.parametrize("num_answer", [5, 50, 400])
def test_a_trail_may_take_what_computing_its_tokens_one_after_the_other_would(num_answer: int) -> None:
    scheduler = Scheduler(make_limits(num_slots=4))
    token_s = scheduler.predict(1, BALANCED, 0.0).inter_token_s

    restore = ask(scheduler, make_answered(60, num_answer, max_tokens=1000))

    assert num_answer * token_s * 0.5 < restore.timeout_s - LEAST_TRAIL_S < num_answer * token_s


def test_the_longest_trail_has_a_bounded_time() -> None:
    restore = ask(Scheduler(make_limits(context_tokens=8192, kv_tokens=8192)), make_answered(60, 4000, max_tokens=5000))

    assert restore.timeout_s == MOST_TRAIL_S


def test_it_gets_the_slot_again_that_it_had() -> None:
    assert ask(Scheduler(make_limits()), make_answered()).slot == 3


def test_a_trail_that_reaches_the_newest_token_leaves_nothing_to_compute_again() -> None:
    scheduler, _ = resume(sequence := make_answered(), RestoredPrefix(3, num_tokens=204))

    assert (sequence.state, sequence.num_to_replay) == (SequenceState.DECODE, 0)
    (row,) = next_batch(scheduler).rows
    assert (row.position, row.token_ids, row.is_start, row.is_sampled) == (204, (TOKEN_ID,), True, True)


def test_tokens_that_a_trail_lacks_are_computed_again_and_sent_to_nobody() -> None:
    scheduler, _ = resume(sequence := make_answered(), RestoredPrefix(3, num_tokens=202))
    positions = []
    emitted = []
    for _ in range(3):
        batch = next_batch(scheduler)
        positions.append((batch.rows[0].position, batch.rows[0].is_start))
        emitted += scheduler.commit(batch.step, [SampledId(RUN, TOKEN_ID)], 0, 0.0)

    assert positions == [(202, True), (203, False), (204, False)]
    assert [one.index for one in emitted] == [5]
    assert sequence.num_to_replay == 0


def test_a_trail_that_ends_within_the_prompt_is_no_more_than_its_blocks() -> None:
    scheduler, _ = resume(sequence := make_answered(), RestoredPrefix(3, num_tokens=199))

    assert sequence.num_restored == 192
    (row,) = next_batch(scheduler).rows
    assert (row.position, row.num_tokens, row.is_start) == (192, 8, True)
    assert sequence.num_to_replay == 5


@pytest.mark.parametrize(("num_prompt", "num_restored"), [(192, 128), (193, 128), (194, 192)])
def test_of_a_prompt_of_whole_blocks_without_a_trail_the_last_one_is_computed(
    num_prompt: int, num_restored: int
) -> None:
    _, restore = resume(sequence := make_answered(num_prompt), RestoredPrefix(3, num_tokens=192 - (num_prompt == 192)))

    assert len(restore.block_hashes) == 3
    assert sequence.num_restored == num_restored


def test_no_more_counts_than_was_asked_for() -> None:
    _, _ = resume(sequence := make_answered(), RestoredPrefix(3, num_tokens=5000))

    assert sequence.num_restored == 204


def test_a_short_prompt_has_a_trail_and_no_blocks() -> None:
    scheduler, restore = resume(sequence := make_answered(20), RestoredPrefix(0, num_tokens=24))

    assert (restore.block_hashes, restore.num_tokens) == ((), 24)
    assert sequence.state is SequenceState.DECODE
    assert next_batch(scheduler).rows[0].position == 24


def test_stages_that_keep_no_blocks_may_still_have_its_trail() -> None:
    _, restore = resume(sequence := make_answered(), RestoredPrefix(0, num_tokens=204), keeps_blocks=False)

    assert restore.block_hashes == ()
    assert sequence.num_restored == 204


def test_without_a_trail_or_an_answer_nothing_but_blocks_is_asked_for() -> None:
    untold = make_answered()
    untold.trail_id = b""
    scheduler = Scheduler(make_limits())
    scheduler.submit(untold, 0.0)

    assert next_batch(scheduler).rows[0].position == 0
    assert scheduler.take_restores() == []


def test_who_wants_nothing_reused_has_no_trail_to_ask_for() -> None:
    sequence = make_answered()
    sequence.trail_id, sequence.kv_reuse = b"", KVReuse.NONE
    scheduler = Scheduler(make_limits())
    scheduler.submit(sequence, 0.0)

    assert next_batch(scheduler).rows[0].position == 0


def test_an_answer_from_another_orchestrator_is_not_refused_for_lack_of_room_or_time() -> None:
    sequence = make_prompt(max_tokens=16)
    sequence.output_token_ids = [TOKEN_ID] * 3
    sequence.deadline_at = 1e-6
    scheduler = Scheduler(make_limits(max_waiting=1))
    scheduler.submit(make_prompt(2), 0.0)

    scheduler.submit(sequence, 0.0)

    assert scheduler.num_waiting == 2


def test_stages_that_never_answer_are_not_waited_for_for_ever() -> None:
    scheduler = Scheduler(make_limits())
    restore = ask(scheduler, sequence := make_answered())
    late_at = restore.timeout_s + ANSWER_S
    assert scheduler.wake_at(1.0) == late_at

    assert scheduler.schedule(late_at - 0.1) is None
    (row,) = next_batch(scheduler, late_at).rows

    assert (row.position, sequence.num_restored) == (0, 0)
    scheduler.restored(RUN, RestoredPrefix(3, num_tokens=204), late_at)
    assert sequence.num_restored == 0
