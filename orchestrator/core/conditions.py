"""Decides what of a device's state counts for where layers are: heat that lasts, low batteries, memory that is short.

A pipeline's pace follows heat at once (`thermal`); moving layers costs more, so only what has lasted counts here, and what
counted goes on to do so until it has been gone for longer still: a device that was relieved cools at once, and would be hot
again with the next layers. Knows no sensors and no placements; control feeds it every heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from orchestrator.core.thermal import LEVELS
from shoal.types import DeviceProfile, Telemetry, ThermalState

# A burst of work warms a device; only one that does not get rid of its heat is worth relieving.
HOT_S = 60.0
COOL_S = 300.0
# Batteries and memory do not come back by themselves, but one reading may be a slip.
SHORT_S = 10.0
ENOUGH_S = 60.0
# Percent of battery above the least, from which a device on its battery counts again.
CHARGED_PERCENT = 10.0
# Less than this free on the whole machine, and the system ends processes.
MIN_FREE_BYTES = 64 * 2**20

_HOT = LEVELS.index(ThermalState.HOT)

# A compute thread that is at one item for longer than this, and than so many times what its longest step takes, is stuck.
STUCK_S = 20.0
STUCK_FACTOR = 20.0
# Before it is known what steps take: a large model on a slow device reads all its weights for the first.
FIRST_STEP_S = 120.0


def is_stuck(busy_s: float, longest_step_s: float | None) -> bool:
    """Whether a compute thread that has been at one item for busy_s makes no progress any more: slow is not stuck.

    longest_step_s: what its longest steps take, as far as is known; None before it was seen.
    """
    bound_s = FIRST_STEP_S if longest_step_s is None else max(STUCK_S, STUCK_FACTOR * longest_step_s)
    return busy_s > bound_s


class Lasting:
    """Whether something is so, as one who is in no hurry sees it: up after on_s of it, down after off_s without it.

    Invariant: `_since` is the time since which what is observed differs from what is_so says; None while it does not.
    """

    __slots__ = ("_off_s", "_on_s", "_since", "is_so")

    def __init__(self, on_s: float, off_s: float) -> None:
        self.is_so = False
        self._on_s = on_s
        self._off_s = off_s
        self._since: float | None = None

    def observe(self, is_seen: bool, now: float) -> bool:
        """Take a look; True if is_so changed."""
        if is_seen == self.is_so:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since < (self._off_s if self.is_so else self._on_s):
            return False
        self.is_so, self._since = is_seen, None
        return True


class DeviceCondition:
    """Of one device.

    slow_down: how many times longer than its figures say it is to be expected to take. causes: what makes it one that is to
    hold no layers if others can, as in "battery at 8 %".
    Invariant: slow_down is above 1 only while it is one that has been hot for long.
    """

    __slots__ = ("_battery", "_heat", "_memory", "_profile", "_telemetry", "slow_down")

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._telemetry = Telemetry()
        self._heat = Lasting(HOT_S, COOL_S)
        self._battery = Lasting(SHORT_S, ENOUGH_S)
        self._memory = Lasting(SHORT_S, ENOUGH_S)
        self.slow_down = 1.0

    def observe(self, telemetry: Telemetry, state: ThermalState, max_batch: int, now: float) -> tuple[str, ...]:
        """Take what a device reports; returns what has begun or ceased to count, in words.

        state: as `thermal` sees it. max_batch: decode rows that it allows in this state.
        """
        self._telemetry = telemetry
        is_hot = LEVELS.index(state) >= _HOT
        changed = []
        if self._heat.observe(is_hot, now):
            changed.append(f"{state.value} for {HOT_S:g} s" if is_hot else f"cool for {COOL_S:g} s")
        if self._battery.observe(self._is_battery_low(), now):
            changed.append(self._battery_text() if self._battery.is_so else "battery charged")
        if self._memory.observe(self._is_memory_short(), now):
            changed.append(self._memory_text() if self._memory.is_so else "memory free again")
        if not self._heat.is_so:
            self.slow_down = 1.0
        elif is_hot:
            # Rows of a batch fall with heat as its clock does.
            self.slow_down = max(self.slow_down, self._profile.max_batch / max_batch)
        return tuple(changed)

    @property
    def is_spent(self) -> bool:
        """Whether it is to hold no layers if others can."""
        return self._battery.is_so or self._memory.is_so

    @property
    def causes(self) -> tuple[str, ...]:
        return tuple(self._causes())

    def _causes(self) -> Iterator[str]:
        if self._battery.is_so:
            yield self._battery_text()
        if self._memory.is_so:
            yield self._memory_text()

    def _battery_text(self) -> str:
        return f"battery at {self._telemetry.battery_percent or 0.0:.0f} %"

    def _memory_text(self) -> str:
        return f"{self._telemetry.free_memory_bytes >> 20} MiB of memory free"

    def _is_battery_low(self) -> bool:
        percent, least = self._telemetry.battery_percent, self._profile.limits.critical_battery_percent
        if percent is None or self._telemetry.is_charging or least <= 0.0:
            return False
        return percent <= least + CHARGED_PERCENT * self._battery.is_so

    def _is_memory_short(self) -> bool:
        telemetry = self._telemetry
        if telemetry.rss_bytes == 0:
            return False  # it does not say
        # An emulated device has used up its budget as planned, and shares the machine's memory with the others.
        least = 0 if self._profile.is_emulated else MIN_FREE_BYTES
        return telemetry.free_memory_bytes < least or telemetry.rss_bytes > self._profile.memory_bytes

    def check_invariants(self) -> None:
        assert math.isfinite(self.slow_down)
        assert self.slow_down >= 1.0
        assert self.slow_down == 1.0 or self._heat.is_so
