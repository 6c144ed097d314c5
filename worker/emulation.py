"""Makes a fast machine look like the device of a profile: how long to wait, how warm it gets, when a message arrives.

Pure arithmetic: times come in, a duration, a temperature or a due time goes out; whoever calls it does the waiting. Knows
no sockets, threads or sessions. The worker's compute thread tells EmulatedDevice what it works and asks its SlowDown,
telemetry reads it, each outgoing link asks its LinkShaper, and a shard is checked against the memory budget before any of
it is downloaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import ConfigError, ShardDoesNotFit
from shoal.types import BatteryModel, DeviceProfile, LinkProfile, ThermalModel

# A device runs at its base clock up to here; above, at base x (1 - (temperature - 60) / 100).
FULL_CLOCK_C = 60.0
CLOCK_LOSS_PER_C = 0.01
# What the formula gives at 150 C: a device that stood still would keep its work waiting forever.
MIN_CLOCK = 0.1
# Temperatures move in seconds at most, steps take milliseconds: working it out for each of them would gain nothing.
ADVANCE_S = 0.05


class SlowDown:
    """Stretches compute time so that a device seems `speed` times as fast as the machine it runs on.

    clock: share of its base clock that heat leaves the device at the moment; kept up to date by EmulatedDevice.
    """

    __slots__ = ("_speed", "clock")

    def __init__(self, speed: float) -> None:
        """Raise ConfigError unless speed is in (0, 1]: waiting makes nothing faster."""
        if not 0.0 < speed <= 1.0:
            raise ConfigError(
                f"speed = {speed} cannot be emulated: it must be above 0 and at most 1, the speed of this machine",
                field="speed",
            )
        self._speed = speed
        self.clock = 1.0

    def extra_seconds(self, compute_s: float) -> float:
        """Return how long to wait after a computation that took compute_s."""
        return compute_s * (1.0 / (self._speed * self.clock) - 1.0)


@dataclass(frozen=True, slots=True)
class Condition:
    """How an emulated device is at a time; None: it has no such sensor. busy_s: what it has computed for since it began."""

    at: float
    busy_s: float
    temperature_c: float | None
    battery_percent: float | None

    @property
    def clock(self) -> float:
        """Share of its base clock that heat leaves the device."""
        return 1.0 if self.temperature_c is None else clock_at(self.temperature_c)


class EmulatedDevice:
    """Warms and empties its battery as it works.

    The compute thread alone calls begin() and end(), around everything it does; any thread may ask for the condition.
    Invariants: `_latest` is replaced, never changed; its time and its busy time never go down; slow_down has its clock.
    """

    __slots__ = ("_began_at", "_busy_s", "_latest", "_profile", "slow_down")

    def __init__(self, profile: DeviceProfile, now: float) -> None:
        """Raise ConfigError for a speed or a thermal model that cannot be emulated."""
        self.slow_down = SlowDown(profile.speed)
        if not (profile.thermal.cooling_per_s > 0.0 and profile.thermal.heat_c_per_s >= 0.0):
            raise ConfigError(f"{profile.thermal}: heat must be 0 or more, cooling above 0", field="thermal")
        self._profile = profile
        self._busy_s = 0.0
        self._began_at = now
        self._latest = Condition(
            at=now,
            busy_s=0.0,
            # A device that work does not warm shows nothing that a sensor would be for.
            temperature_c=profile.thermal.ambient_c if profile.thermal.heat_c_per_s else None,
            battery_percent=profile.battery.start_percent if profile.battery.capacity_wh else None,
        )

    def begin(self, now: float) -> None:
        """Some work begins; until now the device was idle."""
        self._began_at = now
        self._advance(now)

    def end(self, now: float) -> None:
        """The work that began last is done, with the wait that it was stretched by."""
        self._busy_s += now - self._began_at
        self._advance(now)

    def _advance(self, now: float) -> None:
        if now - self._latest.at >= ADVANCE_S:
            self._latest = self._after(self._latest, self._busy_s, now)
            self.slow_down.clock = self._latest.clock

    def condition(self, now: float) -> Condition:
        """As if it had been idle since its latest work ended: what goes on at the moment is counted at its end."""
        latest = self._latest
        return self._after(latest, self._busy_s, now) if now > latest.at else latest

    def _after(self, before: Condition, busy_s: float, now: float) -> Condition:
        elapsed_s = now - before.at
        # A step may end, on its thread, after `now` was read on ours.
        worked_s = min(busy_s - before.busy_s, elapsed_s)
        temperature_c, battery_percent = before.temperature_c, before.battery_percent
        if temperature_c is not None:
            temperature_c = temperature_after(self._profile.thermal, temperature_c, worked_s / elapsed_s, elapsed_s)
        if battery_percent is not None:
            battery_percent = battery_after(self._profile.battery, battery_percent, worked_s, elapsed_s)
        return Condition(now, busy_s, temperature_c, battery_percent)


def clock_at(temperature_c: float) -> float:
    """Share of the base clock that is left at a temperature."""
    return min(1.0, max(MIN_CLOCK, 1.0 - (temperature_c - FULL_CLOCK_C) * CLOCK_LOSS_PER_C))


def temperature_after(model: ThermalModel, temperature_c: float, busy_share: float, elapsed_s: float) -> float:
    """The temperature of a device that goes on for elapsed_s and computes for busy_share of that time, evenly spread.

    dT/dt = heat x busy_share x clock(T) - cooling x (T - ambient): linear below and above the bend of the clock, hence in
    both parts an exponential approach to where heat and cooling are equal. Exact for any length of time.
    """
    heat_c_per_s, cooling_per_s = model.heat_c_per_s * busy_share, model.cooling_per_s
    rate_per_s, target_c = cooling_per_s, model.ambient_c + heat_c_per_s / cooling_per_s
    if temperature_c > FULL_CLOCK_C or (temperature_c == FULL_CLOCK_C and target_c > FULL_CLOCK_C):
        rate_per_s = cooling_per_s + heat_c_per_s * CLOCK_LOSS_PER_C
        heat_at_0_c = heat_c_per_s * (1.0 + FULL_CLOCK_C * CLOCK_LOSS_PER_C)
        target_c = (heat_at_0_c + cooling_per_s * model.ambient_c) / rate_per_s
    if (temperature_c - FULL_CLOCK_C) * (target_c - FULL_CLOCK_C) < 0.0:
        to_bend_s = math.log((temperature_c - target_c) / (FULL_CLOCK_C - target_c)) / rate_per_s
        if to_bend_s < elapsed_s:
            return temperature_after(model, FULL_CLOCK_C, busy_share, elapsed_s - to_bend_s)
    return temperature_c - (target_c - temperature_c) * math.expm1(-rate_per_s * elapsed_s)


def battery_after(model: BatteryModel, percent: float, busy_s: float, elapsed_s: float) -> float:
    """What is left of a battery after elapsed_s, of which the device computed for busy_s."""
    used_ws = model.active_w * busy_s + model.idle_w * (elapsed_s - busy_s)
    return max(0.0, percent - 100.0 * used_ws / (model.capacity_wh * 3600.0))


class LinkShaper:
    """Delays the messages of one direction of a link as its rate and its delay would.

    Invariants: the link carries one message at a time, in the order asked for; due times never go down.
    """

    __slots__ = ("_bytes_per_second", "_delay_s", "_free_at")

    def __init__(self, link: LinkProfile) -> None:
        """Raise ConfigError if delay or rate is negative; 0 means not limited."""
        if not (link.delay_ms >= 0.0 and link.rate_mbit_s >= 0.0):
            raise ConfigError(
                f"a link of {link.delay_ms} ms and {link.rate_mbit_s} Mbit/s: both must be 0 (not limited) or more",
                field="link",
            )
        self._delay_s = link.delay_ms / 1e3
        self._bytes_per_second = link.rate_mbit_s * 1e6 / 8
        self._free_at = float("-inf")

    def due(self, num_bytes: int, now: float) -> float:
        """Return when a message handed over at `now` arrives; the link is taken until it is sent."""
        sending_s = num_bytes / self._bytes_per_second if self._bytes_per_second else 0.0
        self._free_at = max(now, self._free_at) + sending_s
        return self._free_at + self._delay_s


def check_fits(profile: DeviceProfile, need: int, what: str) -> None:
    """Raise ShardDoesNotFit, with the bytes it lacks, if `what` needs more than the device may use beside kept KV blocks."""
    lacking = need - profile.shard_bytes
    if lacking <= 0:
        return
    raise ShardDoesNotFit(
        f"{what} does not fit on {profile.name} ({profile.kind}): it needs {need} bytes, the device may use "
        f"{profile.shard_bytes}, so it lacks {lacking}; give it fewer layers, shorter contexts or a larger memory_mib",
        field="memory_mib",
    )
