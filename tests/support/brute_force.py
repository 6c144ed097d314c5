"""Looks at every pipeline of a small fleet: the reference that searches are held against. And fleets to search in.

Written from the definitions alone, and shares no code with the searches but figures, memory formula and batch rule. Twice:
one pipeline after the other, which is plain to see and slow, and all at once, which is held against the first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.figures import DeviceFigures, FleetFigures, LayerTimes, LinkFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.limits import even_rows
from orchestrator.core.stage_costs import Route
from shoal.types import DeviceProfile, WorkerId
from tests.support.builders import MIB

# Devices in order, and the bounds of their layers.
Pipe = tuple[tuple[DeviceFigures, ...], tuple[int, ...]]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Best:
    """The least seconds of a lone stream's token and the most tokens per second of all streams, each of any pipeline.

    alone_*: of any single device; infinite and 0 where none holds the model.
    """

    token_s: float
    tokens_per_s: float
    alone_token_s: float
    alone_tokens_per_s: float


def all_pipes(model: ModelFootprint, fleet: FleetFigures, kv_tokens: int) -> Iterator[Pipe]:
    """Every choice, order and cut that memory allows."""
    for num_stages in range(1, min(len(fleet.devices), model.num_layers) + 1):
        for order in permutations(fleet.devices, num_stages):
            for inner in combinations(range(1, model.num_layers), num_stages - 1):
                pipe = order, (0, *inner, model.num_layers)
                if fits(model, pipe, kv_tokens):
                    yield pipe


def fits(model: ModelFootprint, pipe: Pipe, kv_tokens: int) -> bool:
    """Whether every device has the memory for its layers and so much KV."""
    order, bounds = pipe
    return all(
        model.need_bytes(start, stop, kv_tokens) <= device.shard_bytes
        for device, (start, stop) in zip(order, pairwise(bounds), strict=True)
    )


def pipe_of(fleet: FleetFigures, route: Route) -> Pipe:
    """What a search has found, to be judged here."""
    return tuple(fleet.devices[device] for device in route.order), (0, *route.stops)


def best_one_by_one(model: ModelFootprint, fleet: FleetFigures, kv_tokens: int, num_streams: int) -> Best | None:
    """Look at one pipeline after the other; None if there is none. For tiny fleets: 20,000 of them take a second."""
    pipes = list(all_pipes(model, fleet, kv_tokens))
    if not pipes:
        return None
    alone = [pipe for pipe in pipes if len(pipe[0]) == 1]
    return Best(
        token_s=min(token_s(model, fleet, pipe) for pipe in pipes),
        tokens_per_s=max(tokens_per_s(model, fleet, pipe, num_streams) for pipe in pipes),
        alone_token_s=min((token_s(model, fleet, pipe) for pipe in alone), default=math.inf),
        alone_tokens_per_s=max((tokens_per_s(model, fleet, pipe, num_streams) for pipe in alone), default=0.0),
    )


def best_of_all(model: ModelFootprint, fleet: FleetFigures, kv_tokens: int, num_streams: int) -> Best | None:
    """The same by arrays: all orders and cuts of a number of stages at once."""
    least_s, most_per_s = [], []
    for num_stages in range(1, min(len(fleet.devices), model.num_layers) + 1):
        group = _SameLength(model, fleet, kv_tokens, num_stages)
        least_s.append(group.least_token_s())
        most_per_s.append(group.most_tokens_per_s(num_streams))
    if min(least_s) == math.inf:
        return None
    return Best(min(least_s), max(most_per_s), least_s[0], most_per_s[0])


class _SameLength:
    """All pipelines of so many stages: `O` orders of devices times `B` ways to cut the layers.

    Devices are numbers, in the fleet's order. A stage that has not the memory takes for ever.
    """

    def __init__(self, model: ModelFootprint, fleet: FleetFigures, kv_tokens: int, num_stages: int) -> None:
        self._model = model
        self._fleet = fleet
        self._kv_tokens = kv_tokens
        self._num_stages = num_stages
        self._orders = np.array(list(permutations(range(len(fleet.devices)), num_stages)))  # [O, num_stages]
        inner = combinations(range(1, model.num_layers), num_stages - 1)
        self._bounds = np.array([(0, *stops, model.num_layers) for stops in inner])  # [B, num_stages + 1]

    def least_token_s(self) -> float:
        """As `token_s`."""
        orders = self._orders
        hop_s = self._between(lambda link: link.transfer_s(self._model.activation_bytes))  # [from, to]
        links_s = sum(hop_s[one, other] for one, other in zip(orders.T, np.roll(orders, -1, axis=1).T, strict=True))
        return float((sum(self._stages_s(orders, 1)) + np.expand_dims(links_s, 1)).min())

    def most_tokens_per_s(self, num_streams: int) -> float:
        """As `tokens_per_s`: orders by the rows of their batches."""
        max_batch = np.array([device.profile.max_batch for device in self._fleet.devices])
        rows = np.array(
            [batch_rows(num_streams, self._num_stages, int(most)) for most in max_batch[self._orders].min(1)]
        )
        return max(
            self._most_with(self._orders[rows == number], int(number), num_streams) for number in np.unique(rows)
        )

    def _most_with(self, orders: Ints, rows: int, num_streams: int) -> float:
        num_bytes = rows * self._model.activation_bytes
        hop_s = self._between(lambda link: link.transfer_s(num_bytes))  # [from, to]
        sending_s = self._between(lambda link: link.sending_s(num_bytes))  # [from, to]
        ids = [device.worker_id for device in self._fleet.devices]
        enter_s = np.array([self._fleet.link(None, one).delay_s for one in ids])
        leave_s = np.array([self._fleet.link(one, None).delay_s for one in ids])
        stages_s = self._stages_s(orders, rows)
        slowest_s = np.maximum.reduce(stages_s)  # [O, B]
        links_s = enter_s[orders[:, 0]] + leave_s[orders[:, -1]]  # [O]
        for one, other in pairwise(orders.T):
            links_s = links_s + hop_s[one, other]
            slowest_s = np.maximum(slowest_s, sending_s[one, other][:, None])
        total_s = sum(stages_s) + links_s[:, None]  # [O, B]
        in_flight = min(num_streams, rows * self._num_stages)
        return float(np.minimum(rows / slowest_s, in_flight / total_s).max())

    def _stages_s(self, orders: Ints, rows: int) -> list[Floats]:
        """Of each stage, what it takes by order and cut: [O, B]."""
        model, num_layers = self._model, self._model.num_layers
        part_s = np.full((len(self._fleet.devices), num_layers + 1, num_layers + 1), np.inf)  # [device, start, stop]
        for index, device in enumerate(self._fleet.devices):
            for start, stop in combinations(range(num_layers + 1), 2):
                if model.need_bytes(start, stop, self._kv_tokens) <= device.shard_bytes:
                    part_s[index, start, stop] = device.times.stage_s(stop - start, stop == num_layers, rows)
        bounds = self._bounds
        return [part_s[orders[:, [i]], bounds[:, i], bounds[:, i + 1]] for i in range(self._num_stages)]

    def _between(self, seconds: Callable[[LinkFigures], float]) -> Floats:
        devices = self._fleet.devices
        return np.array([[seconds(link_between(self._fleet, one, other)) for other in devices] for one in devices])


def batch_rows(num_streams: int, num_stages: int, max_batch: int) -> int:
    """What the scheduler makes of so many streams; kernels take one row as if it were two."""
    return max(min(even_rows(num_streams, num_stages, max_batch), num_streams), 2)


def stage_times(model: ModelFootprint, pipe: Pipe, rows: int) -> list[float]:
    order, bounds = pipe
    return [
        device.times.stage_s(stop - start, stop == model.num_layers, rows)
        for device, start, stop in zip(order, bounds, bounds[1:], strict=False)
    ]


def link_between(fleet: FleetFigures, one: DeviceFigures, other: DeviceFigures) -> LinkFigures:
    """By way of the orchestrator where one of two does not take links of others and nothing was measured between them."""
    ids = one.worker_id, other.worker_id
    takes_links = one.profile.allow_direct_links and other.profile.allow_direct_links
    if one is other or takes_links or ids in fleet.links or ids[::-1] in fleet.links:
        return fleet.link(*ids)
    up, down = fleet.link(ids[0], None), fleet.link(None, ids[1])
    return LinkFigures(up.delay_s + down.delay_s, min(up.bytes_per_s, down.bytes_per_s))


def token_s(model: ModelFootprint, fleet: FleetFigures, pipe: Pipe) -> float:
    """One row round the ring of stages."""
    order = pipe[0]
    links = [link_between(fleet, one, other) for one, other in zip(order, [*order[1:], order[0]], strict=True)]
    return sum(stage_times(model, pipe, 1)) + sum(link.transfer_s(model.activation_bytes) for link in links)


def tokens_per_s(model: ModelFootprint, fleet: FleetFigures, pipe: Pipe, num_streams: int) -> float:
    """As many batches as there are stages follow each other; no stream has two tokens on the way."""
    order, _ = pipe
    rows = batch_rows(num_streams, len(order), min(device.profile.max_batch for device in order))
    times = stage_times(model, pipe, rows)
    links = [link_between(fleet, one, other) for one, other in pairwise(order)]
    num_bytes = rows * model.activation_bytes
    slowest = max([*times, *(link.sending_s(num_bytes) for link in links)])
    ends = fleet.link(None, order[0].worker_id).delay_s + fleet.link(order[-1].worker_id, None).delay_s
    total = sum(times) + sum(link.transfer_s(num_bytes) for link in links) + ends
    return min(rows / slowest, min(num_streams, rows * len(order)) / total)


def random_fleet(
    seed: int, *, max_devices: int, max_layers: int, is_tight: bool, is_full: bool = False
) -> tuple[ModelFootprint, FleetFigures]:
    """Unequal devices, layers and links; is_tight: few devices hold many layers; is_full: as many of both as may be.

    Every fourth device takes no links of others.
    """
    draw = random.Random(seed)
    num_layers = draw.randint(max_layers if is_full else 1, max_layers)
    base = draw.randint(1, 30) * MIB
    model = ModelFootprint(
        layer_bytes=tuple(base + draw.choice((0, 0, base // 5)) for _ in range(num_layers)),
        embedding_bytes=draw.choice((0, 3 * base)),
        head_bytes=draw.choice((0, 2 * base)),
        kv_bytes_per_token_per_layer=2048,
        context_tokens=2048,
        is_head_tied=draw.random() < 0.5,
        shared_bytes=MIB // 4,
    )
    whole = model.need_bytes(0, num_layers, 512)
    share = (0.15, 0.7) if is_tight else (0.4, 2.0)
    devices = tuple(
        _device(draw, index, 140 * MIB + int(whole * draw.uniform(*share)))
        for index in range(draw.randint(max_devices if is_full else 1, max_devices))
    )
    ends = [None, *(device.worker_id for device in devices)]
    links = {
        (one, other): LinkFigures(draw.choice((0.0003, 0.001, 0.006)), draw.choice((2.5e5, 2.5e6, 25e6, float("inf"))))
        for one in ends
        for other in ends
        if one != other and draw.random() < 0.7
    }
    return model, FleetFigures(devices, links, LinkFigures(0.0005, 1e7))


def with_twins(fleet: FleetFigures) -> FleetFigures:
    """As many devices, of the first two kinds by turns, and no link of its own."""
    kinds = fleet.devices[:2]
    devices = (
        replace(kinds[index % len(kinds)], worker_id=device.worker_id) for index, device in enumerate(fleet.devices)
    )
    return FleetFigures(tuple(devices), {}, fleet.default_link)


def large_fleet() -> tuple[ModelFootprint, FleetFigures]:
    """A hundred devices, of which none holds eighty layers by itself."""
    draw = random.Random(7)
    model, small = random_fleet(11, max_devices=6, max_layers=12, is_tight=False, is_full=True)
    model = replace(model, layer_bytes=(20 * 2**20,) * 80)
    devices = tuple(
        replace(
            draw.choice(small.devices),
            worker_id=WorkerId(f"w{index:03}"),
            profile=replace(small.devices[0].profile, memory_bytes=draw.choice((1, 2, 3)) * 2**30),
        )
        for index in range(100)
    )
    return model, FleetFigures(devices, {}, LinkFigures(0.001, 1e7))


def _device(draw: random.Random, index: int, memory_bytes: int) -> DeviceFigures:
    slowness = draw.choice((0.3, 1.0, 1.0, 3.0)) * draw.uniform(0.8, 1.25)
    layer = tuple((rows, slowness * 1e-3 * (1 + draw.uniform(0.5, 1.0) * rows)) for rows in (1, 2, 4, 8, 16))
    head = tuple((rows, 4 * seconds * draw.uniform(0.0, 2.0)) for rows, seconds in layer)
    times = LayerTimes(layer, head, slowness * 3e-4, draw.choice((0.0, 5e-4)))
    profile = DeviceProfile(
        name=f"d{index}",
        kind="phone",
        memory_bytes=memory_bytes,
        max_batch=draw.choice((4, 8, 16)),
        allow_direct_links=index % 4 < 3,
    )
    return DeviceFigures(WorkerId(f"w{index}"), profile, times, is_declared=False)
