"""Finds pipelines whose stages devices still hold, though nobody has them in force: after a restart, or a loss that passed.

Asked for the same shards again, devices go on with what is in their slots and load nothing. A pure function of what they say
they hold; whether a better plan is worth a change later, others decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.demand import Demand
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.placement import Placement, placement_of
from shoal.types import DeviceMode, LayerRange, PipelineId, WorkerId


@dataclass(frozen=True, slots=True)
class Held:
    """A shard of the model that a device has loaded. Sizes: of the pipeline that it was loaded for."""

    worker_id: WorkerId
    pipeline_id: PipelineId
    layers: LayerRange
    num_slots: int
    slot_tokens: int
    kv_tokens: int

    @property
    def form(self) -> tuple[PipelineId, int, int, int]:
        """What all stages of a pipeline have alike."""
        return self.pipeline_id, self.num_slots, self.slot_tokens, self.kv_tokens


def reunite(
    model: ModelFootprint, held: Iterable[Held], modes: Mapping[WorkerId, DeviceMode], demand: Demand
) -> tuple[Placement, ...]:
    """Make the pipelines that these shards are whole ones of, at most one of an id; those that today's options rule out
    are not made.

    modes: of the devices.
    """
    groups: dict[tuple[PipelineId, int, int, int], list[Held]] = {}
    for one in held:
        groups.setdefault(one.form, []).append(one)
    found: dict[PipelineId, Placement] = {}
    for form, shards in sorted(groups.items()):
        stages = _whole(shards, model.num_layers)
        placement = None if stages is None else _placement(model, stages, modes, demand)
        if placement is not None:
            found.setdefault(form[0], placement)
    return tuple(found.values())


def _whole(shards: Sequence[Held], num_layers: int) -> list[Held] | None:
    """The shards that cover all layers one after the other; of two with the same layers, the first by name."""
    by_start: dict[int, Held] = {}
    for shard in sorted(shards, key=lambda one: one.worker_id):
        by_start.setdefault(shard.layers.start, shard)
    stages: list[Held] = []
    start = 0
    while start < num_layers and start in by_start:
        stages.append(by_start[start])
        start = by_start[start].layers.stop
    return stages if start == num_layers else None


def _placement(
    model: ModelFootprint, stages: Sequence[Held], modes: Mapping[WorkerId, DeviceMode], demand: Demand
) -> Placement | None:
    """The placement that these shards were loaded for; None if the options would not make one of these sizes now."""
    if demand.split is not None and [len(one.layers) for one in stages] != [count for count in demand.split if count]:
        return None
    first, worker_ids = stages[0], [one.worker_id for one in stages]
    if demand.has_shared_streams:
        # How many pipelines shared them does not show.
        demand = replace(demand, num_streams=min(demand.num_streams, first.num_slots))
    made = placement_of(model, demand, worker_ids, [one.layers.stop for one in stages], first.kv_tokens)
    if (made.slots, made.context_tokens) != (first.num_slots, first.slot_tokens):
        return None
    return replace(made, pipeline_id=first.pipeline_id, mode=_mode([modes[one] for one in worker_ids]))


def _mode(modes: Sequence[DeviceMode]) -> DeviceMode:
    """What a pipeline of such devices is for: kept for latency only if it is one device, as `grouping` makes them."""
    if modes == [DeviceMode.LATENCY]:
        return DeviceMode.LATENCY
    return DeviceMode.THROUGHPUT if set(modes) == {DeviceMode.THROUGHPUT} else DeviceMode.MIXED
