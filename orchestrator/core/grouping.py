"""Decides which workers make a pipeline together, and when pipelines that serve may be made anew.

Devices kept for latency stand alone where the model fits them; the others share it, in as many replicas as are wanted and
can be had. A pure function of the workers there are: `placement` cuts the layers within each pipeline. It does not know
who is loaded or linked; the control task calls it whenever the workers that can be used have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

from orchestrator.core.placement import ModelFootprint, Placement, Worker, place
from shoal.errors import ConfigError, PlacementImpossible
from shoal.types import DeviceMode, PipelineId, WorkerId


@dataclass(frozen=True, slots=True)
class GroupingRules:
    """What the operator wants.

    num_slots, context_tokens: of each pipeline. split: layers of each stage of the one shared pipeline, see `place`.
    replicas: pipelines to make of the devices not kept for latency; fewer if these do not suffice.
    """

    num_slots: int
    context_tokens: int = 0
    split: tuple[int, ...] | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.split is not None and self.replicas > 1:
            raise ConfigError(
                f"split gives the stages of one pipeline, replicas = {self.replicas} asks for more: leave out one of them",
                field="split",
            )


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


def plan(model: ModelFootprint, workers: Sequence[Worker], in_force: Sequence[Placement], rules: GroupingRules) -> Plan:
    """Plan for all workers that can be used. A placement that need not change keeps its id, hence what it has loaded.

    Raises PlacementImpossible if all of them together cannot hold the model, and ConfigError.
    """
    best = place_all(model, workers, rules)
    return Plan(tuple(in_force), _with_ids_kept(best, in_force), (*in_force, *_beside(model, workers, in_force, rules)))


def place_all(model: ModelFootprint, workers: Sequence[Worker], rules: GroupingRules) -> tuple[Placement, ...]:
    """Make pipelines of workers: first those that share the layers, then devices of mode LATENCY by themselves.

    A LATENCY device that cannot hold the model alone is one of the others. If the others cannot hold it either, LATENCY
    devices are drafted, slowest first, as few as will do. Stages are in the order of the workers' ids.
    Raises PlacementImpossible and ConfigError like `place`.
    """
    alone = _all_alone(model, workers, rules)
    others = [worker for worker in workers if worker[0] not in alone]
    shared: tuple[Placement, ...] = ()
    if others or not alone or rules.split is not None:
        drafts = [worker for worker in workers if worker[0] in alone]
        shared = _shared_with_drafts(model, others, sorted(drafts, key=lambda one: (one[1].speed, one[0])), rules)
    used = {worker_id for placement in shared for worker_id in placement.worker_ids}
    return _numbered([*shared, *(alone[worker_id] for worker_id in sorted(alone.keys() - used))], ())


def _beside(
    model: ModelFootprint, workers: Sequence[Worker], in_force: Sequence[Placement], rules: GroupingRules
) -> tuple[Placement, ...]:
    """Pipelines of the workers that are in none. One that a worker is leaving counts as missing already."""
    ids = {worker_id for worker_id, _ in workers}
    placed = {worker_id for placement in in_force for worker_id in placement.worker_ids}
    free = [worker for worker in workers if worker[0] not in placed]
    lasting = [placement for placement in in_force if ids.issuperset(placement.worker_ids)]
    num_missing = rules.replicas - sum(placement.mode is not DeviceMode.LATENCY for placement in lasting)
    if num_missing < 1:
        return _numbered(list(_all_alone(model, free, rules).values()), in_force)
    try:
        return _numbered(place_all(model, free, replace(rules, replicas=num_missing)), in_force)
    except PlacementImpossible:
        return ()


def _all_alone(model: ModelFootprint, workers: Sequence[Worker], rules: GroupingRules) -> dict[WorkerId, Placement]:
    """The pipelines of the devices that are kept for latency and can hold the model by themselves."""
    alone = {}
    for worker_id, profile in workers:
        if profile.mode is not DeviceMode.LATENCY:
            continue
        with suppress(PlacementImpossible):
            placement = place(
                model, [(worker_id, profile)], num_slots=rules.num_slots, context_tokens=rules.context_tokens
            )
            alone[worker_id] = replace(placement, mode=DeviceMode.LATENCY)
    return alone


def _shared_with_drafts(
    model: ModelFootprint, others: Sequence[Worker], drafts: Sequence[Worker], rules: GroupingRules
) -> tuple[Placement, ...]:
    """The pipelines of the others, with the first of the drafts if need be; none if the drafts could do without them."""
    for num_drafted in range(len(drafts) + 1):
        members = sorted([*others, *drafts[:num_drafted]], key=_id)
        try:
            shared = _share(model, members, rules)
        except PlacementImpossible:
            if num_drafted == len(drafts):
                raise
            continue
        drafted = {worker_id for worker_id, _ in drafts[:num_drafted]}
        if rules.split is None and drafted.issuperset(shared[0].worker_ids):
            return ()
        return shared
    raise AssertionError("the last try returns or raises")


def _share(model: ModelFootprint, workers: Sequence[Worker], rules: GroupingRules) -> tuple[Placement, ...]:
    """As many pipelines as are wanted and as these workers can make, each with the whole model."""
    for num_groups in range(min(rules.replicas, len(workers)), 1, -1):
        for rank in (_by_speed, _by_memory):
            groups = _deal(workers, num_groups, rank)
            try:
                return tuple(_share_one(model, group, rules) for group in groups)
            except PlacementImpossible:
                continue
    return (_share_one(model, workers, rules),)


def _share_one(model: ModelFootprint, workers: Sequence[Worker], rules: GroupingRules) -> Placement:
    placement = place(model, workers, num_slots=rules.num_slots, context_tokens=rules.context_tokens, split=rules.split)
    modes = {profile.mode for worker_id, profile in workers if worker_id in placement.worker_ids}
    return replace(placement, mode=DeviceMode.THROUGHPUT if modes == {DeviceMode.THROUGHPUT} else DeviceMode.MIXED)


Rank = tuple[float, float]


def _by_speed(worker: Worker) -> Rank:
    return worker[1].speed, worker[1].memory_bytes


def _by_memory(worker: Worker) -> Rank:
    return worker[1].memory_bytes, worker[1].speed


def _deal(workers: Sequence[Worker], num_groups: int, rank: Callable[[Worker], Rank]) -> list[list[Worker]]:
    """Give the strongest worker left to the group that has least, so that groups come out even; sort by worker id."""
    groups: list[list[Worker]] = [[] for _ in range(num_groups)]
    sums = [(0.0, 0.0)] * num_groups
    for worker in sorted(workers, key=lambda worker: (*(-part for part in rank(worker)), worker[0])):
        weakest = sums.index(min(sums))
        groups[weakest].append(worker)
        sums[weakest] = (sums[weakest][0] + rank(worker)[0], sums[weakest][1] + rank(worker)[1])
    return sorted((sorted(group, key=_id) for group in groups), key=lambda group: group[0][0])


def _id(worker: Worker) -> WorkerId:
    return worker[0]


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
