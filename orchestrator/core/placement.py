"""A placement: which worker of a pipeline holds which layers, as pure data; and the one that an operator's split says.

Which one is best is found elsewhere (`pipelines`, `grouping`). Knows neither how a shard is loaded nor who is alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.core.demand import Demand
from orchestrator.core.figures import DeviceFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.slots import PAGE_TOKENS, round_down_to_page
from shoal.errors import ConfigError, PlacementImpossible
from shoal.types import DeviceMode, DeviceProfile, LayerRange, PipelineId, WorkerId

FIRST_PIPELINE = PipelineId("p1")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Stage:
    """weight_bytes: stored bytes it loads. need_bytes: memory it takes, KV included."""

    worker_id: WorkerId
    layers: LayerRange
    weight_bytes: int
    need_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One pipeline. kv_tokens: for all slots together; context_tokens: the most a sequence may have.

    mode: what its devices are for, together.
    """

    stages: tuple[Stage, ...]
    kv_tokens: int
    context_tokens: int
    slots: int
    pipeline_id: PipelineId = FIRST_PIPELINE
    mode: DeviceMode = DeviceMode.MIXED

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        return tuple(stage.worker_id for stage in self.stages)


Worker = tuple[WorkerId, DeviceProfile]


def placement_of(
    model: ModelFootprint, demand: Demand, worker_ids: Sequence[WorkerId], stops: Sequence[int], kv_tokens: int
) -> Placement:
    """The pipeline of these workers, whose layers end at these stops."""
    starts = (0, *stops[:-1])
    return Placement(
        stages=tuple(
            Stage(
                worker_id,
                LayerRange(start, stop),
                model.weight_bytes(start, stop),
                model.need_bytes(start, stop, kv_tokens),
            )
            for worker_id, start, stop in zip(worker_ids, starts, stops, strict=True)
        ),
        kv_tokens=kv_tokens,
        context_tokens=min(demand.context_of(model), kv_tokens),
        slots=min(demand.num_streams, kv_tokens // PAGE_TOKENS),
    )


def check_split(split: Sequence[int], num_layers: int) -> None:
    """Raise ConfigError if a split can never share so many layers."""
    shown = ",".join(str(count) for count in split)
    if any(count < 0 for count in split):
        raise ConfigError(f"split {shown} has a negative number of layers", field="split")
    if sum(split) != num_layers:
        raise ConfigError(
            f"split {shown} shares {sum(split)} layers, the model has {num_layers}: make the numbers add up to that",
            field="split",
        )


def place_split(
    model: ModelFootprint, devices: Sequence[DeviceFigures], demand: Demand, split: Sequence[int]
) -> Placement:
    """Follow the operator: layers a device in the order they are given in, with as much KV as there is room for.

    Raises PlacementImpossible (more or other devices may help) and ConfigError (it can never work).
    """
    check_split(split, model.num_layers)
    ends = list(accumulate(split))
    chosen = [index for index, count in enumerate(split) if count]
    if chosen[-1] >= len(devices):
        raise PlacementImpossible(
            f"the split gives layers to {chosen[-1] + 1} workers, {len(devices)} can be used now: start more workers"
        )
    members, stops = [devices[index] for index in chosen], [ends[index] for index in chosen]
    least, room = demand.least_kv(model), _kv_room(model, members, stops)
    if room < least:
        raise impossible(model, devices, dict(zip(chosen, zip((0, *stops), stops, strict=False), strict=True)), least)
    kv_tokens = min(demand.most_kv(model), room)
    return placement_of(model, demand, [device.worker_id for device in members], stops, kv_tokens)


def _kv_room(model: ModelFootprint, devices: Sequence[DeviceFigures], stops: Sequence[int]) -> int:
    """KV tokens that the tightest stage has memory for; less than 0 if not even the weights fit."""
    rooms = []
    for device, start, stop in zip(devices, (0, *stops), stops, strict=False):
        spare = device.shard_bytes - model.need_bytes(start, stop, 0)
        rooms.append(round_down_to_page(spare // ((stop - start) * model.kv_bytes_per_token_per_layer)))
    return min(rooms)


def impossible(
    model: ModelFootprint,
    devices: Sequence[DeviceFigures],
    share: Mapping[int, tuple[int, int]],
    kv_tokens: int,
    advice: str = "another worker, more memory_bytes in a profile, or a smaller model",
) -> PlacementImpossible:
    """Say, device by device, what these shares of the layers need and lack. share: start and stop, by the device's index."""
    lines = []
    for index, device in enumerate(devices):
        line = f"{device.worker_id} ({device.profile.name}) has {device.shard_bytes} bytes"
        if index in share:
            need = model.need_bytes(*share[index], kv_tokens)
            lack = need - device.shard_bytes
            line += f", needs {need} for layers {LayerRange(*share[index])}"
            line += f": lacks {lack} ({-(-lack // MIB)} MiB)" if lack > 0 else ": enough"
        else:
            line += ", gets no layer"
        lines.append(line)
    return PlacementImpossible(
        f"the {model.num_layers} layers and KV for {kv_tokens} tokens do not fit the {len(devices)} device(s): "
        f"{'; '.join(lines)}. What helps: {advice}"
    )
