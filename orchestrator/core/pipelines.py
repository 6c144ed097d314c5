"""Places one pipeline over devices: which of them are used, in which order, with which layers and how much KV.

Puts `solver`'s answers into placements, and says what is missing where there is none. How many pipelines there are, and of
whom, is `grouping`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator.core.demand import MIN_CONTEXT_TOKENS, Demand
from orchestrator.core.figures import DeviceFigures, FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.placement import MIB, Placement, impossible, place_split, placement_of
from orchestrator.core.slots import PAGE_TOKENS
from orchestrator.core.solver import Candidate, Solver
from orchestrator.core.stage_costs import TOLERANCE
from shoal.errors import PlacementImpossible
from shoal.types import DeviceMode, Objective, WorkerId

# A device that may come is at most this large: more helps no model that Shoal runs.
LARGEST_DEVICE_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class Placed:
    """A pipeline. cost_s: seconds a token, of a lone stream or of all together, as the objective has it; lower is better."""

    placement: Placement
    cost_s: float


def place_one(model: ModelFootprint, fleet: FleetFigures, demand: Demand, num_stages: int | None = None) -> Placed:
    """Place the pipeline that is best for the objective (MIXED: for throughput), on so many devices if that is said.

    Of equally good cuts, the one with the most KV. Devices without a stage are standby. Raises PlacementImpossible, which
    says what is missing, and ConfigError for a split that can never work.
    """
    if demand.split is not None:
        return Placed(place_split(model, fleet.devices, demand, demand.split), 0.0)
    found = find_one(model, fleet, demand, num_stages)
    if found is None:
        raise shortage(model, fleet, demand)
    return found


def find_one(
    model: ModelFootprint, fleet: FleetFigures, demand: Demand, num_stages: int | None = None
) -> Placed | None:
    """The same without a split, and None where nothing can be placed: to say what is missing takes longer than to see it."""
    found = search(model, fleet, demand, num_stages)
    return None if found is None else found.place()


@dataclass(frozen=True, slots=True)
class Found:
    """A pipeline to compare with others; its layers are cut for as much KV as fits only when it is placed."""

    solver: Solver
    demand: Demand
    candidate: Candidate

    @property
    def cost_s(self) -> float:
        """As that of `Placed`."""
        return 1 / self.candidate.tokens_per_s

    def place(self) -> Placed:
        model, devices = self.solver.model, self.solver.fleet.devices
        route, kv_tokens = self.solver.most_kv(self.candidate, self.demand.most_kv(model))
        worker_ids = [devices[device].worker_id for device in route.order]
        placement = placement_of(model, self.demand, worker_ids, route.stops, kv_tokens)
        is_for_batches = all(devices[device].profile.mode is DeviceMode.THROUGHPUT for device in route.order)
        mode = DeviceMode.THROUGHPUT if is_for_batches else DeviceMode.MIXED
        return Placed(replace(placement, mode=mode), self.cost_s)


def search(
    model: ModelFootprint,
    fleet: FleetFigures,
    demand: Demand,
    num_stages: int | None = None,
    *,
    is_exact: bool = True,
) -> Found | None:
    """Find the pipeline that `find_one` would place."""
    solver = Solver(model, usable(fleet), is_exact=is_exact)
    best = best_candidate(solver, demand, num_stages)
    return None if best is None else Found(solver, demand, best)


def best_candidate(solver: Solver, demand: Demand, num_stages: int | None = None) -> Candidate | None:
    """The best pipeline for a demand; None if there is none."""
    if not solver.fleet.devices:
        return None
    if demand.objective is Objective.LATENCY:
        return solver.for_latency(demand.least_kv(solver.model), num_stages)
    best: Candidate | None = None
    for num_streams, kv_tokens in demand.amounts(solver.model):
        above = best.tokens_per_s * (1 + TOLERANCE) if best else 0.0
        best = solver.for_throughput(num_streams, kv_tokens, num_stages, above) or best
    return best


def usable(fleet: FleetFigures) -> FleetFigures:
    """Without devices that never finish a layer. In the order of their names: who joined first decides nothing."""
    able = [device for device in fleet.devices if device.times.layer_s[0][1] < math.inf]
    return replace(fleet, devices=tuple(sorted(able, key=lambda device: device.worker_id)))


def can_hold(model: ModelFootprint, fleet: FleetFigures, kv_tokens: int) -> bool:
    """Whether any pipeline of these devices has the memory."""
    able = usable(fleet)
    return bool(able.devices) and Solver(model, able).is_possible(kv_tokens)


def shortage(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> PlacementImpossible:
    """Say which bytes are missing where if speed alone decided, and what would make it possible."""
    if not fleet.devices:
        return PlacementImpossible("no worker has joined yet: start one with `shoal worker --join HOST:PORT`")
    kv_tokens = demand.least_kv(model)
    able = usable(fleet)
    share: dict[int, tuple[int, int]] = {}
    if able.devices:
        found = Solver(model, without_limits(able), is_exact=False).for_throughput(demand.num_streams, kv_tokens)
        ids = [device.worker_id for device in fleet.devices]
        if found is not None:
            indexes = (ids.index(able.devices[device].worker_id) for device in found.route.order)
            share = dict(zip(indexes, zip(found.route.starts, found.route.stops, strict=True), strict=True))
    return impossible(model, fleet.devices, share, kv_tokens, "; or ".join(_remedies(model, fleet, demand)))


def _remedies(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> list[str]:
    """What would make a plan possible, each by itself."""
    least, remedies = demand.least_kv(model), []
    most = _largest(lambda pages: can_hold(model, fleet, pages * PAGE_TOKENS), least // PAGE_TOKENS)
    if most and demand.is_promised:
        context_tokens = most // demand.num_streams * PAGE_TOKENS
        if context_tokens >= min(MIN_CONTEXT_TOKENS, demand.context_of(model)):
            remedies.append(f"a context of {context_tokens} tokens for {demand.num_streams} stream(s)")
        if num_streams := most * PAGE_TOKENS // demand.least_stream(model):
            remedies.append(f"{num_streams} stream(s) of {demand.context_of(model)} tokens")
    size = _smallest(lambda mib: can_hold(model, _with_another(fleet, mib * MIB), least), LARGEST_DEVICE_BYTES // MIB)
    if size:
        remedies.append(f"another worker with {size} MiB for its shard")
    percent = _largest(lambda share: can_hold(_smaller(model, share / 100), fleet, least), 99)
    if percent:
        remedies.append(f"weights of at most {percent} % of the bytes (a more quantised or smaller model)")
    return [*remedies, "more memory_mib in a profile"]


def _largest(is_possible: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that is possible; 0 if none is. What is possible is so for all smaller ones."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_possible(middle) else (low, middle - 1)
    return low


def _smallest(is_possible: Callable[[int], bool], most: int) -> int:
    """The smallest number up to `most` that is possible; 0 if none is. What is possible is so for all larger ones."""
    if not is_possible(most):
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_possible(middle) else (middle + 1, high)
    return low


def without_limits(fleet: FleetFigures) -> FleetFigures:
    """The same devices with memory for anything."""
    return replace(fleet, devices=tuple(_with_room(device, LARGEST_DEVICE_BYTES) for device in fleet.devices))


def _with_room(device: DeviceFigures, num_bytes: int) -> DeviceFigures:
    profile = replace(device.profile, memory_bytes=num_bytes, host_kv_bytes=0)
    return replace(device, profile=profile, free_bytes=0)


def _with_another(fleet: FleetFigures, num_bytes: int) -> FleetFigures:
    another = replace(_with_room(fleet.devices[0], num_bytes), worker_id=WorkerId("another"))
    return replace(fleet, devices=(*fleet.devices, another))


def _smaller(model: ModelFootprint, share: float) -> ModelFootprint:
    return replace(
        model,
        layer_bytes=tuple(int(num_bytes * share) for num_bytes in model.layer_bytes),
        embedding_bytes=int(model.embedding_bytes * share),
        head_bytes=int(model.head_bytes * share),
    )
