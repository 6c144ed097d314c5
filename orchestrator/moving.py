"""Moves layers off a device while they serve: loads them elsewhere first, then changes over, so that no answer ends for it.

Where no other device is free to take a stage as it is, the layers are cut anew over those that are left, and the answers
wait for that. Knows what a move takes; whether there is to be one is decided by `control`, which puts placements in force.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from orchestrator.bringup import LOAD_TIMEOUT_S, Bringup
from orchestrator.core.figures import FleetFigures
from orchestrator.core.fleet import PLACEABLE, Fleet
from orchestrator.core.placement import Placement, Stage, Worker
from orchestrator.core.replacement import Arrival, Change, change
from orchestrator.engine import Engine
from orchestrator.planner import Planner
from shoal.errors import NotReady, PlacementImpossible
from shoal.types import PipelineId, WorkerId

logger = logging.getLogger(__name__)

# Others join, leave and fail while a stage loads; somebody for whom that happens so often is told.
MAX_TRIES = 3
# From the change of placements until all of them serve, where layers have to be loaded.
SERVING_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Moved:
    """text: where layers are now, as in "layers [10, 20) to tablet"; empty: there were none. num_sequences: with them."""

    text: str = ""
    num_sequences: int = 0


class Mover:
    """Moves, one after the other.

    Invariant: `_awaited` has those that are loading ahead, and the pipeline and epoch that they were told.
    """

    def __init__(
        self,
        usable: Callable[[], tuple[Worker, ...]],
        put_in_force: Callable[[tuple[Placement, ...]], None],
        fleet: Fleet,
        bringup: Bringup,
        engine: Engine,
        planner: Planner,
        figures: Callable[[], FleetFigures],
    ) -> None:
        """usable: those that layers may be given to. figures: of all devices, as they are known now."""
        self._usable = usable
        self._put_in_force = put_in_force
        self._fleet = fleet
        self._bringup = bringup
        self._engine = engine
        self._planner = planner
        self._figures = figures
        self._turns = asyncio.Lock()
        self._awaited: dict[WorkerId, tuple[PipelineId, int]] = {}
        self._arrivals: tuple[Arrival, ...] = ()
        self._failed: set[WorkerId] = set()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def loading(self) -> Collection[WorkerId]:
        """Those that load a stage ahead, or have: it is not to be unloaded."""
        return [one.stage.worker_id for one in self._arrivals]

    def loaded(self, worker_id: WorkerId, pipeline_id: PipelineId, epoch: int) -> None:
        """A worker holds a shard that is in no placement; of earlier moves, nothing happens."""
        if self._awaited.get(worker_id) == (pipeline_id, epoch):
            del self._awaited[worker_id]
            self._news.set()

    def failed(self, worker_id: WorkerId, pipeline_id: PipelineId, epoch: int) -> None:
        """A worker could not load what it was to load ahead."""
        if self._awaited.get(worker_id) == (pipeline_id, epoch):
            self._failed.add(worker_id)
            self._news.set()

    def changed(self) -> None:
        """Somebody came or went, or a pipeline came up."""
        self._news.set()

    async def move_off(self, worker_id: WorkerId) -> Moved:
        """Move all layers off a device, and return when those it had serve again.

        Raises PlacementImpossible if nobody else can hold them, and NotReady if the fleet changes again and again; both
        leave what is in force as it was.
        """
        unfit: set[WorkerId] = set()
        async with self._turns:
            for _ in range(MAX_TRIES):
                found = await self.plan_without(worker_id, unfit)
                if found is None:
                    return Moved()
                before = self._fleet.placements
                if await self._load_ahead(found.arrivals) and self._is_possible_still(found, before):
                    return await self._finish(worker_id, found)
                unfit |= self._failed
                self._give_up()
        raise NotReady(
            f"devices came, left or failed while {worker_id} was to be relieved; try again", retry_after_s=5.0
        )

    def begin(self, found: Change) -> None:
        """Load what can be loaded beforehand, then make a change, in a task of its own; nothing happens if loading fails."""
        task = asyncio.create_task(self._carry_out(found))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, found: Change) -> None:
        async with self._turns:
            before = self._fleet.placements
            if await self._load_ahead(found.arrivals) and self._is_possible_still(found, before):
                self.change_over(found)
            else:
                self._give_up()

    def stop(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    async def plan_without(self, worker_id: WorkerId, unfit: Collection[WorkerId] = ()) -> Change | None:
        """Plan for all but one device, and those that are unfit; None if it holds nothing. Raises PlacementImpossible.

        The plan is for what is in force, and for who is there, when this returns.
        """
        while True:
            in_force = self._fleet.placements
            placement = next((one for one in in_force if worker_id in one.worker_ids), None)
            if placement is None:
                return None
            others = tuple(one for one in in_force if one is not placement)
            usable = tuple(worker for worker in self._usable() if worker[0] != worker_id and worker[0] not in unfit)
            free = tuple(worker for worker in usable if self._fleet.pipeline_of(worker[0]) is None)
            repaired = self._planner.repair(placement, worker_id, free, self._figures())
            if repaired is not None:
                return change(in_force, (*others, repaired))
            if not usable and not others:
                raise _nobody_for(placement.stages[placement.worker_ids.index(worker_id)])
            # Whatever serves beside it goes on as it is; the rest of its pipeline is free then.
            plan = self._planner.plan(usable, others, self._figures())
            if plan is not None:
                return change(in_force, plan.choose([one.pipeline_id for one in others]))
            await self._planner.planned()

    def _is_possible_still(self, found: Change, before: tuple[Placement, ...]) -> bool:
        """Whether nothing else was put in force meanwhile, and all who are to hold something new can."""
        new = [one for one in found.placements if one not in before]
        can_hold = all(self._fleet.state(worker_id) in PLACEABLE for one in new for worker_id in one.worker_ids)
        return can_hold and self._fleet.placements == before

    @property
    def is_moving(self) -> bool:
        return self._turns.locked()

    def _give_up(self) -> None:
        self._arrivals = ()
        self._bringup.unload_others()

    async def _load_ahead(self, arrivals: tuple[Arrival, ...]) -> bool:
        """Have stages loaded by those that take them; False if one cannot, or is gone."""
        self._arrivals = arrivals
        self._failed.clear()
        before = self._fleet.placements
        for arrival in arrivals:
            epoch = self._bringup.load_ahead(arrival)
            self._awaited[arrival.stage.worker_id] = (arrival.placement.pipeline_id, epoch)

        def is_settled() -> bool:
            is_gone = any(self._fleet.get(worker_id) is None for worker_id in self._awaited)
            return not self._awaited or bool(self._failed) or is_gone or self._fleet.placements != before

        try:
            await self._wait(is_settled, LOAD_TIMEOUT_S)
            return not self._awaited
        finally:
            self._awaited.clear()

    def change_over(self, found: Change) -> None:
        """Make a change, whatever has been loaded for it."""
        self._arrivals = ()
        self._put_in_force(found.placements)

    async def _finish(self, worker_id: WorkerId, found: Change) -> Moved:
        """Change over; return when all serves."""
        before = self._fleet.placements
        placement = next(one for one in before if worker_id in one.worker_ids)
        lane = self._engine.lane(placement.pipeline_id)
        num_sequences = 0 if lane is None else lane.scheduler.num_running + lane.scheduler.num_waiting
        text = _whereto(placement.stages[placement.worker_ids.index(worker_id)], found, before)
        logger.info("moving worker=%s what=%r sequences=%d", worker_id, text, num_sequences)
        self.change_over(found)
        if found.arrivals or not self._engine.pipelines:
            await self._wait(self._is_serving, SERVING_TIMEOUT_S)
        return Moved(text, num_sequences)

    def _is_serving(self) -> bool:
        return all(one.pipeline_id in self._engine.pipelines for one in self._fleet.placements)

    async def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Return when something is so, or time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            logger.warning("move_late seconds=%g", timeout_s)


def _nobody_for(stage: Stage) -> PlacementImpossible:
    return PlacementImpossible(
        f"layers {stage.layers} of {stage.worker_id} need {stage.need_bytes} bytes, and no other device can be given any: "
        "start one with `shoal worker --join HOST:PORT`, or uncordon one"
    )


def _whereto(stage: Stage, found: Change, before: tuple[Placement, ...]) -> str:
    """Say who gets the layers of a stage, or who takes its requests."""
    takers = []
    for placement in found.placements:
        if placement in before:
            continue
        for other in placement.stages:
            start, stop = max(stage.layers.start, other.layers.start), min(stage.layers.stop, other.layers.stop)
            if start < stop:
                takers.append(f"layers [{start}, {stop}) to {other.worker_id}")
    if takers:
        return ", ".join(takers)
    return f"requests to {', '.join(one.pipeline_id for one in found.placements)}"
