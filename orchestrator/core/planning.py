"""A whole plan with its reasons: pipelines and what they will do, who stands by, what binds, and what else was possible.

For people and tools that ask before they start devices; the control task needs the pipelines alone and calls `grouping`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.grouping import place_all
from orchestrator.core.pipelines import place_one, without_limits
from orchestrator.core.placement import Placement
from orchestrator.core.predictions import Prediction, predict
from orchestrator.core.solver import MAX_EXACT_DEVICES
from shoal.errors import PlacementImpossible
from shoal.types import LayerRange, Objective, WorkerId

# More memory is worth a word from this gain on.
MIN_GAIN = 1.03
# Other plans are shown for so many devices and replicas.
MAX_ALTERNATIVES = 6


@dataclass(frozen=True, slots=True)
class Outcome:
    """What pipelines do together. token_s, first_token_s: of a lone stream on the one that is fastest for it.

    tokens_per_s: of num_streams in all.
    """

    num_pipelines: int
    num_devices: int
    num_streams: int
    first_token_s: float
    token_s: float
    solo_token_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan. what: how it differs, as in "2 devices". is_chosen: it is the plan, after all."""

    what: str
    worker_ids: tuple[tuple[WorkerId, ...], ...]
    outcome: Outcome
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The best plan for a demand. standby: devices that get no layers. bound_by: what keeps it from more."""

    objective: Objective
    pipelines: tuple[Prediction, ...]
    standby: tuple[WorkerId, ...]
    outcome: Outcome
    bound_by: str
    alternatives: tuple[Alternative, ...]

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(one.placement for one in self.pipelines)


def plan_pipelines(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> FleetPlan:
    """Plan for a fleet and explain it. Raises PlacementImpossible, with what is missing where, and ConfigError."""
    return explain(model, fleet, demand, place_all(model, fleet, demand))


def explain(model: ModelFootprint, fleet: FleetFigures, demand: Demand, placements: Sequence[Placement]) -> FleetPlan:
    """The same for placements that are given, as those in force. Raises KeyError for workers without figures."""
    predictions = _predict(model, fleet, demand, placements)
    used = {worker_id for placement in placements for worker_id in placement.worker_ids}
    outcome = _outcome(predictions)
    return FleetPlan(
        objective=demand.objective,
        pipelines=predictions,
        standby=tuple(sorted(device.worker_id for device in fleet.devices if device.worker_id not in used)),
        outcome=outcome,
        bound_by=_memory_bound(model, fleet, demand, outcome) or predictions[0].bound_by,
        alternatives=tuple(_alternatives(model, fleet, demand, placements)),
    )


def _predict(
    model: ModelFootprint, fleet: FleetFigures, demand: Demand, placements: Sequence[Placement]
) -> tuple[Prediction, ...]:
    each = demand.of_each(len(placements))
    return tuple(predict(model, fleet, placement, each) for placement in placements)


def _outcome(predictions: Sequence[Prediction]) -> Outcome:
    fastest = min(predictions, key=lambda one: one.token_s)
    return Outcome(
        num_pipelines=len(predictions),
        num_devices=sum(len(one.stages) for one in predictions),
        num_streams=sum(one.num_streams for one in predictions),
        first_token_s=fastest.first_token_s,
        token_s=fastest.token_s,
        solo_token_s=min(one.solo_token_s for one in predictions),
        tokens_per_s=sum(one.tokens_per_s for one in predictions),
    )


def _memory_bound(model: ModelFootprint, fleet: FleetFigures, demand: Demand, outcome: Outcome) -> str:
    """Say so if the same devices with more memory would do better; empty: they would not."""
    if demand.split is not None:
        return ""
    roomy = without_limits(fleet)
    with suppress(PlacementImpossible):
        better = _outcome(_predict(model, roomy, demand, place_all(model, roomy, demand)))
        if demand.objective is Objective.LATENCY and outcome.solo_token_s > better.solo_token_s * MIN_GAIN:
            return f"memory: with enough of it, a token would take {better.solo_token_s * 1e3:.1f} ms"
        if demand.objective is not Objective.LATENCY and better.tokens_per_s > outcome.tokens_per_s * MIN_GAIN:
            return f"memory: with enough of it, these devices would make {better.tokens_per_s:.0f} tokens/s"
    return ""


def _alternatives(
    model: ModelFootprint, fleet: FleetFigures, demand: Demand, chosen: Sequence[Placement]
) -> Iterator[Alternative]:
    """One pipeline of 1, 2 and so on devices; then several; then the other objectives. Those that are possible."""
    seen: set[frozenset[_Cut]] = set()
    for what, placements in _other_plans(model, fleet, demand):
        cuts = _cuts(placements)
        if cuts not in seen:
            seen.add(cuts)
            outcome = _outcome(_predict(model, fleet, demand, placements))
            yield Alternative(what, tuple(one.worker_ids for one in placements), outcome, cuts == _cuts(chosen))


# Who holds which layers of one pipeline, in order.
_Cut = tuple[tuple[WorkerId, LayerRange], ...]


def _cuts(placements: Sequence[Placement]) -> frozenset[_Cut]:
    return frozenset(tuple((stage.worker_id, stage.layers) for stage in one.stages) for one in placements)


def _other_plans(
    model: ModelFootprint, fleet: FleetFigures, demand: Demand
) -> Iterator[tuple[str, Sequence[Placement]]]:
    num_devices = min(len(fleet.devices), model.num_layers)
    single = replace(demand, split=None, replicas=1)
    for number in range(1, min(num_devices, MAX_ALTERNATIVES) + 1):
        with suppress(PlacementImpossible):
            yield f"{number} device{'s' * (number > 1)}", [place_one(model, fleet, single, number).placement]
    if len(fleet.devices) <= MAX_EXACT_DEVICES:
        many = replace(single, objective=Objective.THROUGHPUT)
        for number in range(2, min(num_devices, MAX_ALTERNATIVES) + 1):
            with suppress(PlacementImpossible):
                placements = place_all(model, fleet, replace(many, replicas=number))
                if len(placements) == number:
                    yield f"{number} pipelines", placements
    for objective in Objective:
        if objective is not demand.objective:
            with suppress(PlacementImpossible):
                yield f"for {objective.value}", place_all(model, fleet, replace(single, objective=objective))


def to_plain(plan: FleetPlan) -> dict[str, object]:
    """The plan as what JSON has: seconds, tokens and bytes; no infinite numbers."""
    return {
        "objective": plan.objective.value,
        "bound_by": plan.bound_by,
        "outcome": _plain_outcome(plan.outcome),
        "standby": list(plan.standby),
        "pipelines": [_plain_pipeline(one) for one in plan.pipelines],
        "alternatives": [
            {
                "what": one.what,
                "pipelines": [list(worker_ids) for worker_ids in one.worker_ids],
                "is_chosen": one.is_chosen,
                **_plain_outcome(one.outcome),
            }
            for one in plan.alternatives
        ],
    }


def _plain_outcome(outcome: Outcome) -> dict[str, object]:
    return {
        "num_pipelines": outcome.num_pipelines,
        "num_devices": outcome.num_devices,
        "num_streams": outcome.num_streams,
        "first_token_s": _finite(outcome.first_token_s),
        "token_s": _finite(outcome.token_s),
        "solo_token_s": _finite(outcome.solo_token_s),
        "tokens_per_s": _finite(outcome.tokens_per_s),
    }


def _plain_pipeline(one: Prediction) -> dict[str, object]:
    placement = one.placement
    return {
        "pipeline_id": placement.pipeline_id,
        "mode": placement.mode.value,
        "context_tokens": placement.context_tokens,
        "kv_tokens": placement.kv_tokens,
        "num_streams": one.num_streams,
        "batch_rows": one.rows,
        "prompt_tokens": one.prompt_tokens,
        "first_token_s": _finite(one.first_token_s),
        "token_s": _finite(one.token_s),
        "solo_token_s": _finite(one.solo_token_s),
        "tokens_per_s": _finite(one.tokens_per_s),
        "bound_by": one.bound_by,
        "stages": [
            {
                "worker_id": part.stage.worker_id,
                "layers": [part.stage.layers.start, part.stage.layers.stop],
                "weight_bytes": part.stage.weight_bytes,
                "need_bytes": part.stage.need_bytes,
                "memory_bytes": part.memory_bytes,
                "batch_s": _finite(part.pass_s),
                "busy": _finite(part.busy),
                "is_declared": part.is_declared,
            }
            for part in one.stages
        ],
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
