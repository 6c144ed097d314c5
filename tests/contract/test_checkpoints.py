"""What stages of a real tiny model write of running answers, when they do, and until when it is there."""

from __future__ import annotations

from collections.abc import Callable

from shoal.types import SamplingParams
from tests.support.kv_reuse import Open, model, open_stages
from tests.support.lower_tier import MemoryLowerTier
from tests.support.stages import make_cancel
from tests.support.trails import (
    MORE,
    NUM_RESUMABLE,
    OTHER_TRAIL,
    TRAIL,
    Answer,
    broken_off,
    goes_on_as,
    moved,
    undisturbed,
)
from worker.checkpoints import MAX_LAST_SEGMENTS
from worker.kv.trail import Segment

__all__ = ["model", "open_stages"]

THREE_STAGES = (1, 2)


def test_nothing_is_checkpointed_of_a_sequence_without_a_trail(open_stages: Open) -> None:
    lower = MemoryLowerTier()

    broken_off(open_stages(lower=lower), trail_id=b"")

    assert lower.trails == {}


def test_a_trail_begins_behind_the_named_blocks_of_the_prompt(open_stages: Open) -> None:
    lower = MemoryLowerTier()

    broken_off(open_stages(lower=lower))

    assert {(one.start, one.stop) for one in lower.trails[TRAIL]} == {
        (start, start + 8) for start in range(192, 240, 8)
    }
    assert len(lower.trails[TRAIL]) == 12


def test_the_end_of_a_sequence_deletes_its_trail(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = broken_off(open_stages(lower=lower))

    answer.stages.send(make_cancel((answer.run_id, 0)))

    assert lower.trails == {}


def test_a_sequence_that_goes_on_later_leaves_all_it_has_computed(open_stages: Open) -> None:
    expected = undisturbed(open_stages)
    lower = MemoryLowerTier()
    answer = broken_off(open_stages(lower=lower))
    answer.stages.send(make_cancel((answer.run_id, 0), will_resume=True))

    restored = answer.restore()

    assert restored.num_tokens == NUM_RESUMABLE
    answer.go_on(restored)
    goes_on_as(answer, expected)


class SparingTier(MemoryLowerTier):
    """Trails have had their share of it."""

    def takes_segment(self, num_bytes: int, *, is_urgent: bool = False) -> bool:
        return is_urgent


def test_what_a_sequence_needs_to_go_on_later_does_not_wait_for_its_share(open_stages: Open) -> None:
    lower = SparingTier()
    answer = broken_off(open_stages(lower=lower))
    assert lower.trails == {}

    answer.stages.send(make_cancel((answer.run_id, 0), will_resume=True))

    assert max(one.stop for one in lower.trails[TRAIL]) == NUM_RESUMABLE


def test_no_more_than_some_segments_are_written_for_that_while_others_wait(open_stages: Open) -> None:
    lower = SparingTier()
    # Without named blocks its trail begins with the first token.
    answer = broken_off(open_stages(lower=lower), names=())

    answer.stages.send(make_cancel((answer.run_id, 0), will_resume=True))

    assert 8 * MAX_LAST_SEGMENTS < NUM_RESUMABLE
    assert max(one.stop for one in lower.trails[TRAIL]) == 8 * MAX_LAST_SEGMENTS


def test_stages_that_are_unloaded_leave_all_that_is_in_their_slots(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    before = broken_off(open_stages(lower=lower))
    for runner in before.stages.stages:
        runner.close()

    assert moved(before, open_stages(lower=lower)).restore().num_tokens == NUM_RESUMABLE


def test_a_tier_without_room_gets_later_what_it_did_not_take(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    lower.segment_room = 3
    answer = broken_off(open_stages((), lower=lower))
    answer.decode(3)
    assert len(lower.trails[TRAIL]) == 3

    answer.decode(MORE)
    assert lower.segment_room == 0
    lower.segment_room = 100
    answer.stages.keep_up()

    assert max(one.stop for one in lower.trails[TRAIL]) == 248


def test_a_segment_that_was_lost_on_its_way_is_written_again(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = Answer(open_stages((), lower=lower))
    answer.begin()
    answer.decode(30)
    lower.loses_segments, lower.segment_room = True, 1
    answer.decode(10)
    assert max(one.stop for one in lower.trails[TRAIL]) == 224

    lower.loses_segments, lower.segment_room = False, 100
    answer.decode(1)

    assert sorted(one.start for one in lower.trails[TRAIL]) == list(range(192, 240, 8))


class LosingTier(MemoryLowerTier):
    """Stores nothing, and does not say so by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.untold: list[Callable[[], None]] = []

    def write_segment(self, trail_id: bytes, segment: Segment, packed: bytes, on_lost: Callable[[], None]) -> None:
        self.begun.append(segment.start)
        self.untold.append(on_lost)


def test_of_several_segments_that_were_lost_all_are_written_again(open_stages: Open) -> None:
    lower = LosingTier()
    answer = Answer(open_stages((), lower=lower))
    answer.begin()
    answer.decode(20)
    assert lower.begun == [192, 200, 208]

    for tell in lower.untold:
        tell()
    answer.decode(1)

    assert lower.begun[3:] == [192, 200, 208]


def test_a_slot_that_was_to_be_filled_for_another_sequence_is_not_checkpointed_as_that_one_s(
    open_stages: Open,
) -> None:
    lower = MemoryLowerTier()
    stages = open_stages(lower=lower)
    Answer(stages).ask()

    broken_off(stages, run_id=2, trail_id=OTHER_TRAIL)

    assert lower.trails.keys() == {OTHER_TRAIL}


def test_the_sequence_that_is_behind_most_is_next(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    lower.segment_room = 0
    stages = open_stages((), lower=lower)
    ahead, behind = Answer(stages), Answer(stages, run_id=2, slot=1, trail_id=OTHER_TRAIL)
    for answer, count in ((ahead, 10), (behind, 40)):
        answer.begin()
        answer.decode(count)

    lower.segment_room = 1
    stages.keep_up()

    assert lower.trails.keys() == {OTHER_TRAIL}


def test_what_a_retained_slot_had_no_room_to_write_is_written_when_its_sequence_goes_on(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    lower.segment_room = 0
    answer = broken_off(open_stages((), lower=lower))
    answer.stages.rebase()
    answer.go_on(answer.restore())

    lower.segment_room = 100
    answer.decode(1)

    assert sorted(one.start for one in lower.trails[TRAIL]) == list(range(192, 240, 8))


def test_two_sequences_have_a_trail_each(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    stages = open_stages(lower=lower)
    other_sampling = SamplingParams(temperature=9.0, seed=11, num_logprobs=5)
    expected = undisturbed(open_stages), undisturbed(open_stages, sampling=other_sampling)
    answers = broken_off(stages), broken_off(stages, run_id=2, slot=1, trail_id=OTHER_TRAIL, sampling=other_sampling)
    fresh = open_stages(lower=lower)
    # Each in the slot of the other.
    for answer, slot, whole in zip(answers, (1, 0), expected, strict=True):
        again = moved(answer, fresh)
        again.slot = slot
        again.go_on(again.restore())
        goes_on_as(again, whole)


def test_a_run_that_goes_on_deletes_what_an_earlier_one_computed_beyond(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = broken_off(open_stages(lower=lower))
    answer.stages.rebase()
    # Of the last tokens nobody has heard.
    answer.tokens = answer.tokens[:30]
    restored = answer.restore()
    assert restored.num_tokens == 229

    answer.go_on(restored)

    assert max(one.stop for one in lower.trails[TRAIL]) == 224
    answer.decode(15)
    assert max(one.stop for one in lower.trails[TRAIL]) == 240


def test_what_was_restored_from_a_trail_is_not_written_again_and_goes_on(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    answer = moved(broken_off(open_stages(lower=lower)), open_stages(lower=lower))
    lower.segment_room = 100

    answer.go_on(answer.restore())
    answer.decode(2)

    assert lower.segment_room == 100
    answer.decode(1)
    assert lower.segment_room == 98
    assert answer.stages.stages[0].has_segment is False
