"""Looks at every pipeline of a small fleet: the reference that searches are held against. And fleets to search in.

Written from the definitions alone, and shares no code with the searches but figures, memory formula and batch rule.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

from orchestrator.core.figures import DeviceFigures, FleetFigures, LayerTimes, LinkFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.limits import even_rows
from shoal.types import DeviceProfile, WorkerId
from tests.support.builders import MIB

# Devices in order, and the bounds of their layers.
Pipe = tuple[tuple[DeviceFigures, ...], tuple[int, ...]]


def all_pipes(model: ModelFootprint, fleet: FleetFigures, kv_tokens: int) -> Iterator[Pipe]:
    """Every choice, order and cut that memory allows."""
    fits = {
        (device.worker_id, start, stop): model.need_bytes(start, stop, kv_tokens) <= device.shard_bytes
        for device in fleet.devices
        for start, stop in combinations(range(model.num_layers + 1), 2)
    }
    for num_stages in range(1, min(len(fleet.devices), model.num_layers) + 1):
        for order in permutations(fleet.devices, num_stages):
            for inner in combinations(range(1, model.num_layers), num_stages - 1):
                bounds = (0, *inner, model.num_layers)
                ids = (device.worker_id for device in order)
                if all(fits[part] for part in zip(ids, bounds, bounds[1:], strict=False)):
                    yield order, bounds


def best_of_all(
    model: ModelFootprint, fleet: FleetFigures, kv_tokens: int, num_streams: int
) -> tuple[float, float] | None:
    """The least seconds of a lone stream's token and the most tokens per second of so many streams, of any pipeline.

    None if there is none.
    """
    pipes = list(all_pipes(model, fleet, kv_tokens))
    if not pipes:
        return None
    least_s = min(token_s(model, fleet, pipe) for pipe in pipes)
    return least_s, max(tokens_per_s(model, fleet, pipe, num_streams) for pipe in pipes)


def stage_times(model: ModelFootprint, pipe: Pipe, rows: int) -> list[float]:
    order, bounds = pipe
    return [
        device.times.stage_s(stop - start, stop == model.num_layers, rows)
        for device, start, stop in zip(order, bounds, bounds[1:], strict=False)
    ]


def token_s(model: ModelFootprint, fleet: FleetFigures, pipe: Pipe) -> float:
    """One row round the ring of stages."""
    ids = [device.worker_id for device in pipe[0]]
    links = [fleet.link(one, other) for one, other in zip(ids, [*ids[1:], ids[0]], strict=True)]
    sent = [model.activation_bytes] * (len(ids) - 1) + [0 if len(ids) == 1 else model.activation_bytes]
    hops = [link.transfer_s(num_bytes) for link, num_bytes in zip(links, sent, strict=True)]
    return sum(stage_times(model, pipe, 1)) + sum(hops)


def tokens_per_s(model: ModelFootprint, fleet: FleetFigures, pipe: Pipe, num_streams: int) -> float:
    order, _ = pipe
    rows = even_rows(num_streams, len(order), min(device.profile.max_batch for device in order))
    rows = max(min(rows, num_streams), 2)
    times, ids = stage_times(model, pipe, rows), [device.worker_id for device in order]
    links = [fleet.link(one, other) for one, other in pairwise(ids)]
    num_bytes = rows * model.activation_bytes
    slowest = max([*times, *(link.sending_s(num_bytes) for link in links)])
    ends = fleet.link(None, ids[0]).delay_s + fleet.link(ids[-1], None).delay_s
    total = sum(times) + sum(link.transfer_s(num_bytes) for link in links) + ends
    return min(rows / slowest, min(num_streams, rows * len(order)) / total)


def random_fleet(
    seed: int, *, max_devices: int, max_layers: int, is_tight: bool, is_full: bool = False
) -> tuple[ModelFootprint, FleetFigures]:
    """Unequal devices, layers and links; is_tight: few devices hold many layers; is_full: as many of both as may be."""
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
        name=f"d{index}", kind="phone", memory_bytes=memory_bytes, max_batch=draw.choice((4, 8, 16))
    )
    return DeviceFigures(WorkerId(f"w{index}"), profile, times, is_declared=False)
