"""How long a forward pass takes as a function of its work, learned from the steps that come back.

Work is counted in tokens of slots that hold nothing: see SchedulerLimits.work_of. A line for each stage, fitted with
exponential forgetting so that a device that warms up is followed. It knows neither rows nor policy: the scheduler asks it
what a batch would take and how much work a time allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Before anything was measured: one row takes 23.5 ms and each further token 4.7 ms. Source: the default model on one thread
# of a server processor (AMD EPYC); the ratio of the two holds for other speeds of the same kind of device.
PRIOR_TOKEN_S = 0.0047
PRIOR_BASE_TOKENS = 4.0
# Share of its weight that an observation keeps with each newer one: half of all weight lies on the last 23 steps.
KEEP = 0.97
# One observation moves the line as if it were at most this many times slower or faster than expected: a lone hiccup counts
# little, and a device that stays slower is followed all the same.
MAX_SURPRISE = 2.0
# How far, in squared tokens, observations must be spread before they outweigh the prior ratio of base and slope.
RIDGE = 16.0
MIN_OBSERVATIONS = 3


@dataclass(frozen=True, slots=True)
class StepTiming:
    """A pass that came back: its work, and what each stage took for it. num_rows: decode rows; 0 if there was more."""

    work: float
    stage_s: tuple[float, ...]
    is_solo: bool
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a request that comes now may expect: until it has a slot, its prompt, and the time between two tokens."""

    queue_s: float
    prefill_s: float
    inter_token_s: float

    @property
    def first_token_s(self) -> float:
        return self.queue_s + self.prefill_s

    def answer_s(self, num_tokens: int, period_s: float) -> float:
        """Until so many tokens are there; period_s: the least time between two that the client wants."""
        return self.first_token_s + (num_tokens - 1) * max(self.inter_token_s, period_s)


class _Line:
    """base_s + token_s * work, by least squares over weighted sums."""

    __slots__ = ("_weight", "_x", "_xx", "_xy", "_y", "base_s", "token_s")

    def __init__(self, base_s: float, token_s: float) -> None:
        self.base_s = base_s
        self.token_s = token_s
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def at(self, work: float) -> float:
        return self.base_s + self.token_s * work

    def observe(self, work: float, seconds: float) -> None:
        if self._weight >= MIN_OBSERVATIONS - 1:
            expected = self.at(work)
            seconds = min(max(seconds, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        self._weight = self._weight * KEEP + 1.0
        self._x = self._x * KEEP + work
        self._y = self._y * KEEP + seconds
        self._xx = self._xx * KEEP + work * work
        self._xy = self._xy * KEEP + work * seconds
        self._fit()

    def _fit(self) -> None:
        """Least squares with a pull of the slope towards the prior ratio, at the level that was observed."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = max(self._xx - self._x * mean_x, 0.0)
        prior = mean_y / (PRIOR_BASE_TOKENS + mean_x)
        slope = (self._xy - self._x * mean_y + RIDGE * prior) / (spread + RIDGE)
        # A token costs something, and a pass of no tokens not less than nothing.
        self.token_s = min(max(slope, prior / 100), mean_y / mean_x)
        self.base_s = mean_y - self.token_s * mean_x


class StepTimes:
    """The lines of all stages, and the mean of SOLO rows, which take other kernels.

    Invariants: base and slope of a stage are not negative, and a token costs something; the sums are those of all stages.
    """

    def __init__(self, num_stages: int, costs: Sequence[float] = ()) -> None:
        """costs: what each stage is expected to take, 1 being the whole model at speed 1; by default equal parts of it."""
        tokens_s = [PRIOR_TOKEN_S * cost for cost in costs or [1 / num_stages] * num_stages]
        self._stages = [_Line(PRIOR_BASE_TOKENS * token_s, token_s) for token_s in tokens_s]
        self._token_s = sum(tokens_s)
        self._base_s = PRIOR_BASE_TOKENS * self._token_s
        self._prior_s = self.latency_s(1)
        self._num_observed = 0
        self._solo_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether predictions rest on observations."""
        return self._num_observed >= MIN_OBSERVATIONS

    @property
    def slowness(self) -> float | None:
        """How many times longer a pass takes than was expected; None before it is known."""
        return self.latency_s(1) / self._prior_s if self.is_known else None

    def expect(self, slowness: float) -> None:
        """Expect as much as pipelines that are known show; nothing once something was observed."""
        if self._num_observed:
            return
        factor = slowness * self._prior_s / self.latency_s(1)
        self._stages = [_Line(line.base_s * factor, line.token_s * factor) for line in self._stages]
        self._base_s, self._token_s = self._base_s * factor, self._token_s * factor

    def observe(self, stage_s: Sequence[float], work: float, is_solo: bool) -> None:
        """Learn from a pass. One with times of another number of stages, or without work, says nothing."""
        if len(stage_s) != len(self._stages) or work <= 0 or min(stage_s) <= 0:
            return
        if is_solo:
            self._observe_solo(sum(stage_s))
            return
        self._num_observed += 1
        for line, seconds in zip(self._stages, stage_s, strict=True):
            line.observe(work, seconds)
        self._base_s = sum(line.base_s for line in self._stages)
        self._token_s = sum(line.token_s for line in self._stages)

    def latency_s(self, work: float) -> float:
        """From entering the first stage to leaving the last."""
        return self._base_s + self._token_s * work

    def bottleneck_s(self, work: float) -> float:
        """What the slowest stage takes: batches that follow each other closely are this far apart."""
        return max(line.at(work) for line in self._stages)

    def solo_s(self) -> float:
        return self.latency_s(1) if self._solo_s is None else self._solo_s

    def work_within(self, latency_s: float, bottleneck_s: float) -> float:
        """The most work of a batch that takes at most latency_s in all, and at each stage at most bottleneck_s."""
        most = (latency_s - self._base_s) / self._token_s
        for line in self._stages:
            most = min(most, (bottleneck_s - line.base_s) / line.token_s)
        return max(most, 0.0)

    def _observe_solo(self, seconds: float) -> None:
        if self._solo_s is None:
            self._solo_s = seconds
            return
        seconds = min(max(seconds, self._solo_s / MAX_SURPRISE), self._solo_s * MAX_SURPRISE)
        # The same memory as that of the lines.
        self._solo_s += (1 - KEEP) * (seconds - self._solo_s)

    def check_invariants(self) -> None:
        for line in self._stages:
            assert line.token_s > 0, f"a token costs {line.token_s} s"
            assert line.base_s >= -1e-12, f"a pass without tokens takes {line.base_s} s"
        assert abs(self._base_s - sum(line.base_s for line in self._stages)) < 1e-9
        assert abs(self._token_s - sum(line.token_s for line in self._stages)) < 1e-9
