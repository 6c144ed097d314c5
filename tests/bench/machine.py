"""The machine under the benchmark: what it is, and how busy it is with what is not ours.

Reads /proc by psutil. Knows nothing of fleets; processes to call ours are given.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

from tests.bench.pairs import Load

PACKAGES = ("shoal", "onnxruntime", "grpcio", "numpy", "protobuf")


def describe() -> dict[str, str]:
    memory_gib = psutil.virtual_memory().total / 2**30
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory_gib:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)]
        ),
    }


class LoadMeter:
    """Measures the cores that are busy between start() and stop(), in all and with the given processes."""

    def __init__(self, process_ids: Iterable[int]) -> None:
        self._processes = [psutil.Process(process_id) for process_id in {os.getpid(), *process_ids}]

    def add(self, process_ids: Iterable[int]) -> None:
        known = {process.pid for process in self._processes}
        self._processes += [psutil.Process(process_id) for process_id in set(process_ids) - known]

    def start(self) -> None:
        self._started = self._read()

    def stop(self) -> Load:
        at, busy, own = (after - before for after, before in zip(self._read(), self._started, strict=True))
        return Load(busy / at, own / at)

    def _read(self) -> tuple[float, float, float]:
        cpu = psutil.cpu_times()
        # Time that the host took away (steal) is load of others too.
        busy_s = cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq + cpu.steal
        own_s = 0.0
        for process in self._processes:
            times = process.cpu_times()
            own_s += times.user + times.system
        return time.monotonic(), busy_s, own_s


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD") or "none"
    return commit + (" with changes" if git("status", "--porcelain", "--untracked-files=no") else "")
