"""What of a device's state counts for where layers are: what lasts, and no longer than it does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.conditions import (
    COOL_S,
    ENOUGH_S,
    FIRST_STEP_S,
    HOT_S,
    MIN_FREE_BYTES,
    SHORT_S,
    STUCK_S,
    DeviceCondition,
    Lasting,
    is_stuck,
)
from orchestrator.core.thermal import LEVELS
from shoal.types import DeviceLimits, DeviceProfile, Telemetry, ThermalState

NOMINAL, MODERATE, HOT, CRITICAL = LEVELS
MIB = 2**20
WELL = Telemetry(rss_bytes=100 * MIB, free_memory_bytes=500 * MIB, battery_percent=80.0)


def make_condition(*, is_emulated: bool = False) -> DeviceCondition:
    profile = DeviceProfile(
        name="phone",
        kind="phone",
        memory_bytes=600 * MIB,
        max_batch=8,
        is_emulated=is_emulated,
        limits=DeviceLimits(critical_battery_percent=10.0),
    )
    return DeviceCondition(profile)


def heated(state: ThermalState, max_batch: int, until: float) -> DeviceCondition:
    condition = make_condition()
    condition.observe(WELL, state, max_batch, 0.0)
    condition.observe(WELL, state, max_batch, until)
    return condition


@pytest.mark.parametrize(
    ("state", "max_batch", "slow_down"), [(MODERATE, 6, 1.0), (HOT, 4, 2.0), (CRITICAL, 2, 4.0)], ids=lambda v: str(v)
)
def test_only_a_device_that_has_to_rest_counts_as_slower_and_by_what_it_may_still_do(
    state: ThermalState, max_batch: int, slow_down: float
) -> None:
    assert heated(state, max_batch, HOT_S).slow_down == slow_down


def test_heat_counts_only_when_it_has_lasted() -> None:
    assert heated(HOT, 4, HOT_S - 0.1).slow_down == 1.0


def test_heat_that_goes_in_between_begins_anew() -> None:
    condition = make_condition()
    for state, at in ((HOT, 0.0), (NOMINAL, 50.0), (HOT, 51.0), (HOT, 51.0 + HOT_S - 1.0)):
        condition.observe(WELL, state, 4, at)
    assert condition.slow_down == 1.0


def test_a_device_that_was_relieved_and_cools_counts_as_hot_for_long_for_its_heat_would_come_back() -> None:
    condition = heated(HOT, 4, HOT_S)

    assert condition.observe(WELL, NOMINAL, 8, HOT_S + 1.0) == ()
    assert condition.observe(WELL, NOMINAL, 8, HOT_S + COOL_S) == ()
    assert condition.slow_down == 2.0
    assert condition.observe(WELL, NOMINAL, 8, HOT_S + 1.0 + COOL_S) == (f"cool for {COOL_S:g} s",)
    assert condition.slow_down == 1.0


def test_what_begins_to_count_is_told_once() -> None:
    condition = make_condition()
    condition.observe(WELL, HOT, 4, 0.0)

    assert condition.observe(WELL, HOT, 4, HOT_S) == (f"hot for {HOT_S:g} s",)
    assert condition.observe(WELL, HOT, 4, HOT_S + 1.0) == ()


def drained_to(percent: float, *, is_charging: bool = False) -> Telemetry:
    return Telemetry(rss_bytes=100 * MIB, free_memory_bytes=500 * MIB, battery_percent=percent, is_charging=is_charging)


@pytest.mark.parametrize(
    ("telemetry", "is_spent"),
    [
        (drained_to(10.5), False),
        (drained_to(10.0), True),
        (drained_to(3.0, is_charging=True), False),
        (Telemetry(rss_bytes=100 * MIB, free_memory_bytes=500 * MIB), False),
        (Telemetry(), False),
        (Telemetry(rss_bytes=100 * MIB, free_memory_bytes=MIN_FREE_BYTES - 1), True),
        (Telemetry(rss_bytes=601 * MIB, free_memory_bytes=500 * MIB), True),
    ],
    ids=["enough", "low", "charging", "no battery", "silent", "little free", "over its budget"],
)
def test_a_device_is_spent_when_its_battery_or_memory_is(telemetry: Telemetry, is_spent: bool) -> None:
    condition = make_condition()
    condition.observe(telemetry, NOMINAL, 8, 0.0)
    assert not condition.is_spent

    condition.observe(telemetry, NOMINAL, 8, SHORT_S)

    assert condition.is_spent is is_spent
    assert bool(condition.causes) is is_spent


def test_an_emulated_device_may_use_all_of_its_budget() -> None:
    condition = make_condition(is_emulated=True)
    for now in (0.0, SHORT_S):
        condition.observe(Telemetry(rss_bytes=600 * MIB, free_memory_bytes=0), NOMINAL, 8, now)
    assert not condition.is_spent


def test_a_battery_that_is_charged_a_little_does_not_count_again_yet() -> None:
    condition = make_condition()
    for now in (0.0, SHORT_S):
        condition.observe(drained_to(9.0), NOMINAL, 8, now)
    for now in (SHORT_S + 1.0, SHORT_S + 1.0 + 2 * ENOUGH_S):
        condition.observe(drained_to(19.0), NOMINAL, 8, now)
    assert condition.causes == ("battery at 19 %",)

    for now in (500.0, 500.0 + ENOUGH_S):
        condition.observe(drained_to(21.0), NOMINAL, 8, now)
    assert not condition.is_spent


@pytest.mark.parametrize(
    ("busy_s", "longest_step_s", "is_so"),
    [
        (0.0, 0.05, False),
        (5.0, 0.05, False),
        (STUCK_S, 0.05, False),
        (STUCK_S + 0.1, 0.05, True),
        (60.0, 4.0, False),
        (80.1, 4.0, True),
        (FIRST_STEP_S, None, False),
        (FIRST_STEP_S + 1.0, None, True),
    ],
)
def test_slow_is_not_stuck(busy_s: float, longest_step_s: float | None, is_so: bool) -> None:
    assert is_stuck(busy_s, longest_step_s) is is_so


@given(looks=st.lists(st.tuples(st.booleans(), st.floats(0.1, 20.0)), max_size=60))
def test_what_lasts_changes_no_more_often_than_its_times_allow(looks: list[tuple[bool, float]]) -> None:
    lasting, now, changes = Lasting(10.0, 30.0), 0.0, [0.0]
    for is_seen, after_s in looks:
        now += after_s
        before = lasting.is_so
        if lasting.observe(is_seen, now):
            assert now - changes[-1] >= (30.0 if before else 10.0) - 1e-9
            changes.append(now)
            assert lasting.is_so is is_seen


@given(
    reports=st.lists(
        st.tuples(st.sampled_from(LEVELS), st.integers(1, 8), st.floats(0.0, 100.0), st.floats(0.1, 400.0)), max_size=30
    )
)
def test_its_invariants_hold_whatever_is_reported(reports: list[tuple[ThermalState, int, float, float]]) -> None:
    condition, now = make_condition(), 0.0
    for state, max_batch, percent, after_s in reports:
        now += after_s
        condition.observe(drained_to(percent), state, max_batch, now)
        condition.check_invariants()
