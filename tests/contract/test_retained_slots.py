"""Slots that still hold an answer when the epoch of their pipeline ends: who goes on with them, and who takes them."""

from __future__ import annotations

from shoal.types import SamplingParams
from shoal.v1 import flow_pb2
from tests.support.kv_reuse import PROMPT, Open, model, open_stages
from tests.support.lower_tier import MemoryLowerTier
from tests.support.stages import EPOCH, make_cancel, make_row, make_step
from tests.support.trails import (
    NUM_ANSWERED,
    NUM_IN_TRAIL,
    NUM_RESUMABLE,
    OTHER_TRAIL,
    TRAIL,
    Answer,
    broken_off,
    goes_on_as,
    moved,
    undisturbed,
)

__all__ = ["model", "open_stages"]

THREE_STAGES = (1, 2)


def test_a_slot_retains_only_what_is_asked_for_by_its_trail(open_stages: Open) -> None:
    stages = open_stages(budget_bytes=0)
    answer = broken_off(stages)
    stages.rebase()
    answer.trail_id = OTHER_TRAIL

    assert answer.restore() == flow_pb2.RestoredBlocks(is_exact=True)
    assert stages.kv_bytes() == [0, 0]


def test_a_slot_without_a_trail_is_not_retained(open_stages: Open) -> None:
    answer = broken_off(open_stages(), trail_id=b"")

    answer.stages.rebase()

    assert answer.stages.kv_bytes() == [0, 0]


def test_a_run_that_asks_for_nothing_takes_a_retained_slot(open_stages: Open) -> None:
    expected = undisturbed(open_stages)
    stages = open_stages()
    broken_off(stages, sampling=SamplingParams(temperature=9.0, seed=1))
    stages.rebase()

    goes_on_as(broken_off(stages, run_id=2, trail_id=OTHER_TRAIL), expected)


def test_a_retained_slot_that_is_cancelled_is_empty_and_its_trail_deleted(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = broken_off(open_stages(lower=lower))
    answer.stages.rebase()

    answer.stages.send(make_cancel((answer.run_id + 1, 0)))
    assert min(answer.stages.kv_bytes()) > 0
    answer.stages.send(make_cancel((answer.run_id, 0)))

    assert answer.stages.kv_bytes() == [0, 0]
    assert lower.trails == {}


def test_a_retained_slot_gives_way_to_a_sequence_that_needs_its_memory(open_stages: Open) -> None:
    stages = open_stages((), kv_tokens=500)
    kept, lost = broken_off(stages), broken_off(stages, run_id=2, slot=1, trail_id=OTHER_TRAIL)
    lost.decode(1)
    stages.rebase()

    broken_off(stages, run_id=3, slot=2, trail_id=b"x" * 16)

    stages.shards[0].check_invariants()
    assert [stages.shards[0].arena.length(slot) for slot in range(3)] == [NUM_RESUMABLE, 0, NUM_RESUMABLE]
    assert kept.restore().num_tokens == NUM_RESUMABLE


def test_lossy_kv_in_a_slot_is_not_what_an_exact_answer_goes_on_with(open_stages: Open) -> None:
    stages = open_stages(budget_bytes=0)
    answer = Answer(stages)
    answer.begin(is_kv_exact=False)
    answer.decode(NUM_ANSWERED - 1)
    stages.rebase()

    assert answer.restore().num_tokens == 0


def test_a_slot_is_retained_over_epochs_in_which_nobody_asks_for_it(open_stages: Open) -> None:
    answer = broken_off(open_stages())
    answer.stages.rebase()
    answer.stages.rebase()

    assert answer.restore().num_tokens == NUM_RESUMABLE


def test_a_run_that_was_lost_while_it_computed_known_tokens_again_goes_on_with_slot_and_trail(
    open_stages: Open,
) -> None:
    expected = undisturbed(open_stages)
    lower = MemoryLowerTier()
    before = broken_off(open_stages(lower=lower))
    again = moved(before, open_stages(lower=lower))
    known = again.tokens
    # From the blocks alone, then lost before the trail's end was reached.
    again.tokens = known[:1]
    again.go_on(again.restore(timeout_ms=5000.0, num_tokens=193))
    again.decode(10)
    # What the trail has of the first run, the second has deleted.
    again.stages.rebase()
    again.tokens = known
    lower.trails = {}
    for runner, shard in zip(before.stages.stages, before.stages.shards, strict=True):
        assert shard.arena.length(0) == NUM_RESUMABLE
        runner.close()

    restored = again.restore()

    assert restored.num_tokens == 210
    again.go_on(restored)
    goes_on_as(again, expected)


def test_a_restore_that_is_under_way_ends_with_its_epoch(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))
    lower.answers_at_once = False
    answer.ask()
    answer.stages.rebase()
    for _ in range(2):
        lower.settle()
        lower.settle_trail()
    answer.stages.send()

    assert answer.stages.take_restored() == []
    assert answer.restore(timeout_ms=0.0).num_tokens == 192


def test_a_run_whose_pipeline_is_lost_before_anything_was_restored_leaves_its_trail(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))
    lower.answers_at_once = False
    answer.ask()
    waiting, lower.asked, lower.asked_trails = len(lower.asked), [], []

    answer.stages.rebase()
    lower.answers_at_once = True

    assert waiting > 0
    assert TRAIL in lower.trails
    assert moved(answer, open_stages(lower=lower)).restore().num_tokens == NUM_IN_TRAIL


def test_frames_of_the_epoch_before_are_dropped(open_stages: Open) -> None:
    answer = broken_off(open_stages())
    for runner in answer.stages.stages:
        runner.suspend()
        runner.check_invariants()

    answer.stages.send(make_step(1, [make_row(1, position=NUM_RESUMABLE)], [5]), make_cancel((1, 0)))

    assert answer.stages.results == []
    assert min(answer.stages.kv_bytes()) > 0
    assert answer.stages.stages[0].spec.epoch != EPOCH


def test_a_prompt_that_was_not_all_computed_goes_on_behind_its_last_whole_block(open_stages: Open) -> None:
    expected = undisturbed(open_stages)
    stages = open_stages(budget_bytes=0)
    answer = Answer(stages)
    start = answer._start()
    rows = [make_row(1, num_tokens=100, sample=False, start=start)]
    stages.send(make_step(1, rows, PROMPT[:100]))
    stages.results.clear()
    stages.rebase()

    restored = answer.restore(num_tokens=len(PROMPT))

    assert (restored.num_blocks, restored.num_tokens) == (1, 100)
    answer.go_on(restored)
    answer.decode(NUM_ANSWERED - 1)
    goes_on_as(answer, expected)
