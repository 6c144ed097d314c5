"""Decides who takes over the layers of a lost stage, or would: another device, or else the stages beside it.

Pure functions. Cutting layers anew is `grouping`'s, which is asked where neither will do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from orchestrator.core.demand import Demand
from orchestrator.core.figures import DeviceFigures, FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.placement import Placement, Stage
from shoal.types import LayerRange, Objective, WorkerId

# A lone stream hardly notices how layers are shared out; many wait for the slowest stage, as long as they keep it from being
# relieved. Two equal stages that share the layers of a third take half as long again; this has some room for unequal ones.
MOST_SLOWER = 1.6


def repair(
    model: ModelFootprint, placement: Placement, lost: WorkerId, free: Iterable[WorkerId], fleet: FleetFigures
) -> Placement | None:
    """Give the stage of a lost worker to the free one that is fastest there; None if none has the memory for it.

    free: workers in no placement; only those are considered that `fleet` knows. Fastest: its pass with one row, and its
    links to the stages beside it.
    """
    index = placement.worker_ids.index(lost)
    stage, wanted = placement.stages[index], set(free)
    has_head = stage.layers.stop == model.num_layers
    before = placement.worker_ids[index - 1]
    after = placement.worker_ids[(index + 1) % len(placement.stages)]

    def rank(device: DeviceFigures) -> tuple[float, WorkerId]:
        seconds = device.times.stage_s(len(stage.layers), has_head, 1)
        if len(placement.stages) > 1:
            seconds += fleet.link(before, device.worker_id).transfer_s(model.activation_bytes)
            seconds += fleet.link(device.worker_id, after).transfer_s(model.activation_bytes)
        return seconds, device.worker_id

    able = [
        device
        for device in fleet.devices
        if device.worker_id in wanted and device.worker_id != lost and device.shard_bytes >= stage.need_bytes
    ]
    if not able:
        return None
    chosen = replace(stage, worker_id=min(able, key=rank).worker_id)
    return replace(placement, stages=(*placement.stages[:index], chosen, *placement.stages[index + 1 :]))


def absorb(
    model: ModelFootprint,
    placement: Placement,
    lost: WorkerId,
    usable: Collection[WorkerId],
    fleet: FleetFigures,
    demand: Demand,
) -> Placement | None:
    """Give the layers of a lost worker to the stages beside it, so that they fetch little; None if that will not do.

    usable: may be given layers. Not where a split says how many layers each device is to have, nor where many streams would
    wait for one of the two.
    """
    if demand.split:
        return None
    index = placement.worker_ids.index(lost)
    known = {device.worker_id: device for device in fleet.devices}
    left = (*placement.stages[:index], *placement.stages[index + 1 :])
    if not left or not known.keys() >= {stage.worker_id for stage in left}:
        return None
    rows = min(known[stage.worker_id].profile.max_batch for stage in left)

    def slowest_s(stages: Iterable[Stage]) -> float:
        return max(
            known[one.worker_id].times.stage_s(len(one.layers), one.layers.stop == model.num_layers, rows)
            for one in stages
        )

    def fetch_s(grown: Stage, stage: Stage) -> float:
        return fleet.link(None, stage.worker_id).sending_s(grown.weight_bytes - stage.weight_bytes)

    def fits(grown: Stage) -> bool:
        return grown.worker_id in usable and grown.need_bytes <= known[grown.worker_id].shard_bytes

    found: list[tuple[float, float, tuple[Stage, ...]]] = []
    limit_s = math.inf if demand.objective is Objective.LATENCY else MOST_SLOWER * slowest_s(left)
    for stages in _divided(model, placement, index):
        grown = [(new, old) for new, old in zip(stages, left, strict=True) if new != old]
        if all(fits(new) for new, _ in grown) and slowest_s(stages) <= limit_s:
            found.append((max(fetch_s(new, old) for new, old in grown), slowest_s(stages), stages))
    if not found:
        return None
    return replace(placement, stages=min(found, key=lambda one: one[:2])[2])


def _divided(model: ModelFootprint, placement: Placement, index: int) -> Iterator[tuple[Stage, ...]]:
    """The stages without that one, whose layers go to the one before and the one behind it, in all ways there are."""
    stages, gone = placement.stages, placement.stages[index].layers
    before, after = stages[:index], stages[index + 1 :]

    def grown(stage: Stage, start: int, stop: int) -> Stage:
        return Stage(
            stage.worker_id,
            LayerRange(start, stop),
            model.weight_bytes(start, stop),
            model.need_bytes(start, stop, placement.kv_tokens),
        )

    for cut in range(gone.start if after else gone.stop, (gone.stop if before else gone.start) + 1):
        head = (*before[:-1], grown(before[-1], before[-1].layers.start, cut)) if cut > gone.start else before
        tail = (grown(after[0], cut, after[0].layers.stop), *after[1:]) if cut < gone.stop else after
        yield (*head, *tail)


def takers(
    model: ModelFootprint, placements: Iterable[Placement], free: Sequence[WorkerId], fleet: FleetFigures
) -> dict[WorkerId, list[Stage]]:
    """The stages that each of the free workers would take, should one device be lost, whichever that is."""
    taken: dict[WorkerId, list[Stage]] = {}
    for placement in placements:
        for index, stage in enumerate(placement.stages):
            repaired = repair(model, placement, stage.worker_id, free, fleet)
            if repaired is not None:
                taken.setdefault(repaired.worker_ids[index], []).append(stage)
    return taken
