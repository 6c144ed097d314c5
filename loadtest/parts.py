"""Shares an open-loop plan out among several harnesses, and puts what they saw together as one run.

Requests keep their numbers and times; the turns of a conversation stay with one harness, which waits for each of their
answers. All harnesses begin at one time of the wall clock, so that differences of clocks are errors of what is reported.
Knows neither processes nor who runs them. Called by the command line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from loadtest.plan import Plan, PlannedRequest, Record, RunResult, Slo
from loadtest.runner import Ending, Outcome, Progress, Watch, run
from loadtest.targets import Target
from shoal.errors import ConfigError
from shoal.types import QosClass

# The end that says most of a run of which some parts ended in one way and some in another.
_WORST_FIRST = (Ending.LOST, Ending.INTERRUPTED, Ending.TIMEOUT, Ending.COMPLETE)


@dataclass(frozen=True, slots=True)
class Part:
    """What one harness is to do. make_target: called where it runs."""

    plan: Plan
    make_target: Callable[[], Target]
    slos: Mapping[QosClass, Slo] = field(default_factory=dict)
    timeout_s: float | None = None


def split(plan: Plan, num_parts: int) -> tuple[Plan, ...]:
    """Plans that together are the plan; fewer where there are fewer conversations. Raises ConfigError for a closed loop."""
    if plan.concurrency:
        raise ConfigError(
            "only requests that come at times of their own can be spread over harnesses, as `server` and `trace` send them",
            field="ray",
        )
    part_of: dict[int, int] = {}
    parts: list[list[PlannedRequest]] = [[] for _ in range(num_parts)]
    num_begun = 0
    for request in plan.requests:
        if request.after is None:
            part_of[request.number] = num_begun % num_parts
            num_begun += 1
        else:
            part_of[request.number] = part_of[request.after]
        parts[part_of[request.number]].append(request)
    return tuple(replace(plan, requests=tuple(requests)) for requests in parts if requests)


async def run_part(part: Part, start_at_s: float, show: Callable[[Progress], None], stopping: asyncio.Event) -> Outcome:
    """Run a part from a time of the wall clock on; where that has passed, it is late, and its latencies say so.

    show: takes how far it is, a few times a second. stopping: ends it, with what there is.
    """
    target = part.make_target()
    try:
        name = await target.describe()
        await asyncio.sleep(start_at_s - time.time())
        late_s = max(0.0, time.time() - start_at_s)
        outcome = await run(
            part.plan,
            target,
            target_name=name,
            slos=part.slos,
            timeout_s=part.timeout_s,
            stopping=stopping,
            watch=Watch(on_progress=show),
        )
    finally:
        await target.close()
    return Outcome(shifted(outcome.result, late_s), outcome.ending)


def together(seen: Sequence[Progress], num_planned: int) -> Progress:
    """How far a plan is of which several harnesses do parts. ttft_s: the median of what each has."""
    ttfts_s = [progress.ttft_s for progress in seen if progress.ttft_s is not None]
    return Progress(
        elapsed_s=max((progress.elapsed_s for progress in seen), default=0.0),
        num_planned=num_planned,
        num_running=sum(progress.num_running for progress in seen),
        num_ok=sum(progress.num_ok for progress in seen),
        num_failed=sum(progress.num_failed for progress in seen),
        num_tokens=sum(progress.num_tokens for progress in seen),
        tokens_per_s=sum(progress.tokens_per_s for progress in seen),
        ttft_s=median(ttfts_s) if ttfts_s else None,
    )


def shifted(result: RunResult, late_s: float) -> RunResult:
    """What a harness that began late saw, by the time at which it was to begin. Requests were due when they were."""
    return replace(
        result,
        records=tuple(_shifted(record, late_s) for record in result.records),
        duration_s=result.duration_s + late_s,
    )


def _shifted(record: Record, late_s: float) -> Record:
    # A turn was due at its planned time, or when the answer before it, which came late by the clock of all, had ended.
    is_planned = record.due_s == record.request.due_s
    return replace(
        record,
        due_s=record.due_s if is_planned else record.due_s + late_s,
        sent_at_s=record.sent_at_s + late_s,
        ended_at_s=record.ended_at_s + late_s,
        token_at_s=tuple(at_s + late_s for at_s in record.token_at_s),
    )


def merge(plan: Plan, outcomes: Sequence[Outcome], command: str = "", *, num_lost: int = 0) -> Outcome:
    """One run of the plan, of what the harnesses of its parts saw; num_lost: those of whom it is not known.

    cpu_share: of the busiest.
    """
    results = [outcome.result for outcome in outcomes]
    records = [record for result in results for record in result.records]
    machines = sorted({result.machine for result in results})
    merged = RunResult(
        plan=plan,
        target=results[0].target,
        records=tuple(sorted(records, key=lambda record: record.request.number)),
        duration_s=max(result.duration_s for result in results),
        slos=results[0].slos,
        loop_lag_s=tuple(lag_s for result in results for lag_s in result.loop_lag_s),
        cpu_share=max(result.cpu_share for result in results),
        machine=f"{len(results)} harnesses on {'; '.join(machines)}",
        command=command,
    )
    endings = {outcome.ending for outcome in outcomes} | ({Ending.LOST} if num_lost else set())
    return Outcome(merged, next(ending for ending in _WORST_FIRST if ending in endings))
