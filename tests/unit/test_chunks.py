"""How prompts are cut into chunks, whatever room there is: no kernel gets a token alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.batch import ATTENTION_BLOCK, INDIVISIBLE_TOKENS, chunk_size
from orchestrator.core.prompts import MIN_CHUNK_TOKENS


@given(num_prompt=st.integers(2, 500), rooms=st.lists(st.integers(0, 70), min_size=1, max_size=40))
def test_no_cut_of_a_longer_prompt_has_a_chunk_of_one_token(num_prompt: int, rooms: list[int]) -> None:
    left = num_prompt
    for room in rooms:
        size = chunk_size(left, room)
        assert size != 1
        assert size <= room
        left -= size
        assert left != 1


@given(num_left=st.integers(1, 500), room=st.integers(MIN_CHUNK_TOKENS, 70))
def test_room_for_two_tokens_is_enough_to_go_on_but_for_the_last_three(num_left: int, room: int) -> None:
    assert (chunk_size(num_left, room) > 0) == (num_left != INDIVISIBLE_TOKENS or room >= INDIVISIBLE_TOKENS)


@given(num_left=st.integers(2, 500), room=st.integers(4, 70))
def test_at_most_two_tokens_of_the_room_are_given_away(num_left: int, room: int) -> None:
    assert chunk_size(num_left, room) >= min(num_left, room) - 2


@given(num_left=st.integers(2, 500), room=st.integers(4, 200))
def test_no_token_is_alone_in_a_block_of_attention(num_left: int, room: int) -> None:
    size = chunk_size(num_left, room)
    assert size >= 2
    assert size % ATTENTION_BLOCK != 1
    assert num_left - size != 1
