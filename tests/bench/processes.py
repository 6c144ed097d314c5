"""Time from `shoal up` to ready, and what workers take of memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import LaunchFailed
from tests.bench.context import NUM_STREAMS, Bench, decode_prompts
from tests.bench.figures import GOALS, Figure, Goal
from tests.bench.fleet import System
from tests.bench.machine import LoadMeter
from tests.bench.pairs import MAX_FOREIGN_CORES

DEVICES = "phone,phone,tablet"
READY_TEXT = "is ready at"
QUIET_S = 0.5
STOP_S = 15.0
# A heartbeat carries what a worker takes.
HEARTBEATS_S = 1.5
MB = 10**6


def start(bench: Bench) -> list[Figure]:
    """The first start after a pull, when no device has any layer yet; a second one beside it."""
    raw: list[dict[str, object]] = []
    plan = bench.long_plan
    while len(raw) < plan.tries and sum(bool(row["counts"]) for row in raw) < plan.counted:
        home = bench.home(f"up-{len(raw)}")
        foreign = _foreign_load()
        first_s, again_s = _start_once(home, bench.model), _start_once(home, bench.model)
        counts = foreign <= MAX_FOREIGN_CORES
        raw.append({"first_s": first_s, "again_s": again_s, "foreign_cores": foreign, "counts": counts})
    counted = [row for row in raw if row["counts"]]
    if not counted:
        return [Figure("start", None, 0, len(raw), raw)]
    first_s, again_s = (statistics.median(float(str(row[name])) for row in counted) for name in ("first_s", "again_s"))
    note = f"first start after the pull, devices without any layer; again: {again_s:.2f} s"
    return [Figure("start", first_s, len(counted), len(raw) - len(counted), raw, note)]


def _foreign_load() -> float:
    """Cores that others keep busy just before."""
    meter = LoadMeter([])
    meter.start()
    time.sleep(QUIET_S)
    return meter.stop().foreign_cores


def _start_once(home: Path, model: str) -> float:
    """Seconds from `shoal up` until it says that it is ready. Raises LaunchFailed if it ends before."""
    started = time.monotonic()
    up = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "cli.main",
            "up",
            f"--devices={DEVICES}",
            f"--model={model}",
            f"--home={home}",
            "--port=0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert up.stdout is not None
    try:
        lines = []
        for line in up.stdout:
            lines.append(line)
            if READY_TEXT in line:
                return time.monotonic() - started
        raise LaunchFailed("`shoal up` ended before it was ready:\n" + "".join(lines[-10:]))
    finally:
        up.terminate()
        try:
            up.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            up.kill()
            up.communicate()


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a worker took, and of what, in bytes."""

    worker: str
    rss: int
    weights: int
    kv: int

    @property
    def gate(self) -> float:
        return self.weights * 2.3 + self.kv + 130 * MB

    @property
    def aim(self) -> float:
        return self.weights * 1.3 + self.kv + 90 * MB


def footprints(bench: Bench, system: System) -> list[Footprint]:
    """Of every worker, while 16 streams hold KV and after they ended."""
    system.ask(decode_prompts(bench, NUM_STREAMS, 64), 40)
    seen = [system.status()]
    system.wait(HEARTBEATS_S)
    seen.append(system.status())
    return [
        Footprint(
            f"{device.layers} of {len(status.devices)}",
            device.telemetry.rss_bytes,
            device.telemetry.weight_bytes,
            device.telemetry.kv_bytes,
        )
        for status in seen
        for device in status.devices
    ]


def memory(found: list[Footprint]) -> list[Figure]:
    """The worker that is worst by the gate's bound, in MB (10^6 bytes)."""
    worst = max(found, key=lambda one: one.rss / one.gate)
    raw: list[dict[str, object]] = [
        {
            "worker": one.worker,
            "rss_mb": one.rss / MB,
            "weights_mb": one.weights / MB,
            "kv_mb": one.kv / MB,
            "gate_mb": one.gate / MB,
            "aim_mb": one.aim / MB,
        }
        for one in found
    ]
    goal = Goal(GOALS["memory"].title, worst.gate / MB, worst.aim / MB, "MB", is_upper=True)
    note = f"layers {worst.worker}: weights {worst.weights / MB:.0f} MB, KV {worst.kv / MB:.0f} MB"
    return [Figure("memory", worst.rss / MB, len(raw), 0, raw, note, goal)]
