"""Decides how much a device is to be spared, from what it reports: heat, battery, other programs.

Limits tighten at once and relax a level at a time, each after a calm while, so that a pipeline does not swing. It knows
neither the worker nor its pipeline: control feeds it every heartbeat, ticks it in between (recovery needs time, not news),
and gives the tightest pace of a pipeline's stages to the engine.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from orchestrator.core.limits import Pace
from shoal.types import DeviceLimits, Telemetry, ThermalState

# A level is left when its cause has been so far from the threshold, for so long: sensors jitter by a degree, and a device
# that was just relieved cools at once but has stored its heat.
HOLD_S = 10.0
MARGIN_C = 3.0
MARGIN_PERCENT = 3.0
MARGIN_LOAD = 0.1
# Programs that start take a processor for a moment; only one that keeps it is worth yielding to.
BUSY_S = 10.0

LEVELS = (ThermalState.NOMINAL, ThermalState.MODERATE, ThermalState.HOT, ThermalState.CRITICAL)
_MODERATE, _CRITICAL = LEVELS.index(ThermalState.MODERATE), LEVELS.index(ThermalState.CRITICAL)
# Of what the profile allows: the 8, 6, 4 and 2 rows of a device that takes 8.
_BATCH_SHARES = (1.0, 0.75, 0.5, 0.25)


class _Cause(Enum):
    HEAT = "heat"
    BATTERY = "battery"
    OTHERS = "others"


class ThermalMonitor:
    """The thermal state of one device.

    max_batch: decode rows that its profile allows when nothing limits it.
    Invariants: there is a cause exactly above NOMINAL; calm is timed only there; a device is busy only while its load is
    above the threshold or within the margin below it.
    """

    __slots__ = (
        "_busy_since",
        "_calm_since",
        "_cause",
        "_is_busy",
        "_level",
        "_limits",
        "_paces",
        "_telemetry",
        "_text",
    )

    def __init__(self, limits: DeviceLimits, max_batch: int) -> None:
        """Lists of limits that do not have a value for each state, as another version may send them, count as not given."""
        self._limits = limits
        self._paces = _paces(limits, max_batch)
        self._telemetry = Telemetry()
        self._level = 0
        self._cause: _Cause | None = None
        self._text = ""
        self._is_busy = False
        self._busy_since: float | None = None
        self._calm_since: float | None = None

    @property
    def state(self) -> ThermalState:
        return LEVELS[self._level]

    @property
    def cause(self) -> str:
        """What brought the device into its state, as in "71.5 C"; empty while NOMINAL."""
        return self._text

    def pace(self) -> Pace:
        """What the device may do in its state."""
        return self._paces[self._level]

    def observe(self, telemetry: Telemetry, now: float) -> bool:
        """Take what the device reports; True if its state changed."""
        self._telemetry = telemetry
        return self.tick(now)

    def tick(self, now: float) -> bool:
        """Let time go by since the last report; True if the state changed."""
        self._watch_load(now)
        before, levels = self._level, self._levels(is_relaxing=False)
        worst = max(_Cause, key=levels.__getitem__)
        if levels[worst] > self._level:
            self._level, self._calm_since = levels[worst], None
            self._blame(worst)
        elif self._level > 0:
            self._relax(now)
        return self._level != before

    def _relax(self, now: float) -> None:
        """Go down a level if nothing has asked for the present one for HOLD_S."""
        holding = [cause for cause, level in self._levels(is_relaxing=True).items() if level >= self._level]
        if holding:
            self._calm_since = None
            if self._cause not in holding:
                self._blame(holding[0])
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= HOLD_S:
            self._level -= 1
            self._calm_since = now
            if self._level == 0:
                self._calm_since, self._cause, self._text = None, None, ""

    def _blame(self, cause: _Cause) -> None:
        self._cause = cause
        match cause:
            case _Cause.HEAT:
                self._text = f"{self._telemetry.temperature_c:.1f} C"
            case _Cause.BATTERY:
                self._text = f"battery at {self._telemetry.battery_percent:.0f} %"
            case _Cause.OTHERS:
                self._text = f"other programs take {100 * self._telemetry.other_load:.0f} %"
            case _:
                assert_never(cause)

    def _watch_load(self, now: float) -> None:
        load, threshold = self._telemetry.other_load, self._limits.busy_load
        if threshold <= 0.0 or load < threshold:
            self._busy_since = None
            self._is_busy = self._is_busy and load >= threshold - MARGIN_LOAD
            return
        if self._busy_since is None:
            self._busy_since = now
        self._is_busy = self._is_busy or now - self._busy_since >= BUSY_S

    def _levels(self, *, is_relaxing: bool) -> dict[_Cause, int]:
        """The level that each cause asks for; is_relaxing: or is too close to for it to be left."""
        margin = 1.0 if is_relaxing else 0.0
        return {
            _Cause.HEAT: self._heat_level(margin * MARGIN_C),
            _Cause.BATTERY: self._battery_level(margin * MARGIN_PERCENT),
            _Cause.OTHERS: _MODERATE if self._is_busy else 0,
        }

    def _heat_level(self, margin_c: float) -> int:
        limits, temperature_c = self._limits, self._telemetry.temperature_c
        if temperature_c is None:
            return 0
        thresholds = (limits.moderate_c, limits.hot_c, limits.critical_c)
        reached = (at for at, least in enumerate(thresholds, 1) if 0.0 < least <= temperature_c + margin_c)
        return max(reached, default=0)

    def _battery_level(self, margin_percent: float) -> int:
        limits, percent = self._limits, self._telemetry.battery_percent
        if percent is None or self._telemetry.is_charging:
            return 0
        if limits.critical_battery_percent > 0.0 and percent <= limits.critical_battery_percent + margin_percent:
            return _CRITICAL
        is_low = limits.low_battery_percent > 0.0 and percent <= limits.low_battery_percent + margin_percent
        return _MODERATE if is_low else 0

    def check_invariants(self) -> None:
        assert (self._cause is None) == (self._level == 0) == (self._text == "")
        assert self._calm_since is None or self._level > 0
        assert not self._is_busy or self._telemetry.other_load >= self._limits.busy_load - MARGIN_LOAD


def _paces(limits: DeviceLimits, max_batch: int) -> tuple[Pace, ...]:
    batches, steps_per_s = limits.max_batch, limits.steps_per_s
    if len(batches) != len(LEVELS):
        batches = tuple(int(share * max_batch) for share in _BATCH_SHARES)
    if len(steps_per_s) != len(LEVELS):
        steps_per_s = DeviceLimits().steps_per_s
    return tuple(
        Pace(max_batch=max(1, min(rows, max_batch)), steps_per_s=max(0.0, steps))
        for rows, steps in zip(batches, steps_per_s, strict=True)
    )
