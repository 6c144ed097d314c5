"""Decides which workers make a pipeline together, and when pipelines that serve may be made anew.

Devices kept for latency stand alone where the model fits them; the others share it, in as many replicas as are wanted and
can be had. A pure function of the workers there are: `pipelines` places each of them. It does not know who is loaded or
linked; the control task calls it whenever the workers that can be used have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from orchestrator.core.demand import Demand
from orchestrator.core.figures import DeviceFigures, FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.pipelines import Found, Placed, can_hold, find_one, place_one, search, shortage
from orchestrator.core.placement import Placement
from orchestrator.core.solver import MAX_EXACT_DEVICES
from orchestrator.core.stage_costs import TOLERANCE
from shoal.errors import PlacementImpossible
from shoal.types import DeviceMode, Objective, PipelineId, WorkerId

# The fastest of the devices are tried as the pipeline for latency of a mixed plan.
NUM_FASTEST = 3
# More replicas are tried until this many numbers of them in a row are not better.
MAX_WORSE = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What to put in force in place of `in_force`.

    best: of all workers. meanwhile: what is in force, and pipelines of workers that are in none where one is missing.
    """

    in_force: tuple[Placement, ...]
    best: tuple[Placement, ...]
    meanwhile: tuple[Placement, ...]

    def choose(self, busy: Collection[PipelineId]) -> tuple[Placement, ...]:
        """Return what disturbs nobody who is served by one of these pipelines."""
        ends_busy = any(one.pipeline_id in busy and one not in self.best for one in self.in_force)
        return self.meanwhile if ends_busy else self.best


def plan(model: ModelFootprint, fleet: FleetFigures, in_force: Sequence[Placement], demand: Demand) -> Plan:
    """Plan for all workers that can be used. A placement that need not change keeps its id, hence what it has loaded.

    Raises PlacementImpossible if all of them together cannot hold the model, and ConfigError.
    """
    best = place_all(model, fleet, demand)
    if not in_force:
        return Plan((), best, best)
    beside = _beside(model, fleet, in_force, demand)
    return Plan(tuple(in_force), _with_ids_kept(best, in_force), (*in_force, *beside))


def place_all(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> tuple[Placement, ...]:
    """Make pipelines of workers: first those that share the layers, then devices of mode LATENCY by themselves.

    A LATENCY device that cannot hold the model alone is one of the others. If the others cannot hold it either, LATENCY
    devices are drafted, slowest first, as few as will do. Raises PlacementImpossible and ConfigError like `place_one`.
    """
    fleet = replace(fleet, devices=tuple(sorted(fleet.devices, key=_id)))
    alone = _all_alone(model, fleet, demand)
    others = [device for device in fleet.devices if device.worker_id not in alone]
    shared: list[Placement] = []
    if others or not alone or demand.split is not None:
        drafts = [device for device in fleet.devices if device.worker_id in alone]
        drafts.sort(key=lambda device: (-device.times.layer_at(1), device.worker_id))
        shared = _shared_with_drafts(model, fleet, others, drafts, demand)
    used = {worker_id for placement in shared for worker_id in placement.worker_ids}
    return _numbered([*shared, *(alone[worker_id] for worker_id in sorted(alone.keys() - used))], ())


def _beside(
    model: ModelFootprint, fleet: FleetFigures, in_force: Sequence[Placement], demand: Demand
) -> tuple[Placement, ...]:
    """Pipelines of the workers that are in none. One that a worker is leaving counts as missing already."""
    ids = {device.worker_id for device in fleet.devices}
    placed = {worker_id for placement in in_force for worker_id in placement.worker_ids}
    free = _only(fleet, [device for device in fleet.devices if device.worker_id not in placed])
    lasting = [placement for placement in in_force if ids.issuperset(placement.worker_ids)]
    num_missing = max(demand.replicas, 1) - sum(placement.mode is not DeviceMode.LATENCY for placement in lasting)
    if num_missing < 1:
        return _numbered(list(_all_alone(model, free, demand).values()), in_force)
    try:
        return _numbered(place_all(model, free, replace(demand, replicas=num_missing)), in_force)
    except PlacementImpossible:
        return ()


def _all_alone(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> dict[WorkerId, Placement]:
    """The pipelines of the devices that are kept for latency and can hold the model by themselves."""
    alone = {}
    for device in fleet.devices:
        if device.profile.mode is not DeviceMode.LATENCY:
            continue
        placed = find_one(model, _only(fleet, [device]), replace(demand, split=None, objective=Objective.LATENCY))
        if placed is not None:
            alone[device.worker_id] = replace(placed.placement, mode=DeviceMode.LATENCY)
    return alone


def _shared_with_drafts(
    model: ModelFootprint,
    fleet: FleetFigures,
    others: Sequence[DeviceFigures],
    drafts: Sequence[DeviceFigures],
    demand: Demand,
) -> list[Placement]:
    """The pipelines of the others, with the first of the drafts if need be; none if the drafts could do without them."""
    for num_drafted in range(len(drafts) + 1):
        members = _only(fleet, sorted([*others, *drafts[:num_drafted]], key=_id))
        is_last = num_drafted == len(drafts)
        if not is_last and demand.split is None and not can_hold(model, members, demand.least_kv(model)):
            continue
        try:
            shared = [placed.placement for placed in _share(model, members, demand)]
        except PlacementImpossible:
            if is_last:
                raise
            continue
        drafted = {device.worker_id for device in drafts[:num_drafted]}
        if demand.split is None and drafted.issuperset(shared[0].worker_ids):
            return []
        return shared
    raise AssertionError("the last try returns or raises")


def _share(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> list[Placed]:
    """The pipelines for the objective, each with the whole model."""
    if demand.split is not None:
        return [place_one(model, fleet, demand)]
    match demand.objective:
        case Objective.LATENCY:
            return _one_after_the_other(model, fleet, demand)
        case Objective.THROUGHPUT:
            return [found.place() for found in _replicas(model, fleet, demand)]
        case Objective.MIXED:
            return _for_each(model, fleet, demand)


def _one_after_the_other(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> list[Placed]:
    """The fastest pipeline for a lone stream, then the fastest of who is left, up to the number of replicas."""
    num_wanted = demand.replicas
    while num_wanted > 1:
        found, left = list[Placed](), fleet
        while len(found) < num_wanted and (placed := find_one(model, left, demand.of_each(num_wanted))) is not None:
            found.append(placed)
            left = _without(left, placed.placement.worker_ids)
        if len(found) == num_wanted:
            return found
        num_wanted = len(found)
    return [place_one(model, fleet, demand)]


def _replicas(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> list[Found]:
    """As many pipelines as are wanted and as these workers can make; if no number is wanted, those with most tokens."""
    num_devices = len(fleet.devices)
    for num_groups in range(min(demand.replicas, num_devices), 1, -1):
        if found := _dealt(model, fleet, demand, num_groups):
            return found
    best, num_worse = [_whole(model, fleet, demand)], 0
    if demand.replicas:
        return best
    for num_groups in _group_counts(num_devices, min(num_devices, demand.num_streams)):
        found = _dealt(model, fleet, demand, num_groups)
        if found and _rate(found) > _rate(best) * (1 + TOLERANCE):
            best, num_worse = found, 0
        elif (num_worse := num_worse + 1) == MAX_WORSE:
            break
    return best


def _whole(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> Found:
    """The best pipeline of all of them. Raises PlacementImpossible."""
    found = search(model, fleet, demand)
    if found is None:
        raise shortage(model, fleet, demand)
    return found


def _group_counts(num_devices: int, most: int) -> Iterator[int]:
    """2, 3, 4 and so on; of many devices, from 6 on each by half as large again."""
    is_small = num_devices <= MAX_EXACT_DEVICES
    num_groups = 2 if is_small else 6
    while num_groups <= most:
        yield num_groups
        num_groups = num_groups + 1 if is_small else num_groups * 3 // 2


def _dealt(model: ModelFootprint, fleet: FleetFigures, demand: Demand, num_groups: int) -> list[Found]:
    """So many pipelines of about equal speed, or else of about equal memory; none if these groups cannot hold the model."""
    demand = demand.of_each(num_groups)
    is_exact = len(fleet.devices) <= MAX_EXACT_DEVICES
    for rank in (_by_speed, _by_memory):
        pipelines = []
        for group in _deal(fleet.devices, num_groups, rank):
            found = search(model, _only(fleet, group), demand, is_exact=is_exact)
            if found is None:
                break
            pipelines.append(found)
        if len(pipelines) == num_groups:
            return pipelines
    return []


def _rate(pipelines: Sequence[Found]) -> float:
    return sum(1 / one.cost_s for one in pipelines)


def _for_each(model: ModelFootprint, fleet: FleetFigures, demand: Demand) -> list[Placed]:
    """A pipeline for lone streams beside those for many, so that neither loses more of what it could have than the other.

    Where the devices do not suffice for both: one for many.
    """
    for_many, for_lone = replace(demand, objective=Objective.THROUGHPUT), replace(demand, objective=Objective.LATENCY)
    best: tuple[list[Found], Placed] | None = None
    best_rate = 0.0
    fastest = sorted(fleet.devices, key=lambda device: (device.times.layer_at(1), device.worker_id))
    fastest = fastest[: NUM_FASTEST if len(fastest) <= MAX_EXACT_DEVICES else 0]
    for members in [fleet.devices, *([device] for device in fastest)]:
        lone = find_one(model, _only(fleet, members), for_lone)
        rest = _without(fleet, lone.placement.worker_ids) if lone else fleet
        if lone is None or not can_hold(model, rest, demand.least_kv(model)):
            continue
        many = _replicas(model, rest, for_many)
        if _rate(many) / lone.cost_s > best_rate * (1 + TOLERANCE):
            best, best_rate = (many, lone), _rate(many) / lone.cost_s
    if best is None:
        return [found.place() for found in _replicas(model, fleet, for_many)]
    kept = replace(best[1], placement=replace(best[1].placement, mode=DeviceMode.LATENCY))
    return [*(found.place() for found in best[0]), kept]


Rank = tuple[float, float]


def _by_speed(device: DeviceFigures) -> Rank:
    return 1 / device.times.layer_at(1) if device.times.layer_at(1) > 0 else 0.0, device.shard_bytes


def _by_memory(device: DeviceFigures) -> Rank:
    return device.shard_bytes, _by_speed(device)[0]


def _deal(
    devices: Sequence[DeviceFigures], num_groups: int, rank: Callable[[DeviceFigures], Rank]
) -> list[list[DeviceFigures]]:
    """Give the strongest worker left to the group that has least, so that groups come out even; sort by worker id."""
    groups: list[list[DeviceFigures]] = [[] for _ in range(num_groups)]
    sums = [(0.0, 0.0)] * num_groups
    for device in sorted(devices, key=lambda device: (*(-part for part in rank(device)), device.worker_id)):
        weakest = sums.index(min(sums))
        groups[weakest].append(device)
        sums[weakest] = (sums[weakest][0] + rank(device)[0], sums[weakest][1] + rank(device)[1])
    return sorted((sorted(group, key=_id) for group in groups), key=lambda group: group[0].worker_id)


def _only(fleet: FleetFigures, devices: Sequence[DeviceFigures]) -> FleetFigures:
    return replace(fleet, devices=tuple(devices))


def _without(fleet: FleetFigures, worker_ids: Collection[WorkerId]) -> FleetFigures:
    return _only(fleet, [device for device in fleet.devices if device.worker_id not in worker_ids])


def _id(device: DeviceFigures) -> WorkerId:
    return device.worker_id


def _with_ids_kept(placements: Sequence[Placement], in_force: Sequence[Placement]) -> tuple[Placement, ...]:
    """Give placements that are in force their ids back: nothing has to be loaded again for them."""
    known = {_content(placement): placement for placement in in_force}
    kept = [known.get(_content(placement)) for placement in placements]
    free = _free_ids({old.pipeline_id for old in kept if old is not None})
    return tuple(
        replace(new, pipeline_id=next(free)) if old is None else old for new, old in zip(placements, kept, strict=True)
    )


def _content(placement: Placement) -> Placement:
    return replace(placement, pipeline_id=PipelineId(""))


def _numbered(placements: Sequence[Placement], others: Sequence[Placement]) -> tuple[Placement, ...]:
    """Give placements the ids p1, p2, ... that the others have not."""
    free = _free_ids({placement.pipeline_id for placement in others})
    return tuple(replace(placement, pipeline_id=next(free)) for placement in placements)


def _free_ids(taken: Collection[PipelineId]) -> Iterator[PipelineId]:
    return (pipeline_id for number in count(1) if (pipeline_id := PipelineId(f"p{number}")) not in taken)
