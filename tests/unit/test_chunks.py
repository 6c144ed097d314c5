"""How prompts are cut into chunks, whatever room there is: no kernel gets a token alone, no chunk crosses a border."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.batch import ATTENTION_BLOCK, INDIVISIBLE_TOKENS, chunk_size
from orchestrator.core.limits import CHUNK_BORDERS, PREFILL_ROOM_TOKENS
from orchestrator.core.prompts import MIN_CHUNK_TOKENS
from shoal.kv import BLOCK_TOKENS
from tests.support.builders import make_limits

ROOMS = st.lists(st.integers(PREFILL_ROOM_TOKENS, 80), min_size=1, max_size=40)


def cut(num_prompt: int, num_restored: int, border: int, rooms: list[int]) -> list[tuple[int, int]]:
    """Where the chunks of a prompt begin and end, with room for as many tokens as the rooms say, over and over."""
    limits, chunks, position = make_limits(chunk_border=border), list[tuple[int, int]](), num_restored
    while position < num_prompt:
        num_left = limits.before_border(num_prompt - position, position)
        size = chunk_size(num_left, rooms[len(chunks) % len(rooms)])
        assert size > 0, f"{num_left} tokens from {position} on wait for ever"
        chunks.append((position, position + size))
        position += size
    return chunks


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


@given(st.integers(1, 700), st.integers(0, 3), st.sampled_from(CHUNK_BORDERS[1:]), ROOMS)
def test_no_chunk_crosses_a_border_or_is_of_one_token_but_for_a_last_one_behind_a_border(
    num_left: int, num_blocks: int, border: int, rooms: list[int]
) -> None:
    num_restored = num_blocks * BLOCK_TOKENS
    num_prompt = num_restored + num_left
    chunks = cut(num_prompt, num_restored, border, rooms)
    assert chunks[-1][1] == num_prompt
    for start, stop in chunks:
        assert start // border == (stop - 1) // border
        is_last_behind_border = start % border == 0 and stop == num_prompt
        assert (stop - start) % ATTENTION_BLOCK != 1 or (is_last_behind_border and stop - start == 1)


@given(st.integers(0, 20), st.sampled_from(CHUNK_BORDERS[1:]), ROOMS)
def test_a_last_token_behind_a_border_is_alone_however_the_prompt_is_cut(
    num_parts: int, border: int, rooms: list[int]
) -> None:
    start = num_parts * border
    assert cut(start + 1, 0, border, rooms)[-1] == (start, start + 1)


@given(st.integers(1, 700), ROOMS)
def test_prompts_are_cut_by_room_alone_where_there_are_no_borders(num_prompt: int, rooms: list[int]) -> None:
    sizes = [stop - start for start, stop in cut(num_prompt, 0, 0, rooms)]
    left = [num_prompt - done for done in accumulate(sizes, initial=0)]
    assert sizes == [chunk_size(rest, rooms[at % len(rooms)]) for at, rest in enumerate(left[:-1])]
