"""How many devices a fleet should have: what an operator may say, and what the queue says."""

from __future__ import annotations

import pytest

from launch.scaling import DOWN_S, SETTLE_S, UP_S, Bounds, QueueScaler, parse_bounds, parse_count, scaled
from shoal.errors import ConfigError

LATER = 1000.0


def make_scaler(least: int = 1, most: int = 3) -> QueueScaler:
    return QueueScaler(Bounds("tablet", least, most), now=0.0)


def decide(
    scaler: QueueScaler, now: float, *, count: int = 1, num_devices: int = 2, waiting: int = 0, running: int = 0
) -> int:
    return scaler.decide(count, num_devices, waiting, running, now)


def test_a_count_is_read() -> None:
    assert parse_count("tablet=4") == ("tablet", 4)


@pytest.mark.parametrize("text", ["tablet", "=4", "tablet=", "tablet=-1", "tablet=four", "tablet=257", "tablet=²"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=COUNT"):
        parse_count(text)


def test_bounds_are_read() -> None:
    assert parse_bounds("tablet=0..4") == Bounds("tablet", 0, 4)


@pytest.mark.parametrize("text", ["tablet=4", "tablet=3..1", "tablet=0..0", "=1..2", "tablet=1..x", "tablet=1..257"])
def test_what_are_no_bounds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"NAME=LEAST\.\.MOST"):
        parse_bounds(text)


def test_further_devices_come_last_so_that_the_others_keep_their_names() -> None:
    assert scaled(["tablet", "phone"], "tablet", 3) == ["tablet", "phone", "tablet", "tablet"]


def test_the_last_of_a_name_go_first() -> None:
    assert scaled(["tablet", "phone", "tablet", "tablet:latency"], "tablet", 1) == ["tablet", "phone", "tablet:latency"]


def test_a_fleet_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no device"):
        scaled(["tablet", "tablet"], "tablet", 0)


def test_a_queue_that_stays_full_brings_another_device() -> None:
    scaler = make_scaler()

    assert decide(scaler, LATER, waiting=9) == 1
    assert decide(scaler, LATER + UP_S, waiting=9) == 2


def test_a_queue_that_was_full_for_a_moment_brings_none() -> None:
    scaler = make_scaler()
    decide(scaler, LATER, waiting=9)
    decide(scaler, LATER + 1.0, waiting=0, running=9)

    assert decide(scaler, LATER + UP_S, waiting=9) == 1


def test_nothing_changes_until_the_last_change_has_had_its_effect() -> None:
    scaler = make_scaler()
    decide(scaler, LATER, waiting=9)
    changed_at = LATER + UP_S
    assert decide(scaler, changed_at, waiting=9) == 2

    decide(scaler, changed_at + 1.0, count=2, waiting=20, num_devices=3)

    assert decide(scaler, changed_at + SETTLE_S - 0.1, count=2, num_devices=3, waiting=20) == 2
    assert decide(scaler, changed_at + SETTLE_S, count=2, num_devices=3, waiting=20) == 3


def test_no_more_come_than_may() -> None:
    scaler = make_scaler(most=1)
    decide(scaler, LATER, waiting=99)

    assert decide(scaler, LATER + UP_S, waiting=99) == 1


def test_a_fleet_that_is_idle_for_long_gives_one_back() -> None:
    scaler = make_scaler()

    assert decide(scaler, LATER, count=2) == 2
    assert decide(scaler, LATER + DOWN_S - 1.0, count=2) == 2
    assert decide(scaler, LATER + DOWN_S, count=2) == 1


def test_one_that_still_has_a_queue_is_not_idle() -> None:
    scaler = make_scaler()
    decide(scaler, LATER, count=2, waiting=1)

    assert decide(scaler, LATER + DOWN_S, count=2, waiting=1) == 2


def test_no_fewer_stay_than_may() -> None:
    scaler = make_scaler()
    decide(scaler, LATER, count=1)

    assert decide(scaler, LATER + DOWN_S, count=1) == 1


def test_one_that_is_busy_without_a_queue_keeps_what_it_has() -> None:
    scaler = make_scaler()
    decide(scaler, LATER, count=2, running=2)

    assert decide(scaler, LATER + DOWN_S, count=2, running=2) == 2


@pytest.mark.parametrize(("count", "decided"), [(0, 1), (5, 3)])
def test_what_is_out_of_bounds_is_brought_within_them_at_once(count: int, decided: int) -> None:
    assert decide(make_scaler(), 0.0, count=count) == decided
