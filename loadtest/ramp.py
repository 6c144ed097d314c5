"""Finds the highest rate of requests at which a server still keeps its objectives.

`RateSearch` decides, purely, which rate is tried next. `ramp` tries them within a bound of time, each with a plan made anew
from the same seed, and gives a probe up as soon as it cannot hold any more. How plans are made and run is given to it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from loadtest.plan import Plan, Record, Slo
from loadtest.runner import Ending, Outcome
from loadtest.statistics import client_health, is_good
from shoal.errors import ConfigError
from shoal.types import QosClass

# Share of requests that must be good. Source: MLPerf's server scenario, which bounds the 99th percentile.
GOOD_SHARE = 0.99
MAX_PROBES = 12
# A rate that holds and one that does not, this close together, are one to whoever plans a fleet.
PRECISION = 0.1
# With fewer requests, a share of 99 % would be one of all.
MIN_PROBE_REQUESTS = 100
_DIGITS = 3


class RateSearch:
    """Doubles from a first rate until one does not hold, or halves until one does; then bisects between the two.

    Bisection is by the geometric mean, for rates are compared by ratio. Invariants: best < worst; every rate tried lies
    strictly between them; at most max_probes are tried.
    """

    __slots__ = ("_best", "_max_probes", "_next", "_num_probes", "_precision", "_worst")

    def __init__(self, first_rate_per_s: float, *, max_probes: int = MAX_PROBES, precision: float = PRECISION) -> None:
        if not 0.0 < first_rate_per_s < math.inf:
            raise ConfigError(f"rate = {first_rate_per_s} is not allowed; it must be a number above 0", field="rate")
        self._best = 0.0
        self._worst = math.inf
        self._next = first_rate_per_s
        self._num_probes = 0
        self._max_probes = max_probes
        self._precision = precision

    @property
    def best_per_s(self) -> float:
        """The highest rate that held; 0 if none did."""
        return self._best

    @property
    def worst_per_s(self) -> float:
        """The lowest rate that did not hold; infinite if all did."""
        return self._worst

    @property
    def is_narrow(self) -> bool:
        """Whether the limit is known to the precision."""
        return self._worst <= self._best * (1 + self._precision)

    def next_rate_per_s(self) -> float | None:
        """The rate to try now; None if the search is over."""
        is_over = self.is_narrow or self._num_probes >= self._max_probes
        return None if is_over or not self._best < self._next < self._worst else self._next

    def add(self, *, holds: bool) -> None:
        """Take in how the rate fared that was to be tried."""
        self._num_probes += 1
        if holds:
            self._best = self._next
        else:
            self._worst = self._next
        self._next = self._between()

    def _between(self) -> float:
        if math.isinf(self._worst):
            return self._best * 2
        if not self._best:
            return self._worst / 2
        # Short numbers, for people; next_rate_per_s() ends the search where they no longer lie between.
        return float(f"{math.sqrt(self._best * self._worst):.{_DIGITS}g}")


class RampEnd(Enum):
    """Why a ramp ended."""

    FOUND = "limit found"
    NO_LIMIT = "no limit met"
    NONE_HOLDS = "no rate holds"
    IMPRECISE = "out of probes"
    NO_PLAN = "no further rate can be planned"
    OUT_OF_TIME = "out of time"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Probe:
    """A rate that was tried. good_share: of all that were planned; was_cut_short: it could not hold any more.

    is_client_limited: the harness itself was too slow for it (see `statistics.ClientHealth`).
    """

    rate_per_s: float
    holds: bool
    good_share: float
    num_requests: int
    duration_s: float
    was_cut_short: bool
    is_client_limited: bool


@dataclass(frozen=True, slots=True)
class Ramp:
    """What a ramp found. best_per_s: the highest rate that held, 0 if none; best: its run, or the last one if none held.

    reason: in words, why a further rate could not be planned; "" where that did not end the search.
    """

    probes: tuple[Probe, ...]
    best_per_s: float
    end: RampEnd
    best: Outcome
    reason: str = ""

    @property
    def decisive(self) -> Probe | None:
        """The probe that the result rests on: of the highest rate that held, or the last one; None if there was none."""
        held = (probe for probe in self.probes if probe.holds and probe.rate_per_s == self.best_per_s)
        return next(held, self.probes[-1] if self.probes else None)


@dataclass(frozen=True, slots=True)
class RampBounds:
    """When a rate holds, and how long the search may take in all; a probe that is under way then does not count."""

    good_share: float = GOOD_SHARE
    max_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.good_share <= 1.0:
            raise ConfigError(
                f"good_share = {self.good_share} is not allowed; it must be above 0 and at most 1", field="good_share"
            )


Slos = Mapping[QosClass, Slo]
# Makes and runs a plan; it is to stop when the event is set, and tells of each record.
RunPlan = Callable[[Plan, asyncio.Event, Callable[[Record], None]], Awaitable[Outcome]]


async def ramp(
    search: RateSearch,
    make_plan: Callable[[float], Plan],
    run_plan: RunPlan,
    *,
    slos: Slos,
    bounds: RampBounds,
    stopping: asyncio.Event,
    on_probe: Callable[[Probe], None] = lambda _: None,
) -> Ramp:
    """Try rates until the search is over, the time is, `stopping` is set, or the next rate has no plan.

    Raises ConfigError if the first rate has none.
    """
    over = asyncio.create_task(_await_end(stopping, bounds.max_s))
    probes: list[Probe] = []
    best: Outcome | None = None
    try:
        while (rate_per_s := search.next_rate_per_s()) is not None:
            try:
                plan = make_plan(rate_per_s)
            except ConfigError as error:
                if best is None:
                    raise
                return Ramp(tuple(probes), search.best_per_s, RampEnd.NO_PLAN, best, error.message)
            outcome = await _run_probe(plan, run_plan, slos, bounds.good_share, over)
            if over.done():
                return Ramp(tuple(probes), search.best_per_s, over.result(), best or outcome)
            probe = _judge(rate_per_s, outcome, slos, bounds.good_share)
            search.add(holds=probe.holds)
            # The last one stands in for the best while none holds.
            best = outcome if probe.holds or not search.best_per_s else best
            probes.append(probe)
            on_probe(probe)
    finally:
        over.cancel()
    assert best is not None, "a search has a first rate"
    return Ramp(tuple(probes), search.best_per_s, _end(search), best)


async def _await_end(stopping: asyncio.Event, max_s: float | None) -> RampEnd:
    try:
        async with asyncio.timeout(max_s):
            await stopping.wait()
    except TimeoutError:
        return RampEnd.OUT_OF_TIME
    return RampEnd.INTERRUPTED


async def _run_probe(
    plan: Plan, run_plan: RunPlan, slos: Slos, good_share: float, over: asyncio.Task[RampEnd]
) -> Outcome:
    """Run a plan; stop it when the ramp is over, or more requests have missed their objectives than may."""
    cutting = asyncio.Event()
    num_left = len(plan.requests)

    def count(record: Record) -> None:
        nonlocal num_left
        num_left -= not _is_good(record, slos)
        if not _suffices(num_left, len(plan.requests), good_share):
            cutting.set()

    def cut(_: object) -> None:
        cutting.set()

    over.add_done_callback(cut)
    try:
        return await run_plan(plan, cutting, count)
    finally:
        over.remove_done_callback(cut)


def _is_good(record: Record, slos: Slos) -> bool:
    return is_good(record, slos.get(record.request.qos, Slo()))


def _suffices(num_good: int, num_planned: int, good_share: float) -> bool:
    # 99 of 100 are 0.99, whatever the last bit of a quotient says.
    return num_good >= good_share * num_planned - 1e-9


def _judge(rate_per_s: float, outcome: Outcome, slos: Slos, good_share: float) -> Probe:
    result = outcome.result
    num_planned = len(result.plan.requests)
    num_good = sum(_is_good(record, slos) for record in result.records)
    return Probe(
        rate_per_s=rate_per_s,
        holds=_suffices(num_good, num_planned, good_share),
        good_share=num_good / num_planned,
        num_requests=num_planned,
        duration_s=result.duration_s,
        was_cut_short=outcome.ending is not Ending.COMPLETE,
        is_client_limited=client_health(result).is_client_limited,
    )


def _end(search: RateSearch) -> RampEnd:
    if not search.best_per_s:
        return RampEnd.NONE_HOLDS
    if math.isinf(search.worst_per_s):
        return RampEnd.NO_LIMIT
    return RampEnd.FOUND if search.is_narrow else RampEnd.IMPRECISE
