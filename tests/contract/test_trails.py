"""Stages of a real tiny model whose answers break off: they go on bit by bit, with what is left of them wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from shoal.types import SamplingParams
from shoal.v1 import flow_pb2
from tests.support.kv_reuse import TWO_STAGES, Open, model, open_stages
from tests.support.lower_tier import MemoryLowerTier
from tests.support.stages import make_cancel
from tests.support.trails import (
    DRAWN,
    NUM_ANSWERED,
    NUM_IN_TRAIL,
    NUM_RESUMABLE,
    OTHER_TRAIL,
    TRAIL,
    Answer,
    broken_off,
    contents,
    goes_on_as,
    moved,
    undisturbed,
)
from worker import filling, trail_fetches
from worker.kv.trail import Segment

__all__ = ["model", "open_stages"]

THREE_STAGES = (1, 2)


# Where an answer's KV comes from


@pytest.mark.parametrize("solo", [False, True], ids=["shared", "solo"])
@pytest.mark.parametrize("cuts", [(), TWO_STAGES, THREE_STAGES])
def test_an_answer_goes_on_with_its_trail_at_stages_that_know_nothing(
    open_stages: Open, cuts: Sequence[int], solo: bool
) -> None:
    expected = undisturbed(open_stages, cuts, solo=solo)
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(cuts, lower=lower), solo=solo), open_stages(cuts, lower=lower))

    restored = answer.restore()

    assert restored == flow_pb2.RestoredBlocks(
        num_blocks=3, num_from_redis=3, codec="f32", is_exact=True, num_tokens=NUM_IN_TRAIL
    )
    answer.go_on(restored)
    goes_on_as(answer, expected)


@pytest.mark.parametrize("solo", [False, True], ids=["shared", "solo"])
@pytest.mark.parametrize("cuts", [(), TWO_STAGES, THREE_STAGES])
def test_an_answer_goes_on_with_what_its_slots_retain(open_stages: Open, cuts: Sequence[int], solo: bool) -> None:
    expected = undisturbed(open_stages, cuts, solo=solo)
    lower = MemoryLowerTier()
    answer = broken_off(open_stages(cuts, lower=lower), solo=solo)
    answer.stages.rebase()

    restored = answer.restore()

    assert restored == flow_pb2.RestoredBlocks(num_blocks=3, codec="f32", is_exact=True, num_tokens=NUM_RESUMABLE)
    assert (lower.num_fetches, lower.asked_trails) == (0, [])
    answer.go_on(restored)
    goes_on_as(answer, expected)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_only_the_stage_that_was_lost_gets_anything_from_the_tier_below(open_stages: Open, lost: int) -> None:
    expected = undisturbed(open_stages, THREE_STAGES)
    lower = MemoryLowerTier()
    answer = broken_off(open_stages(THREE_STAGES, lower=lower))
    answer.stages.rebase()
    answer.stages.replace(lost)
    lower.answers_at_once = False

    answer.ask()
    (part,) = [part for part, _, _ in lower.asked_trails]
    assert len(lower.asked) == 1
    lower.settle()
    lower.settle_trail()
    answer.stages.send()
    (restored,) = answer.stages.take_restored()

    assert (part.start, part.stop, part.form.layers.start) == (192, NUM_RESUMABLE, lost)
    assert restored.restored.num_tokens == NUM_IN_TRAIL
    answer.go_on(restored.restored)
    goes_on_as(answer, expected)


@pytest.mark.parametrize(("before", "after"), [((2,), (1,)), ((), (1, 2)), ((1, 2), ()), ((1,), (2,))])
def test_stages_that_cut_the_layers_otherwise_read_a_trail(
    open_stages: Open, before: Sequence[int], after: Sequence[int]
) -> None:
    expected = undisturbed(open_stages, after)
    lower = MemoryLowerTier()
    stages = open_stages(after, lower=lower)
    # Blocks are joined by the Redis tier alone: here the stages have computed them.
    broken_off(stages, trail_id=OTHER_TRAIL)
    stages.send(make_cancel((1, 0)))
    answer = moved(broken_off(open_stages(before, lower=lower)), stages)

    restored = answer.restore()

    assert restored.num_tokens == NUM_IN_TRAIL
    answer.go_on(restored)
    goes_on_as(answer, expected)


def test_without_a_tier_below_only_blocks_in_memory_are_left(open_stages: Open) -> None:
    expected = undisturbed(open_stages)
    stages = open_stages()
    before = broken_off(stages)
    answer = moved(before, open_stages(caches=stages.caches))

    restored = answer.restore()

    assert (restored.num_blocks, restored.num_tokens) == (3, 192)
    answer.go_on(restored)
    goes_on_as(answer, expected)


def test_a_trail_whose_blocks_are_not_all_there_is_of_no_use(open_stages: Open) -> None:
    expected = undisturbed(open_stages)
    lower = MemoryLowerTier()
    stages = open_stages(lower=lower)
    answer = moved(broken_off(stages), open_stages(lower=lower))
    last = [key for key in lower.values if stages.caches[0].holds(key) or stages.caches[1].holds(key)][-1]
    del lower.values[last]

    restored = answer.restore()

    assert (restored.num_blocks, restored.num_tokens) == (2, 128)
    answer.go_on(restored)
    goes_on_as(answer, expected)


def damaged(packed: bytes) -> bytes:
    return packed[:-1] + bytes([packed[-1] ^ 1])


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    "damage",
    [
        lambda segments, one: segments.update({one: damaged(segments[one])}),
        lambda segments, one: segments.update({one: segments[one][:100]}),
        lambda segments, one: segments.pop(one),
        lambda segments, one: segments.update({one: next(iter(segments.values()))}),
    ],
    ids=["damaged", "cut off", "missing", "another"],
)
def test_a_trail_is_used_up_to_the_first_segment_that_is_not_as_it_was_written(
    open_stages: Open, damage: Callable[[dict[Segment, bytes], Segment], object], stage: int
) -> None:
    expected = undisturbed(open_stages)
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))
    segments = lower.trails[TRAIL]
    damage(segments, next(one for one in segments if one.start == 224 and (one.layers.start == 0) == (stage == 0)))

    restored = answer.restore()

    assert restored.num_tokens == 224
    answer.go_on(restored)
    goes_on_as(answer, expected)


def test_a_segment_of_another_trail_is_not_taken_for_its_own(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))
    lower.trails = {OTHER_TRAIL: lower.trails[TRAIL]}
    answer.trail_id = OTHER_TRAIL

    assert answer.restore().num_tokens == 192


def test_what_was_computed_from_lossy_kv_is_not_exact_in_a_trail_either(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    before = Answer(open_stages(lower=lower))
    before.begin(is_kv_exact=False)
    before.decode(NUM_ANSWERED - 1)
    # The same blocks, exact, as another request computed them.
    broken_off(open_stages(lower=lower), trail_id=OTHER_TRAIL)
    answer = moved(before, open_stages(lower=lower))

    assert answer.restore().num_tokens == 192
    answer.stages.send(make_cancel((answer.run_id, 0), will_resume=True))
    restored = answer.restore(is_exact_only=False)
    assert (restored.num_tokens, restored.is_exact) == (NUM_IN_TRAIL, False)


def test_penalties_count_the_tokens_of_the_answer_that_are_not_computed_again(open_stages: Open) -> None:
    sampling = SamplingParams(
        temperature=8.0, seed=7, num_logprobs=5, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0
    )
    expected = undisturbed(open_stages, sampling=sampling)
    answer = broken_off(open_stages(), sampling=sampling)
    answer.stages.rebase()

    answer.go_on(answer.restore())

    assert answer.tokens != undisturbed(open_stages, sampling=DRAWN).tokens[:NUM_ANSWERED]
    goes_on_as(answer, expected)


# Fetching


def test_all_stages_fetch_at_the_same_time(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(THREE_STAGES, lower=lower)), open_stages(THREE_STAGES, lower=lower))
    lower.answers_at_once = False

    answer.ask()

    assert [part.form.layers.start for part, _, _ in lower.asked_trails] == [0, 1, 2]
    assert len(lower.asked) == 3
    for _ in range(3):
        lower.settle()
        lower.settle_trail()
    answer.stages.send()
    (restored,) = answer.stages.take_restored()
    assert restored.restored.num_tokens == NUM_IN_TRAIL
    assert lower.asked_trails == []


def test_a_trail_that_does_not_come_in_time_costs_no_more_than_computing_what_is_in_it(open_stages: Open) -> None:
    expected = undisturbed(open_stages)
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))
    lower.answers_at_once = False
    answer.ask()
    lower.settle()
    lower.settle()
    while lower.asked_trails:
        lower.settle_trail(finds=False)
        answer.stages.send()
    (restored,) = answer.stages.take_restored()

    assert restored.restored.num_tokens == 192
    answer.go_on(restored.restored)
    goes_on_as(answer, expected)


def test_without_time_to_fetch_no_trail_is_asked_for(open_stages: Open) -> None:
    lower = MemoryLowerTier(answers_at_once=False)
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))

    assert answer.restore(timeout_ms=0.0).num_tokens == 0
    assert lower.asked_trails == []


def test_a_long_trail_is_fetched_and_copied_a_part_at_a_time(
    open_stages: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trail_fetches, "TURN_SEGMENTS", 1)
    # 16 tokens of two layers.
    monkeypatch.setattr(trail_fetches, "MAX_PART_BYTES", 16 * 2 * 256)
    monkeypatch.setattr(filling, "TURN_BLOCKS", 1)
    expected = undisturbed(open_stages)
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))

    restored = answer.restore()

    assert restored.num_tokens == NUM_IN_TRAIL
    answer.go_on(restored)
    goes_on_as(answer, expected)


def test_a_trail_of_which_a_part_is_lossy_is_not_exact(open_stages: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    # 16 tokens of two layers.
    monkeypatch.setattr(trail_fetches, "MAX_PART_BYTES", 16 * 2 * 256)
    lossy, exact = MemoryLowerTier(), MemoryLowerTier()
    before = Answer(open_stages(lower=lossy))
    before.begin(is_kv_exact=False)
    before.decode(NUM_ANSWERED - 1)
    broken_off(open_stages(lower=exact))
    firsts = {one: packed for one, packed in lossy.trails[TRAIL].items() if one.start < 208}
    exact.trails[TRAIL].update(firsts)

    restored = moved(before, open_stages(lower=exact)).restore(is_exact_only=False)

    assert (restored.num_tokens, restored.is_exact) == (NUM_IN_TRAIL, False)


def test_a_sequence_cancelled_during_its_restore_is_not_answered_and_its_slot_stays_empty(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))
    lower.answers_at_once = False
    answer.ask()

    answer.stages.send(make_cancel((answer.run_id, 0)))
    for _ in range(2):
        lower.settle()
        lower.settle_trail()
    answer.stages.send()

    assert answer.stages.take_restored() == []
    assert answer.stages.kv_bytes() == [0, 0]
    assert lower.trails == {}


def test_what_was_fetched_for_a_slot_s_last_sequence_does_not_get_into_the_next(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    before = broken_off(open_stages(lower=lower))
    other = broken_off(open_stages(lower=lower), trail_id=OTHER_TRAIL, sampling=SamplingParams(temperature=9.0, seed=1))
    stages = open_stages(lower=lower)
    first, second = moved(before, stages), moved(other, stages)
    expected = contents(other.stages, NUM_IN_TRAIL)
    lower.answers_at_once = False
    first.ask()
    late, lower.asked_trails = lower.asked_trails, []
    stages.send(make_cancel((first.run_id, 0), will_resume=True))
    lower.answers_at_once = True
    while lower.asked:
        lower.settle()
    second.ask()
    lower.asked_trails = late
    while lower.asked_trails:
        lower.settle_trail()
    stages.send()

    assert [one.restored.num_tokens for one in stages.take_restored()] == [NUM_IN_TRAIL]
    assert contents(stages, NUM_IN_TRAIL) == expected


def test_what_an_epoch_before_asked_for_does_not_get_into_a_run_that_is_numbered_alike(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    before = broken_off(open_stages((), lower=lower))
    other = broken_off(
        open_stages((), lower=lower), trail_id=OTHER_TRAIL, sampling=SamplingParams(temperature=9.0, seed=1)
    )
    stages = open_stages((), lower=lower)
    first, second = moved(before, stages), moved(other, stages)
    lower.answers_at_once = False
    first.ask()
    lower.settle()
    stages.rebase()
    stages.send()
    second.ask()
    assert second.run_id == first.run_id

    # The trail of the first, then that of the second.
    for _ in range(2):
        lower.settle_trail()
        stages.send()

    assert [one.restored.num_tokens for one in stages.take_restored()] == [NUM_IN_TRAIL]
    assert contents(stages, NUM_IN_TRAIL) == contents(other.stages, NUM_IN_TRAIL)
