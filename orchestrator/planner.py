"""Plans pipelines for the workers there are, as the operator's options want them, and remembers the plan.

The decisions are `core.grouping`'s. It knows neither who is loaded nor who is lost: `control` says which workers can be used
and which placements are in force, and asks again with every tick while a busy pipeline is in the way of the plan.
"""

from __future__ import annotations

from modelstore.manifest import Manifest
from orchestrator.core.grouping import GroupingRules, Plan, plan
from orchestrator.core.placement import Placement, Worker, check_split
from orchestrator.shards import footprint
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError


class Planner:
    """Invariant: `_plan` is that of `_workers`; planning anew takes tens of milliseconds, which tokens would wait for."""

    def __init__(self, config: OrchestratorConfig, manifest: Manifest) -> None:
        """Raise ConfigError for options that no fleet can fulfil."""
        self._footprint = footprint(manifest)
        self._rules = GroupingRules(
            num_slots=config.max_sequences,
            context_tokens=config.context_tokens,
            split=_parse_split(config.split, manifest.config.num_layers),
            replicas=config.replicas,
        )
        self._plan: Plan | None = None
        self._workers: tuple[Worker, ...] = ()

    def plan(self, workers: tuple[Worker, ...], in_force: tuple[Placement, ...]) -> Plan:
        """Plan for these workers, in place of what is in force. Raises PlacementImpossible and ConfigError."""
        if self._plan is None or (self._workers, self._plan.in_force) != (workers, in_force):
            self._plan, self._workers = plan(self._footprint, workers, in_force, self._rules), workers
        return self._plan


def _parse_split(text: str, num_layers: int) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        split = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"split = {text!r} is not a list of layer counts such as 12,10,8", field="split") from error
    check_split(split, num_layers)
    return split
