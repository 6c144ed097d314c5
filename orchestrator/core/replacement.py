"""Decides when other pipelines are put in the place of those in force, and in which order that is done.

Only for a gain worth the trouble, not soon after the last change, and never by what leaves layers without a device. Takes
what the planner predicts as one number to be small; knows neither how placements are made nor how they are carried out:
control tells it what happened, asks it, and does what it says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from orchestrator.core.placement import Placement, Stage
from shoal.types import PipelineId, WorkerId

# A move costs seconds of loading, KV and a pause of every stream, and predictions are off by some percent.
MIN_GAIN = 0.15
# Since the last change: what a placement does shows, and devices that were relieved cool.
HOLD_S = 60.0


class Action(Enum):
    """KEEP: nothing to be done until something happens. WAIT: ask again at a time. REPLACE: now, where nobody is disturbed.

    REPLACE_NOW: now, and running answers wait for it: what is in force cannot stay.
    """

    KEEP = "keep"
    WAIT = "wait"
    REPLACE = "replace"
    REPLACE_NOW = "replace now"


@dataclass(frozen=True, slots=True)
class Verdict:
    """at: when to ask again; inf: when something has happened."""

    action: Action
    why: str
    at: float = math.inf


@dataclass(frozen=True, slots=True)
class Outlook:
    """Placements and what they are predicted to cost, in seconds of what the objective minimises; inf: they cannot serve."""

    placements: tuple[Placement, ...]
    cost: float


class Replacement:
    """When placements change.

    Invariant: while somebody is served, what serves is replaced at most once in HOLD_S; further pipelines beside it may come
    at any time.
    """

    def __init__(self) -> None:
        self._changed_at = -math.inf

    def changed(self, now: float) -> None:
        """Other placements were put in force, for whatever reason."""
        self._changed_at = now

    def decide(
        self,
        in_force: Outlook,
        candidate: Outlook,
        num_layers: int,
        now: float,
        *,
        usable: Collection[WorkerId],
        spent: Collection[WorkerId] = (),
        is_idle: bool = False,
    ) -> Verdict:
        """Say whether the candidate is to be put in the place of what is in force.

        usable: who may hold layers. spent: who is to hold none if others can (low battery, short memory). is_idle: nobody is
        served, so that a device that holds nothing yet can be given layers without waiting for HOLD_S.
        """
        can_begin = is_idle and not holders_of(candidate.placements) <= holders_of(in_force.placements)
        hold_until = -math.inf if can_begin else self._changed_at + HOLD_S
        return _judge(in_force, candidate, num_layers, now, frozenset(usable), frozenset(spent), hold_until)


def _judge(
    in_force: Outlook,
    candidate: Outlook,
    num_layers: int,
    now: float,
    usable: frozenset[WorkerId],
    spent: frozenset[WorkerId],
    hold_until: float,
) -> Verdict:
    gap = gap_of(candidate.placements, num_layers, usable)
    if gap:
        return Verdict(Action.KEEP, gap)
    if candidate.placements == in_force.placements:
        return Verdict(Action.KEEP, "what is in force is the best there is")
    if not in_force.placements:
        return Verdict(Action.REPLACE_NOW, "nothing is in force")
    if set(in_force.placements) < set(candidate.placements):
        return Verdict(Action.REPLACE, "further pipelines beside those in force")
    relieved = holders_of(in_force.placements) & spent - holders_of(candidate.placements)
    gain = 1.0 - candidate.cost / in_force.cost if candidate.cost < in_force.cost else 0.0
    if not relieved and gain < MIN_GAIN:
        return Verdict(Action.KEEP, f"another placement gains {gain:.1%}, less than {MIN_GAIN:.0%}")
    if now < hold_until:
        return Verdict(Action.WAIT, "the last change is too recent", hold_until)
    if relieved:
        return Verdict(Action.REPLACE_NOW, f"{', '.join(sorted(relieved))} can hold no layers for long")
    return Verdict(Action.REPLACE, f"another placement gains {gain:.0%}")


def gap_of(placements: Sequence[Placement], num_layers: int, usable: Collection[WorkerId]) -> str:
    """Say why placements cannot serve, each with all layers and devices of its own; empty if they can."""
    held: set[WorkerId] = set()
    for placement in placements:
        stop = 0
        for stage in placement.stages:
            if stage.layers.start != stop:
                return f"nobody of {placement.pipeline_id} would hold layer {stop}"
            if stage.worker_id not in usable or stage.worker_id in held:
                return f"{stage.worker_id} cannot hold layers {stage.layers} of {placement.pipeline_id}"
            held.add(stage.worker_id)
            stop = stage.layers.stop
        if stop != num_layers:
            return f"nobody of {placement.pipeline_id} would hold layer {stop}"
    return "" if placements else "no placement at all"


def holders_of(placements: Sequence[Placement]) -> frozenset[WorkerId]:
    """The workers that some of these placements name."""
    return frozenset(worker_id for placement in placements for worker_id in placement.worker_ids)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A stage that a worker which holds nothing takes from another one: it can be loaded while that one still serves."""

    placement: Placement
    index: int

    @property
    def stage(self) -> Stage:
        return self.placement.stages[self.index]


@dataclass(frozen=True, slots=True)
class Change:
    """How to get from what is in force to what was chosen.

    placements: those to be in force, where one takes over from an earlier one under its id, so that its other stages stay
    loaded. arrivals: what to load beforehand. ended: pipelines that cannot serve while their successors load.
    has_successors: some of the placements were not in force.
    """

    placements: tuple[Placement, ...]
    arrivals: tuple[Arrival, ...]
    ended: tuple[PipelineId, ...]
    has_successors: bool


def change(in_force: Sequence[Placement], chosen: Sequence[Placement]) -> Change:
    """Find the order in which the fewest pipelines end before their successors are loaded."""
    holders = holders_of(in_force)
    left = [one for one in in_force if one not in chosen]
    placements, arrivals = [], []
    # Ids that successors have taken over, each with the one that was given up for it: another may have had it.
    given_up: dict[PipelineId, PipelineId] = {}
    successors: list[Placement] = []
    for placement in chosen:
        successor = placement
        earlier = next(
            (one for one in left if placement not in in_force and _takes_over(placement, one, holders)), None
        )
        if earlier is not None:
            left.remove(earlier)
            given_up[earlier.pipeline_id] = placement.pipeline_id
            successor = replace(placement, pipeline_id=earlier.pipeline_id)
            successors.append(successor)
            pairs = zip(successor.stages, earlier.stages, strict=True)
            arrivals += [
                Arrival(successor, at) for at, (new, old) in enumerate(pairs) if new.worker_id != old.worker_id
            ]
        placements.append(successor)
    placements = [one if one in successors else _renamed(one, given_up) for one in placements]
    has_successors = any(one not in in_force for one in placements)
    return Change(tuple(placements), tuple(arrivals), tuple(one.pipeline_id for one in left), has_successors)


def _renamed(placement: Placement, given_up: Mapping[PipelineId, PipelineId]) -> Placement:
    pipeline_id = placement.pipeline_id
    while given_up.get(pipeline_id, pipeline_id) != pipeline_id:
        pipeline_id = given_up[pipeline_id]
    return replace(placement, pipeline_id=pipeline_id)


def _takes_over(placement: Placement, earlier: Placement, holders: Collection[WorkerId]) -> bool:
    """Whether a placement is an earlier one with stages given to workers that hold nothing."""
    if _anonymous(placement) != _anonymous(earlier):
        return False
    pairs = zip(placement.stages, earlier.stages, strict=True)
    return all(new.worker_id == old.worker_id or new.worker_id not in holders for new, old in pairs)


def _anonymous(placement: Placement) -> Placement:
    stages = tuple(replace(stage, worker_id=WorkerId("")) for stage in placement.stages)
    return replace(placement, pipeline_id=PipelineId(""), stages=stages)
