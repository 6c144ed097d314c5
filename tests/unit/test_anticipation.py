"""A device that may poll sleeps first, polls around the time it expects, and gives up in time."""

from __future__ import annotations

import pytest

from worker.anticipation import LATE_FACTOR, SLEEP_SHARE, Anticipation


def test_nothing_is_expected_before_anything_was_seen() -> None:
    assert Anticipation(0.01).plan() is None


def test_a_device_on_battery_never_polls() -> None:
    anticipation = Anticipation(0.0)
    anticipation.observe(0.008)

    assert anticipation.plan() is None


def test_the_first_part_of_an_expected_wait_is_slept() -> None:
    anticipation = Anticipation(1.0)
    anticipation.observe(0.010)

    wait = anticipation.plan()
    assert wait is not None
    assert wait.sleep_s == pytest.approx(SLEEP_SHARE * 0.010)
    assert wait.sleep_s + wait.poll_s == pytest.approx(LATE_FACTOR * 0.010)


def test_polling_is_bounded_by_what_the_device_allows() -> None:
    anticipation = Anticipation(0.002)
    anticipation.observe(0.100)

    wait = anticipation.plan()
    assert wait is not None
    assert wait.poll_s == 0.002


def test_short_waits_are_slept() -> None:
    anticipation = Anticipation(1.0)
    anticipation.observe(0.0005)

    assert anticipation.plan() is None


def test_the_expectation_follows_what_is_seen() -> None:
    anticipation = Anticipation(1.0)
    for _ in range(50):
        anticipation.observe(0.020)
    for _ in range(50):
        anticipation.observe(0.005)

    wait = anticipation.plan()
    assert wait is not None
    assert wait.sleep_s == pytest.approx(SLEEP_SHARE * 0.005, rel=0.01)
