"""Minutes of mixed sessions on a fleet with every tier on: does memory stay flat, and does every answer come?

Clients hold conversations that go on, are cancelled, deleted and begun anew, in all classes, with and without kept KV. The
devices' memory holds a part of one conversation, so what is reused comes from a Valkey too, which is too small for all of it
and evicts. Prints the resident memory of every process over time and what came of the
requests, as markdown. Run it with `python -m tests.bench.soak --minutes 10`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import psutil

from launch.local import LocalFleet
from launch.profiles import load_profile
from launch.redis_server import EmbeddedRedis
from modelstore.pull import pull
from modelstore.store import ModelStore
from shoal.client import Client
from shoal.config import OrchestratorConfig
from shoal.errors import ShoalError
from shoal.generation import GenerateOptions
from tests.bench.machine import describe
from tests.bench.report import table

DEVICES = ("phone", "phone", "tablet")
REDIS_MIB = 192
# A third of the layers of 500 tokens.
HOST_KV_MIB = 16
NUM_CLIENTS = 4
NUM_BEFORE_CANCEL = 3
SAMPLE_S = 15.0
# Processes fill caches and pools at first; what they have after this part is compared with the end.
WARM_SHARE = 0.4
MIB = 2**20
WORDS = [
    "river",
    "fish",
    "water",
    "boats",
    "harbour",
    "stones",
    "gulls",
    "nets",
    "tide",
    "wind",
    "rope",
    "sail",
    "quiet",
]


@dataclass(slots=True)
class Outcomes:
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, count: int = 1) -> None:
        with self.lock:
            self.counts[what] += count


class Talker(threading.Thread):
    """One client with a few sessions, which it goes on with in turn until told to stop."""

    def __init__(self, address: str, number: int, outcomes: Outcomes, stopping: threading.Event) -> None:
        super().__init__(name=f"talker-{number}")
        self._address = address
        self._number = number
        self._random = random.Random(number)
        self._outcomes = outcomes
        self._stopping = stopping

    def run(self) -> None:
        with Client(self._address, timeout_s=120.0) as client:
            while not self._stopping.is_set():
                try:
                    self._act(client)
                except ShoalError as error:
                    self._outcomes.add(error.reason)

    def _act(self, client: Client) -> None:
        draw, session_id = self._random, f"s{self._number}-{self._random.randrange(4)}"
        tenant = f"t{self._number % 2}"
        options: GenerateOptions = {
            "max_tokens": draw.choice((4, 12, 40)),
            "qos_class": draw.choice(("latency", "balanced", "throughput")),
            "tenant": tenant,
            "kv_reuse": draw.choice(("policy", "policy", "exact", "none")),
            "context_overflow": "window",
        }
        if draw.random() < 0.8:
            options["session_id"] = session_id
        kind = draw.random()
        if kind < 0.04:
            client.delete_session(session_id, tenant=tenant)
            self._outcomes.add("deleted")
            return
        messages = [{"role": "user", "content": " ".join(draw.choices(WORDS, k=draw.choice((5, 40, 200))))}]
        if kind < 0.15:
            with client.stream(messages=messages, **options) as stream:
                list(islice(stream, NUM_BEFORE_CANCEL))
            self._outcomes.add("cancelled")
            return
        answer = client.generate(messages=messages, **options)
        self._outcomes.add("answered")
        self._outcomes.add("prompt_tokens", answer.prompt_tokens)
        self._outcomes.add("cached_tokens", answer.cache.cached_tokens)
        self._outcomes.add("from_redis_tokens", answer.cache.from_redis_tokens)


def sample(fleet: LocalFleet, redis: EmbeddedRedis) -> dict[str, float]:
    """Resident MiB by process."""
    processes = {child.name: child.process.pid for child in fleet.children}
    if redis.pid is not None:
        processes["valkey"] = redis.pid
    return {name: psutil.Process(pid).memory_info().rss / MIB for name, pid in processes.items()}


def soak(home: Path, minutes: float) -> tuple[list[tuple[float, dict[str, float]]], Outcomes]:
    redis, outcomes, stopping = EmbeddedRedis(home / "redis", REDIS_MIB * MIB), Outcomes(), threading.Event()
    config = OrchestratorConfig(port=0, home=home, context_tokens=1024)
    pull(ModelStore(home), config.model)
    samples = []
    devices = [replace(load_profile(name), host_kv_bytes=HOST_KV_MIB * MIB) for name in DEVICES]
    with LocalFleet(config, devices, redis=redis) as fleet:
        fleet.wait_ready()
        talkers = [Talker(fleet.address, number, outcomes, stopping) for number in range(NUM_CLIENTS)]
        began_at = time.monotonic()
        for talker in talkers:
            talker.start()
        try:
            while (elapsed_s := time.monotonic() - began_at) < minutes * 60:
                samples.append((elapsed_s, sample(fleet, redis)))
                fleet.check()
                time.sleep(SAMPLE_S)
        finally:
            stopping.set()
            for talker in talkers:
                talker.join()
        samples.append((time.monotonic() - began_at, sample(fleet, redis)))
    return samples, outcomes


def to_markdown(samples: list[tuple[float, dict[str, float]]], outcomes: Outcomes) -> str:
    last, warm = samples[-1], samples[int(len(samples) * WARM_SHARE)]
    every = max(1, len(samples) // 12)
    rows = [
        {"minute": f"{elapsed_s / 60:.1f}", **{name: f"{size:.0f}" for name, size in memory.items()}}
        for elapsed_s, memory in [*samples[:-1:every], last]
    ]
    growth = ", ".join(f"{name} {size - warm[1][name]:+.0f}" for name, size in last[1].items())
    prompt, cached, stored = (outcomes.counts[f"{what}_tokens"] for what in ("prompt", "cached", "from_redis"))
    counts = ", ".join(f"{what} {count}" for what, count in sorted(outcomes.counts.items()))
    machine = ", ".join(f"{name} {value}" for name, value in describe().items())
    return "\n".join(
        [
            f"{machine}.",
            "",
            "Resident MiB.",
            "",
            *table(rows),
            "",
            f"From minute {warm[0] / 60:.1f} to the end: {growth}.",
            "",
            f"Of {prompt:,} prompt tokens {cached:,} were reused: {cached - stored:,} from the devices' memory and "
            f"{stored:,} from Redis.",
            "",
            counts,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="where the table goes as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as home:
        text = to_markdown(*soak(Path(home), arguments.minutes))
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(f"# Soak\n\n`python -m tests.bench.soak --minutes {arguments.minutes:g}`\n\n{text}")


if __name__ == "__main__":
    main()
