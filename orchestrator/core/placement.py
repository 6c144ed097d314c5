"""Decides which worker of a pipeline holds which layers: a pure function from a model's sizes and the devices' profiles.

Declared memory caps a share, without the part set apart for kept KV blocks; declared speed sizes it. Workers keep the order
they are given in. It knows neither how a shard is loaded nor who is alive; `grouping` calls it with the workers of one
pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.core.slots import PAGE_TOKENS, round_down_to_page, round_up_to_page
from shoal.errors import ConfigError, PlacementImpossible
from shoal.memory import need_bytes
from shoal.types import DeviceMode, DeviceProfile, LayerRange, PipelineId, WorkerId

# A pipeline that cannot hold even one conversation of this length is of no use.
MIN_CONTEXT_TOKENS = 512
FIRST_PIPELINE = PipelineId("p1")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """What a model takes: bytes as stored, KV as computed.

    embedding_bytes: held by the first stage; by the last too, if the head is tied to it. head_bytes: of the head alone.
    shared_bytes: held by every stage (rotary tables). head_cost_layers: the head's time in layers (measured: 8 for one
    row, 4 for 8 to 16 rows; facts of a 135M model with 49,152 tokens).
    """

    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    kv_bytes_per_token_per_layer: int
    context_tokens: int
    head_cost_layers: float = 6.0
    is_head_tied: bool = False
    shared_bytes: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    def weight_bytes(self, start: int, stop: int) -> int:
        """Stored bytes of all a stage with layers [start, stop) loads."""
        is_first, is_last = start == 0, stop == self.num_layers
        has_embedding = is_first or (is_last and self.is_head_tied)
        ends = self.embedding_bytes * has_embedding + self.head_bytes * is_last
        return sum(self.layer_bytes[start:stop]) + ends + self.shared_bytes

    def fixed_bytes(self, start: int, stop: int) -> int:
        """Memory of a stage without KV."""
        return need_bytes(self.weight_bytes(start, stop), 0)

    def need_bytes(self, start: int, stop: int, kv_tokens: int) -> int:
        return self.fixed_bytes(start, stop) + (stop - start) * self.kv_bytes_per_token_per_layer * kv_tokens

    def cost(self, start: int, stop: int) -> float:
        """Time of a stage at speed 1, in layers."""
        return stop - start + self.head_cost_layers * (stop == self.num_layers)


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


# A cut is (index of the worker, start, stop) in a plan.
Cut = tuple[int, int, int]
Worker = tuple[WorkerId, DeviceProfile]


@dataclass(frozen=True, slots=True)
class _Plan:
    """bottleneck: time of the slowest stage. unevenness: sum of squared times, to choose among equal bottlenecks."""

    bottleneck: float = 0.0
    unevenness: float = 0.0
    cuts: tuple[Cut, ...] = ()

    @property
    def rank(self) -> tuple[float, float]:
        return self.bottleneck, self.unevenness


def place(
    model: ModelFootprint,
    workers: Sequence[Worker],
    *,
    num_slots: int,
    context_tokens: int = 0,
    split: Sequence[int] | None = None,
) -> Placement:
    """Share the layers so that the slowest stage is as fast as can be; of such plans, take one with the most KV.

    context_tokens: what a sequence shall be able to have, 0 for what the model allows; it gets less where memory is
    short. split: layers per worker in order instead, 0 for a worker to leave out. Workers without a stage are standby.
    Raises PlacementImpossible (more or other devices may help) and ConfigError (split or num_slots can never work).
    """
    if num_slots < 1:
        raise ConfigError(f"num_slots is {num_slots}; it must be at least 1", field="num_slots")
    context_tokens = min(context_tokens or model.context_tokens, model.context_tokens)
    least = round_up_to_page(min(MIN_CONTEXT_TOKENS, context_tokens))
    most = num_slots * round_up_to_page(context_tokens)
    if split is not None:
        check_split(split, model.num_layers)
    if not workers:
        raise PlacementImpossible("no worker has joined yet: start one with `shoal worker --join HOST:PORT`")
    if split is None:
        cuts, kv_tokens = _balanced_cuts(model, workers, least, most)
    else:
        cuts = _split_cuts(split, workers)
        kv_tokens = min(most, _kv_room(model, workers, cuts))
        if kv_tokens < least:
            raise _impossible(model, workers, cuts, least)
    return Placement(
        stages=tuple(_stage(model, workers[index][0], start, stop, kv_tokens) for index, start, stop in cuts),
        kv_tokens=kv_tokens,
        context_tokens=min(context_tokens, kv_tokens),
        slots=min(num_slots, kv_tokens // PAGE_TOKENS),
    )


def _balanced_cuts(
    model: ModelFootprint, workers: Sequence[Worker], least: int, most: int
) -> tuple[tuple[Cut, ...], int]:
    """Find the least bottleneck with `least` KV, then the most KV (a bisection in pages) that keeps it."""
    plan = _least_bottleneck(model, workers, least, math.inf)
    if plan is None:
        unbound = _least_bottleneck(model, workers, None, math.inf)
        raise _impossible(model, workers, unbound.cuts if unbound else (), least)
    low, high = least // PAGE_TOKENS, most // PAGE_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        other = _least_bottleneck(model, workers, middle * PAGE_TOKENS, plan.bottleneck)
        if other is None:
            high = middle - 1
        else:
            plan, low = other, middle
    return plan.cuts, low * PAGE_TOKENS


def _least_bottleneck(
    model: ModelFootprint, workers: Sequence[Worker], kv_tokens: int | None, limit: float
) -> _Plan | None:
    """Cut exactly, by dynamic programming over workers; None if no cut fits memory and takes at most `limit` a stage.

    kv_tokens None: memory is ignored. plans[stop] is the best plan of the workers so far that covers layers [0, stop).
    """
    plans = {0: _Plan()}
    for index, (_, profile) in enumerate(workers):
        extended = dict(plans)
        for start, plan in plans.items():
            for stop, time in _stages_from(model, profile, start, kv_tokens, limit):
                bottleneck, unevenness = max(plan.bottleneck, time), plan.unevenness + time * time
                if stop not in extended or (bottleneck, unevenness) < extended[stop].rank:
                    extended[stop] = _Plan(bottleneck, unevenness, (*plan.cuts, (index, start, stop)))
        plans = extended
        if model.num_layers in plans:
            limit = plans[model.num_layers].bottleneck
    return plans.get(model.num_layers)


def _stages_from(
    model: ModelFootprint, profile: DeviceProfile, start: int, kv_tokens: int | None, limit: float
) -> Iterator[tuple[int, float]]:
    """The stages from `start` on that a device can hold and that take at most `limit`, as (stop, time)."""
    if profile.speed <= 0:
        return
    for stop in range(start + 1, model.num_layers + 1):
        time = model.cost(start, stop) / profile.speed
        if time > limit or (kv_tokens is not None and model.need_bytes(start, stop, kv_tokens) > profile.shard_bytes):
            return
        yield stop, time


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


def _split_cuts(split: Sequence[int], workers: Sequence[Worker]) -> tuple[Cut, ...]:
    ends = list(accumulate(split))
    cuts = tuple((index, end - count, end) for index, (count, end) in enumerate(zip(split, ends, strict=True)) if count)
    if cuts[-1][0] >= len(workers):
        raise PlacementImpossible(
            f"the split gives layers to {cuts[-1][0] + 1} workers, {len(workers)} can be used now: start more workers"
        )
    return cuts


def _kv_room(model: ModelFootprint, workers: Sequence[Worker], cuts: Sequence[Cut]) -> int:
    """KV tokens that the tightest stage has memory for; less than 0 if not even the weights fit."""
    rooms = []
    for index, start, stop in cuts:
        spare = workers[index][1].shard_bytes - model.fixed_bytes(start, stop)
        rooms.append(round_down_to_page(spare // ((stop - start) * model.kv_bytes_per_token_per_layer)))
    return min(rooms)


def _stage(model: ModelFootprint, worker_id: WorkerId, start: int, stop: int, kv_tokens: int) -> Stage:
    return Stage(
        worker_id,
        LayerRange(start, stop),
        model.weight_bytes(start, stop),
        model.need_bytes(start, stop, kv_tokens),
    )


def _impossible(
    model: ModelFootprint, workers: Sequence[Worker], cuts: Sequence[Cut], kv_tokens: int
) -> PlacementImpossible:
    """Say, device by device, what the cuts that speed alone would give need and lack."""
    share = {index: (start, stop) for index, start, stop in cuts}
    lines = []
    for index, (worker_id, profile) in enumerate(workers):
        line = f"{worker_id} ({profile.name}) has {profile.shard_bytes} bytes"
        if index in share:
            need = model.need_bytes(*share[index], kv_tokens)
            lack = need - profile.shard_bytes
            line += f", needs {need} for layers {LayerRange(*share[index])}"
            line += f": lacks {lack} ({-(-lack // MIB)} MiB)" if lack > 0 else ": enough"
        else:
            line += ", gets no layer"
        lines.append(line)
    return PlacementImpossible(
        f"the {model.num_layers} layers and KV for {kv_tokens} tokens do not fit the {len(workers)} device(s): "
        f"{'; '.join(lines)}. What helps: another worker, more memory_bytes in a profile, or a smaller model"
    )
