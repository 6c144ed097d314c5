"""Slots and the KV reserved with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.slots import PAGE_TOKENS, SlotPool, round_down_to_page, round_up_to_page
from shoal.types import SequenceId, SlotId


def acquire(pool: SlotPool, sequence_id: int, num_tokens: int = 10) -> int | None:
    return pool.acquire(SequenceId(sequence_id), num_tokens)


def test_the_lowest_free_slot_is_taken_first() -> None:
    pool = SlotPool(4, 1024)
    assert [acquire(pool, key) for key in (1, 2, 3)] == [0, 1, 2]
    pool.release(SequenceId(2))
    pool.release(SequenceId(1))
    assert acquire(pool, 4) == 0
    assert acquire(pool, 5) == 1
    assert acquire(pool, 6) == 3


def test_no_slot_is_left_once_all_are_held() -> None:
    pool = SlotPool(1, 1024)
    assert acquire(pool, 1) == 0
    assert acquire(pool, 2) is None
    assert pool.used_slots == 1


def test_reservations_occupy_whole_pages() -> None:
    pool = SlotPool(2, 1024)
    acquire(pool, 1, num_tokens=17)
    assert pool.used_tokens == 32


def test_a_reservation_that_exceeds_the_tokens_left_is_refused_and_changes_nothing() -> None:
    pool = SlotPool(2, 64)
    acquire(pool, 1, num_tokens=33)
    assert acquire(pool, 2, num_tokens=17) is None
    assert (pool.used_slots, pool.used_tokens) == (1, 48)
    assert acquire(pool, 2, num_tokens=16) == 1


def test_releasing_gives_slot_and_tokens_back() -> None:
    pool = SlotPool(1, 64)
    acquire(pool, 1, num_tokens=64)
    assert pool.release(SequenceId(1)) == 0
    assert (pool.used_slots, pool.used_tokens, pool.get(SequenceId(1))) == (0, 0, None)


def test_a_sequence_cannot_hold_two_slots() -> None:
    pool = SlotPool(2, 64)
    acquire(pool, 1)
    with pytest.raises(AssertionError, match="already holds"):
        acquire(pool, 1)


def test_what_nobody_holds_cannot_be_released() -> None:
    with pytest.raises(KeyError):
        SlotPool(1, 64).release(SequenceId(1))


def test_a_slot_lost_breaks_an_invariant() -> None:
    pool = SlotPool(2, 64)
    acquire(pool, 1)
    pool.check_invariants()
    pool._held.clear()
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check_invariants()


@given(st.integers(0, 10_000))
def test_rounding_goes_to_the_nearest_page_on_either_side(num_tokens: int) -> None:
    down, up = round_down_to_page(num_tokens), round_up_to_page(num_tokens)
    assert down % PAGE_TOKENS == up % PAGE_TOKENS == 0
    assert down <= num_tokens <= up
    assert up - down in (0, PAGE_TOKENS)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 90)), max_size=60))
def test_whatever_is_acquired_and_released_slots_and_tokens_add_up(actions: list[tuple[int, int]]) -> None:
    pool, held = SlotPool(4, 160), dict[int, int]()
    for key, num_tokens in actions:
        if key in held:
            assert pool.release(SequenceId(key)) == held.pop(key)
        else:
            slot = acquire(pool, key, num_tokens)
            if slot is not None:
                assert slot == min(set(range(4)) - set(held.values()))
                held[key] = SlotId(slot)
        pool.check_invariants()
        assert pool.used_slots == len(held)
