"""One run of `shoal load`: whom to ask, how it is watched, and how it is stopped.

Ctrl-C ends a run early, with a report of what there is; a second one ends the command. Runs are made by `loadtest`, which is
imported on use, and shown by `cli.load_report`. Called by `cli.load`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from cli.load_report import Files, check_files, finish
from cli.on_ray import needing_ray
from cli.terminal import following, note
from shoal.errors import ConfigError, LaunchFailed
from shoal.types import QosClass

if TYPE_CHECKING:
    from loadtest.plan import Plan, Record, Slo
    from loadtest.ramp import Probe, Ramp, RampBounds, RateSearch
    from loadtest.runner import Outcome, Progress
    from loadtest.targets import Target

KEY_VARIABLE = "SHOAL_OPENAI_KEY"
# For the word to get to all harnesses before the first request is due.
START_LEAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What all scenarios are told: whom to ask, what is good, how long at most, and what to write."""

    seed: int
    server: str
    openai: str | None
    model: str
    is_raw: bool
    ttft_ms: float | None
    tpot_ms: float | None
    timeout_s: float
    files: Files
    num_harnesses: int = 0
    ray_address: str = "auto"


@dataclass(frozen=True, slots=True)
class Ramping:
    """How to look for the highest rate."""

    first_rate_per_s: float
    good_share: float
    max_probes: int


Slos: TypeAlias = "Mapping[QosClass, Slo]"
Show: TypeAlias = "Callable[[Progress], None]"


def run_and_report(settings: Settings, plan: Plan, slos: Slos) -> None:
    """Run a plan, show and write the report; exit code 1 if no request ended well."""
    check_files(settings.files)
    _check_time(plan, settings.timeout_s)
    slos = _objectives(settings, slos)
    run = _run_on_ray if settings.num_harnesses else _run
    finish(settings.files, asyncio.run(run(settings, plan, slos)))


def ramp_and_report(settings: Settings, make_plan: Callable[[float], Plan], slos: Slos, ramping: Ramping) -> None:
    """Find the highest rate, show and write the report of its run; exit code 1 if no rate held."""
    from loadtest.ramp import RampBounds, RateSearch

    check_files(settings.files)
    if settings.num_harnesses:
        raise ConfigError("--ramp looks for a rate with one harness; leave --ray or --ramp out", field="ray")
    slos = _objectives(settings, slos)
    search = RateSearch(ramping.first_rate_per_s, max_probes=ramping.max_probes)
    bounds = RampBounds(ramping.good_share, settings.timeout_s)
    first = make_plan(ramping.first_rate_per_s)
    if not any(_is_asked_for(slos.get(request.qos)) for request in first.requests):
        raise ConfigError("a ramp needs an objective to keep: give --ttft-ms or --tpot-ms", field="ttft_ms")
    ramp = asyncio.run(_ramp(settings, make_plan, slos, search, bounds))
    finish(settings.files, ramp.best, ramp, ramping.good_share)


async def _run_on_ray(settings: Settings, plan: Plan, slos: Slos) -> Outcome:
    """Run a plan from several harnesses on a Ray cluster; what all of them saw is one report."""
    from loadtest.parts import Part, merge, run_part, split, together

    make_target = partial(_make_target, settings, _key())
    parts = [Part(part, make_target, dict(slos), settings.timeout_s) for part in split(plan, settings.num_harnesses)]
    with needing_ray():
        from launch.ray_cluster.work import Hands

    title = f"{plan.description}, from {len(parts)} harnesses on Ray"
    with Hands(settings.ray_address, run_part, parts) as hands, _stopping() as stopping, _progress(title) as show:
        results = await hands.work(
            START_LEAD_S, stopping, lambda seen: show(together(seen, num_planned=len(plan.requests)))
        )
    lost = [result for result in results if isinstance(result, LaunchFailed)]
    seen = [result for result in results if not isinstance(result, LaunchFailed)]
    for error in lost:
        note(f"a harness is lost, with what it saw: {error.message}")
    if not seen:
        raise lost[0]
    return merge(plan, seen, _command(), num_lost=len(lost))


async def _run(settings: Settings, plan: Plan, slos: Slos) -> Outcome:
    from loadtest.runner import Watch, run

    async with _open_target(settings) as (target, name):
        with _stopping() as stopping, _progress(plan.description) as show:
            return await run(
                plan,
                target,
                target_name=name,
                command=_command(),
                slos=slos,
                timeout_s=settings.timeout_s,
                stopping=stopping,
                watch=Watch(on_progress=show),
            )


async def _ramp(
    settings: Settings, make_plan: Callable[[float], Plan], slos: Slos, search: RateSearch, bounds: RampBounds
) -> Ramp:
    from loadtest.ramp import ramp
    from loadtest.runner import Watch, run

    async with _open_target(settings) as (target, name):

        async def run_plan(plan: Plan, cutting: asyncio.Event, on_record: Callable[[Record], None]) -> Outcome:
            with _progress(plan.description) as show:
                watch = Watch(on_progress=show, on_record=on_record)
                return await run(
                    plan, target, target_name=name, command=_command(), slos=slos, stopping=cutting, watch=watch
                )

        with _stopping() as stopping:
            return await ramp(
                search, make_plan, run_plan, slos=slos, bounds=bounds, stopping=stopping, on_probe=_tell_probe
            )


@asynccontextmanager
async def _open_target(settings: Settings) -> AsyncIterator[tuple[Target, str]]:
    """Make contact, so that a wrong address is found out before anything else; yields target and description."""
    target = _make_target(settings, _key())
    try:
        yield target, await target.describe()
    finally:
        await target.close()


def _key() -> str:
    return os.environ.get(KEY_VARIABLE, "")


def _make_target(settings: Settings, key: str) -> Target:
    from loadtest.targets import OpenAiTarget, ShoalTarget

    if settings.openai is None:
        return ShoalTarget(settings.server, model=settings.model, is_chat=not settings.is_raw)
    return OpenAiTarget(settings.openai, model=settings.model, api_key=key, is_chat=not settings.is_raw)


@contextmanager
def _stopping() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; after it, Ctrl-C is as everywhere."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def stop() -> None:
        stopping.set()
        # At a terminal the line has a spinner and a ^C in it.
        start = "\n" if sys.stderr.isatty() else ""
        note(f"{start}stopping: the report has what there is (Ctrl-C again leaves without one)")
        release()

    def release() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield stopping
    finally:
        release()


@contextmanager
def _progress(title: str) -> Iterator[Show]:
    """Show how far a run is: all the time at a terminal, now and then in a log."""
    with following(title) as show:
        yield lambda progress: show(partial(_describe, progress))


def _describe(progress: Progress) -> str:
    from loadtest.runner import RATE_S
    from loadtest.tables import format_rate, format_s

    num_ended = progress.num_ok + progress.num_failed
    failed = f" ({progress.num_failed} failed)" if progress.num_failed else ""
    return (
        f"{progress.elapsed_s:.0f} s: {num_ended} of {progress.num_planned} ended{failed}, "
        f"{progress.num_running} under way, {format_rate(progress.tokens_per_s)} tokens/s "
        f"(last {RATE_S:g} s), TTFT p50 {format_s(progress.ttft_s)}"
    )


def _tell_probe(probe: Probe) -> None:
    from loadtest.tables import format_rate, format_share

    verdict = "holds" if probe.holds else "does not hold"
    note(f"{format_rate(probe.rate_per_s)} requests/s: {verdict}, {format_share(probe.good_share)} good", style="")


def _objectives(settings: Settings, slos: Slos) -> Slos:
    """The workload's objectives, with those of the command line in their place."""
    given = {"ttft_s": settings.ttft_ms, "tpot_s": settings.tpot_ms}
    changes = {name: limit_ms / 1000 or None for name, limit_ms in given.items() if limit_ms is not None}
    return {qos: replace(slo, **changes) for qos, slo in slos.items()}


def _is_asked_for(slo: Slo | None) -> bool:
    return slo is not None and (slo.ttft_s, slo.tpot_s, slo.e2e_s) != (None, None, None)


def _check_time(plan: Plan, timeout_s: float) -> None:
    last_s = max((request.due_s or 0.0 for request in plan.requests), default=0.0)
    if last_s >= timeout_s:
        raise ConfigError(
            f"timeout = {timeout_s:g} is not allowed; it must be more than {last_s:.0f} s, when the last request is due",
            field="timeout",
        )


def _command() -> str:
    """The command line, without the passwords and keys that URLs may have."""
    from loadtest.targets import without_credentials

    words = (re.sub(r"\w+://\S+", lambda found: without_credentials(found[0]), word) for word in sys.argv[1:])
    return shlex.join(["shoal", *words])
