"""What every worker reports of its device: heat for the pace of its pipeline, and what lasts for where layers are.

Owns thermal monitors and conditions; the decisions are `core.thermal`'s and `core.conditions`'s. Reads no sensors and knows
no sequences: `control` hands in what workers report and lets time go by, and the engine is told the pace of the tightest
stage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from orchestrator.core.conditions import STUCK_S, DeviceCondition, is_stuck
from orchestrator.core.fleet import Fleet, WorkerState
from orchestrator.core.limits import Pace
from orchestrator.core.thermal import ThermalMonitor
from orchestrator.departures import Departures
from orchestrator.engine import Engine
from shoal.types import DeviceProfile, PipelineId, Telemetry, WorkerId

logger = logging.getLogger(__name__)


class Monitors:
    """Invariant: whenever a method has returned, a pipeline that serves goes at the pace of its tightest stage."""

    def __init__(self, fleet: Fleet, engine: Engine) -> None:
        self._fleet = fleet
        self._engine = engine
        self._monitors: dict[WorkerId, ThermalMonitor] = {}
        self._conditions: dict[WorkerId, DeviceCondition] = {}
        self.departures = Departures()

    def __getitem__(self, worker_id: WorkerId) -> ThermalMonitor:
        """For reading only."""
        return self._monitors[worker_id]

    def add(self, worker_id: WorkerId, profile: DeviceProfile) -> None:
        """Watch a worker that has attached: as NOMINAL until it reports."""
        self._monitors[worker_id] = ThermalMonitor(profile.limits, profile.max_batch)
        self._conditions[worker_id] = DeviceCondition(profile)
        self.departures.back(worker_id)

    def remove(self, worker_id: WorkerId, why: str, now: float) -> None:
        self.departures.gone(worker_id, why, now)
        self._monitors.pop(worker_id, None)
        self._conditions.pop(worker_id, None)

    def observe(self, worker_id: WorkerId, telemetry: Telemetry, now: float) -> bool:
        """Take what a worker reports of its device; True if something has begun or ceased to count for where layers are."""
        monitor = self._monitors[worker_id]
        if monitor.observe(telemetry, now):
            self._changed(worker_id)
        changes = self._conditions[worker_id].observe(telemetry, monitor.state, monitor.pace().max_batch, now)
        for change in changes:
            logger.info("device_condition worker=%s what=%r", worker_id, change)
        return bool(changes)

    def slow_downs(self) -> Mapping[WorkerId, float]:
        """How many times longer than their figures say devices are to be expected to take, where it is more than once."""
        return {one: known.slow_down for one, known in self._conditions.items() if known.slow_down > 1.0}

    def spent(self) -> frozenset[WorkerId]:
        """Those that are to hold no layers if others can."""
        return frozenset(one for one, condition in self._conditions.items() if condition.is_spent)

    def unfit(self, now: float) -> frozenset[WorkerId]:
        """Those that are to be given nothing now: they are late, or hold nothing and yet compute and compute."""
        return frozenset(
            one.worker_id
            for one in self._fleet.members()
            if self._fleet.is_suspect(one.worker_id, now) or (one.stage is None and one.telemetry.busy_s > STUCK_S)
        )

    def stuck_s(self, worker_id: WorkerId) -> float:
        """How long the compute thread of a worker has been at one step, if that is too long for any; else 0."""
        member = self._fleet.get(worker_id)
        if member is None or member.state is not WorkerState.READY or member.pipeline_id is None:
            return 0.0  # loading takes as long as it takes, and has a bound of its own
        lane = self._engine.lane(member.pipeline_id)
        if lane is None or not is_stuck(member.telemetry.busy_s, lane.longest_pass_s):
            return 0.0
        return member.telemetry.busy_s

    def tick(self, now: float) -> None:
        """Let time go by: recovery is gradual and needs no news."""
        for worker_id, monitor in self._monitors.items():
            if monitor.tick(now):
                self._changed(worker_id)

    def apply(self, pipeline_id: PipelineId) -> None:
        """Tell the engine the pace of a pipeline in force; nothing if it does not serve yet."""
        placed = self._fleet.placed(pipeline_id)
        if placed is not None:
            paces = (self._monitors[worker_id].pace() for worker_id in placed.placement.worker_ids)
            self._engine.set_pace(pipeline_id, tightest(paces))

    def _changed(self, worker_id: WorkerId) -> None:
        monitor, member = self._monitors[worker_id], self._fleet.get(worker_id)
        pace = monitor.pace()
        logger.info(
            "thermal_state worker=%s state=%s cause=%r max_batch=%d steps_per_s=%g",
            worker_id, monitor.state.value, monitor.cause, pace.max_batch, pace.steps_per_s,
        )  # fmt: skip
        if member is not None and member.pipeline_id is not None:
            self.apply(member.pipeline_id)


def tightest(paces: Iterable[Pace]) -> Pace:
    """The pace that none of these is slower than; there must be one at least."""
    paces = tuple(paces)
    limited = [pace.steps_per_s for pace in paces if pace.steps_per_s > 0]
    return Pace(max_batch=min(pace.max_batch for pace in paces), steps_per_s=min(limited, default=0.0))
