"""How far a device's passes are from what its figures say: a factor for each device, learned from the steps that come back.

So a measurement that was wrong, or is old, corrects itself, and a device that throttles looks as slow as it is. A pure
value with time passed in; `measuring` feeds it and multiplies the figures that the planner gets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.core.figures import LayerTimes
from orchestrator.core.step_time import StepTiming

# Share of what a pass says that the factor takes on: half of it within 14 passes.
NEWEST_WEIGHT = 0.05
# A pass counts as at most this many times slower or faster than was expected: a lone hiccup says little.
MAX_SURPRISE = 2.0
MIN_PASSES = 16
# Plans are made anew for figures that change, so these follow in steps.
STEP = 0.1
# What a device showed says less and less of it while nothing is seen of it: it has cooled down, or is charged again.
HALF_LIFE_S = 300.0
# Tokens that slots held when times were measured; the same as worker.profiling has.
CONTEXT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What a stage holds. context_work: the work of one decode row at CONTEXT_TOKENS, see SchedulerLimits.work_of."""

    num_layers: int
    has_head: bool
    context_work: float

    def expected_s(self, times: LayerTimes, timing: StepTiming) -> float:
        """What a decode pass should take by these times, which are of slots that hold CONTEXT_TOKENS each."""
        # A SHARED row that is alone is computed as two.
        rows = timing.num_rows if timing.is_solo else max(timing.num_rows, 2)
        more_work = timing.work - timing.num_rows * self.context_work
        more_s = more_work * times.prefill_token_s * self.num_layers
        least_s = times.stage_s(self.num_layers, self.has_head, rows)
        # Empty slots take less, and still more than nothing.
        return max(least_s + more_s, least_s / 2)


class Correction:
    """The factor of one device.

    Invariants: `factor` is 1 before MIN_PASSES passes were seen, and moves by more than STEP or not at all.
    """

    __slots__ = ("_level", "_num_passes", "_seen_at", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._level = 0.0
        self._num_passes = 0
        self._seen_at = -math.inf

    def observe(self, took_s: float, expected_s: float, now: float) -> None:
        """Take what a pass took and should have taken by the figures without this factor."""
        if took_s <= 0.0 or not 0.0 < expected_s < math.inf:
            return
        self._decay(now)
        most = math.log(MAX_SURPRISE)
        surprise = min(max(math.log(took_s / expected_s) - self._level, -most), most)
        self._num_passes += 1
        # The first ones count alike: their mean is better than any of them.
        self._level += max(NEWEST_WEIGHT, 1.0 / self._num_passes) * surprise
        self._seen_at = now

    def update(self, now: float) -> bool:
        """Let the factor follow what was learned; True if it moved."""
        self._decay(now)
        if self._num_passes < MIN_PASSES:
            return False
        learned = math.exp(self._level)
        if abs(learned / self.factor - 1.0) <= STEP:
            return False
        self.factor = learned
        return True

    def _decay(self, now: float) -> None:
        if self._seen_at > -math.inf and now > self._seen_at:
            self._level *= 0.5 ** ((now - self._seen_at) / HALF_LIFE_S)
            self._seen_at = now

    def check_invariants(self) -> None:
        assert self.factor > 0.0, f"a factor of {self.factor}"
        assert self._num_passes >= MIN_PASSES or self.factor == 1.0, f"{self.factor} after {self._num_passes} passes"
