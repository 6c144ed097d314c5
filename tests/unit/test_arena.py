"""The arena takes memory as tokens are written, gives it back on release, and holds no more than it may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InternalError
from shoal.types import ShardShape
from tests.support.resident import on_linux, resident_bytes_at
from worker.kv.arena import MAX_CHUNK_TOKENS, Arena


def make_arena(
    *, num_slots: int = 4, slot_tokens: int = 1000, kv_tokens: int = 2000, head_dim: int = 64, num_kv_heads: int = 3
) -> Arena:
    shape = ShardShape(
        num_layers=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=64,
        vocab_size=288,
        num_slots=num_slots,
        slot_tokens=slot_tokens,
        kv_tokens=kv_tokens,
        is_first=True,
        is_last=True,
    )
    return Arena(shape)


def write_tokens(arena: Arena, slot: int, tokens: int) -> None:
    arena.array[:, :, slot, :, :tokens] = slot + 1
    arena.set_length(slot, tokens)


def test_pointers_lead_to_the_array_of_their_layer_half_and_slot() -> None:
    arena = make_arena()
    for layer, kv, slot in [(0, 0, 0), (0, 1, 2), (1, 0, 3), (1, 1, 1)]:
        assert arena.pointer(layer, kv, slot) == arena.array[layer, kv, slot].ctypes.data
        assert arena.pointer(layer, kv, slot) % 64 == 0


def test_a_slot_has_room_for_a_padded_chunk_after_its_last_token() -> None:
    arena = make_arena(slot_tokens=1000)
    assert arena.array.shape[4] == arena.capacity >= 1000 + MAX_CHUNK_TOKENS


@on_linux
def test_a_new_arena_takes_no_memory_for_the_room_it_reserves() -> None:
    arena = make_arena(num_slots=64, slot_tokens=100_000)
    assert arena.array.nbytes > 10 << 30
    assert resident_bytes_at(arena.pointer(0, 0, 0)) < 1 << 20


@on_linux
def test_a_slot_grows_by_pages_as_its_tokens_are_written_and_nothing_is_copied() -> None:
    arena = make_arena(num_slots=16, slot_tokens=8192, kv_tokens=16 * 8192)
    pointer, grown = arena.pointer(0, 0, 0), []
    for tokens in range(16, 1025, 16):
        before = resident_bytes_at(pointer)
        arena.array[:, :, 3, :, tokens - 16 : tokens] = tokens
        arena.set_length(3, tokens)
        grown.append(resident_bytes_at(pointer) - before)
    # 16 tokens of a head of 64 floats are a page.
    assert set(grown) == {2 * 2 * 3 * 4096}
    assert arena.pointer(0, 0, 0) == pointer
    assert arena.resident_bytes == sum(grown)


@on_linux
def test_an_arena_that_is_closed_gives_its_memory_back_though_somebody_has_a_view() -> None:
    arena = make_arena()
    write_tokens(arena, 1, 600)
    pointer, view = arena.pointer(0, 0, 0), arena.block(1, 0)
    arena.close()
    assert resident_bytes_at(pointer) == 0
    assert (view == 0).all()


def test_a_block_of_a_slot_is_read_and_filled_in_place() -> None:
    arena = make_arena()
    write_tokens(arena, 1, 600)
    arena.block(1, 2)[...] = 9
    assert arena.block(1, 2).shape == (2, 2, 3, 64, 64)
    assert (arena.array[:, :, 1, :, 128:192] == 9).all()
    assert (arena.array[:, :, 1, :, :128] == 2).all()
    assert (arena.array[:, :, 1, :, 192:600] == 2).all()


@pytest.mark.parametrize(
    ("slot", "tokens", "message"),
    [
        (4, 64, "slot 4 was to be filled; this shard has 4"),
        (-1, 64, "slot -1"),
        (0, 1024, "a slot of this shard holds 1000"),
        (0, 960, "slots would hold 2160 tokens; this shard holds 2000"),
    ],
)
def test_a_slot_is_not_filled_with_more_than_there_is_room_for(slot: int, tokens: int, message: str) -> None:
    arena = make_arena()
    write_tokens(arena, 1, 600)
    write_tokens(arena, 2, 600)
    with pytest.raises(InternalError, match=message):
        arena.check_fill(slot, tokens)


@on_linux
@pytest.mark.parametrize("head_dim", [64, 80, 8])
def test_memory_follows_what_is_written_and_stays_below_the_estimate(head_dim: int) -> None:
    arena = make_arena(head_dim=head_dim)
    write_tokens(arena, 1, 300)
    resident = resident_bytes_at(arena.pointer(0, 0, 0))
    assert 300 * 2 * 2 * 3 * head_dim * 4 <= resident <= arena.resident_bytes


@on_linux
@pytest.mark.parametrize(("head_dim", "num_kv_heads", "slot_tokens"), [(64, 3, 1000), (20, 1, 1100)])
def test_release_gives_memory_back_and_leaves_the_neighbours_alone(
    head_dim: int, num_kv_heads: int, slot_tokens: int
) -> None:
    """In the second case slots are no whole number of pages, and share some."""
    arena = make_arena(head_dim=head_dim, num_kv_heads=num_kv_heads, slot_tokens=slot_tokens)
    for slot in range(3):
        write_tokens(arena, slot, 600)
    before = resident_bytes_at(arena.pointer(0, 0, 0))
    arena.release(1)
    given_back = before - resident_bytes_at(arena.pointer(0, 0, 0))
    # Nothing but a page at either end of a slot may stay, where it is shared with a neighbour.
    assert given_back >= 2 * 2 * (num_kv_heads * 600 * head_dim * 4 - 2 * 4096)
    assert (arena.array[:, :, (0, 2), :, :600] == np.array([1, 3])[:, None, None, None]).all()
    assert (arena.length(0), arena.length(1), arena.length(2)) == (600, 0, 600)
    arena.check_invariants()


def test_rolling_back_keeps_counting_the_memory_that_was_touched() -> None:
    arena = make_arena()
    write_tokens(arena, 0, 600)
    taken = arena.resident_bytes
    arena.set_length(0, 10)
    assert arena.tokens_held == 10
    assert arena.resident_bytes == taken
    arena.release(0)
    assert arena.resident_bytes == 0


@pytest.mark.parametrize(
    ("slot", "position", "num_tokens", "message"),
    [
        (0, 11, 1, "from token 11, but it holds 10"),
        (0, -1, 1, "from token -1"),
        (4, 0, 1, "no such slot"),
        (0, 10, 0, "writes 0 tokens"),
        (0, 0, MAX_CHUNK_TOKENS + 1, f"at most {MAX_CHUNK_TOKENS}"),
        (1, 600, 401, "would hold 1001 tokens; a slot of this shard holds 1000"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(slot: int, position: int, num_tokens: int, message: str) -> None:
    arena = make_arena()
    write_tokens(arena, 0, 10)
    write_tokens(arena, 1, 600)
    with pytest.raises(InternalError, match=message):
        arena.check_room(slot, position, num_tokens)


def test_all_slots_together_hold_no_more_than_promised() -> None:
    arena = make_arena(kv_tokens=1500)
    write_tokens(arena, 0, 1000)
    arena.check_total({0: 1000, 1: 500})
    with pytest.raises(InternalError, match="would hold 1501 tokens; this shard holds 1500"):
        arena.check_total({1: 501})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500), st.booleans()), max_size=30))
def test_invariants_hold_whatever_is_written_rolled_back_and_released(actions: list[tuple[int, int, bool]]) -> None:
    arena = make_arena(kv_tokens=4000)
    held = dict.fromkeys(range(4), 0)
    for slot, tokens, releases in actions:
        if releases:
            arena.release(slot)
        else:
            arena.set_length(slot, tokens)
        held[slot] = 0 if releases else tokens
        arena.check_invariants()
        assert arena.tokens_held == sum(held.values())
        assert arena.resident_bytes >= arena.tokens_held * 2 * 2 * 3 * 64 * 4
