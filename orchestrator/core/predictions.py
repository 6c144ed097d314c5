"""Predicts what a placement will do: first token, time between tokens, tokens per second, and what keeps it from more.

The same arithmetic as the searches', for pipelines however they came about: planned, cut by an operator, or in force.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.core.demand import Demand
from orchestrator.core.figures import DeviceFigures, FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.limits import LEAST_ROWS
from orchestrator.core.placement import Placement, Stage
from orchestrator.core.solver import batch_rows, tokens_per_s
from orchestrator.core.stage_costs import Links
from shoal.types import DeviceMode, Objective, WorkerId

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """memory_bytes: what the device has for its shard; fixed_bytes: what that takes of it without KV.

    pass_s: of a batch of all streams. busy: share of the time it computes for them.
    """

    stage: Stage
    fixed_bytes: int
    memory_bytes: int
    pass_s: float
    busy: float
    is_declared: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a pipeline does.

    first_token_s: of prompt_tokens, idle. token_s: between two tokens of a lone stream; solo_token_s: one of class LATENCY.
    tokens_per_s: of num_streams together, in batches of `rows`. bound_by: what to change to get more.
    """

    placement: Placement
    stages: tuple[StagePrediction, ...]
    prompt_tokens: int
    first_token_s: float
    token_s: float
    solo_token_s: float
    num_streams: int
    rows: int
    tokens_per_s: float
    bound_by: str


class _Pipe:
    """A placement with the figures of its devices."""

    def __init__(self, model: ModelFootprint, fleet: FleetFigures, placement: Placement) -> None:
        """Raise KeyError for a worker that has no figures."""
        by_id = {device.worker_id: index for index, device in enumerate(fleet.devices)}
        self.model = model
        self.stages = placement.stages
        self.indexes = [by_id[stage.worker_id] for stage in placement.stages]
        self.devices: list[DeviceFigures] = [fleet.devices[index] for index in self.indexes]
        self.links = Links(fleet)
        self.max_rows = min(device.profile.max_batch for device in self.devices)

    def passes_s(self, rows: int) -> list[float]:
        return [
            device.times.stage_s(len(stage.layers), stage.layers.stop == self.model.num_layers, rows)
            for device, stage in zip(self.devices, self.stages, strict=True)
        ]

    def hops_s(self, rows: int) -> list[float]:
        num_bytes = rows * self.model.activation_bytes
        return [self.links.between(one, other).transfer_s(num_bytes) for one, other in pairwise(self.indexes)]

    def sendings_s(self, rows: int) -> list[float]:
        num_bytes = rows * self.model.activation_bytes
        return [self.links.between(one, other).sending_s(num_bytes) for one, other in pairwise(self.indexes)]

    @property
    def outside_s(self) -> float:
        """From the orchestrator to the first stage and from the last one back."""
        return self.links.enter_s[self.indexes[0]] + self.links.leave_s[self.indexes[-1]]

    def ring_s(self, rows: int) -> float:
        """Between two tokens of a lone stream, whose last stage feeds the first.

        rows: that are computed; one travels.
        """
        back = self.links.between(self.indexes[-1], self.indexes[0]).transfer_s(self.model.activation_bytes)
        return sum(self.passes_s(rows)) + sum(self.hops_s(1)) + (back if len(self.indexes) > 1 else 0.0)

    def first_token_s(self, prompt_tokens: int) -> float:
        """Chunks follow each other through the stages: all of them at the slowest place, one at the others."""
        num_chunks = -(-prompt_tokens // CHUNK_TOKENS)
        tokens = prompt_tokens / num_chunks
        chunks_s = [
            device.times.pass_s + len(stage.layers) * device.times.prefill_token_s * tokens
            for device, stage in zip(self.devices, self.stages, strict=True)
        ]
        slowest_s = max([*chunks_s, *self.sendings_s(round(tokens))])
        head_s = self.devices[-1].times.head_at(LEAST_ROWS)
        return sum(chunks_s) + sum(self.hops_s(round(tokens))) + (num_chunks - 1) * slowest_s + head_s + self.outside_s


def predict(model: ModelFootprint, fleet: FleetFigures, placement: Placement, demand: Demand) -> Prediction:
    """Predict with as many of the streams as the placement has KV for. Raises KeyError for workers without figures."""
    pipe = _Pipe(model, fleet, placement)
    num_streams = max(min(demand.num_streams, placement.slots, placement.kv_tokens // demand.least_stream(model)), 1)
    rows = batch_rows(num_streams, len(pipe.stages), pipe.max_rows)
    passes_s = pipe.passes_s(rows)
    slowest_s = max([*passes_s, *pipe.sendings_s(rows)])
    total_s = sum(passes_s) + sum(pipe.hops_s(rows)) + pipe.outside_s
    rate = tokens_per_s(rows, len(pipe.stages), num_streams, slowest_s, total_s)
    return Prediction(
        placement=placement,
        stages=tuple(
            StagePrediction(
                stage=stage,
                fixed_bytes=model.need_bytes(stage.layers.start, stage.layers.stop, 0),
                memory_bytes=device.shard_bytes,
                pass_s=pass_s,
                busy=pass_s * rate / rows,
                is_declared=device.is_declared,
            )
            for stage, device, pass_s in zip(pipe.stages, pipe.devices, passes_s, strict=True)
        ),
        prompt_tokens=demand.prompt_tokens,
        first_token_s=pipe.first_token_s(demand.prompt_tokens),
        token_s=pipe.ring_s(min(LEAST_ROWS, pipe.max_rows)),
        solo_token_s=pipe.ring_s(1),
        num_streams=num_streams,
        rows=rows,
        tokens_per_s=rate,
        bound_by=_lone_bound(pipe)
        if demand.objective is Objective.LATENCY
        else _bound(pipe, rows, num_streams, total_s),
    )


def _bound(pipe: _Pipe, rows: int, num_streams: int, total_s: float) -> str:
    """What tokens of many streams wait for."""
    passes_s, sendings_s = pipe.passes_s(rows), pipe.sendings_s(rows)
    slowest_s = max([*passes_s, *sendings_s])
    in_flight = min(num_streams, rows * len(passes_s))
    if in_flight / total_s < 0.97 * rows / slowest_s:
        if num_streams < rows * len(passes_s):
            return f"streams: {num_streams} are too few to keep {len(passes_s)} stage(s) busy all the time"
        links_s = sum(pipe.hops_s(rows)) + pipe.outside_s
        return f"links: they take {_ms(links_s)} of the {_ms(total_s)} that a batch is on its way"
    if slowest_s in passes_s:
        device = pipe.devices[passes_s.index(slowest_s)]
        return f"device {device.worker_id}: {_ms(slowest_s)} for a batch of {rows}, the slowest stage"
    index = sendings_s.index(slowest_s)
    return f"link {_link(pipe, index)}: a batch of {rows} occupies it for {_ms(slowest_s)}"


def _lone_bound(pipe: _Pipe) -> str:
    """What a lone stream waits for most."""
    total_s, passes_s, hops_s = pipe.ring_s(1), pipe.passes_s(1), pipe.hops_s(1)
    if sum(passes_s) < total_s / 2:
        return f"link {_link(pipe, hops_s.index(max(hops_s)))}: links take {_ms(total_s - sum(passes_s))} of {_ms(total_s)}"
    slowest = passes_s.index(max(passes_s))
    return f"device {pipe.devices[slowest].worker_id}: it computes for {_ms(passes_s[slowest])} of {_ms(total_s)}"


def _link(pipe: _Pipe, index: int) -> str:
    return f"{pipe.devices[index].worker_id} > {pipe.devices[index + 1].worker_id}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def cost_s(model: ModelFootprint, fleet: FleetFigures, placements: Sequence[Placement], demand: Demand) -> float:
    """One number for how good placements are, in seconds, lower is better; inf: they cannot serve.

    LATENCY: between two tokens of a lone stream on the best pipeline. THROUGHPUT: a token of all streams together. MIXED:
    the geometric mean of both. Placements with workers that have no figures cannot serve.
    """
    known: set[WorkerId] = {device.worker_id for device in fleet.devices}
    able = [one for one in placements if known.issuperset(one.worker_ids)]
    if not able:
        return math.inf
    predictions = [predict(model, fleet, one, demand) for one in able]
    lone_s = min(one.solo_token_s for one in predictions)
    shared = [one for one in predictions if one.placement.mode is not DeviceMode.LATENCY] or predictions
    rate = sum(one.tokens_per_s for one in shared)
    token_s = 1 / rate if rate > 0 else math.inf
    match demand.objective:
        case Objective.LATENCY:
            return lone_s
        case Objective.THROUGHPUT:
            return token_s
        case Objective.MIXED:
            return math.sqrt(lone_s * token_s)
