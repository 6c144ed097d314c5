"""A whole fleet in the event loop of a test: a real orchestrator and real workers on loopback, no processes.

Owns what it starts and ends it in close(). Knows how to wait for a state of the fleet, as operators see it, within a
bound. Used by the fleet contract tests.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from orchestrator import membership
from orchestrator.app import CORDONS_FILE, SESSIONS_FILE, Orchestrator
from orchestrator.core.figures import FleetFigures, LinkFigures
from orchestrator.measuring import Measuring
from shoal import AsyncClient
from shoal.config import OrchestratorConfig, WorkerConfig
from shoal.errors import ConnectionFailed
from shoal.status import FleetStatus
from shoal.types import DeviceProfile
from worker.agent import Agent
from worker.app import lower_tier

WAIT_S = 15.0
# Between two looks at the fleet: there is nothing to be told by.
LOOK_S = 0.01
MODEL = "tiny"
UNMEASURED = FleetFigures((), default_link=LinkFigures(0.0))


def make_device(
    *, memory_bytes: int = 1 << 30, allow_direct_links: bool = True, max_batch: int = 16, **fields: Any
) -> DeviceProfile:
    return DeviceProfile(
        name="box",
        kind="box",
        memory_bytes=memory_bytes,
        allow_direct_links=allow_direct_links,
        max_batch=max_batch,
        **fields,
    )


@dataclass(slots=True)
class Running:
    """A part of the fleet that runs until `stopping` is set."""

    stopping: asyncio.Event
    task: asyncio.Task[None]

    async def end(self) -> None:
        self.stopping.set()
        async with asyncio.timeout(WAIT_S):
            await self.task

    async def end_of_itself(self) -> None:
        """Wait until it ends with nobody telling it to; raises what it ended with."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(self.task)

    async def vanish(self) -> None:
        """End without a word to anybody."""
        self.task.cancel()
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({self.task})


@dataclass(slots=True)
class LocalFleet:
    """An orchestrator, its workers by name, and a client."""

    home: Path
    config: OrchestratorConfig
    orchestrator: Running
    client: AsyncClient
    workers: dict[str, Running] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.config.host}:{self.config.port}"

    def add_worker(self, worker_id: str, profile: DeviceProfile | None = None, *, use_sockets: bool = True) -> Running:
        config = WorkerConfig(
            join=self.address, use_sockets=use_sockets, home=self.home, redis_url=self.config.redis_url
        )
        device = profile or make_device()
        lower = lower_tier(config, device)
        agent = Agent(config, device, worker_id, self.home / "devices" / worker_id, lower=lower)
        self.workers[worker_id] = _run(agent.run)
        return self.workers[worker_id]

    def another_client(self, *, resume_s: float = 0.0) -> AsyncClient:
        """A client with a connection of its own, to be closed by whoever wants it."""
        return AsyncClient(self.address, WAIT_S, resume_s=resume_s)

    async def restart_orchestrator(self) -> None:
        await self.orchestrator.end()
        self.orchestrator = _run(Orchestrator(self.config).run)
        await self.until(lambda _: True)

    async def until(self, is_so: Callable[[FleetStatus], bool], bound_s: float = WAIT_S) -> FleetStatus:
        """Wait until the status of the fleet is as wanted; fails with the last one seen."""
        status = None
        try:
            async with asyncio.timeout(bound_s):
                while (status := await self._look()) is None or not is_so(status):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise AssertionError(f"not so within {bound_s} s: {status}") from error
        return status

    async def _look(self) -> FleetStatus | None:
        try:
            return await self.client.status()
        except ConnectionFailed:
            return None  # it has not begun to listen

    async def serving(self, num_stages: int) -> FleetStatus:
        """Wait until pipelines of so many stages together serve, and no other is on its way."""

        def is_serving(status: FleetStatus) -> bool:
            return status.is_complete and sum(one.layers is not None for one in status.devices) == num_stages

        return await self.until(is_serving)

    async def close(self) -> None:
        await self.client.close()
        for worker in self.workers.values():
            await worker.end() if not worker.task.done() else None
        await self.orchestrator.end() if not self.orchestrator.task.done() else None


def _run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> Running:
    stopping = asyncio.Event()
    return Running(stopping, asyncio.create_task(main(stopping)))


class HeldFetch:
    """Holds the first blob that any worker fetches from now on until it may go on; those after it are let through.

    is_given_up: nobody wants the blob that is held any more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_held, self.may_go_on, self.is_given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._read_chunks = membership._read_chunks
        monkeypatch.setattr(membership, "_read_chunks", self._hold_first)

    async def _hold_first(self, path: Path, offset: int) -> AsyncGenerator[bytes, None]:
        if not self.is_held.is_set():
            self.is_held.set()
            try:
                await self.may_go_on.wait()
            except asyncio.CancelledError:
                self.is_given_up.set()
                raise
        async for chunk in self._read_chunks(path, offset):
            yield chunk


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@asynccontextmanager
async def start_fleet(
    store: Path,
    home: Path,
    devices: Sequence[DeviceProfile] = (),
    *,
    use_sockets: bool = True,
    is_measured: bool = False,
    **options: Any,
) -> AsyncIterator[LocalFleet]:
    """Serve the model of a store with these devices, w0, w1, ...; options are those of OrchestratorConfig.

    Unless is_measured, devices are placed by their profiles: a device computes a tiny model faster than it hands half of it
    on, so that measured it would be left alone with all of it.
    """
    defaults = {
        "port": free_port(),
        "model": MODEL,
        "expect_workers": max(1, len(devices)),
        "max_sequences": 4,
        "drain_s": 5.0,
    }
    config = OrchestratorConfig(home=store, use_sockets=use_sockets, **{**defaults, **options})
    # Tests share a store, but not what was said.
    (store / SESSIONS_FILE).unlink(missing_ok=True)
    (store / CORDONS_FILE.format(port=config.port)).unlink(missing_ok=True)
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    # It resumes nothing: tests are to see what breaks off.
    client = AsyncClient(f"127.0.0.1:{config.port}", WAIT_S, resume_s=0.0)
    placed_by = patch.object(Measuring, "figures", Measuring.figures if is_measured else lambda _: UNMEASURED)
    placed_by.start()
    fleet = LocalFleet(home, config, _run(Orchestrator(config).run), client)
    try:
        await fleet.until(lambda _: True)
        for index, device in enumerate(devices):
            fleet.add_worker(f"w{index}", device, use_sockets=use_sockets)
        if devices:
            await fleet.serving(len(devices))
        yield fleet
    finally:
        await fleet.close()
        placed_by.stop()
        # A task that nobody waits for shows its error only when it is collected.
        gc.collect()
        asyncio.get_running_loop().set_exception_handler(None)
    assert problems == []
