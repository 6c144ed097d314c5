"""Plans pipelines for the workers there are, as the operator's options want them, beside the event loop.

The decisions are `core.grouping`'s. It knows neither who is loaded nor who is lost: `control` says which workers can be used
and which placements are in force, and asks again once there is a plan, so that one for a fleet that has changed meanwhile is
found by nobody (ADR 20).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future

from modelstore.manifest import Manifest
from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures, declared_fleet
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.grouping import Plan, plan
from orchestrator.core.placement import Placement, Stage, Worker, check_split
from orchestrator.core.predictions import cost_s
from orchestrator.core.repair import absorb, repair, takers
from orchestrator.core.reunion import Held, reunite
from orchestrator.shards import footprint
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError, ShoalError
from shoal.types import DeviceMode, Objective, WorkerId

# Beside the loop, so that a token waits so long for its turn, not 5 ms, each time the loop has let go of the interpreter.
SWITCH_S = 0.0001
# As many as are asked for in turns: with and without devices that are spent, and without one that is relieved.
NUM_KEPT = 4
# After so many plans that nobody wanted any more when they came, the next one is made while all wait.
MAX_UNWANTED = 3

# What a plan is for: figures of the workers, and what is in force.
Question = tuple[FleetFigures, tuple[Placement, ...]]


class Planner:
    """Invariants: a plan is given to whoever asks for the very figures and placements that it was made for, and to nobody
    else; at most one is being made, and whoever asks meanwhile is told when it is there.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        manifest: Manifest,
        executor: Executor,
        on_planned: Callable[[], None] = lambda: None,
    ) -> None:
        """Raise ConfigError for options that no fleet can fulfil.

        executor: makes plans, which takes up to some tenths of a second. on_planned: called on the event loop when there is
        a plan that had to be waited for.
        """
        self._footprint = footprint(manifest)
        self.demand = Demand(
            num_streams=config.max_sequences,
            context_tokens=config.context_tokens,
            split=_parse_split(config.split, manifest.config.num_layers),
            replicas=config.replicas,
            objective=Objective(config.objective),
        )
        self._executor = executor
        self._on_planned = on_planned
        self._plans: list[tuple[Question, Future[Plan]]] = []
        self._num_unwanted = 0
        self._news = asyncio.Event()

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

    def absorb(
        self,
        placement: Placement,
        lost: WorkerId,
        usable: Sequence[Worker],
        known: Sequence[Worker],
        figures: FleetFigures | None = None,
    ) -> Placement | None:
        """Give the layers of a lost worker to the stages beside it: same id, one stage fewer. None if that will not do.

        usable: may be given layers. known: all that are there; others of the placement keep what they have.
        """
        fleet = declared_fleet(self._footprint, known, figures)
        return absorb(self._footprint, placement, lost, [one for one, _ in usable], fleet, self.demand)

    def takers(
        self, placements: Iterable[Placement], free: Sequence[Worker], figures: FleetFigures
    ) -> dict[WorkerId, list[Stage]]:
        """The stages that each of the free would be given, should one device be lost, whichever that is."""
        fleet = declared_fleet(self._footprint, free, figures)
        return takers(self._footprint, placements, [worker_id for worker_id, _ in free], fleet)

    def reunite(self, held: Iterable[Held], modes: Mapping[WorkerId, DeviceMode]) -> tuple[Placement, ...]:
        """The pipelines that devices hold all stages of, as far as the options would make such."""
        return reunite(self._footprint, held, modes, self.demand)

    def plan(
        self, workers: tuple[Worker, ...], in_force: tuple[Placement, ...], figures: FleetFigures | None = None
    ) -> Plan | None:
        """Plan for these workers, in place of what is in force; None while that takes, and another plan is being made.

        figures: what is known of them; for others, and without it, what their profiles declare. Raises PlacementImpossible
        and ConfigError.
        """
        question = (declared_fleet(self._footprint, workers, figures), in_force)
        known = next((future for asked, future in self._plans if asked == question), None)
        if known is None:
            if any(not future.done() for _, future in self._plans):
                return None
            known = self._begin(question)
        if not known.done():
            return None
        self._num_unwanted = 0
        return known.result()

    async def planned(self) -> None:
        """Wait until there is another plan: it is time to ask again."""
        self._news.clear()
        await self._news.wait()

    def _begin(self, question: Question) -> Future[Plan]:
        """Have a plan made; here, if the fleet changes faster than plans are made, for there has to be one at last."""
        fleet, in_force = question
        if self._num_unwanted < MAX_UNWANTED:
            future = self._executor.submit(_plan_aside, self._footprint, fleet, in_force, self.demand)
        else:
            future = _made_now(self._footprint, fleet, in_force, self.demand)
        self._plans = [*self._plans[1 - NUM_KEPT :], (question, future)]
        if not future.done():
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda _: _tell(loop, self._done))
        return future

    def _done(self) -> None:
        self._num_unwanted += 1
        self._news.set()
        self._on_planned()

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


def _plan_aside(model: ModelFootprint, fleet: FleetFigures, in_force: tuple[Placement, ...], demand: Demand) -> Plan:
    """Plan in a thread of its own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        return plan(model, fleet, in_force, demand)
    finally:
        sys.setswitchinterval(before)


def _made_now(
    model: ModelFootprint, fleet: FleetFigures, in_force: tuple[Placement, ...], demand: Demand
) -> Future[Plan]:
    made = Future[Plan]()
    try:
        made.set_result(plan(model, fleet, in_force, demand))
    except ShoalError as error:
        made.set_exception(error)
    return made


def _tell(loop: asyncio.AbstractEventLoop, done: Callable[[], None]) -> None:
    # A plan may come when the event loop has ended: nobody wants it.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(done)
