"""Plans pipelines for the workers there are, as the operator's options want them, and remembers the plan.

The decisions are `core.grouping`'s. It knows neither who is loaded nor who is lost: `control` says which workers can be used
and which placements are in force, and asks again with every tick while a busy pipeline is in the way of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from modelstore.manifest import Manifest
from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures, declared_fleet
from orchestrator.core.grouping import Plan, plan
from orchestrator.core.placement import Placement, Worker, check_split
from orchestrator.core.predictions import cost_s
from orchestrator.core.repair import repair
from orchestrator.core.reunion import Held, reunite
from orchestrator.shards import footprint
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError
from shoal.types import DeviceMode, Objective, WorkerId


class Planner:
    """Invariant: `_plan` is that of `_fleet`; planning anew takes tens of milliseconds, which tokens would wait for."""

    def __init__(self, config: OrchestratorConfig, manifest: Manifest) -> None:
        """Raise ConfigError for options that no fleet can fulfil."""
        self._footprint = footprint(manifest)
        self.demand = Demand(
            num_streams=config.max_sequences,
            context_tokens=config.context_tokens,
            split=_parse_split(config.split, manifest.config.num_layers),
            replicas=config.replicas,
            objective=Objective(config.objective),
        )
        self._plan: Plan | None = None
        self._fleet: FleetFigures | None = None

    def repair(
        self,
        placement: Placement,
        lost: WorkerId,
        free: Sequence[Worker],
        figures: FleetFigures | None = None,
    ) -> Placement | None:
        """Give the stage of a lost worker to one of the free: same id, same cuts. None if none can hold it.

        free: workers in no placement, without the lost one. figures: what is known of them; those not in it are taken as
        their profiles declare them.
        """
        fleet = declared_fleet(self._footprint, free, figures)
        return repair(self._footprint, placement, lost, [worker_id for worker_id, _ in free], fleet)

    def reunite(self, held: Iterable[Held], modes: Mapping[WorkerId, DeviceMode]) -> tuple[Placement, ...]:
        """The pipelines that devices hold all stages of, as far as the options would make such."""
        return reunite(self._footprint, held, modes, self.demand)

    def plan(
        self, workers: tuple[Worker, ...], in_force: tuple[Placement, ...], figures: FleetFigures | None = None
    ) -> Plan:
        """Plan for these workers, in place of what is in force. Raises PlacementImpossible and ConfigError.

        figures: what is known of them; for others, and without it, what their profiles declare.
        """
        fleet = declared_fleet(self._footprint, workers, figures)
        if self._plan is None or (self._fleet, self._plan.in_force) != (fleet, in_force):
            self._plan, self._fleet = plan(self._footprint, fleet, in_force, self.demand), fleet
        return self._plan

    def cost_s(
        self, placements: Sequence[Placement], workers: Sequence[Worker], figures: FleetFigures | None = None
    ) -> float:
        """How good placements are: the seconds that the objective minimises; inf: they cannot serve on these workers."""
        return cost_s(self._footprint, declared_fleet(self._footprint, workers, figures), placements, self.demand)


def _parse_split(text: str, num_layers: int) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        split = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"split = {text!r} is not a list of layer counts such as 12,10,8", field="split") from error
    check_split(split, num_layers)
    return split
