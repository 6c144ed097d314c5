"""Emulation: the arithmetic of slow devices, slow links and small memories."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, ShardDoesNotFit
from shoal.memory import need_bytes
from shoal.types import BatteryModel, DeviceProfile, LinkProfile, ThermalModel
from worker.emulation import (
    ADVANCE_S,
    EmulatedDevice,
    LinkShaper,
    SlowDown,
    battery_after,
    check_fits,
    clock_at,
    temperature_after,
)

PHONE = DeviceProfile(name="phone-2", kind="phone", memory_bytes=1000)
# Alone it would end at 125 C: 25 + 0.5 / 0.005.
WARM = ThermalModel(ambient_c=25.0, heat_c_per_s=0.5, cooling_per_s=0.005)
BATTERY = BatteryModel(capacity_wh=10.0, start_percent=80.0, active_w=5.0, idle_w=1.0)

MODELS = st.builds(ThermalModel, st.floats(-40.0, 60.0), st.floats(0.0, 100.0), st.floats(1e-5, 10.0))
SHARES = st.floats(0.0, 1.0)
TEMPERATURES = st.floats(-40.0, 150.0)


def make_device(**fields: object) -> EmulatedDevice:
    defaults: dict[str, object] = {"is_emulated": True, "speed": 0.5, "thermal": WARM, "battery": BATTERY}
    return EmulatedDevice(replace(PHONE, **{**defaults, **fields}), now=100.0)  # type: ignore[arg-type]


def degrees(device: EmulatedDevice, now: float) -> float:
    temperature_c = device.condition(now).temperature_c
    assert temperature_c is not None
    return temperature_c


def work(device: EmulatedDevice, begin: float, end: float) -> None:
    device.begin(begin)
    device.end(end)


def test_half_the_speed_takes_twice_the_time() -> None:
    assert SlowDown(0.5).extra_seconds(0.03) == pytest.approx(0.03)


def test_full_speed_waits_for_nothing() -> None:
    assert SlowDown(1.0).extra_seconds(0.5) == 0.0


@given(st.floats(0.01, 1.0), st.floats(0.0, 100.0))
def test_compute_and_wait_together_are_the_time_at_that_speed(speed: float, compute_s: float) -> None:
    assert compute_s + SlowDown(speed).extra_seconds(compute_s) == pytest.approx(compute_s / speed)


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.01, float("nan")])
def test_a_speed_that_waiting_cannot_give_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        SlowDown(speed)


def test_half_the_clock_takes_twice_the_time() -> None:
    slow_down = SlowDown(0.5)
    slow_down.clock = 0.5

    assert slow_down.extra_seconds(0.01) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("temperature_c", "clock"), [(25.0, 1.0), (60.0, 1.0), (61.0, 0.99), (75.0, 0.85), (110.0, 0.5), (400.0, 0.1)]
)
def test_the_clock_falls_by_a_hundredth_a_degree_from_60_degrees(temperature_c: float, clock: float) -> None:
    assert clock_at(temperature_c) == pytest.approx(clock)


def test_an_idle_device_cools_towards_its_surroundings_as_newton_says() -> None:
    for elapsed_s in (0.0, 1.0, 50.0, 1000.0):
        expected = 25.0 + 30.0 * math.exp(-0.005 * elapsed_s)
        assert temperature_after(WARM, 55.0, 0.0, elapsed_s) == pytest.approx(expected)


def test_below_60_degrees_heat_comes_at_the_base_clock() -> None:
    expected = 25.0 + 50.0 * (1.0 - math.exp(-0.005 * 100.0))

    assert temperature_after(WARM, 25.0, 0.5, 100.0) == pytest.approx(expected)


def test_above_60_degrees_the_falling_clock_lowers_what_it_ends_at() -> None:
    # 0.5 (1.6 - T/100) = 0.005 (T - 25)
    end_c = (0.8 + 0.125) / 0.01
    expected = end_c + (65.0 - end_c) * math.exp(-0.01 * 70.0)

    assert temperature_after(WARM, 65.0, 1.0, 70.0) == pytest.approx(expected)
    assert temperature_after(WARM, 65.0, 1.0, 1e9) == pytest.approx(end_c)


def test_the_bend_of_the_clock_is_met_in_both_directions() -> None:
    up_s = math.log(100.0 / 65.0) / 0.005
    down_s = math.log(55.0 / 35.0) / 0.005

    assert temperature_after(WARM, 25.0, 1.0, up_s) == pytest.approx(60.0)
    assert temperature_after(WARM, 25.0, 1.0, up_s + 70.0) == pytest.approx(temperature_after(WARM, 60.0, 1.0, 70.0))
    assert temperature_after(WARM, 80.0, 0.0, down_s + 70.0) == pytest.approx(temperature_after(WARM, 60.0, 0.0, 70.0))


def test_a_device_that_ends_exactly_at_the_bend_stays_there() -> None:
    model = ThermalModel(ambient_c=25.0, heat_c_per_s=0.35, cooling_per_s=0.01)

    assert temperature_after(model, 25.0, 1.0, 1e6) == pytest.approx(60.0)
    assert temperature_after(model, 60.0, 1.0, 1e6) == pytest.approx(60.0)
    assert temperature_after(model, 90.0, 1.0, 1e6) == pytest.approx(60.0)


@given(MODELS, TEMPERATURES, SHARES, st.floats(0.0, 1e5), st.floats(0.0, 1e5))
def test_going_on_for_a_while_and_another_is_going_on_for_both(
    model: ThermalModel, temperature_c: float, share: float, first_s: float, second_s: float
) -> None:
    between = temperature_after(model, temperature_c, share, first_s)
    at_once = temperature_after(model, temperature_c, share, first_s + second_s)

    assert temperature_after(model, between, share, second_s) == pytest.approx(at_once, rel=1e-6, abs=1e-6)


@given(MODELS, SHARES, st.floats(0.0, 1e12))
def test_a_device_never_gets_colder_than_its_surroundings_nor_as_hot_as_stops_its_clock(
    model: ThermalModel, share: float, elapsed_s: float
) -> None:
    assert model.ambient_c - 1e-9 <= temperature_after(model, model.ambient_c, share, elapsed_s) <= 160.0


@given(TEMPERATURES, SHARES, SHARES, st.floats(0.1, 1000.0))
def test_more_work_is_never_cooler(temperature_c: float, share: float, other: float, elapsed_s: float) -> None:
    less, more = sorted((share, other))
    cooler, warmer = (temperature_after(WARM, temperature_c, one, elapsed_s) for one in (less, more))

    assert cooler <= warmer + 1e-9


@given(TEMPERATURES, SHARES)
def test_the_solution_is_that_of_the_equation_in_small_steps(temperature_c: float, share: float) -> None:
    stepped, step_s = temperature_c, 0.05
    for _ in range(2000):
        clock = min(1.0, 1.0 - (stepped - 60.0) / 100.0)
        stepped += step_s * (0.5 * share * clock - 0.005 * (stepped - 25.0))

    assert temperature_after(WARM, temperature_c, share, 100.0) == pytest.approx(stepped, abs=0.05)


def test_a_battery_loses_the_power_of_work_and_of_idling() -> None:
    # 360 Ws are a percent of 10 Wh: 36 s of work at 5 W and 180 s idle at 1 W.
    assert battery_after(BATTERY, 80.0, busy_s=36.0, elapsed_s=216.0) == pytest.approx(79.0)


def test_an_empty_battery_stays_empty() -> None:
    assert battery_after(BATTERY, 1.0, busy_s=1e6, elapsed_s=1e6) == 0.0


def test_a_device_begins_at_the_temperature_of_its_surroundings_and_with_its_battery_as_declared() -> None:
    condition = make_device().condition(100.0)

    assert (condition.temperature_c, condition.battery_percent, condition.clock) == (25.0, 80.0, 1.0)


def test_a_device_warms_by_what_it_works_and_cools_in_between() -> None:
    device = make_device()
    work(device, 100.0, 110.0)
    warm_c = temperature_after(WARM, 25.0, 1.0, 10.0)

    assert degrees(device, 110.0) == pytest.approx(warm_c)
    assert degrees(device, 150.0) == pytest.approx(temperature_after(WARM, warm_c, 0.0, 40.0))
    work(device, 150.0, 151.0)
    cooled_c = temperature_after(WARM, warm_c, 0.0, 40.0)
    assert degrees(device, 151.0) == pytest.approx(temperature_after(WARM, cooled_c, 1.0, 1.0))


def test_work_that_ends_while_the_condition_is_asked_for_does_not_count_for_more_than_the_time_it_had() -> None:
    device = make_device()
    work(device, 100.0, 100.04)

    assert degrees(device, 100.01) == pytest.approx(temperature_after(WARM, 25.0, 1.0, 0.01), abs=1e-9)


def test_asking_for_the_condition_changes_nothing() -> None:
    asked, left_alone = make_device(), make_device()
    for device in (asked, left_alone):
        work(device, 100.0, 110.0)
    for now in (111.0, 150.0, 10_000.0):
        asked.condition(now)

    assert asked.condition(120.0) == left_alone.condition(120.0)


def test_work_of_a_moment_adds_up() -> None:
    device = make_device()
    for step in range(10_000):
        work(device, 100.0 + step * 0.01, 100.0 + step * 0.01 + 0.005)

    assert degrees(device, 200.0) == pytest.approx(temperature_after(WARM, 25.0, 0.5, 100.0), abs=0.05)
    assert device.condition(200.0).busy_s == pytest.approx(50.0, abs=ADVANCE_S)


def test_heat_slows_a_device_down_and_its_next_work_begins_at_the_clock_it_has_cooled_to() -> None:
    device = make_device()
    work(device, 100.0, 1100.0)
    hot_clock = clock_at(degrees(device, 1100.0))

    assert hot_clock < 0.75
    assert device.slow_down.extra_seconds(0.1) == pytest.approx(0.1 * (2.0 / hot_clock - 1.0))

    device.begin(1150.0)
    assert device.slow_down.clock == clock_at(degrees(device, 1150.0)) > hot_clock


def test_a_battery_of_a_device_empties_as_it_works_and_idles() -> None:
    device = make_device()
    work(device, 100.0, 136.0)

    assert device.condition(136.0 + 180.0).battery_percent == pytest.approx(79.0)


def test_a_device_without_a_thermal_model_or_a_battery_has_no_such_sensor_and_keeps_its_clock() -> None:
    device = make_device(thermal=ThermalModel(), battery=BatteryModel())
    work(device, 100.0, 1e6)

    condition = device.condition(1e6)
    assert (condition.temperature_c, condition.battery_percent, condition.clock) == (None, None, 1.0)


@pytest.mark.parametrize(
    "model",
    [ThermalModel(cooling_per_s=0.0), ThermalModel(heat_c_per_s=-1.0), ThermalModel(cooling_per_s=float("nan"))],
)
def test_a_device_that_never_cools_or_that_work_cools_is_refused(model: ThermalModel) -> None:
    with pytest.raises(ConfigError, match="heat must be 0 or more, cooling above 0"):
        make_device(thermal=model)


def test_a_link_without_limits_delivers_at_once() -> None:
    assert LinkShaper(LinkProfile()).due(10**9, now=5.0) == 5.0


def test_delay_is_added_to_every_message() -> None:
    shaper = LinkShaper(LinkProfile(delay_ms=5.0))
    assert shaper.due(100, now=1.0) == pytest.approx(1.005)
    assert shaper.due(100, now=1.001) == pytest.approx(1.006)


def test_a_message_takes_its_bits_over_the_rate() -> None:
    # 8 Mbit/s are a million bytes a second.
    assert LinkShaper(LinkProfile(delay_ms=5.0, rate_mbit_s=8.0)).due(20_000, now=1.0) == pytest.approx(1.025)


def test_messages_queue_for_the_rate_but_overlap_in_the_delay() -> None:
    shaper = LinkShaper(LinkProfile(delay_ms=100.0, rate_mbit_s=8.0))
    assert [shaper.due(10_000, now=0.0) for _ in range(3)] == pytest.approx([0.11, 0.12, 0.13])


def test_an_idle_link_saves_up_nothing() -> None:
    shaper = LinkShaper(LinkProfile(rate_mbit_s=8.0))
    shaper.due(10_000, now=0.0)
    assert shaper.due(10_000, now=10.0) == pytest.approx(10.01)


@given(
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 50.0]),
    st.lists(st.tuples(st.integers(0, 10**7), st.floats(0.0, 50.0)), max_size=20),
)
def test_messages_are_never_reordered_even_if_the_clock_steps_back(
    delay_ms: float, rate_mbit_s: float, messages: list[tuple[int, float]]
) -> None:
    shaper = LinkShaper(LinkProfile(delay_ms, rate_mbit_s))
    due_times = [shaper.due(num_bytes, now) for num_bytes, now in messages]
    assert due_times == sorted(due_times)
    assert all(due >= now for due, (_, now) in zip(due_times, messages, strict=True))


@pytest.mark.parametrize("link", [LinkProfile(delay_ms=-1.0), LinkProfile(rate_mbit_s=-1.0)])
def test_a_negative_link_is_refused(link: LinkProfile) -> None:
    with pytest.raises(ConfigError, match="0 \\(not limited\\) or more"):
        LinkShaper(link)


def test_need_counts_weights_with_their_repacked_copy_tables_kv_and_workspace() -> None:
    assert need_bytes(100_000_000, 5_000_000, 7) == 135_000_007 + 130 * 2**20


def test_a_shard_of_exactly_the_memory_fits() -> None:
    check_fits(PHONE, 1000, "layers [0, 10)")
    with pytest.raises(ShardDoesNotFit, match="lacks 1;"):
        check_fits(PHONE, 1001, "layers [0, 10)")


def test_memory_for_kept_kv_is_not_there_for_a_shard() -> None:
    keeping = replace(PHONE, host_kv_bytes=100)
    check_fits(keeping, 900, "layers [0, 10)")
    with pytest.raises(ShardDoesNotFit, match="may use 900, so it lacks 1;"):
        check_fits(keeping, 901, "layers [0, 10)")


def test_a_shard_that_does_not_fit_is_refused_with_device_and_missing_bytes() -> None:
    with pytest.raises(ShardDoesNotFit, match=r"layers \[0, 10\) does not fit on phone-2 \(phone\).* lacks 234"):
        check_fits(PHONE, 1234, "layers [0, 10)")
