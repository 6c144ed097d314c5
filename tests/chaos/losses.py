"""A fleet that loses processes while it answers: who is killed or frozen, what each stream got, and how long it stood still.

Real processes, real model, real Valkey. Every answer is compared, token by token, with that of a fleet which nothing
happened to. Used by the chaos tests and by `python -m tests.chaos.run`, which measures.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from launch.local import REDIS_URL_ENV, Child, LocalFleet
from launch.redis_server import EmbeddedRedis
from shoal.client import AsyncClient
from shoal.config import OrchestratorConfig
from shoal.errors import ShoalError
from shoal.status import FleetStatus
from shoal.types import DeviceProfile

MIB = 2**20
# Three stages of ten layers and a fourth device that stands by; as fast as this machine.
BOX = DeviceProfile(name="box", kind="box", memory_bytes=1024 * MIB, host_kv_bytes=64 * MIB)
NUM_STAGES, NUM_LAYERS_EACH = 3, 10
READY_S = 60.0
ANSWER_S = 120.0
LOOK_S = 0.05
# Longer than the orchestrator takes to look whether it should place anew.
SETTLED_S = 0.6
# One that keeps dying is started again after half a minute at most.
REVIVAL_S, MAX_REVIVALS = 0.1, 400
TOPICS = ("rivers", "bread", "clocks", "gardens", "ships", "music", "snow", "maps")


class Fault(Enum):
    """What happens in mid-stream."""

    KILL = "kill"
    FREEZE = "freeze"
    ORCHESTRATOR = "orchestrator"


@dataclass(slots=True)
class Stream:
    """One answer as its client gets it. token_at: when each token came. problem: what ended it, empty if nothing did."""

    prompt: str
    options: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)
    token_at: list[float] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    text: str = ""
    num_recoveries: int = 0
    problem: str = ""

    def gap_s(self, since: float) -> float:
        """The longest time between two tokens, the second of which came after `since`."""
        pairs = zip(self.token_at, self.token_at[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault did.

    had_standby: a device held nothing before. detected_s: until the orchestrator's log tells of the loss; None where that
    is not to be told.
    """

    streams: tuple[Stream, ...]
    had_standby: bool
    hit_at: float
    detected_s: float | None
    wrong: tuple[str, ...]

    @property
    def gaps_s(self) -> list[float]:
        return [one.gap_s(self.hit_at) for one in self.streams if one.token_at and one.token_at[-1] > self.hit_at]


def make_streams(count: int, num_tokens: int) -> list[Stream]:
    """Greedy and seeded answers by turns, to prompts of different length."""
    streams = []
    for number in range(count):
        topic = TOPICS[number % len(TOPICS)]
        prompt = f"Tell me everything about {topic}. " * (2 + 6 * (number % 3)) + f"Story {number}: once upon a time"
        options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "deadline_s": ANSWER_S}
        options |= {"temperature": 0.8, "seed": 11 + number} if number % 2 else {"temperature": 0.0}
        streams.append(Stream(prompt, options))
    return streams


class LossyFleet:
    """A local fleet whose processes can be killed, frozen and started again; a client reads its answers."""

    def __init__(self, fleet: LocalFleet, redis: EmbeddedRedis | None) -> None:
        self.fleet = fleet
        self.redis = redis

    def child(self, name: str) -> Child:
        return next(one for one in self.fleet.children if one.name == name)

    def status(self) -> FleetStatus | None:
        async def look() -> FleetStatus:
            async with AsyncClient(self.fleet.address, timeout_s=2.0) as client:
                return await client.status()

        try:
            return asyncio.run(look())
        except ShoalError:
            return None

    def wait_whole(self) -> FleetStatus:
        """Wait until all devices are there and a pipeline serves that nothing replaces."""
        deadline = since = time.monotonic()
        deadline += READY_S
        before: list[tuple[str, object]] = []
        while (now := time.monotonic()) < deadline:
            status = self.status()
            layers = _layers(status)
            is_whole = {worker_id for worker_id, _ in layers} == set(self.fleet.worker_ids)
            if status is None or not (is_whole and status.is_complete and layers == before):
                since, before = now, layers
            elif now - since > SETTLED_S:
                return status
            time.sleep(LOOK_S)
        raise AssertionError(f"the fleet is not whole after {READY_S} s: {before}")

    def restart(self, name: str) -> None:
        """Start a process again that has ended, with the command line it had."""
        child = self.child(name)
        child.process.wait(READY_S)
        with child.log_path.open("ab") as log:
            process = subprocess.Popen(
                child.process.args,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, REDIS_URL_ENV: self.fleet.redis_url},
            )
        if child.process.stdin is not None:
            child.process.stdin.close()
        index = self.fleet.children.index(child)
        self.fleet.children[index] = replace(child, process=process)

    def answer(self, streams: Sequence[Stream]) -> None:
        """Read all of them to their ends, with nothing happening."""
        asyncio.run(self._answer(streams))

    async def _answer(self, streams: Sequence[Stream]) -> None:
        async with AsyncClient(self.fleet.address, timeout_s=ANSWER_S) as client:
            await asyncio.gather(*(read_stream(client, one) for one in streams))

    def suffer(
        self,
        streams: Sequence[Stream],
        expected: Sequence[Stream],
        fault: Fault,
        after: int,
        *,
        restarts_at_once: bool = False,
        kills_redis: bool = False,
    ) -> Outcome:
        """Let the fault happen once every stream has so many tokens; compare what comes with what is expected.

        A killed device is started again when the answers are there, or at once. kills_redis: in the same moment; it is
        started again as `shoal up` does.
        """
        status = self.wait_whole()
        victim = str(status.pipelines[0].worker_ids[1])
        had_standby = any(device.layers is None for device in status.devices)

        async def run() -> tuple[float, float]:
            async with AsyncClient(self.fleet.address, timeout_s=ANSWER_S) as client:
                reading = [asyncio.create_task(read_stream(client, one)) for one in streams]
                while min(len(one.token_ids) for one in streams) < after and not any(one.done() for one in reading):
                    await asyncio.sleep(0.005)
                hit, wall = time.perf_counter(), time.time()
                if kills_redis:
                    self.kill_redis()
                self._hit(victim, fault)
                if restarts_at_once:
                    self.restart(victim)
                if kills_redis:
                    await self._revive_redis()
                await asyncio.gather(*reading)
                return hit, wall

        hit_at, hit_wall = asyncio.run(run())
        if fault is Fault.FREEZE:
            os.kill(self.child(victim).process.pid, signal.SIGCONT)
        detected_s = None if fault is Fault.ORCHESTRATOR else self._detected_s(victim, hit_wall)
        if fault is Fault.KILL and not restarts_at_once:
            self.restart(victim)
        return Outcome(tuple(streams), had_standby, hit_at, detected_s, tuple(differences(streams, expected)))

    def kill_redis(self) -> None:
        assert self.redis is not None
        assert self.redis.pid is not None
        os.kill(self.redis.pid, signal.SIGKILL)

    async def _revive_redis(self) -> None:
        assert self.redis is not None
        for _ in range(MAX_REVIVALS):
            if self.redis.revive():
                return
            await asyncio.sleep(REVIVAL_S)
        raise AssertionError("redis was not started again")

    def _hit(self, victim: str, fault: Fault) -> None:
        match fault:
            case Fault.KILL:
                self.child(victim).process.kill()
            case Fault.FREEZE:
                os.kill(self.child(victim).process.pid, signal.SIGSTOP)
            case Fault.ORCHESTRATOR:
                self.child("orchestrator").process.kill()
                self.restart("orchestrator")

    def _detected_s(self, victim: str, hit_wall: float) -> float | None:
        """From the fault to the line of the orchestrator's log that tells of it."""
        log = self.child("orchestrator").log_path.read_text(encoding="utf-8", errors="replace")
        found = re.findall(
            rf"^(\S+ \S+) \S+ \S+ (?:pipeline_lost|worker_lost) .*worker={re.escape(victim)} ", log, re.M
        )
        times = [datetime.strptime(one, "%Y-%m-%d %H:%M:%S,%f").timestamp() for one in found]
        return min((one - hit_wall for one in times if one >= hit_wall - 0.01), default=None)


async def read_stream(client: AsyncClient, stream: Stream) -> None:
    """Read an answer to its end; what ends it early is its problem."""
    try:
        answer = client.stream(stream.prompt, **stream.options)
        async for delta in answer:
            for token_id in delta.token_ids:
                stream.token_ids.append(token_id)
                stream.token_at.append(time.perf_counter())
            stream.text += delta.text
        stream.num_recoveries = getattr(answer.result, "num_recoveries", 0)
    except ShoalError as error:
        stream.problem = f"{error.reason}: {error.message}"


def differences(streams: Sequence[Stream], expected: Sequence[Stream]) -> Iterator[str]:
    """What each stream has that it should not have, or the other way round."""
    for number, (got, wanted) in enumerate(zip(streams, expected, strict=True)):
        if got.problem:
            yield f"stream {number} ended with {got.problem}"
        elif got.token_ids != wanted.token_ids:
            pairs = enumerate(zip(got.token_ids, wanted.token_ids, strict=False))
            first = next((index for index, (one, other) in pairs if one != other), None)
            yield f"stream {number} differs from token {first}: {len(got.token_ids)} of {len(wanted.token_ids)}"
        elif got.text != wanted.text:
            yield f"stream {number} has another text"


def _layers(status: FleetStatus | None) -> list[tuple[str, object]]:
    return [] if status is None else [(one.worker_id, one.layers) for one in status.devices]


@contextmanager
def lossy_fleet(
    home: Path,
    *,
    num_devices: int = NUM_STAGES + 1,
    profiles: Sequence[DeviceProfile] = (),
    has_redis: bool = True,
    **options: Any,
) -> Iterator[LossyFleet]:
    """Run three stages and devices that stand by until the block ends; or these profiles, with layers cut as is best."""
    split = "" if profiles else ",".join([str(NUM_LAYERS_EACH)] * NUM_STAGES)
    config = OrchestratorConfig(port=0, home=home, split=split, drain_s=1.0, **options)
    redis = EmbeddedRedis(home / "redis", 256 * MIB) if has_redis else None
    with LocalFleet(config, profiles or [BOX] * num_devices, redis=redis) as fleet:
        fleet.wait_ready(READY_S)
        yield LossyFleet(fleet, redis)
