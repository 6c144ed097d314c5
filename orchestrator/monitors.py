"""The thermal monitor of every worker, and what its state means for the pipeline it is a stage of.

Owns the monitors; the decisions are `core.thermal`'s. Reads no sensors and knows no sequences: `control` hands in what
workers report and lets time go by, and the engine is told the pace of the tightest stage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from orchestrator.core.fleet import Fleet
from orchestrator.core.limits import Pace
from orchestrator.core.thermal import ThermalMonitor
from orchestrator.engine import Engine
from shoal.types import DeviceProfile, PipelineId, Telemetry, WorkerId

logger = logging.getLogger(__name__)


class Monitors:
    """Invariant: whenever a method has returned, a pipeline that serves goes at the pace of its tightest stage."""

    def __init__(self, fleet: Fleet, engine: Engine) -> None:
        self._fleet = fleet
        self._engine = engine
        self._monitors: dict[WorkerId, ThermalMonitor] = {}

    def __getitem__(self, worker_id: WorkerId) -> ThermalMonitor:
        """For reading only."""
        return self._monitors[worker_id]

    def add(self, worker_id: WorkerId, profile: DeviceProfile) -> None:
        """Watch a worker that has attached: as NOMINAL until it reports."""
        self._monitors[worker_id] = ThermalMonitor(profile.limits, profile.max_batch)

    def remove(self, worker_id: WorkerId) -> None:
        self._monitors.pop(worker_id, None)

    def observe(self, worker_id: WorkerId, telemetry: Telemetry, now: float) -> None:
        """Take what a worker reports of its device."""
        if self._monitors[worker_id].observe(telemetry, now):
            self._changed(worker_id)

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
