"""What every tier of KV blocks keeps to, whatever it stores them in; and what the tier in memory loses first.

The contract comes first, for all implementations; then retention.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from shoal.kv import BlockKey
from tests.support.clock import FakeClock
from worker.kv.tiers import HostTier, KVTier, Refusal, TierStats

MakeTier = Callable[[int, Callable[[], float]], KVTier]
IMPLEMENTATIONS: dict[str, MakeTier] = {"host": HostTier}


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def put(
    tier: KVTier, number: int, num_bytes: int = 10, *, after: int | None = None, cost_s: float = 1.0, fill: int = 0
) -> bool:
    data = bytes([fill or number]) * num_bytes
    return tier.put(key(number), data, parent=None if after is None else key(after), cost_s=cost_s)


def read(tier: KVTier, *numbers: int) -> None:
    """Use blocks, which must be there, and let go of them."""
    assert tier.get(keys(*numbers)).keys() == set(keys(*numbers))
    tier.release(keys(*numbers))


def present(tier: KVTier, *numbers: int) -> list[int]:
    return [number for number in numbers if tier.contains(key(number))]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
def tier(request: pytest.FixtureRequest, clock: FakeClock) -> KVTier:
    """A tier that holds three blocks of ten bytes."""
    make_tier: MakeTier = request.param
    return make_tier(30, clock.now)


def test_what_was_put_comes_back_and_what_was_not_is_missing(tier: KVTier) -> None:
    tier.put(key(1), b"\0\xff\r\n", parent=None, cost_s=1.0)
    tier.put(key(2), b"", parent=key(1), cost_s=1.0)
    assert tier.get(keys(1, 2, 3)) == {key(1): b"\0\xff\r\n", key(2): b""}
    assert tier.stats == TierStats(hits=2, misses=1, puts=2)


def test_asking_whether_a_block_is_there_is_no_use_of_it(tier: KVTier) -> None:
    put(tier, 1)
    assert present(tier, 1, 2) == [1]
    assert tier.stats == TierStats(puts=1)


def test_the_budget_holds_whatever_is_put(tier: KVTier) -> None:
    for number in range(1, 20):
        put(tier, number, num_bytes=number % 13)
        assert tier.used_bytes <= tier.budget_bytes == 30
    assert put(tier, 20, num_bytes=30)
    assert (present(tier, *range(1, 21)), tier.used_bytes) == ([20], 30)


def test_a_block_larger_than_the_budget_is_refused_and_costs_nobody_anything(tier: KVTier) -> None:
    put(tier, 1)
    assert not put(tier, 2, num_bytes=31)
    assert not put(tier, 1, num_bytes=31)
    assert tier.get(keys(1, 2)) == {key(1): b"\1" * 10}
    assert tier.stats.refused == {Refusal.TOO_LARGE: 2}


def test_new_bytes_replace_the_old_ones(tier: KVTier) -> None:
    put(tier, 1, num_bytes=10)
    assert put(tier, 1, num_bytes=4, fill=9)
    assert tier.get(keys(1)) == {key(1): b"\x09" * 4}
    assert tier.used_bytes == 4
    assert tier.stats == TierStats(hits=1, puts=1, replacements=1)


def test_larger_bytes_for_a_block_take_the_room_of_others_not_its_own(tier: KVTier) -> None:
    put(tier, 1, cost_s=0.1)
    put(tier, 2)
    put(tier, 3)
    assert put(tier, 1, num_bytes=20, cost_s=0.1)
    assert len(present(tier, 2, 3)) == 1
    assert tier.get(keys(1)) == {key(1): b"\1" * 20}


def test_a_block_that_is_read_stays_and_keeps_its_bytes(tier: KVTier) -> None:
    put(tier, 1, cost_s=0.0)
    held = tier.get(keys(1))
    for number in range(2, 9):
        assert put(tier, number)
    assert not put(tier, 1, fill=7)
    assert tier.get(keys(1)) == held == {key(1): b"\1" * 10}
    assert tier.stats.refused == {Refusal.IN_USE: 1}


def test_a_block_read_twice_stays_until_both_let_go(tier: KVTier) -> None:
    put(tier, 1, num_bytes=30)
    tier.get(keys(1))
    tier.get(keys(1))
    tier.release(keys(1))
    assert not put(tier, 2)
    assert tier.stats.refused == {Refusal.NO_ROOM: 1}
    tier.release(keys(1))
    assert put(tier, 2)
    assert present(tier, 1, 2) == [2]


def test_a_key_asked_for_twice_at_once_is_read_once(tier: KVTier) -> None:
    put(tier, 1, num_bytes=30)
    assert tier.get(keys(1, 1, 2, 2)) == {key(1): b"\1" * 30}
    tier.release(keys(1))
    assert put(tier, 2)
    assert tier.stats == TierStats(hits=1, misses=1, puts=2, evictions=1)


def test_a_pinned_block_stays_until_its_time_is_over(tier: KVTier, clock: FakeClock) -> None:
    put(tier, 1, num_bytes=30)
    assert tier.pin(keys(1, 2), ttl_s=5.0) == 1
    clock.move_to(4.9)
    assert not put(tier, 2)
    clock.move_to(5.0)
    assert put(tier, 2)
    assert present(tier, 1, 2) == [2]
    assert (tier.stats.pins_expired, tier.stats.refused) == (1, {Refusal.NO_ROOM: 1})


def test_pins_last_as_long_as_the_longest(tier: KVTier, clock: FakeClock) -> None:
    put(tier, 1, num_bytes=30)
    for ttl_s in (2.0, 6.0, 3.0):
        tier.pin(keys(1), ttl_s)
    clock.move_to(5.9)
    assert not put(tier, 2)
    clock.move_to(6.0)
    assert put(tier, 2)
    assert tier.stats.pins_expired == 1


def test_a_pin_outlives_new_bytes_but_not_a_deletion(tier: KVTier) -> None:
    put(tier, 1)
    tier.pin(keys(1), ttl_s=5.0)
    put(tier, 1, num_bytes=30)
    assert not put(tier, 2)
    assert tier.delete(keys(1)) == 1
    put(tier, 1, num_bytes=30)
    assert put(tier, 2)


def test_deleted_blocks_are_gone_even_pinned_ones(tier: KVTier) -> None:
    put(tier, 1)
    put(tier, 2, after=1)
    tier.pin(keys(1), ttl_s=5.0)
    assert tier.delete(keys(1, 3)) == 1
    assert tier.get(keys(1, 2)) == {key(2): b"\2" * 10}
    assert (tier.used_bytes, tier.stats.deletions) == (10, 1)


def test_a_block_deleted_while_it_is_read_counts_until_it_is_released(tier: KVTier) -> None:
    put(tier, 1, num_bytes=30)
    tier.get(keys(1))
    assert tier.delete(keys(1)) == 1
    assert (present(tier, 1), tier.used_bytes) == ([], 30)
    assert not put(tier, 1)
    assert not put(tier, 2)
    assert tier.stats.refused == {Refusal.IN_USE: 1, Refusal.NO_ROOM: 1}
    tier.release(keys(1))
    assert tier.used_bytes == 0
    assert put(tier, 1)


def test_a_chain_loses_its_tail_first_however_cheap_its_head_is(tier: KVTier) -> None:
    put(tier, 1, cost_s=0.1)
    put(tier, 2, after=1, cost_s=1.0)
    put(tier, 3, after=2, cost_s=9.0)
    assert put(tier, 4, cost_s=0.1)
    assert present(tier, 1, 2, 3) == [1, 2]


def test_a_full_chain_is_not_continued_at_the_cost_of_its_own_blocks(tier: KVTier) -> None:
    put(tier, 1)
    put(tier, 2, after=1)
    put(tier, 3, after=2)
    assert not put(tier, 4, after=3)
    assert present(tier, 1, 2, 3, 4) == [1, 2, 3]


def test_a_pinned_tail_keeps_all_before_it(tier: KVTier) -> None:
    put(tier, 1)
    put(tier, 2, after=1)
    tier.pin(keys(2), ttl_s=5.0)
    put(tier, 3)
    assert put(tier, 4)
    assert not put(tier, 5, num_bytes=11)
    assert present(tier, 1, 2) == [1, 2]


def test_a_parent_that_comes_after_its_child_still_goes_after_it(tier: KVTier) -> None:
    put(tier, 2, after=1, cost_s=9.0)
    put(tier, 1, cost_s=0.1)
    put(tier, 3, cost_s=99.0)
    assert put(tier, 4, cost_s=99.0)
    assert present(tier, 1, 2, 3) == [1, 3]


def test_a_parent_goes_only_after_all_that_continue_it(tier: KVTier) -> None:
    put(tier, 1, cost_s=0.1)
    put(tier, 2, after=1)
    put(tier, 3, after=1)
    tier.delete(keys(2))
    assert put(tier, 4, num_bytes=20)
    assert present(tier, 1, 3) == [1]


# Retention, of the tier in memory.


@pytest.fixture
def host(clock: FakeClock) -> HostTier:
    return HostTier(30, clock.now)


@pytest.mark.parametrize(
    ("kept", "lost"), [({"cost_s": 3.0}, {"cost_s": 2.0}), ({"num_bytes": 7}, {"num_bytes": 13})], ids=["cost", "size"]
)
def test_what_costs_more_for_its_bytes_stays(host: HostTier, kept: dict[str, float], lost: dict[str, float]) -> None:
    put(host, 1, **kept)  # type: ignore[arg-type]
    put(host, 2, **lost)  # type: ignore[arg-type]
    put(host, 3, cost_s=50.0)
    put(host, 4, cost_s=50.0)
    assert present(host, 1, 2, 3, 4) == [1, 3, 4]


def test_what_is_used_more_often_stays(host: HostTier) -> None:
    for number in (1, 2, 3):
        put(host, number)
    read(host, 1, 3)
    put(host, 4)
    assert present(host, 1, 2, 3, 4) == [1, 3, 4]


def test_of_equal_blocks_the_one_used_longest_ago_goes(host: HostTier) -> None:
    for number in (1, 2, 3):
        put(host, number)
    read(host, 2)
    read(host, 1)
    read(host, 3)
    put(host, 4, cost_s=5.0)
    assert present(host, 1, 2, 3, 4) == [1, 3, 4]


def test_new_bytes_do_not_make_a_block_unpopular(host: HostTier) -> None:
    put(host, 1, cost_s=0.6)
    read(host, 1)
    put(host, 2)
    put(host, 3)
    put(host, 1, cost_s=0.6)
    put(host, 4)
    assert present(host, 1, 2, 3) == [1, 3]


def test_a_single_pass_over_many_blocks_does_not_drive_out_a_popular_one(host: HostTier) -> None:
    put(host, 1)
    for _ in range(9):
        read(host, 1)
    for number in range(2, 10):
        put(host, number)
    assert present(host, 1) == [1]


def test_what_was_popular_long_ago_goes_in_the_end(host: HostTier) -> None:
    put(host, 1)
    for _ in range(9):
        read(host, 1)
    for number in range(2, 40):
        put(host, number)
    assert present(host, 1) == []


def test_a_cheap_head_that_goes_late_does_not_make_new_blocks_look_old(host: HostTier) -> None:
    put(host, 1, cost_s=0.1)
    put(host, 2, after=1, cost_s=5.0)
    put(host, 3, cost_s=9.0)
    put(host, 4, cost_s=9.0)
    put(host, 5, cost_s=5.0)
    assert present(host, 1, 2, 3, 4, 5) == [3, 4, 5]
    put(host, 6)
    assert present(host, 3, 4, 5, 6) == [4, 5, 6]


def test_releasing_what_nobody_reads_is_a_bug_of_the_caller(host: HostTier) -> None:
    put(host, 1)
    with pytest.raises(AssertionError, match="nobody reads it"):
        host.release(keys(1))


@pytest.mark.parametrize("cost_s", [-1.0, math.nan, math.inf])
def test_a_cost_that_cannot_be_compared_is_a_bug_of_the_caller(host: HostTier, cost_s: float) -> None:
    with pytest.raises(AssertionError, match="to compute"):
        put(host, 1, cost_s=cost_s)


def test_the_index_does_not_grow_with_use(host: HostTier, clock: FakeClock) -> None:
    put(host, 1)
    for now in range(1000):
        clock.move_to(now)
        read(host, 1)
        host.pin(keys(1), ttl_s=1e6)
        host.check_invariants()
    assert len(host._heap) + len(host._pins) < 200
