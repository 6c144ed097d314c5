"""What a device reports of itself: read from the machine it is, or made up by the models of an emulated one.

A sensor that is missing, or that the system does not let us read, is reported as absent: never an error, for a worker
serves without it. Decides nothing: limits are the orchestrator's. Called by the agent for every heartbeat.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from shoal.types import DeviceProfile, Telemetry
from worker.emulation import EmulatedDevice

# Loads are means over at least this long: heartbeats may follow each other by milliseconds, which says nothing.
LOAD_WINDOW_S = 0.5
# Chips and thermal zones, by a part of their names, that sit in or beside the processor on x86, ARM boards and phones.
# Others, disks and batteries among them, run at temperatures of their own.
PROCESSOR_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu", "soc", "tsens", "x86_pkg", "acpitz")
# What sensors without a value report is outside.
PLAUSIBLE_C = (1.0, 125.0)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id(boot_id: Path = BOOT_ID) -> str:
    """What all processes of this machine have in common until it is started anew, containers too; empty: not known."""
    try:
        return hashlib.sha256(b"shoal machine\0" + boot_id.read_bytes().strip()).hexdigest()[:16]
    except OSError:
        return ""


class TelemetrySource(Protocol):
    def read(self, now: float) -> Telemetry:
        """Report all but kv_bytes and weight_bytes; now is that of the monotonic clock."""
        ...


class Reading(Protocol):
    """A sensor's value as psutil gives it."""

    @property
    def current(self) -> float: ...


def telemetry_of(profile: DeviceProfile, emulated: EmulatedDevice | None, now: float) -> TelemetrySource:
    """Choose where a device's telemetry comes from; emulated: None for a real device."""
    return MachineTelemetry(now) if emulated is None else EmulatedTelemetry(profile, emulated, now)


class MachineTelemetry:
    """Telemetry of this machine.

    Invariant: loads are those of the latest complete window, which ended at `_window_began_at`; 0 before there was one.
    """

    __slots__ = ("_cpu_load", "_num_cores", "_other_load", "_process", "_window_began_at")

    def __init__(self, now: float) -> None:
        self._process = psutil.Process()
        self._num_cores = psutil.cpu_count() or 1
        self._cpu_load = 0.0
        self._other_load = 0.0
        self._window_began_at = now
        self._process.cpu_percent()
        _cpu_load_of_all()

    def read(self, now: float) -> Telemetry:
        self._measure_loads(now)
        battery_percent, is_charging = read_battery()
        return Telemetry(
            rss_bytes=self._process.memory_info().rss,
            free_memory_bytes=psutil.virtual_memory().available,
            cpu_load=self._cpu_load,
            other_load=self._other_load,
            temperature_c=read_temperature_c(),
            battery_percent=battery_percent,
            is_charging=is_charging,
        )

    def _measure_loads(self, now: float) -> None:
        if now - self._window_began_at < LOAD_WINDOW_S:
            return
        self._cpu_load = self._process.cpu_percent() / 100.0 / self._num_cores
        self._other_load = max(0.0, _cpu_load_of_all() - self._cpu_load)
        self._window_began_at = now


class EmulatedTelemetry:
    """Telemetry of an emulated device: what its models say, and of memory what its budget leaves.

    Invariant: the load is that of the latest complete window, which ended at `_window_began`.
    """

    __slots__ = ("_cpu_load", "_device", "_memory_bytes", "_process", "_window_began")

    def __init__(self, profile: DeviceProfile, device: EmulatedDevice, now: float) -> None:
        self._process = psutil.Process()
        self._memory_bytes = profile.memory_bytes
        self._device = device
        self._window_began = device.condition(now)
        self._cpu_load = 0.0

    def read(self, now: float) -> Telemetry:
        condition = self._device.condition(now)
        window_s = condition.at - self._window_began.at
        if window_s >= LOAD_WINDOW_S:
            self._cpu_load = (condition.busy_s - self._window_began.busy_s) / window_s
            self._window_began = condition
        rss_bytes = self._process.memory_info().rss
        return Telemetry(
            rss_bytes=rss_bytes,
            free_memory_bytes=min(psutil.virtual_memory().available, max(0, self._memory_bytes - rss_bytes)),
            cpu_load=self._cpu_load,
            temperature_c=condition.temperature_c,
            battery_percent=condition.battery_percent,
            clock=condition.clock,
        )


def _cpu_load_of_all() -> float:
    """Share of all processors that was taken since the last call; 0 where the system does not tell, as on Android."""
    try:
        return psutil.cpu_percent() / 100.0
    except OSError:
        return 0.0


def read_temperature_c() -> float | None:
    """The temperature of this machine's processor, or None."""
    if sys.platform != "linux":
        return None
    try:
        return processor_temperature_c(psutil.sensors_temperatures())
    except OSError:
        return None


def processor_temperature_c(chips: Mapping[str, Sequence[Reading]]) -> float | None:
    """The hottest plausible value of the chips that are in or beside a processor."""
    coldest_c, hottest_c = PLAUSIBLE_C
    values = [
        reading.current
        for chip, readings in chips.items()
        if any(part in chip.lower() for part in PROCESSOR_CHIPS)
        for reading in readings
        if coldest_c <= reading.current <= hottest_c
    ]
    return max(values, default=None)


def read_battery() -> tuple[float | None, bool]:
    """Percent left in this machine's battery, None without one, and whether it is on mains power."""
    try:
        battery = psutil.sensors_battery()
    except (OSError, RuntimeError):
        # No sensors here, or what they say makes no sense to the library.
        return None, False
    if battery is None:
        return None, False
    return min(max(float(battery.percent), 0.0), 100.0), bool(battery.power_plugged)
