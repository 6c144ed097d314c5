"""The rule by which a comparison counts: pairs of baseline, candidate, baseline on an otherwise idle machine.

Pure: it is given functions that measure, and decides how often to call them and which pairs count. The bounds were fixed
before the first measurement and are not options.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

# The baseline itself keeps one core busy; one that is a fleet of two stages keeps two.
MAX_BASELINE_BUSY_CORES = 1.3
MAX_FLEET_BUSY_CORES = 2.3
# What runs beside the benchmark's own processes, in any part of a pair: the same bound without the baseline's own core.
MAX_FOREIGN_CORES = 0.3
MIN_COUNTED = 3


@dataclass(frozen=True, slots=True)
class Load:
    """Cores busy during a measurement, in all and with processes of the benchmark alone."""

    busy_cores: float
    own_cores: float

    @property
    def foreign_cores(self) -> float:
        return max(0.0, self.busy_cores - self.own_cores)


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement. details: what else it showed, by name."""

    value: float
    load: Load
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """The candidate between two runs of its baseline. max_busy_cores: while those ran."""

    before: Run
    candidate: Run
    after: Run
    max_busy_cores: float = MAX_BASELINE_BUSY_CORES

    @property
    def baseline(self) -> float:
        return (self.before.value + self.after.value) / 2

    @property
    def ratio(self) -> float:
        return self.candidate.value / self.baseline

    @property
    def difference(self) -> float:
        return self.candidate.value - self.baseline

    @property
    def inverse_ratio(self) -> float:
        """For times: how many times faster the candidate is."""
        return self.baseline / self.candidate.value

    @property
    def counts(self) -> bool:
        baselines_alone = all(run.load.busy_cores <= self.max_busy_cores for run in (self.before, self.after))
        runs = (self.before, self.candidate, self.after)
        return baselines_alone and all(run.load.foreign_cores <= MAX_FOREIGN_CORES for run in runs)


@dataclass(frozen=True, slots=True)
class Plan:
    """Measure until `counted` pairs count, at most `tries` in all."""

    counted: int
    tries: int


@dataclass(frozen=True, slots=True)
class PairSet:
    """All pairs of a comparison in the order they were measured, the discarded included."""

    pairs: tuple[Pair, ...]

    @property
    def counted(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if pair.counts)

    @property
    def num_discarded(self) -> int:
        return len(self.pairs) - len(self.counted)

    @property
    def is_enough(self) -> bool:
        return len(self.counted) >= MIN_COUNTED

    def median(self, value: Callable[[Pair], float]) -> float | None:
        """The median over the pairs that count; None if none does."""
        values = [value(pair) for pair in self.counted]
        return statistics.median(values) if values else None

    def typical(self, value: Callable[[Pair], float]) -> float:
        """The median over all pairs, for remarks beside a figure."""
        return statistics.median(value(pair) for pair in self.counted or self.pairs)


def collect(
    plan: Plan,
    measure_baseline: Callable[[], Run],
    measure_candidate: Callable[[], Run],
    *,
    max_busy_cores: float = MAX_BASELINE_BUSY_CORES,
) -> PairSet:
    """Measure pairs one after the other; no value has a say in when to stop."""
    pairs: list[Pair] = []
    while len(pairs) < plan.tries and sum(pair.counts for pair in pairs) < plan.counted:
        before = measure_baseline()
        candidate = measure_candidate()
        pairs.append(Pair(before, candidate, measure_baseline(), max_busy_cores))
    return PairSet(tuple(pairs))
