"""The search for the highest rate that holds: which rates are tried, when it ends, and what a probe is judged by."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.answers import Arrival, End, Event
from loadtest.plan import Plan, PlannedRequest, Record
from loadtest.ramp import MAX_PROBES, PRECISION, Probe, Ramp, RampBounds, RampEnd, RateSearch, ramp
from loadtest.runner import Outcome, Watch, run
from shoal.errors import ConfigError
from tests.support.load_runs import SLOS, make_plan, planned
from tests.support.virtual_time import run_virtually


def search_for(limit_per_s: float, first_per_s: float = 1.0, **options: Any) -> tuple[list[float], RateSearch]:
    """The rates that are tried where all up to a limit hold."""
    search = RateSearch(first_per_s, **options)
    tried: list[float] = []
    while (rate_per_s := search.next_rate_per_s()) is not None:
        tried.append(rate_per_s)
        search.add(holds=rate_per_s <= limit_per_s)
    return tried, search


def test_rates_double_until_one_does_not_hold_and_then_the_gap_is_halved() -> None:
    tried, search = search_for(5.2)

    assert tried == [1.0, 2.0, 4.0, 8.0, 5.66, 4.76, 5.19]
    assert (search.best_per_s, search.worst_per_s, search.is_narrow) == (5.19, 5.66, True)


def test_rates_halve_where_the_first_is_too_high() -> None:
    tried, search = search_for(0.3)

    assert tried[:3] == [1.0, 0.5, 0.25]
    assert search.best_per_s == pytest.approx(0.3, rel=PRECISION)


def test_a_server_that_never_holds_is_given_up() -> None:
    tried, search = search_for(0.0)

    assert len(tried) == MAX_PROBES
    assert search.best_per_s == 0.0


def test_a_server_that_always_holds_is_given_up_too() -> None:
    tried, search = search_for(1e9, max_probes=5)

    assert tried == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert search.best_per_s == 16.0


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_first_rate_must_be_one(rate_per_s: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        RateSearch(rate_per_s)


@given(
    limit=st.floats(0.01, 100),
    first=st.floats(0.01, 100),
    max_probes=st.integers(1, 30),
    precision=st.floats(1e-4, 1.0),
)
def test_a_search_ends_between_what_held_and_what_did_not(
    limit: float, first: float, max_probes: int, precision: float
) -> None:
    tried, search = search_for(limit, first, max_probes=max_probes, precision=precision)

    assert 1 <= len(tried) <= max_probes
    assert len(set(tried)) == len(tried)
    assert search.best_per_s <= limit < search.worst_per_s
    assert search.best_per_s == max((rate for rate in tried if rate <= limit), default=0.0)
    # It stops short of the precision only for want of probes or of digits.
    assert search.is_narrow or len(tried) == max_probes or precision < 0.01


@given(answers=st.lists(st.booleans(), min_size=MAX_PROBES, max_size=MAX_PROBES))
def test_a_server_of_changing_mind_does_not_confuse_a_search(answers: list[bool]) -> None:
    search = RateSearch(1.0)
    tried: list[tuple[float, bool]] = []
    for holds in answers:
        rate_per_s = search.next_rate_per_s()
        if rate_per_s is None:
            break
        assert search.best_per_s < rate_per_s < search.worst_per_s
        search.add(holds=holds)
        tried.append((rate_per_s, holds))

    assert search.best_per_s == max((rate for rate, holds in tried if holds), default=0.0)


class Server:
    """Takes 50 ms a request, one at a time, and so holds at most 20 a second."""

    def __init__(self, service_s: float = 0.05) -> None:
        self._free_at_s = 0.0
        self._service_s = service_s

    async def describe(self) -> str:
        return "a fake"

    async def close(self) -> None: ...

    async def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + self._service_s
        await asyncio.sleep(self._free_at_s - now_s)
        yield Arrival(1)
        yield End("length")


def steady(rate_per_s: float, num_requests: int = 100) -> Plan:
    return make_plan(*(planned(number, number / rate_per_s) for number in range(num_requests)))


def run_ramp(
    search: RateSearch,
    *,
    make: Callable[[float], Plan] = steady,
    service_s: float = 0.05,
    bounds: RampBounds | None = None,
    stop_after_s: float | None = None,
    told: list[Probe] | None = None,
) -> Ramp:
    async def run_plan(plan: Plan, cutting: asyncio.Event, on_record: Callable[[Record], None]) -> Outcome:
        return await run(
            plan, Server(service_s), slos=SLOS, stopping=cutting, watch=Watch(on_record=on_record), timeout_s=600.0
        )

    async def main() -> Ramp:
        stopping = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stopping.set)
        return await ramp(
            search,
            make,
            run_plan,
            slos=SLOS,
            bounds=bounds or RampBounds(),
            stopping=stopping,
            on_probe=(told if told is not None else []).append,
        )

    return run_virtually(main())


def test_a_ramp_finds_the_rate_at_which_a_server_begins_to_lag() -> None:
    # 2 s to the first token: after 100 requests that come at 33 a second, the last waits for 2 s.
    found = run_ramp(RateSearch(1.0))

    assert found.end is RampEnd.FOUND
    assert found.best_per_s == pytest.approx(33.0, rel=PRECISION)
    assert found.best.result.plan == steady(found.best_per_s)
    assert [probe.holds for probe in found.probes[:7]] == [True, True, True, True, True, True, False]


def test_a_probe_that_cannot_hold_any_more_is_cut_short() -> None:
    found = run_ramp(RateSearch(1000.0, max_probes=1))

    (probe,) = found.probes
    # At 1000 a second the 41st request is the first to wait for more than 2 s, and the 42nd one too many.
    assert (probe.was_cut_short, probe.holds, probe.good_share) == (True, False, 0.4)
    assert probe.duration_s < 2.5
    assert (found.end, found.best_per_s) == (RampEnd.NONE_HOLDS, 0.0)


def test_one_request_in_a_hundred_may_miss() -> None:
    def with_slow_ones(num_slow: int) -> Callable[[float], Plan]:
        # Slow ones come at once with another, in front of them by 40 places.
        return lambda _: make_plan(
            *(planned(number, 0.0 if number < 40 + num_slow else 100.0 + number) for number in range(100))
        )

    assert run_ramp(RateSearch(1.0, max_probes=1), make=with_slow_ones(1)).probes[0].holds
    assert not run_ramp(RateSearch(1.0, max_probes=1), make=with_slow_ones(2)).probes[0].holds


def test_how_many_may_miss_can_be_set() -> None:
    found = run_ramp(RateSearch(1000.0, max_probes=1), bounds=RampBounds(good_share=0.4))

    assert found.probes[0].holds


@pytest.mark.parametrize("good_share", [0.0, -0.5, 1.1])
def test_the_share_of_good_requests_must_be_one(good_share: float) -> None:
    with pytest.raises(ConfigError, match="good_share"):
        RampBounds(good_share=good_share)


def test_a_ramp_that_is_out_of_time_tells_what_it_knows() -> None:
    # A probe at 1 a second takes 99 s, and one at 2 half of that.
    found = run_ramp(RateSearch(1.0), bounds=RampBounds(max_s=120.0))

    assert (found.end, found.best_per_s) == (RampEnd.OUT_OF_TIME, 1.0)
    assert [probe.rate_per_s for probe in found.probes] == [1.0]
    assert found.best.result.plan == steady(1.0)


def test_a_ramp_that_is_told_to_stop_tells_what_it_knows() -> None:
    found = run_ramp(RateSearch(1.0), stop_after_s=30.0)

    assert (found.end, found.best_per_s, found.probes) == (RampEnd.INTERRUPTED, 0.0, ())
    assert 0 < len(found.best.result.records) < 100


def test_a_ramp_that_meets_no_limit_says_so() -> None:
    found = run_ramp(RateSearch(1.0, max_probes=3), service_s=0.0)

    assert (found.end, found.best_per_s) == (RampEnd.NO_LIMIT, 4.0)


def test_every_probe_is_told_as_it_ends() -> None:
    told: list[Probe] = []

    found = run_ramp(RateSearch(1.0, max_probes=4), told=told)

    assert tuple(told) == found.probes
    assert found.end is RampEnd.NO_LIMIT


def test_plans_are_made_for_the_rate_of_each_probe() -> None:
    asked: list[float] = []

    def make(rate_per_s: float) -> Plan:
        asked.append(rate_per_s)
        return steady(rate_per_s)

    found = run_ramp(RateSearch(1.0), make=make)

    assert asked == [probe.rate_per_s for probe in found.probes]
    assert all(left != right for left, right in itertools.pairwise(asked))


@pytest.mark.parametrize(("least", "most", "first", "best"), [(0.0, 5.0, 1.0, 4.0), (200.0, 1e9, 256.0, 0.0)])
def test_a_rate_that_cannot_be_planned_ends_the_search_with_what_was_found(
    least: float, most: float, first: float, best: float
) -> None:
    def make(rate_per_s: float) -> Plan:
        if not least < rate_per_s < most:
            raise ConfigError("no such plan")
        return steady(rate_per_s)

    found = run_ramp(RateSearch(first), make=make)

    assert (found.end, found.reason, found.best_per_s) == (RampEnd.NO_PLAN, "no such plan", best)
    assert found.decisive is not None
    assert found.decisive.rate_per_s == (best or found.probes[-1].rate_per_s)
    assert found.best.result.records


def test_a_first_rate_that_cannot_be_planned_is_refused() -> None:
    def make(_: float) -> Plan:
        raise ConfigError("no such plan")

    with pytest.raises(ConfigError, match="no such plan"):
        run_ramp(RateSearch(1.0), make=make)
