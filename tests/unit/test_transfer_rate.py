"""What is expected of a link after some transfers."""

from __future__ import annotations

import pytest

from worker.kv.transfer_rate import SMALL_BYTES, TransferRate


def measured(*transfers: tuple[int, float]) -> TransferRate:
    rate = TransferRate()
    for num_bytes, seconds in transfers:
        rate.observe(num_bytes, seconds)
    return rate


def test_nothing_is_known_before_a_large_transfer() -> None:
    rate = measured((100, 0.01))

    assert rate.seconds(1000) is None
    assert rate.bytes_within(1.0) is None


def test_a_small_transfer_tells_the_round_trip_and_a_large_one_the_bandwidth() -> None:
    rate = measured((100, 0.01), (1_000_000, 0.11))

    assert rate.latency_s == pytest.approx(0.01)
    assert rate.seconds(2_000_000) == pytest.approx(0.21)
    assert rate.bytes_within(0.21) == pytest.approx(2_000_000, rel=0.01)


def test_no_time_at_all_leaves_no_room() -> None:
    assert measured((100, 0.01), (1_000_000, 0.11)).bytes_within(0.005) == 0


def test_a_slower_link_shows_within_a_few_transfers() -> None:
    rate = measured((1_000_000, 0.01), *[(1_000_000, 1.0)] * 12)

    assert rate.bytes_per_s is not None
    assert 1e6 < rate.bytes_per_s < 3e6


def test_one_that_was_given_up_halves_what_is_expected() -> None:
    rate = measured((1_000_000, 0.01))
    rate.observe_late(1_000_000, 0.5)

    assert rate.seconds(1_000_000) == pytest.approx(1.0)


def test_giving_up_early_makes_nobody_expect_more_than_before() -> None:
    rate = measured((1_000_000, 10.0))
    rate.observe_late(1_000_000, 0.001)

    assert rate.seconds(1_000_000) == pytest.approx(10.0)


def test_a_round_trip_that_came_too_late_says_nothing_of_the_bandwidth() -> None:
    rate = measured((1_000_000, 0.01))
    rate.observe_late(0, 0.5)

    assert rate.seconds(1_000_000) == pytest.approx(0.01)


def test_a_transfer_in_no_time_is_possible_where_clocks_are_coarse() -> None:
    rate = measured((10, 0.0), (SMALL_BYTES + 1, 0.0))

    rate.check_invariants()
    assert rate.seconds(1) is not None
