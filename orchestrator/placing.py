"""What is to be in force next: the plan for the devices there are, where it is worth a change, and how to get there.

Puts together what the planner and `core.replacement` decide by: figures, heat that lasts, who can hold no layers for long.
Asks again only when something has changed, or a wait is over. `control`, its only caller, carries out what it says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelstore.manifest import Manifest
from orchestrator.core.figures import FleetFigures
from orchestrator.core.grouping import Plan
from orchestrator.core.placement import Placement, Worker
from orchestrator.core.replacement import Action, Change, Outlook, Replacement, Verdict, change, holders_of
from orchestrator.measuring import Measuring
from orchestrator.monitors import Monitors
from orchestrator.planner import Planner
from orchestrator.worker_session import WorkerSession, held_of
from shoal.errors import PlacementImpossible
from shoal.types import PipelineId, WorkerId

logger = logging.getLogger(__name__)

# Figures drift as devices and links do: so often a plan is looked at although nothing has happened.
REVIEW_S = 30.0
# What would disturb somebody is planned again after so long, with the figures of then.
AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Choice:
    """change: how to get to other placements; None: nothing is to be done now. is_settled: nor later, if nothing happens."""

    change: Change | None
    is_settled: bool


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice depends on, apart from figures.

    workers: that layers may be given to. known: all members. busy: pipelines that must not end now.
    """

    workers: tuple[Worker, ...]
    known: tuple[Worker, ...]
    in_force: tuple[Placement, ...]
    busy: frozenset[PipelineId]


class Placing:
    """Invariant: `_asked` is the situation of the latest choice, and nothing else comes of it before `_ask_at`."""

    def __init__(
        self,
        planner: Planner,
        measuring: Measuring,
        monitors: Monitors,
        sessions: Mapping[WorkerId, WorkerSession],
        manifest: Manifest,
    ) -> None:
        self._planner = planner
        self._measuring = measuring
        self._monitors = monitors
        self._sessions = sessions
        self._manifest = manifest
        self._replacement = Replacement()
        self._asked: tuple[Situation, frozenset[WorkerId]] | None = None
        self._ask_at = 0.0
        self._review_at = 0.0
        self._told = ""

    def changed(self, now: float) -> None:
        """Other placements were put in force: what was chosen before says nothing of what to do once they are lost."""
        self._asked = None
        self._replacement.changed(now)

    def is_review_due(self, now: float) -> bool:
        """Whether the plan is to be looked at again although nothing has happened; True once in REVIEW_S."""
        if now < self._review_at:
            return False
        self._review_at = now + REVIEW_S
        return True

    def reunited(self, free: Sequence[Worker], in_force: Sequence[Placement]) -> tuple[Placement, ...]:
        """Pipelines that devices in no placement hold all stages of: theirs of before a restart, or a loss that passed."""
        held = (held_of(self._sessions[worker_id], self._manifest.digest) for worker_id, _ in free)
        modes = {worker_id: profile.mode for worker_id, profile in free}
        reunited = self._planner.reunite([one for one in held if one is not None], modes)
        taken = {placement.pipeline_id for placement in in_force}
        return tuple(one for one in reunited if one.pipeline_id not in taken)

    def choose(self, situation: Situation, now: float) -> Choice:
        """Choose what to do: nothing yet while it is being planned.

        Raises PlacementImpossible if these devices cannot hold the model, and ConfigError.
        """
        spent = self._monitors.spent()
        if self._asked == (situation, spent) and now < self._ask_at:
            return Choice(None, is_settled=False)
        in_force, figures = situation.in_force, derated(self._measuring.figures(), self._monitors.slow_downs())
        plan = self._plan(situation, spent, figures)
        if plan is None:
            return Choice(None, is_settled=False)
        verdict = self._replacement.decide(
            self._outlook(in_force, situation, figures),
            self._outlook(plan.best, situation, figures),
            self._manifest.config.num_layers,
            now,
            usable={worker_id for worker_id, _ in situation.workers} | holders_of(in_force),
            spent=spent,
            is_idle=not situation.busy,
        )
        self._tell(verdict)
        self._asked, self._ask_at = (situation, spent), min(verdict.at, now + AGAIN_S)
        wanted = change(in_force, plan.best)
        is_gentle = not set(wanted.ended) & situation.busy
        if verdict.action is Action.REPLACE_NOW or (verdict.action is Action.REPLACE and is_gentle):
            return Choice(wanted, is_settled=True)
        if plan.meanwhile != in_force:
            return Choice(change(in_force, plan.meanwhile), is_settled=verdict.action is Action.KEEP)
        return Choice(None, is_settled=verdict.action is Action.KEEP)

    def _plan(self, situation: Situation, spent: frozenset[WorkerId], figures: FleetFigures) -> Plan | None:
        """Plan without those that are spent, if that is possible; None while it is being planned."""
        healthy = tuple(worker for worker in situation.workers if worker[0] not in spent)
        if healthy and healthy != situation.workers:
            try:
                return self._planner.plan(healthy, situation.in_force, figures)
            except PlacementImpossible:
                logger.info("spent_devices_are_needed workers=%s", ",".join(sorted(spent)))
        return self._planner.plan(situation.workers, situation.in_force, figures)

    def _outlook(self, placements: Sequence[Placement], situation: Situation, figures: FleetFigures) -> Outlook:
        return Outlook(tuple(placements), self._planner.cost_s(placements, situation.known, figures))

    def _tell(self, verdict: Verdict) -> None:
        """Log what was decided, once for each reason."""
        if verdict.why != self._told:
            self._told = verdict.why
            logger.info("placing action=%r why=%r", verdict.action.value, verdict.why)


def derated(figures: FleetFigures, slow_downs: Mapping[WorkerId, float]) -> FleetFigures:
    """Figures with the times of devices that are hot for long multiplied."""
    if not slow_downs:
        return figures
    devices = (
        replace(device, times=device.times.scaled(slow_downs.get(device.worker_id, 1.0))) for device in figures.devices
    )
    return replace(figures, devices=tuple(devices))
