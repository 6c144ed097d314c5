"""What a device reports: which sensors count, what a missing one looks like, and the models of an emulated device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from shoal.types import BatteryModel, DeviceProfile, ThermalModel
from worker.emulation import EmulatedDevice, clock_at, temperature_after
from worker.telemetry import (
    LOAD_WINDOW_S,
    EmulatedTelemetry,
    MachineTelemetry,
    machine_id,
    processor_temperature_c,
    read_battery,
    read_temperature_c,
    telemetry_of,
)

WARM = ThermalModel(ambient_c=25.0, heat_c_per_s=0.5, cooling_per_s=0.005)


@dataclass(frozen=True)
class Sensor:
    current: float


@dataclass(frozen=True)
class Battery:
    percent: float
    power_plugged: bool | None


def chips(**readings: list[float]) -> dict[str, list[Sensor]]:
    return {chip: [Sensor(value) for value in values] for chip, values in readings.items()}


def make_emulated(**fields: object) -> tuple[EmulatedDevice, EmulatedTelemetry]:
    defaults: dict[str, object] = {
        "memory_bytes": 1 << 40,
        "is_emulated": True,
        "thermal": WARM,
        "battery": BatteryModel(capacity_wh=10.0, start_percent=80.0, active_w=5.0, idle_w=1.0),
    }
    profile = DeviceProfile(name="phone", kind="phone", **{**defaults, **fields})  # type: ignore[arg-type]
    device = EmulatedDevice(profile, now=100.0)
    return device, EmulatedTelemetry(profile, device, now=100.0)


def fail(error: Exception) -> Callable[[], None]:
    def failing() -> None:
        raise error

    return failing


@pytest.mark.parametrize("chip", ["coretemp", "k10temp", "cpu_thermal", "cpu-0-0", "soc_thermal", "tsens_tz_sensor1"])
def test_the_hottest_sensor_of_the_processor_counts(chip: str) -> None:
    assert processor_temperature_c(chips(**{chip: [41.0, 63.5, 50.0]})) == 63.5


def test_disks_radios_and_batteries_do_not_count() -> None:
    assert processor_temperature_c(chips(nvme=[80.0], iwlwifi_1=[70.0], battery=[45.0])) is None


@pytest.mark.parametrize("value", [0.0, 0.9, -273.2, 125.1, 65535.0, float("nan")])
def test_a_sensor_without_a_value_does_not_count(value: float) -> None:
    assert processor_temperature_c(chips(coretemp=[value, 40.0])) == 40.0
    assert processor_temperature_c(chips(coretemp=[value])) is None


@pytest.mark.parametrize("value", [1.0, 125.0])
def test_a_sensor_may_be_as_cold_and_as_hot_as_chips_get(value: float) -> None:
    assert processor_temperature_c(chips(coretemp=[value])) == value


def test_a_machine_reports_what_its_sensors_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chips(coretemp=[50.0]), raising=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: Battery(55.5, True), raising=False)

    telemetry = MachineTelemetry(now=0.0).read(now=0.0)

    assert (telemetry.temperature_c, telemetry.battery_percent, telemetry.is_charging) == (50.0, 55.5, True)
    assert (telemetry.cpu_load, telemetry.other_load) == (0.0, 0.0)


def test_a_system_other_than_linux_is_not_asked_for_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)

    assert read_temperature_c() is None


def test_a_machine_without_sensors_has_no_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)

    assert read_temperature_c() is None


def test_sensors_that_may_not_be_read_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", fail(PermissionError("no")), raising=False)
    monkeypatch.setattr(psutil, "sensors_battery", fail(PermissionError("no")), raising=False)
    monkeypatch.setattr(psutil, "cpu_percent", fail(PermissionError("no")))

    telemetry = MachineTelemetry(now=0.0).read(now=1.0)

    assert (telemetry.temperature_c, telemetry.battery_percent, telemetry.is_charging) == (None, None, False)
    assert telemetry.other_load == 0.0


@pytest.mark.parametrize(
    ("battery", "seen"),
    [
        (None, (None, False)),
        (Battery(55.5, False), (55.5, False)),
        (Battery(100.4, True), (100.0, True)),
        (Battery(-1.0, False), (0.0, False)),
        (Battery(0.5, False), (0.5, False)),
        (Battery(30.0, None), (30.0, False)),
    ],
)
def test_a_battery_is_charging_while_it_is_known_to_be_on_mains_power(
    monkeypatch: pytest.MonkeyPatch, battery: Battery | None, seen: tuple[float | None, bool]
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)

    assert read_battery() == seen


def test_this_machine_reports_memory_and_loads_within_their_ranges() -> None:
    telemetry = MachineTelemetry(now=0.0).read(now=LOAD_WINDOW_S)

    assert telemetry.rss_bytes > 0
    assert telemetry.free_memory_bytes > 0
    assert 0.0 <= telemetry.other_load <= 1.0
    assert telemetry.clock == 1.0


def test_what_a_worker_takes_itself_is_not_counted_as_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 80.0)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda _: 200.0)

    telemetry = MachineTelemetry(now=0.0).read(now=1.0)

    assert telemetry.cpu_load == pytest.approx(0.5)
    assert telemetry.other_load == pytest.approx(0.3)


def test_where_the_number_of_processors_is_not_known_it_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: None)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda _: 50.0)

    assert MachineTelemetry(now=0.0).read(now=1.0).cpu_load == 0.5


def test_reports_in_quick_succession_keep_the_load_of_the_latest_whole_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """What psutil says first is of no window, and both loads are asked for it."""
    loads, ours = iter([70.0, 50.0, 100.0]), iter([70.0, 25.0, 50.0])
    monkeypatch.setattr(psutil, "cpu_count", lambda: 1)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: next(loads))
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda _: next(ours))
    machine = MachineTelemetry(now=0.0)
    seen = [machine.read(now) for now in (0.1, 1.0, 1.1, 1.4, 1.5)]

    assert [one.cpu_load for one in seen] == [0.0, 0.25, 0.25, 0.25, 0.5]
    assert [one.other_load for one in seen] == [0.0, 0.25, 0.25, 0.25, 0.5]


def test_an_emulated_device_reports_its_models() -> None:
    device, telemetry = make_emulated()
    device.begin(100.0)
    device.end(300.0)

    seen = telemetry.read(300.0)

    warm_c = temperature_after(WARM, 25.0, 1.0, 200.0)
    assert seen.temperature_c == pytest.approx(warm_c)
    assert seen.clock == pytest.approx(clock_at(warm_c))
    assert seen.clock < 1.0
    assert seen.battery_percent == pytest.approx(80.0 - 1000.0 / 360.0)
    assert (seen.is_charging, seen.other_load) == (False, 0.0)


def test_an_emulated_device_is_loaded_by_what_it_worked_with_its_waits() -> None:
    device, telemetry = make_emulated()
    loads = [telemetry.read(100.1).cpu_load]
    device.begin(101.0)
    device.end(102.0)
    loads += [telemetry.read(now).cpu_load for now in (104.0, 104.2, 104.0 + LOAD_WINDOW_S)]

    assert loads == [0.0, 0.25, 0.25, 0.0]


def test_an_emulated_device_has_no_more_free_memory_than_its_budget_and_this_machine_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = psutil.virtual_memory()._replace(available=1 << 33)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    _, roomy = make_emulated()
    _, full = make_emulated(memory_bytes=1)
    _, small = make_emulated(memory_bytes=psutil.Process().memory_info().rss + (1 << 30))

    assert roomy.read(100.0).free_memory_bytes == 1 << 33
    assert roomy.read(100.0).rss_bytes > 0
    assert full.read(100.0).free_memory_bytes == 0
    assert small.read(100.0).free_memory_bytes <= 1 << 30


def test_an_emulated_device_without_models_has_no_sensors() -> None:
    _, telemetry = make_emulated(thermal=ThermalModel(), battery=BatteryModel())

    seen = telemetry.read(200.0)

    assert (seen.temperature_c, seen.battery_percent, seen.clock) == (None, None, 1.0)


def test_only_an_emulated_device_is_read_from_its_models() -> None:
    device, _ = make_emulated()
    profile = DeviceProfile(name="box", kind="box", memory_bytes=1)

    assert isinstance(telemetry_of(profile, device, now=100.0), EmulatedTelemetry)
    assert isinstance(telemetry_of(profile, None, now=100.0), MachineTelemetry)


def test_a_machine_has_one_id_until_it_is_started_anew_and_does_not_tell_the_systems_own(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("0f0e-0d0c\n")
    second.write_text("1f1e-1d1c\n")

    assert machine_id(first) == machine_id(first)
    assert machine_id(first) not in ("", machine_id(second), "0f0e-0d0c")


def test_a_system_without_such_an_id_has_none(tmp_path: Path) -> None:
    assert machine_id(tmp_path / "missing") == ""
