"""A fleet under measurement: real processes, equal boxes unless told otherwise, and a client that times what it gets.

Owns the fleet's processes and the client's event loop. What is asked for, and what the times mean, is the figures'.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from launch.local import LocalFleet
from shoal.client import AsyncClient
from shoal.config import OrchestratorConfig, WorkerConfig
from shoal.generation import Generation
from shoal.status import FleetStatus
from shoal.types import DeviceProfile, LinkProfile, QosClass
from tests.bench.machine import LoadMeter
from tests.bench.pairs import Load

# A box on mains power, which waits awake as the shipped `host` does.
BOX = DeviceProfile(name="box", kind="box", memory_bytes=4096 * 2**20, poll_ms=10.0)
READY_TIMEOUT_S = 30.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """When a request was sent and when each token of the answer came, on one clock.

    server_ttft_ms: by the server's. cached_tokens: of the prompt, those not computed; from_redis_tokens: of these.
    """

    sent_at: float
    token_at: tuple[float, ...]
    server_ttft_ms: float
    cached_tokens: int = 0
    from_redis_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.sent_at

    def tokens_per_s(self, skip: int) -> float:
        """The rate after the first `skip` tokens."""
        return (len(self.token_at) - skip) / (self.token_at[-1] - self.token_at[skip - 1])


@dataclass(frozen=True, slots=True)
class Measured:
    """Streams that ran at the same time. client_s, orchestrator_s: processor time that both took for them."""

    streams: tuple[StreamTimes, ...]
    load: Load
    client_s: float
    orchestrator_s: float

    @property
    def cpu_ms(self) -> dict[str, float]:
        """Processor time a token; of the whole request, its prompt included."""
        num_tokens = sum(len(stream.token_at) for stream in self.streams)
        return {
            "client_cpu_ms": 1e3 * self.client_s / num_tokens,
            "orchestrator_cpu_ms": 1e3 * self.orchestrator_s / num_tokens,
        }

    def shared_tokens_per_s(self, skip: int) -> float:
        """The rate of all streams together, from when each had `skip` tokens until the first ended."""
        start = max(stream.token_at[skip - 1] for stream in self.streams)
        stop = min(stream.token_at[-1] for stream in self.streams)
        count = sum(start < at <= stop for stream in self.streams for at in stream.token_at)
        return count / (stop - start)


class System:
    """A running fleet and its client."""

    def __init__(self, fleet: LocalFleet, runner: asyncio.Runner, also_ours: Sequence[int]) -> None:
        self._runner = runner
        self.address = fleet.address
        self._client = AsyncClient(fleet.address)
        self.process_ids = [child.process.pid for child in fleet.children]
        self._client_process, self._orchestrator = psutil.Process(), psutil.Process(self.process_ids[0])
        self.meter = LoadMeter([*self.process_ids, *also_ours])

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, qos: QosClass = QosClass.BALANCED, **options: Any
    ) -> Measured:
        """Ask for greedy answers of exactly max_tokens to all prompts at once."""

        async def ask_all() -> list[StreamTimes]:
            return await asyncio.gather(*(self._time(prompt, max_tokens, qos, **options) for prompt in prompts))

        before = _cpu_s(self._client_process), _cpu_s(self._orchestrator)
        self.meter.start()
        streams = self._runner.run(ask_all())
        load = self.meter.stop()
        client_s, orchestrator_s = _cpu_s(self._client_process) - before[0], _cpu_s(self._orchestrator) - before[1]
        return Measured(tuple(streams), load, client_s, orchestrator_s)

    async def _time(self, prompt: Sequence[int], max_tokens: int, qos: QosClass, **options: Any) -> StreamTimes:
        token_at: list[float] = []
        sent_at = time.perf_counter()
        answer = await self.read(prompt, max_tokens, qos, token_at, **options)
        cache = answer.cache
        return StreamTimes(sent_at, tuple(token_at), answer.ttft_ms, cache.cached_tokens, cache.from_redis_tokens)

    async def read(
        self, prompt: Sequence[int], max_tokens: int, qos: QosClass, token_at: list[float], **options: Any
    ) -> Generation:
        """Read a greedy answer of exactly max_tokens; token_at grows by the time of each of its tokens."""
        stream = self._client.stream(
            prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, qos_class=qos, **options
        )
        async for delta in stream:
            token_at.extend([time.perf_counter()] * len(delta.token_ids))
        return stream.result

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something on the client's event loop."""
        return self._runner.run(work)

    def status(self) -> FleetStatus:
        return self._runner.run(self._client.status())

    def wait(self, seconds: float) -> None:
        self._runner.run(asyncio.sleep(seconds))

    def close(self) -> None:
        self._runner.run(self._client.close())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def running(
    home: Path,
    model: str,
    runner: asyncio.Runner,
    *,
    num_workers: int,
    also_ours: Sequence[int],
    link: LinkProfile | None = None,
    profiles: Sequence[DeviceProfile] = (),
    **options: Any,
) -> Iterator[System]:
    """Run a fleet until the block ends; options are OrchestratorConfig's. also_ours: processes that are not other load.

    runner: has the client's event loop; one for all fleets, as gRPC wants it. profiles: of the workers, instead of
    num_workers boxes with such a link.
    """
    config = OrchestratorConfig(port=0, home=home, model=model, drain_s=1.0, **options)
    profile = BOX if link is None else replace(BOX, link=link, is_emulated=True)
    worker = WorkerConfig(use_sockets=config.use_sockets)
    with LocalFleet(config, profiles or [profile] * num_workers, worker=worker) as fleet:
        fleet.wait_ready(READY_TIMEOUT_S)
        system = System(fleet, runner, also_ours)
        try:
            yield system
        finally:
            system.close()
