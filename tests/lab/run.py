"""The whole test of the lab: build, up, chat, a minute of load, faults, down. `make lab-test` runs it on a private engine.

Takes the model from this machine's SHOAL_HOME. Takes everything down however it ends, and says what each part took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.compose import DEVICES, ORCHESTRATOR, ComposeLab
from shoal.client import Client
from shoal.config import OrchestratorConfig, default_home
from shoal.errors import ShoalError
from tests.lab import chaos
from tests.lab.chaos import ADDRESS, ROOT, wait_whole

UP_S = 180.0
TARGET_UP_S, TARGET_MB = 60.0, 250
BASE, WORKER = "shoal-lab-base", "shoal-lab-worker"


@contextmanager
def part(name: str) -> Iterator[None]:
    """Say how long a part of the test took."""
    began = time.monotonic()
    yield
    say(f"{name}: {time.monotonic() - began:.1f} s")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def check_size(lab: ComposeLab) -> None:
    sizes = {}
    for line in lab.engine("image", "ls", "--format", "{{.Repository}} {{.ID}}").splitlines():
        name, _, image = line.partition(" ")
        if name in (BASE, WORKER):
            sizes[name] = int(lab.engine("image", "inspect", "--format", "{{.Size}}", image))
    if BASE in sizes:
        beyond = (sizes[WORKER] - sizes[BASE]) / 1e6
        say(f"worker image: {beyond:.0f} MB beyond its base (target {TARGET_MB})")
        if beyond > TARGET_MB:
            sys.exit("the worker's image is too large")


def chat() -> None:
    with Client(ADDRESS, timeout_s=60.0) as client:
        answer = client.chat([{"role": "user", "content": "What is a shoal of fish?"}], max_tokens=24, temperature=0.0)
    say(f"chat: {answer.text!r} by {len(answer.pipeline)} devices")
    if not answer.text.strip():
        sys.exit("the lab has nothing to say")


def load(lab: ComposeLab, duration_s: int) -> None:
    """Ask for a while; all must be answered."""
    command = [
        "load",
        "server",
        "--server=orchestrator:50070",
        "--workload=chat",
        "--rate=0.5",
        f"--duration={duration_s}",
    ]
    out = lab.compose("run", "--rm", "-T", "loadtest", *command, "--json", "-", timeout_s=120.0 + 2 * duration_s)
    overall = json.loads(out)["statistics"]["overall"]
    say(
        f"load: {overall['num_ok']} of {overall['num_requests']} answered, first token p50 "
        f"{overall['ttft']['p50_s']:.2f} s, then p50 {overall['tpot']['p50_s'] * 1e3:.0f} ms a token"
    )
    if not 0 < overall["num_ok"] == overall["num_requests"]:
        sys.exit(f"not all requests were answered: {overall['errors']}")


def save_logs(lab: ComposeLab, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for service in (*DEVICES, ORCHESTRATOR, "redis"):
        (folder / f"{service}.log").write_text(lab.logs(service), encoding="utf-8")


def run(lab: ComposeLab, options: argparse.Namespace) -> bool:
    with part("images built"):
        lab.build()
    check_size(lab)
    try:
        lab.seed(default_home(), OrchestratorConfig().model)
        with part(f"up --wait (target {TARGET_UP_S:.0f} s)"):
            lab.up(UP_S)
        say("\n".join(f"  {one.worker_id}: {one.state} {one.layers or ''}" for one in wait_whole().devices))
        chat()
        with part("load"):
            load(lab, options.load_s)
        with part("faults"):
            return chaos.run(lab)
    finally:
        if options.logs is not None:
            save_logs(lab, options.logs)
        with part("down"):
            lab.down(with_volumes=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.run", description=__doc__)
    parser.add_argument("--load-s", type=int, default=60, help="seconds of load")
    parser.add_argument("--logs", type=Path, help="folder for what all processes have logged")
    options = parser.parse_args()
    try:
        is_sound = run(ComposeLab(ROOT), options)
    except ShoalError as error:
        sys.exit(f"error: {error.message}")
    say("all as it should be" if is_sound else "answers were lost or differ")
    sys.exit(0 if is_sound else 1)


if __name__ == "__main__":
    main()
