"""Has a fleet have more devices of a name while its queue is long, and fewer when it is idle.

Looks now and then, asks `scaling` and has `shoal scale` do what it says, as a process: draining takes its time, and the
launcher has others to look after. Called by `shoal up --autoscale`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch.desk import Desk
from launch.scaling import Bounds, QueueScaler, count_of
from shoal.client import Client
from shoal.errors import ShoalError
from shoal.status import FleetStatus

LOOK_S = 2.0
STATUS_TIMEOUT_S = 1.0
STOP_S = 5.0


class Autoscaler:
    """Invariant: at most one change is under way, and nothing is decided meanwhile."""

    def __init__(
        self,
        address: str,
        home: Path,
        desk: Desk,
        bounds: Bounds,
        *,
        status: Callable[[str], FleetStatus | None] | None = None,
        command: Callable[[str], list[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """status: asks an orchestrator, None where it does not answer; command: makes the process that scales."""
        self._address = address
        self._home = home
        self._desk = desk
        self._name = bounds.name
        self._clock = clock
        self._look_at = clock()
        self._scaler = QueueScaler(bounds, clock())
        self._status = status or _status
        self._command = command or self._scale_command
        self._changing: subprocess.Popen[str] | None = None

    def step(self) -> list[str]:
        """Look if it is time to; return what the operator should know."""
        if self._changing is not None:
            return self._on_change(self._changing)
        now = self._clock()
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        status = self._status(self._address)
        if status is None:
            return []
        devices = self._desk.look().devices
        count = count_of(devices, self._name)
        wanted = self._scaler.decide(count, len(devices), status.num_waiting, status.num_running, now)
        if wanted == count:
            return []
        self._changing = subprocess.Popen(
            self._command(f"{self._name}={wanted}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "SHOAL_HOME": str(self._home)},
        )
        return [
            f"{status.num_waiting} requests wait, {status.num_running} are computed: "
            f"{self._name}={wanted} in place of {count}"
        ]

    def _on_change(self, changing: subprocess.Popen[str]) -> list[str]:
        if changing.poll() is None:
            return []
        self._changing = None
        said, _ = changing.communicate()
        return said.splitlines()[-2:] if changing.returncode else []

    def _scale_command(self, count: str) -> list[str]:
        return [sys.executable, "-m", "cli.main", "scale", count, f"--server={self._address}"]

    def stop(self) -> None:
        """End a change that is under way."""
        if self._changing is not None:
            # As Ctrl-C would: it lets in again whom it has cordoned.
            self._changing.send_signal(signal.SIGINT)
            try:
                self._changing.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                self._changing.kill()
                self._changing.communicate()
            self._changing = None


def _status(address: str) -> FleetStatus | None:
    try:
        with Client(address, timeout_s=STATUS_TIMEOUT_S) as client:
            return client.status()
    except ShoalError:
        return None
