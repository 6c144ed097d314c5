"""The thermal state of a device: when it is limited, by how much, and how slowly it is let go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.limits import Pace
from orchestrator.core.thermal import HOLD_S, LEVELS, ThermalMonitor
from shoal.types import DeviceLimits, Telemetry, ThermalState

NOMINAL, MODERATE, HOT, CRITICAL = LEVELS
LIMITS = DeviceLimits(
    moderate_c=60.0,
    hot_c=66.0,
    critical_c=71.0,
    low_battery_percent=20.0,
    critical_battery_percent=10.0,
    busy_load=0.5,
    max_batch=(8, 6, 4, 2),
)


def make_monitor(limits: DeviceLimits = LIMITS, max_batch: int = 8) -> ThermalMonitor:
    return ThermalMonitor(limits, max_batch)


def at(temperature_c: float) -> Telemetry:
    return Telemetry(temperature_c=temperature_c)


def heated_to(temperature_c: float) -> ThermalMonitor:
    monitor = make_monitor()
    monitor.observe(at(temperature_c), 0.0)
    return monitor


def test_a_device_begins_nominal_with_all_its_rows_and_no_limit_of_steps() -> None:
    monitor = make_monitor()

    assert (monitor.state, monitor.cause, monitor.pace()) == (NOMINAL, "", Pace(8, 0.0))


@pytest.mark.parametrize(
    ("temperature_c", "state", "pace"),
    [
        (59.9, NOMINAL, Pace(8, 0.0)),
        (60.0, MODERATE, Pace(6, 12.0)),
        (66.0, HOT, Pace(4, 6.0)),
        (71.0, CRITICAL, Pace(2, 3.0)),
        (110.0, CRITICAL, Pace(2, 3.0)),
    ],
)
def test_a_threshold_that_is_reached_limits_at_once_over_several_levels_too(
    temperature_c: float, state: ThermalState, pace: Pace
) -> None:
    monitor = make_monitor()

    assert monitor.observe(at(temperature_c), 0.0) is (state is not NOMINAL)
    assert (monitor.state, monitor.pace()) == (state, pace)


def test_the_cause_says_the_temperature_that_brought_it_there() -> None:
    monitor = heated_to(61.0)
    monitor.observe(at(63.5), 1.0)

    assert monitor.cause == "61.0 C"

    monitor.observe(at(71.52), 2.0)
    assert monitor.cause == "71.5 C"


def test_a_report_that_changes_nothing_is_not_a_change() -> None:
    monitor = heated_to(61.0)

    assert not monitor.observe(at(62.0), 1.0)
    assert not monitor.tick(2.0)


def test_it_stays_limited_while_within_three_degrees_of_the_threshold() -> None:
    monitor = heated_to(60.0)
    monitor.observe(at(57.0), 1.0)
    monitor.tick(1000.0)

    assert monitor.state is MODERATE


def test_it_is_let_go_when_it_was_three_degrees_cooler_for_the_hold_time() -> None:
    monitor = heated_to(60.0)
    monitor.observe(at(56.9), 5.0)

    assert not monitor.tick(5.0 + HOLD_S - 0.1)
    assert monitor.tick(5.0 + HOLD_S)
    assert (monitor.state, monitor.cause, monitor.pace()) == (NOMINAL, "", Pace(8, 0.0))


def test_a_relapse_within_the_hold_time_begins_it_anew() -> None:
    monitor = heated_to(60.0)
    monitor.observe(at(56.0), 0.0)
    monitor.observe(at(58.0), 9.0)
    monitor.observe(at(56.0), 10.0)

    assert not monitor.tick(19.0)
    assert monitor.tick(20.0)


def test_recovery_goes_down_one_level_at_a_time_with_a_hold_time_for_each() -> None:
    monitor = heated_to(80.0)
    monitor.observe(at(25.0), 1.0)

    changes = [(now, monitor.state) for now in range(2, 100) if monitor.tick(float(now))]

    assert changes == [(11, HOT), (21, MODERATE), (31, NOMINAL)]


def test_recovery_stops_at_the_level_that_the_temperature_still_asks_for() -> None:
    monitor = heated_to(71.0)
    monitor.observe(at(65.0), 1.0)
    for now in range(2, 100):
        monitor.tick(float(now))

    assert monitor.state is HOT


def test_heat_during_recovery_limits_at_once() -> None:
    monitor = heated_to(71.0)
    monitor.observe(at(50.0), 1.0)
    monitor.tick(11.0)
    assert monitor.state is HOT

    assert monitor.observe(at(72.0), 12.0)
    assert (monitor.state, monitor.cause) == (CRITICAL, "72.0 C")


@pytest.mark.parametrize(
    ("percent", "state", "cause"),
    [
        (21.0, NOMINAL, ""),
        (20.0, MODERATE, "battery at 20 %"),
        (10.0, CRITICAL, "battery at 10 %"),
        (0.0, CRITICAL, "battery at 0 %"),
    ],
)
def test_a_battery_that_runs_low_limits(percent: float, state: ThermalState, cause: str) -> None:
    monitor = make_monitor()
    monitor.observe(Telemetry(battery_percent=percent), 0.0)

    assert (monitor.state, monitor.cause) == (state, cause)


def test_a_battery_on_mains_power_limits_nothing() -> None:
    monitor = make_monitor()
    monitor.observe(Telemetry(battery_percent=1.0, is_charging=True), 0.0)

    assert monitor.state is NOMINAL


def test_a_battery_must_be_three_percent_fuller_or_charging_before_it_counts_as_recovered() -> None:
    monitor = make_monitor()
    monitor.observe(Telemetry(battery_percent=19.0), 0.0)
    monitor.observe(Telemetry(battery_percent=23.0), 1.0)
    monitor.tick(100.0)
    assert monitor.state is MODERATE

    monitor.observe(Telemetry(battery_percent=23.0, is_charging=True), 101.0)
    assert monitor.tick(111.0)
    assert monitor.state is NOMINAL


def test_other_programs_limit_only_after_they_were_busy_for_ten_seconds() -> None:
    monitor = make_monitor()
    for now in range(10):
        monitor.observe(Telemetry(other_load=0.8), float(now))
    assert monitor.state is NOMINAL

    assert monitor.observe(Telemetry(other_load=0.8), 10.0)
    assert (monitor.state, monitor.cause) == (MODERATE, "other programs take 80 %")


def test_a_pause_of_other_programs_begins_their_ten_seconds_anew() -> None:
    monitor = make_monitor()
    monitor.observe(Telemetry(other_load=0.8), 0.0)
    monitor.observe(Telemetry(other_load=0.4), 9.0)
    monitor.observe(Telemetry(other_load=0.8), 10.0)
    monitor.tick(19.9)

    assert monitor.state is NOMINAL


def test_a_busy_device_is_let_go_when_others_have_clearly_left_for_the_hold_time() -> None:
    monitor = make_monitor()
    monitor.observe(Telemetry(other_load=0.8), 0.0)
    monitor.tick(10.0)
    monitor.observe(Telemetry(other_load=0.45), 11.0)
    monitor.tick(100.0)
    assert monitor.state is MODERATE

    monitor.observe(Telemetry(other_load=0.3), 101.0)
    assert monitor.tick(111.0)
    assert monitor.state is NOMINAL


def test_the_worst_cause_counts() -> None:
    monitor = make_monitor()
    monitor.observe(Telemetry(temperature_c=67.0, battery_percent=15.0), 0.0)
    assert (monitor.state, monitor.cause) == (HOT, "67.0 C")

    monitor.observe(Telemetry(temperature_c=67.0, battery_percent=5.0), 1.0)
    assert (monitor.state, monitor.cause) == (CRITICAL, "battery at 5 %")


def test_a_cause_that_is_over_gives_way_to_the_one_that_still_holds() -> None:
    monitor = heated_to(61.0)
    monitor.observe(Telemetry(temperature_c=61.0, battery_percent=15.0), 1.0)
    assert monitor.cause == "61.0 C"

    assert not monitor.observe(Telemetry(temperature_c=40.0, battery_percent=15.0), 2.0)
    assert (monitor.state, monitor.cause) == (MODERATE, "battery at 15 %")


def test_a_device_without_sensors_stays_nominal() -> None:
    monitor = make_monitor()
    for now in range(100):
        monitor.observe(Telemetry(), float(now))

    assert monitor.state is NOMINAL


def test_a_sensor_that_fails_lets_the_device_go_gradually() -> None:
    monitor = heated_to(71.0)
    monitor.observe(Telemetry(), 1.0)

    assert [now for now in range(2, 50) if monitor.tick(float(now))] == [11, 21, 31]


def test_values_that_are_no_numbers_limit_nothing() -> None:
    monitor = make_monitor()
    nan = float("nan")
    monitor.observe(Telemetry(temperature_c=nan, battery_percent=nan, other_load=nan), 0.0)

    assert monitor.state is NOMINAL


def test_a_device_without_thresholds_is_never_limited() -> None:
    monitor = make_monitor(DeviceLimits())
    monitor.observe(Telemetry(temperature_c=140.0, battery_percent=0.0, other_load=1.0), 0.0)
    monitor.tick(100.0)

    assert monitor.state is NOMINAL


def test_a_threshold_may_be_left_out_in_between() -> None:
    monitor = make_monitor(DeviceLimits(critical_c=70.0))
    monitor.observe(at(69.9), 0.0)
    assert monitor.state is NOMINAL

    monitor.observe(at(70.0), 1.0)
    assert monitor.state is CRITICAL


@pytest.mark.parametrize(
    ("max_batch", "rows"), [(8, (8, 6, 4, 2)), (16, (16, 12, 8, 4)), (3, (3, 2, 1, 1)), (1, (1, 1, 1, 1))]
)
def test_a_device_that_says_nothing_of_its_batches_gives_up_a_quarter_of_them_a_level(
    max_batch: int, rows: tuple[int, ...]
) -> None:
    limits = DeviceLimits(moderate_c=1.0, hot_c=2.0, critical_c=3.0)
    monitors = [make_monitor(limits, max_batch) for _ in LEVELS]
    for degrees, monitor in enumerate(monitors):
        monitor.observe(at(float(degrees)), 0.0)

    assert tuple(monitor.pace().max_batch for monitor in monitors) == rows


def test_a_limit_never_allows_more_rows_than_the_profile() -> None:
    assert make_monitor(LIMITS, max_batch=5).pace() == Pace(5, 0.0)


def test_lists_of_another_version_count_as_not_given() -> None:
    limits = DeviceLimits(moderate_c=60.0, max_batch=(4, 2), steps_per_s=())
    monitor = make_monitor(limits, max_batch=8)
    monitor.observe(at(60.0), 0.0)

    assert monitor.pace() == Pace(6, 12.0)


def test_limits_that_would_stop_a_device_leave_it_a_row() -> None:
    limits = DeviceLimits(max_batch=(0, 0, 0, 0), steps_per_s=(-1.0, 0.0, 0.0, 0.0))

    assert make_monitor(limits).pace() == Pace(1, 0.0)


REPORTS = st.builds(
    Telemetry,
    temperature_c=st.none() | st.floats(20.0, 90.0),
    battery_percent=st.none() | st.floats(0.0, 100.0),
    is_charging=st.booleans(),
    other_load=st.floats(0.0, 1.0),
)


@given(st.lists(st.tuples(st.none() | REPORTS, st.floats(0.0, 20.0)), max_size=40))
def test_whatever_is_reported_levels_fall_one_at_a_time_after_a_hold_and_never_below_what_is_asked_for(
    reports: list[tuple[Telemetry | None, float]],
) -> None:
    monitor, now, changed_at, latest = make_monitor(), 0.0, 0.0, Telemetry()
    for report, gap_s in reports:
        now += gap_s
        before = LEVELS.index(monitor.state)
        changed = monitor.tick(now) if report is None else monitor.observe(report, now)
        latest = report or latest
        after = LEVELS.index(monitor.state)

        monitor.check_invariants()
        assert changed == (after != before)
        assert after >= before - 1
        assert after == before or after > before or now - changed_at >= HOLD_S
        fresh = make_monitor()
        fresh.observe(latest, 0.0)
        assert after >= LEVELS.index(fresh.state)
        changed_at = now if changed else changed_at
