"""Links that have become slow, told from clocks that differ, hiccups and links that are far by nature."""

from __future__ import annotations

import pytest

from orchestrator.core.hops import DRIFT_S, FORGET_S, MIN_LATE_S, NUM_HOPS, TELL_EVERY_S, Hop, HopWatch
from shoal.types import WorkerId

A, B, C = (WorkerId(name) for name in "abc")
KNOWN_S = 0.002
NOW = 1000.0


def observe(
    watch: HopWatch, seconds: float, now: float = NOW, *, count: int = NUM_HOPS, known_s: float = KNOWN_S
) -> bool:
    for _ in range(count):
        watch.observe((A, B), seconds, known_s, now)
    has_changed = watch.update(now)
    watch.check_invariants()
    return has_changed


def test_a_hop_says_between_whom_it_was() -> None:
    assert Hop(None, A, 0.1).ends == (None, A)


@pytest.mark.parametrize("offset_s", [0.0, 5000.0, -3.0])
def test_a_link_that_takes_much_longer_than_before_is_late_whatever_the_clocks_say(offset_s: float) -> None:
    watch = HopWatch()
    assert not observe(watch, offset_s + 0.003)

    assert observe(watch, offset_s + 0.103, NOW + 1.0)

    assert watch.late_s == {(A, B): pytest.approx(0.1)}
    assert watch.by_s((A, B)) == watch.by_s((B, A)) == pytest.approx(0.1)
    assert watch.by_s((A, C)) == 0.0


def test_a_link_is_not_late_by_less_than_counts() -> None:
    watch = HopWatch()
    observe(watch, 0.003)

    assert not observe(watch, 0.003 + 0.9 * MIN_LATE_S, NOW + 1.0)


def test_a_link_that_is_far_by_nature_has_to_be_later_than_a_near_one() -> None:
    watch = HopWatch()
    observe(watch, 0.1, known_s=0.1)

    assert not observe(watch, 0.1 + 0.19, NOW + 1.0, known_s=0.1)
    assert observe(watch, 0.1 + 0.21, NOW + 2.0, known_s=0.1)


def test_hiccups_are_no_slow_link() -> None:
    watch = HopWatch()
    observe(watch, 0.003)

    assert not observe(watch, 3.0, NOW + 1.0, count=NUM_HOPS // 2 - 1)


def test_a_link_that_is_well_again_is_told_of_and_not_before_some_time_has_gone_by() -> None:
    watch = HopWatch()
    observe(watch, 0.003)
    observe(watch, 0.103, NOW)

    assert not observe(watch, 0.003, NOW + TELL_EVERY_S - 0.1)
    assert watch.late_s
    assert observe(watch, 0.003, NOW + TELL_EVERY_S)
    assert not watch.late_s


def test_a_link_that_is_less_late_than_counts_stays_late_until_it_is_by_half_of_that() -> None:
    watch = HopWatch()
    observe(watch, 0.003)
    observe(watch, 0.103, NOW)

    assert not observe(watch, 0.003 + 0.6 * MIN_LATE_S, NOW + TELL_EVERY_S)
    assert watch.late_s
    assert observe(watch, 0.003 + 0.4 * MIN_LATE_S, NOW + 2 * TELL_EVERY_S)
    assert not watch.late_s


def test_a_link_that_is_known_to_be_farther_by_now_may_be_later() -> None:
    watch = HopWatch()
    observe(watch, 0.003)

    assert not observe(watch, 0.103, NOW + 1.0, known_s=0.1)


def test_what_a_link_took_at_first_is_not_forgotten_within_a_second_however_long_it_took_that() -> None:
    watch = HopWatch()
    observe(watch, 0.0)
    observe(watch, 0.0, NOW + 4 * DRIFT_S)
    assert not observe(watch, 0.9 * MIN_LATE_S, NOW + 4 * DRIFT_S + 0.5)

    assert observe(watch, 1.1 * MIN_LATE_S, NOW + 4 * DRIFT_S + 1.0)


def test_it_is_told_of_again_only_if_it_is_much_later_or_much_less_late() -> None:
    watch = HopWatch()
    observe(watch, 0.0)
    observe(watch, 0.100, NOW)

    assert not observe(watch, 0.140, NOW + TELL_EVERY_S)
    assert observe(watch, 0.160, NOW + 2 * TELL_EVERY_S)
    assert watch.late_s == {(A, B): pytest.approx(0.16)}
    assert observe(watch, 0.070, NOW + 3 * TELL_EVERY_S)
    assert watch.late_s == {(A, B): pytest.approx(0.07)}


def test_clocks_that_drift_make_no_link_late() -> None:
    watch = HopWatch()
    # A hundred parts in a million, for ten minutes: sixty milliseconds.
    assert not any(observe(watch, 1e-4 * second, NOW + second) for second in range(600))


def test_a_link_that_stays_late_does_not_become_usual() -> None:
    watch = HopWatch()
    observe(watch, 0.003)
    observe(watch, 0.103, NOW)

    assert not any(observe(watch, 0.103, NOW + second) for second in range(0, int(2 * FORGET_S), 10))
    assert watch.late_s


def test_a_link_that_nothing_goes_over_is_forgotten() -> None:
    watch = HopWatch()
    observe(watch, 0.003)
    observe(watch, 0.103, NOW)

    assert not watch.update(NOW + FORGET_S - 1.0)
    assert watch.update(NOW + FORGET_S)
    assert watch.late_s == {}


def test_what_is_known_of_a_device_that_left_is_not_known_of_who_comes_after_it() -> None:
    watch = HopWatch()
    observe(watch, 0.003)
    observe(watch, 0.103, NOW)

    watch.forget(C)
    assert watch.late_s
    watch.forget(B)
    assert watch.late_s == {}
    assert not observe(watch, 5.0, NOW + TELL_EVERY_S), "its clock may be another one"
