"""The state machine and the token arithmetic of one sequence."""

from __future__ import annotations

import pytest

from orchestrator.core.sequence import MAX_EVENTS, TRANSITIONS, RestoredPrefix, RunId, Sequence, SequenceState
from shoal.errors import InternalError
from shoal.types import FinishReason, SlotId
from tests.support.builders import STOP_ID, TOKEN_ID, make_sequence, with_blocks


def test_a_new_sequence_waits_without_a_slot() -> None:
    sequence = make_sequence(num_prompt=5, max_tokens=3)
    assert sequence.state is SequenceState.WAITING
    assert sequence.slot is None
    assert (sequence.num_prompt_left, sequence.num_output_left, sequence.num_tokens_max) == (5, 3, 8)


def test_the_table_has_every_state_and_leads_each_to_the_end() -> None:
    assert set(TRANSITIONS) == set(SequenceState)
    for state in set(SequenceState) - {SequenceState.FINISHED}:
        assert SequenceState.FINISHED in TRANSITIONS[state]
    assert not TRANSITIONS[SequenceState.FINISHED]


@pytest.mark.parametrize("state", SequenceState)
@pytest.mark.parametrize("target", SequenceState)
def test_only_transitions_of_the_table_are_possible(state: SequenceState, target: SequenceState) -> None:
    sequence = make_sequence()
    sequence.state = state
    if target in TRANSITIONS[state]:
        sequence.move_to(target)
        assert sequence.state is target
    else:
        with pytest.raises(InternalError):
            sequence.move_to(target)


def test_an_illegal_transition_tells_the_story_of_the_sequence() -> None:
    sequence = make_sequence(42, num_prompt=9, arrived_at=1.5)
    with pytest.raises(InternalError, match=r"sequence 42 is waiting .* arrived 1.5, .* 0 of 9 .* become decode"):
        sequence.move_to(SequenceState.DECODE)


def test_what_an_earlier_run_restored_is_nothing_to_a_later_one() -> None:
    sequence = with_blocks(make_sequence(num_prompt=200))
    sequence.begin_run(RunId(1), SlotId(0), 0.0)
    sequence.begin_restore(2, 128, 0.0)
    sequence.end_restore(RestoredPrefix(2, is_exact=False), 0.0)
    sequence.stop_run(1.0)

    sequence.begin_run(RunId(2), SlotId(0), 2.0)

    assert (sequence.num_dispatched, sequence.num_restored, sequence.is_kv_exact) == (0, 0, True)
    sequence.check_invariants()


def test_a_stop_token_ends_the_answer_and_is_kept() -> None:
    sequence = make_sequence(max_tokens=4)
    assert sequence.append(TOKEN_ID, 0.0) is None
    assert sequence.append(STOP_ID, 0.0) is FinishReason.STOP
    assert sequence.output_token_ids == [TOKEN_ID, STOP_ID]


def test_the_last_allowed_token_ends_the_answer_by_length() -> None:
    sequence = make_sequence(max_tokens=2)
    assert sequence.append(TOKEN_ID, 0.0) is None
    assert sequence.append(TOKEN_ID, 0.0) is FinishReason.LENGTH


def test_a_stop_token_in_the_last_place_counts_as_stop() -> None:
    assert make_sequence(max_tokens=1).append(STOP_ID, 0.0) is FinishReason.STOP


def test_the_newest_answer_token_is_fed_behind_all_earlier_tokens() -> None:
    sequence = make_sequence(num_prompt=5)
    sequence.append(TOKEN_ID, 0.0)
    assert sequence.next_input() == (5, TOKEN_ID)
    sequence.append(TOKEN_ID, 0.0)
    assert sequence.next_input() == (6, TOKEN_ID)


def test_a_slot_held_while_waiting_breaks_an_invariant() -> None:
    sequence = make_sequence()
    sequence.check_invariants()
    sequence.slot = SlotId(0)
    with pytest.raises(AssertionError):
        sequence.check_invariants()


def test_decoding_before_the_whole_prompt_is_dispatched_breaks_an_invariant() -> None:
    sequence = make_sequence(num_prompt=5)
    sequence.begin_run(RunId(1), SlotId(0), 0.0)
    sequence.check_invariants()
    sequence.move_to(SequenceState.DECODE)
    with pytest.raises(AssertionError):
        sequence.check_invariants()


def preempted(*token_ids: int, num_prompt: int = 5) -> Sequence:
    """A sequence that has this answer so far, and lost its slot at 4.0."""
    sequence = make_sequence(num_prompt=num_prompt, max_tokens=8, arrived_at=1.0)
    sequence.queued_at = 1.0
    sequence.begin_run(RunId(1), SlotId(0), 3.0)
    sequence.num_dispatched = num_prompt
    sequence.move_to(SequenceState.DECODE)
    for token_id in token_ids:
        sequence.append(token_id, 3.5)
    sequence.stop_run(4.0)
    return sequence


def test_a_sequence_that_loses_its_slot_waits_with_what_it_has_of_its_answer() -> None:
    sequence = preempted(11, 12)
    sequence.check_invariants()
    assert (sequence.state, sequence.slot, sequence.run_id) == (SequenceState.WAITING, None, None)
    assert (sequence.output_token_ids, sequence.num_prompt_left, sequence.num_output_left) == ([11, 12], 5, 6)


def test_the_known_tokens_are_fed_one_by_one_in_the_next_run() -> None:
    sequence = preempted(11, 12, 13)
    sequence.begin_run(RunId(2), SlotId(3), 6.0)
    sequence.num_dispatched = 5
    assert sequence.replay(11)
    fed = []
    while sequence.num_to_replay:
        fed.append(sequence.next_input())
        assert sequence.replay(sequence.output_token_ids[len(fed)])
    assert fed == [(5, 11), (6, 12)]
    assert sequence.next_input() == (7, 13)


def test_another_token_than_the_known_one_is_noticed_and_not_used() -> None:
    sequence = preempted(11, 12)
    sequence.begin_run(RunId(2), SlotId(3), 6.0)
    assert not sequence.replay(99)
    assert sequence.output_token_ids == [11, 12]
    assert sequence.num_to_replay == 1


def test_what_a_lost_slot_costs_counts_prompt_and_answer_of_this_run() -> None:
    sequence = preempted(11, 12, 13)
    sequence.begin_run(RunId(2), SlotId(3), 6.0)
    sequence.num_dispatched = 4
    assert sequence.num_held == 4
    sequence.num_dispatched = 5
    sequence.replay(11)
    assert sequence.num_held == 6


def test_time_without_a_slot_adds_up_over_all_waits() -> None:
    sequence = preempted(11)
    assert sequence.queue_s == 2.0
    sequence.begin_run(RunId(2), SlotId(0), 7.5)
    assert sequence.queue_s == 5.5


def test_the_story_of_a_sequence_has_what_happened_and_when() -> None:
    sequence = preempted(11)
    sequence.begin_run(RunId(2), SlotId(1), 6.0)
    sequence.finish(None, 9.0)
    assert [(one.at, one.what, one.detail) for one in sequence.events] == [
        (3.0, "admitted", "run 1 in slot 0"),
        (3.5, "first_token", ""),
        (6.0, "resumed", "run 2 in slot 1"),
        (9.0, "ended", "error"),
    ]


def test_a_story_that_gets_too_long_keeps_its_beginning() -> None:
    sequence = make_sequence()
    for number in range(MAX_EVENTS + 5):
        sequence.note(float(number), "moved")
    assert len(sequence.events) == MAX_EVENTS
    assert sequence.events[0].at == 0.0


class TestPace:
    def test_tokens_are_due_at_the_rate_that_was_asked_for(self) -> None:
        sequence = make_sequence(max_tokens_per_s=2.0)
        due = []
        for now in (10.0, 10.5, 11.1, 11.5):
            sequence.append(TOKEN_ID, now)
            due.append(sequence.next_token_at)
        assert due == [10.5, 11.0, 11.5, 12.0]

    def test_one_late_token_is_made_up_for_and_no_more(self) -> None:
        sequence = make_sequence(max_tokens_per_s=2.0)
        sequence.append(TOKEN_ID, 10.0)
        sequence.append(TOKEN_ID, 20.0)
        assert sequence.next_token_at == 20.0
        sequence.append(TOKEN_ID, 20.1)
        assert sequence.next_token_at == 20.5

    def test_without_a_rate_nothing_is_held_back(self) -> None:
        sequence = make_sequence()
        sequence.append(TOKEN_ID, 10.0)
        sequence.append(TOKEN_ID, 20.0)
        assert not sequence.is_paced
