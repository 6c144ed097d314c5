"""Devices that are to hold nothing more: drained or cordoned by an operator, or about to leave.

Has `moving` take their layers elsewhere, and says what came of it. What happens to a device that wants to go and whose
layers nobody can take is decided by `control`, which owns this; operators come by way of `admin`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from orchestrator.core.fleet import Fleet, WorkerState
from orchestrator.moving import Moved, Mover
from shoal.errors import InvalidRequest, NotReady, PlacementImpossible, ShoalError
from shoal.types import WorkerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did, and how long it took."""

    moved: Moved
    took_s: float


class Relief:
    """Invariant: `relieving` has exactly the devices whose layers are being moved off, or that wait for that."""

    def __init__(
        self,
        fleet: Fleet,
        mover: Mover,
        on_leave: Callable[[WorkerId, int], None],
        on_uncordon: Callable[[], None],
        keep_cordoned: Callable[[Collection[WorkerId]], None],
    ) -> None:
        """on_leave: a worker that wants to go, with its incarnation, holds nothing, or what nobody can take.

        on_uncordon: a device may be given layers again. keep_cordoned: remembers all that are cordoned over a restart.
        """
        self._fleet = fleet
        self._mover = mover
        self._on_leave = on_leave
        self._on_uncordon = on_uncordon
        self._keep_cordoned = keep_cordoned
        self._tasks: set[asyncio.Task[Any]] = set()
        self.relieving: set[WorkerId] = set()

    def leave(self, worker_id: WorkerId, incarnation: int) -> None:
        """Move what a worker holds elsewhere before it goes."""
        self._start(self._leave(worker_id, incarnation))

    async def _leave(self, worker_id: WorkerId, incarnation: int) -> None:
        try:
            found = await self._mover.plan_without(worker_id)
        except PlacementImpossible as error:
            logger.info("nobody_takes_over worker=%s message=%s", worker_id, error.message)
            found = None
        if found is not None and found.arrivals:
            await self._move_then_leave(worker_id, incarnation)
            return
        if found is not None and found.has_successors:
            self._mover.change_over(found)
        self._on_leave(worker_id, incarnation)

    async def _move_then_leave(self, worker_id: WorkerId, incarnation: int) -> None:
        try:
            await self._relieve(worker_id)
        except (PlacementImpossible, NotReady) as error:
            logger.warning("not_relieved worker=%s message=%s", worker_id, error.message)
        self._on_leave(worker_id, incarnation)

    async def drain(self, worker_id: WorkerId) -> Drained:
        """Move everything off a device and keep it from being given layers; goes on also if nobody waits for it any more.

        Raises InvalidRequest for a stranger, PlacementImpossible if no other devices can hold its layers, and NotReady if it
        is about to load or to leave, or others come and go; all of them leave everything as it was.
        """
        member = self._fleet.get(worker_id)
        if member is None:
            raise self._stranger(worker_id)
        if member.state in (WorkerState.LOADING, WorkerState.DRAINING):
            raise NotReady(f"{worker_id} is {member.state.value}; try again when that is over", retry_after_s=1.0)
        return await asyncio.shield(self._start(self._drain(worker_id, is_cordoned=member.is_cordoned)))

    async def _drain(self, worker_id: WorkerId, *, is_cordoned: bool) -> Drained:
        began_at = time.monotonic()
        self._fleet.cordon(worker_id, True)
        is_drained = False
        try:
            moved = await self._relieve(worker_id)
            is_drained = True
        finally:
            if not is_drained:
                self._fleet.cordon(worker_id, is_cordoned)
            # Also if it was not: another one may have been cordoned meanwhile, and this one kept with it.
            self._keep_cordoned(self._fleet.cordoned)
        logger.info("drained worker=%s moved=%r sequences=%d", worker_id, moved.text, moved.num_sequences)
        return Drained(moved, time.monotonic() - began_at)

    async def _relieve(self, worker_id: WorkerId) -> Moved:
        self.relieving.add(worker_id)
        try:
            return await self._mover.move_off(worker_id)
        finally:
            self.relieving.discard(worker_id)

    def cordon(self, worker_id: WorkerId, is_cordoned: bool) -> None:
        """Keep a device from being given layers, or let it again; what it computes goes on. Raises InvalidRequest."""
        if not self._fleet.cordon(worker_id, is_cordoned):
            raise self._stranger(worker_id)
        self._keep_cordoned(self._fleet.cordoned)
        logger.info("cordoned worker=%s is_cordoned=%s", worker_id, is_cordoned)
        if not is_cordoned:
            self._on_uncordon()

    def _stranger(self, worker_id: WorkerId) -> InvalidRequest:
        members = ", ".join(sorted(one.worker_id for one in self._fleet.members())) or "none"
        return InvalidRequest("worker_id", f"no device {worker_id!r} is attached; there are: {members}")

    def stop(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), ShoalError):
            logger.warning("relief_failed", exc_info=task.exception())
