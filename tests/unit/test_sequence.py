"""The state machine and the token arithmetic of one sequence."""

from __future__ import annotations

import pytest

from orchestrator.core.sequence import TRANSITIONS, SequenceState
from shoal.errors import InternalError
from shoal.types import FinishReason, SlotId
from tests.support.builders import STOP_ID, TOKEN_ID, make_sequence


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


def test_a_stop_token_ends_the_answer_and_is_kept() -> None:
    sequence = make_sequence(max_tokens=4)
    assert sequence.append(TOKEN_ID) is None
    assert sequence.append(STOP_ID) is FinishReason.STOP
    assert sequence.output_token_ids == [TOKEN_ID, STOP_ID]


def test_the_last_allowed_token_ends_the_answer_by_length() -> None:
    sequence = make_sequence(max_tokens=2)
    assert sequence.append(TOKEN_ID) is None
    assert sequence.append(TOKEN_ID) is FinishReason.LENGTH


def test_a_stop_token_in_the_last_place_counts_as_stop() -> None:
    assert make_sequence(max_tokens=1).append(STOP_ID) is FinishReason.STOP


def test_the_newest_answer_token_is_fed_behind_all_earlier_tokens() -> None:
    sequence = make_sequence(num_prompt=5)
    sequence.append(TOKEN_ID)
    assert sequence.decode_position == 5
    sequence.append(TOKEN_ID)
    assert sequence.decode_position == 6


def test_a_slot_held_while_waiting_breaks_an_invariant() -> None:
    sequence = make_sequence()
    sequence.check_invariants()
    sequence.slot = SlotId(0)
    with pytest.raises(AssertionError):
        sequence.check_invariants()


def test_an_answer_before_the_prompt_is_dispatched_breaks_an_invariant() -> None:
    sequence = make_sequence(num_prompt=5)
    sequence.append(TOKEN_ID)
    with pytest.raises(AssertionError):
        sequence.check_invariants()
