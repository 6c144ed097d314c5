"""Decides who takes the place of a lost stage, or would: same cuts, same pipeline, another device.

Pure functions. Making layers cut anew is `grouping`'s, which is asked where nobody can take the stage as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.core.figures import DeviceFigures, FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.placement import Placement, Stage
from shoal.types import WorkerId


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
