"""Figures of a simulated run: rates, percentiles, what recovering took, and what keeps the fleet from more.

Makes them of what was planned and what was counted. Pure numbers: how they are shown is the command line's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.types import QosClass
from simulation.run import PlannedSite, Played
from simulation.settings import Settings, targets_of
from simulation.tally import ClassTally, End, Losses

# A stage that computes for so much of the time is what a pipeline waits for.
BUSY = 0.85
# Pipelines that so often have somebody waiting are full.
FULL = 0.25
# Requests without a pipeline are worth a word from this share on.
SOME = 0.01


@dataclass(frozen=True, slots=True)
class Spread:
    """Samples in seconds, summed up."""

    count: int
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """Of one class: num_judged requests, of which good_share met the targets; None where there is no sample."""

    qos: QosClass
    num_judged: int
    good_share: float | None
    ttft_s: float | None
    inter_token_s: float | None
    ttft: Spread | None
    gap: Spread | None


@dataclass(frozen=True, slots=True)
class RecoveryFigures:
    """num_left: devices that left. num_pipelines: pipelines lost by that, num_repaired of them by another device, num_built
    made anew. num_moved, num_parked: running answers that went on elsewhere, or waited. gap: of their streams.
    """

    num_left: int
    num_pipelines: int
    num_repaired: int
    num_built: int
    num_moved: int
    num_parked: int
    gap: Spread | None


@dataclass(frozen=True, slots=True)
class Results:
    """stages: how many pipelines have how many. predicted_tokens_per_s: of answers alone, all streams decoding.

    tokens_per_s, prompt_tokens_per_s: counted within the window from warm_s to duration_s, as are requests: by when they
    came. goodput_per_s: requests a second that met their targets. ends: of all requests. busy: of devices with layers, on
    average.
    """

    num_devices: int
    num_sites: int
    num_pipelines: int
    num_standby: int
    stages: dict[int, int]
    num_streams: int
    rate_per_s: float
    seed: int
    duration_s: float
    warm_s: float
    predicted_tokens_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    goodput_per_s: float
    good_share: float | None
    ttft: Spread | None
    gap: Spread | None
    classes: tuple[ClassFigures, ...]
    ends: dict[str, int]
    busy: float
    busiest: float
    bound_by: str
    recovery: RecoveryFigures | None
    num_events: int
    tokens_by_s: tuple[int, ...]
    losses_at_s: tuple[float, ...]


def results_of(settings: Settings, sites: Sequence[PlannedSite], played: Played) -> Results:
    """Make all figures of a run."""
    tally, window_s = played.tally, settings.duration_s - settings.warm_s
    predictions = [one for site in sites for one in site.predictions]
    num_devices = sum(len(site.fleet.devices) for site in sites)
    num_judged = sum(one.num_judged for one in tally.by_class.values())
    num_good = sum(one.num_good for one in tally.by_class.values())
    return Results(
        num_devices=num_devices,
        num_sites=len(sites),
        num_pipelines=len(predictions),
        num_standby=num_devices - sum(len(one.stages) for one in predictions),
        stages=dict(sorted(Counter(len(one.stages) for one in predictions).items())),
        num_streams=settings.load.num_streams,
        rate_per_s=settings.load.rate_per_s,
        seed=settings.seed,
        duration_s=settings.duration_s,
        warm_s=settings.warm_s,
        predicted_tokens_per_s=sum(one.tokens_per_s for one in predictions),
        tokens_per_s=tally.num_tokens / window_s,
        prompt_tokens_per_s=tally.num_prompt_tokens / window_s,
        goodput_per_s=num_good / window_s,
        good_share=num_good / num_judged if num_judged else None,
        ttft=spread([one for of_class in tally.by_class.values() for one in of_class.ttft_s]),
        gap=spread([one for of_class in tally.by_class.values() for one in of_class.gap_s]),
        classes=tuple(_class_figures(qos, one) for qos, one in tally.by_class.items() if one.num_judged),
        ends={end.value: tally.ends[end] for end in End},
        busy=_mean(played.busy),
        busiest=_mean(played.bottlenecks),
        bound_by=_bound_by(settings, played),
        recovery=_recovery(tally.losses) if settings.churn.per_hour else None,
        num_events=played.num_events,
        tokens_by_s=tuple(tally.tokens_by_s[second] for second in range(int(settings.duration_s))),
        losses_at_s=tuple(sorted(tally.losses.at_s)),
    )


def spread(samples: Sequence[float]) -> Spread | None:
    """Sum up samples; None if there is none."""
    if not samples:
        return None
    p50, p95, p99, most = np.percentile(np.asarray(samples), [50, 95, 99, 100])
    return Spread(len(samples), float(p50), float(p95), float(p99), float(most))


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / max(len(shares), 1)


def _class_figures(qos: QosClass, one: ClassTally) -> ClassFigures:
    targets = targets_of(qos)
    return ClassFigures(
        qos=qos,
        num_judged=one.num_judged,
        good_share=one.num_good / one.num_judged if one.num_judged else None,
        ttft_s=targets.ttft_s,
        inter_token_s=targets.inter_token_s,
        ttft=spread(one.ttft_s),
        gap=spread(one.gap_s),
    )


def _recovery(losses: Losses) -> RecoveryFigures:
    return RecoveryFigures(
        num_left=losses.num_left,
        num_pipelines=losses.num_pipelines,
        num_repaired=losses.num_repaired,
        num_built=losses.num_built,
        num_moved=losses.num_moved,
        num_parked=losses.num_parked,
        gap=spread(losses.gap_s),
    )


def _bound_by(settings: Settings, played: Played) -> str:
    """What keeps the fleet from more, as far as counts show it."""
    ends, busiest = played.tally.ends, _mean(played.bottlenecks)
    if ends[End.NO_CAPACITY] > SOME * ends.total():
        return f"devices that are away: {ends[End.NO_CAPACITY]} request(s) found no pipeline"
    if busiest >= BUSY:
        return f"compute: the busiest stage of a pipeline computes {busiest:.0%} of the time"
    if played.full >= FULL:
        return (
            f"slots: requests wait for one at {played.full:.0%} of the looks at pipelines, "
            f"whose busiest stage computes {busiest:.0%} of the time"
        )
    if settings.load.num_streams:
        return f"streams: {settings.load.num_streams} keep the busiest stages busy {busiest:.0%} of the time"
    return f"load: what is asked for keeps the busiest stages busy {busiest:.0%} of the time"
