"""The devices of a fleet that a Ray cluster's nodes run, as whoever starts the fleet has them.

Owns the dispatcher (`ray_cluster`, a process of its own): tells it which devices are wanted, hears what became of them, and
starts another when it ends, as it does when Ray's head is lost. Called by `shoal up --on ray` and tests.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from launch.backoff import Backoff
from launch.desk import Desk, Wanted
from launch.detached import WorkerOrder
from launch.local import Child, failure_of, reachable
from launch.profiles import SHIPPED
from launch.ray_nodes import NodeMap, NodeWish
from launch.roster import Device, absolute, worker_ids
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError

DISPATCHER = "ray"
# Its workers get eight seconds to end, Ray some more.
STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A device as it was last heard of. pid: its worker's process on that node, 0 while there is none."""

    pid: int = 0
    node: str = ""


class RayDevices:
    """Devices on Ray nodes, which join the orchestrator of a configuration; its host and port are where it is.

    Invariant: from __enter__ to __exit__ there is a dispatcher, or a time at which the next one starts.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        devices: Sequence[str],
        *,
        ray_address: str = "auto",
        node_map: NodeMap | None = None,
        redis_url: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """devices: as LocalFleet takes them. Raises ConfigError."""
        if not devices:
            raise ConfigError("a fleet needs at least one device", field="devices")
        self._config = config
        self._ray_address = ray_address
        self._redis_url = redis_url
        self._clock = clock
        self._node_map = node_map or NodeMap({})
        self._desk = Desk(config.home, config.port)
        self._wanted = Wanted(tuple(map(absolute, devices)))
        self._devices = _orders(config, self._wanted.devices, self._node_map, redis_url)
        self._log_path = config.home / "logs" / str(config.port) / f"{DISPATCHER}.log"
        self._backoff = Backoff()
        self._dispatcher: Child | None = None
        self._start_at: float | None = None
        self._has_connected = False
        # Nobody can be told to end a worker.
        self.is_lost = False
        self._rest = b""
        self.placed: dict[str, Placed] = {order.worker_id: Placed() for order, _ in self._devices}

    @property
    def worker_ids(self) -> list[str]:
        return [order.worker_id for order, _ in self._devices]

    def hear(self) -> list[str]:
        """What has happened since the last time, in lines for the operator; starts the dispatcher again when that is due.

        Raises LaunchFailed if it has never reached Ray.
        """
        told = self._read()
        wanted = self._desk.take()
        if wanted is not None:
            told += self._change(wanted)
        now = self._clock()
        if self._dispatcher is not None and self._dispatcher.process.poll() is not None:
            told += self._read()
            if not self._has_connected:
                raise failure_of(self._dispatcher)
            self._start_at = self._backoff.ended(now)
            if not self.is_lost:
                told.append(
                    f"Ray is lost: devices go on, and are looked after again when Ray is back (log: {self._log_path})"
                )
            self.is_lost = True
            self._close()
        if self._start_at is not None and now >= self._start_at:
            self._start(is_first=False)
        return told

    def _change(self, wanted: Wanted) -> list[str]:
        try:
            self._devices = _orders(self._config, wanted.devices, self._node_map, self._redis_url)
        except ConfigError as error:
            return [f"devices stay as they are: {error.message}"]
        before, self._wanted = [*self.placed], wanted
        self._desk.tell(wanted)
        self.placed = {worker_id: self.placed.get(worker_id, Placed()) for worker_id in self.worker_ids}
        if self._dispatcher is not None:
            self._send(is_first=False)
        # Those that are to be started anew tell so themselves.
        return [f"wanted are {', '.join(self.worker_ids)}"] if before != [*self.placed] else []

    def _start(self, *, is_first: bool) -> None:
        self._start_at = None
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("wb" if is_first else "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", "ray-dispatcher", f"--address={self._ray_address}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._dispatcher = Child(DISPATCHER, process, self._log_path)
        self._backoff.began(self._clock())
        self._rest = b""
        os.set_blocking(_pipe(process.stdout).fileno(), False)
        self._send(is_first=is_first)

    def _send(self, *, is_first: bool) -> None:
        assert self._dispatcher is not None
        stdin = _pipe(self._dispatcher.process.stdin)
        try:
            stdin.write(json.dumps(self.message(is_first=is_first)).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return  # it has ended: hear() sees that

    def message(self, *, is_first: bool) -> dict[str, object]:
        """What the dispatcher is told. is_first: no worker of this fleet can be there yet."""
        return {
            "devices": [
                {
                    "order": asdict(order),
                    "wish": asdict(wish),
                    "generation": self._wanted.generations.get(order.worker_id, 0),
                }
                for order, wish in self._devices
            ],
            "port": self._config.port,
            "reach": reach_of(self._config),
            "is_first": is_first,
        }

    def _read(self) -> list[str]:
        if self._dispatcher is None:
            return []
        # None: nothing to read now.
        while chunk := _pipe(self._dispatcher.process.stdout).read(65536):
            self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        return [told for line in lines if (told := self.take(json.loads(line)))]

    def take(self, message: Mapping[str, Any]) -> str:
        """Take in what the dispatcher says; return what the operator should know of it, or nothing."""
        if "connected" in message:
            was_lost, self.is_lost, self._has_connected = self.is_lost, False, True
            return f"Ray is back at {message['connected']}" if was_lost else ""
        worker_id, pid, node = message["worker_id"], message["pid"], message["node"]
        if worker_id in self.placed:
            self.placed[worker_id] = Placed(pid, node)
        where = f" (node {node}, process {pid})" if pid else ""
        return f"{worker_id} {message['news']}{where}" if message["news"] else ""

    def _close(self) -> None:
        assert self._dispatcher is not None
        for pipe in (self._dispatcher.process.stdin, self._dispatcher.process.stdout):
            try:
                _pipe(pipe).close()
            except BrokenPipeError:
                continue  # it was not read to the end
        self._dispatcher = None

    def __enter__(self) -> Self:
        self._desk.tell(self._wanted)
        self._start(is_first=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all workers; those that a dispatcher without Ray cannot reach end by themselves, without an orchestrator."""
        self._desk.leave()
        if self._dispatcher is None:
            return
        process = self._dispatcher.process
        if not self._has_connected:
            # It has placed nothing, and may try to reach Ray for long.
            process.kill()
        _pipe(process.stdin).close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._close()


def _orders(
    config: OrchestratorConfig, devices: Sequence[str], node_map: NodeMap, redis_url: str
) -> list[tuple[WorkerOrder, NodeWish]]:
    parsed = [Device.parse(device) for device in devices]
    ids = worker_ids([device.profile for device in parsed])
    return [
        (_order(config, worker_id, device, redis_url), node_map.wish(device))
        for worker_id, device in zip(ids, parsed, strict=True)
    ]


def _order(config: OrchestratorConfig, worker_id: str, device: Device, redis_url: str) -> WorkerOrder:
    is_shipped = device.source in SHIPPED.names()
    return WorkerOrder(
        worker_id=worker_id,
        join=f"{reachable(config.host)}:{config.port}",
        profile=device.source if is_shipped else "",
        profile_text="" if is_shipped else Path(device.source).read_text(encoding="utf-8"),
        mode=device.mode,
        home=str(config.home.absolute()),
        use_sockets=config.use_sockets,
        redis_url=redis_url,
    )


def reach_of(config: OrchestratorConfig) -> str:
    """Where other machines find the orchestrator: "all" for whichever address this one has, "" for nowhere."""
    if reachable(config.host) != config.host:
        return "all"
    try:
        is_loopback = ipaddress.ip_address(config.host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = config.host == "localhost"
    return "" if is_loopback else f"{config.host}:{config.port}"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
