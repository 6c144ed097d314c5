"""A fleet on this machine: one orchestrator and its emulated devices as child processes.

Owns the children: their ids, ports, logs, start, end. What they compute is no concern of it: it knows them by their
command lines and by what the orchestrator's GetStatus says. Called by `shoal up`, `shoal demo`, tests and benchmarks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Self

from launch.profiles import to_toml
from launch.redis_server import EmbeddedRedis
from launch.roster import Device, worker_ids
from modelstore.file_lock import exclusive_lock
from shoal.client import Client
from shoal.config import Config, OrchestratorConfig, WorkerConfig, options
from shoal.errors import ConfigError, ConnectionFailed, DeadlineExceeded, LaunchFailed, NotReady, PlacementImpossible
from shoal.status import FleetStatus
from shoal.types import DeviceProfile
from worker.kv.trace import TRACE_SUFFIX

ORCHESTRATOR = "orchestrator"
POLL_S = 0.05
# A fleet that is complete and idle for so long without serving will not serve by waiting.
STUCK_S = 3.0
# A status call answers in milliseconds; one that takes longer hit a machine that is busy starting the fleet.
STATUS_TIMEOUT_S = 2.0
WORKER_STOP_S = 3.0
# What the orchestrator may take beyond draining.
ORCHESTRATOR_STOP_S = 3.0
# An orchestrator that runs for so long was well: the next time that it dies is the first one again.
STEADY_S = 10.0
# One that dies more often in a row is not started again.
MAX_DEATHS = 4
NUM_LOG_LINES = 12
REDIS_URL_ENV = "SHOAL_REDIS_URL"


@dataclass(frozen=True, slots=True)
class Child:
    """A process of the fleet. profile: what it emulates; None for the orchestrator."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    profile: DeviceProfile | None = None

    @property
    def last_log_lines(self) -> list[str]:
        return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]


class LocalFleet:
    """An orchestrator and one worker a device, on this machine.

    devices: names or paths of profiles, with :latency, :throughput or :mixed behind them to change what they are for; or
    profiles. Port 0 takes a free port; `address` is where the orchestrator is.
    Children end with the fleet, and also when this process dies in any way: the other end of their standard input is
    held by it alone.

    Invariant: between start() and stop() every child is in `children`, the orchestrator first.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        devices: Sequence[str | DeviceProfile],
        *,
        worker: WorkerConfig | None = None,
        redis: EmbeddedRedis | None = None,
        kv_trace: Path | None = None,
        num_elsewhere: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """redis: a server to run beside them, in place of the configuration's redis_url.

        kv_trace: a folder where each worker tells of its KV blocks, in a file of its name. num_elsewhere: devices that
        others start, and that are waited for.
        """
        if not devices and not num_elsewhere:
            raise ConfigError("a fleet needs at least one device", field="devices")
        self._worker = worker or WorkerConfig()
        self._devices = [Device.parse(device) if isinstance(device, str) else Device(device) for device in devices]
        self.redis = redis
        self._kv_trace = kv_trace
        port = config.port or _free_port(config.host)
        self.num_elsewhere = num_elsewhere
        self.config = replace(config, port=port, expect_workers=len(devices) + num_elsewhere)
        self.address = f"{reachable(config.host)}:{port}"
        self._lock = ExitStack()
        self.children: list[Child] = []
        self._clock = clock
        self._orchestrator_at = clock()
        self._num_deaths = 0
        # When to start the orchestrator again; None while it runs.
        self._revive_at: float | None = None
        # Why there is no embedded Redis though one was to be started.
        self.redis_failure = ""

    @property
    def log_directory(self) -> Path:
        """One for each port, so that fleets of one home do not write over each other's logs."""
        return self.config.home / "logs" / str(self.config.port)

    @property
    def redis_url(self) -> str:
        """What the processes are told; by their environment, for everybody may read a command line. Empty: there is none."""
        return self.config.redis_url if self.redis is None else self.redis.url

    @property
    def worker_ids(self) -> list[str]:
        return list(worker_ids([device.profile for device in self._devices]))

    def start(self) -> None:
        """Start all processes at once: workers ask for the orchestrator until it answers.

        Raises ConfigError if the folder of traces cannot be made, or if the port is taken, be it by another fleet of this
        home that does not listen yet: its devices and this one's would take each other for their own.
        """
        self._lock.enter_context(exclusive_lock(self.log_directory / "lock", self._fail_as_taken))
        _check_free(self.config.host, self.config.port)
        if self._kv_trace is not None:
            _make_folder(self._kv_trace)
        if self.redis is not None:
            self._start_redis(self.redis)
        self._orchestrator_at = self._clock()
        self._start_child(ORCHESTRATOR, [ORCHESTRATOR, *to_flags(self.config)])
        for worker_id, device in zip(self.worker_ids, self._devices, strict=True):
            config = replace(self._worker, join=self.address, worker_id=worker_id, home=self.config.home)
            if device.mode:
                config = replace(config, mode=device.mode)
            if self._kv_trace is not None:
                config = replace(config, kv_trace=str(self._kv_trace.absolute() / f"{worker_id}{TRACE_SUFFIX}"))
            source = device.source or self._write_profile(worker_id, device.profile)
            self._start_child(worker_id, ["worker", f"--profile={source}", *to_flags(config)], device.profile)

    def _fail_as_taken(self) -> NoReturn:
        raise ConfigError(
            f"another fleet of {self.config.home} runs on port {self.config.port}; choose another port, or 0 for any "
            "that is free",
            field="port",
        )

    def _start_redis(self, redis: EmbeddedRedis) -> None:
        """Start it, or go on without one: nothing that is asked of a fleet needs it."""
        try:
            redis.start()
        except LaunchFailed as error:
            self.redis = None
            self.redis_failure = error.message

    def _write_profile(self, worker_id: str, profile: DeviceProfile) -> Path:
        path = self.config.home / "devices" / worker_id / "profile.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_toml(profile), encoding="utf-8")
        return path

    def revive(self) -> str:
        """Start the orchestrator again if it has died; what is to be told of that, or nothing. Workers wait for it.

        At once the first time, later after ever longer. Raises LaunchFailed if it was told to end, or dies again and again.
        """
        orchestrator, now = self.children[0], self._clock()
        if orchestrator.process.poll() is None:
            return ""
        if self._revive_at is None:
            self._num_deaths = 1 if now - self._orchestrator_at > STEADY_S else self._num_deaths + 1
            if orchestrator.process.returncode == 0 or self._num_deaths > MAX_DEATHS:
                raise failure_of(orchestrator)
            self._revive_at = now + self._num_deaths - 1
        if now < self._revive_at:
            return ""
        self._revive_at, self._orchestrator_at = None, now
        _pipe_of(orchestrator).close()
        # It would wait for those who are gone, too.
        num_workers = sum(child.process.poll() is None for child in self.children[1:]) + self.num_elsewhere
        config = replace(self.config, expect_workers=max(num_workers, 1))
        self.children[0] = self._spawn(ORCHESTRATOR, [ORCHESTRATOR, *to_flags(config)], is_again=True)
        return f"{ORCHESTRATOR} {how_it_ended(orchestrator)}; it is started again (log: {orchestrator.log_path})"

    def _start_child(self, name: str, args: list[str], profile: DeviceProfile | None = None) -> None:
        self.children.append(self._spawn(name, args, profile))

    def _spawn(
        self, name: str, args: list[str], profile: DeviceProfile | None = None, *, is_again: bool = False
    ) -> Child:
        """is_again: what the one before it has said stays in the log."""
        log_path = self.log_directory / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab" if is_again else "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *args, "--stop-on-stdin-eof"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Out of the terminal's reach: Ctrl-C is for this process alone, which then stops them in order.
                start_new_session=True,
                env={**os.environ, REDIS_URL_ENV: self.redis_url},
            )
        return Child(name, process, log_path, profile)

    def ended(self) -> list[Child]:
        """The children that have ended by themselves."""
        return [child for child in self.children if child.process.poll() is not None]

    def check(self) -> None:
        """Raise LaunchFailed, with its last log lines, if a child has ended."""
        for child in self.ended():
            raise failure_of(child)

    def wait_ready(
        self, timeout_s: float = 60.0, on_status: Callable[[FleetStatus], None] = lambda _: None
    ) -> FleetStatus:
        """Wait until every pipeline serves; on_status sees every status on the way.

        Raises LaunchFailed if a child ends, PlacementImpossible if the layers do not fit the devices, and NotReady, saying
        what is waited for, when time is up.
        """
        waiting_for = "the orchestrator has not answered"
        now = time.monotonic()
        deadline, stuck_since = now + timeout_s, now
        with Client(self.address, timeout_s=STATUS_TIMEOUT_S) as client:
            while time.monotonic() < deadline:
                self.check()
                status = try_status(client)
                if status is not None:
                    on_status(status)
                    if status.is_complete:
                        return status
                    if not self._is_stuck(status) or status.waiting_for != waiting_for:
                        stuck_since = time.monotonic()
                    waiting_for = status.waiting_for or "other pipelines are being built"
                    if time.monotonic() - stuck_since > STUCK_S:
                        raise PlacementImpossible(waiting_for)
                time.sleep(POLL_S)
        raise NotReady(f"the fleet is not ready after {timeout_s:g} s: {waiting_for}")

    def _is_stuck(self, status: FleetStatus) -> bool:
        """Whether all devices are there and none of them has anything to do."""
        num_expected = len(self._devices) + self.num_elsewhere
        return len(status.devices) == num_expected and all(one.layers is None for one in status.devices)

    def stop(self) -> None:
        """End all children: the orchestrator, which drains, the workers, Redis at last; who does not end is killed."""
        try:
            self._end(self.children[:1], self.config.drain_s + ORCHESTRATOR_STOP_S)
            self._end(self.children[1:], WORKER_STOP_S)
        finally:
            for child in self.children:
                child.process.kill()
                child.process.wait()
                _pipe_of(child).close()
            self.children.clear()
            if self.redis is not None:
                self.redis.stop()
            self._lock.close()

    def _end(self, children: list[Child], timeout_s: float) -> None:
        for child in children:
            child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def failure_of(child: Child) -> LaunchFailed:
    """What is to be said of a child that has ended by itself."""
    lines = "\n".join(f"  {line}" for line in child.last_log_lines) or "  (nothing)"
    return LaunchFailed(f"{child.name} {how_it_ended(child)}; the last lines of {child.log_path}:\n{lines}")


def failure_of_all(children: Sequence[Child]) -> LaunchFailed:
    """What is to be said when all devices have ended by themselves."""
    if len(children) == 1:
        return failure_of(children[0])
    ends = ", ".join(f"{child.name} {how_it_ended(child)}" for child in children)
    first = children[0]
    lines = "\n".join(f"  {line}" for line in first.last_log_lines) or "  (nothing)"
    return LaunchFailed(
        f"all {len(children)} devices have ended, nothing can serve any more: {ends}; the last lines of "
        f"{first.log_path}:\n{lines}"
    )


def how_it_ended(child: Child) -> str:
    """As in "was ended by SIGKILL"."""
    return _describe_end(child.process.returncode)


def to_flags(config: Config) -> list[str]:
    """The command line that gives a `shoal` process this configuration, apart from what only its environment may have."""
    flags: list[str] = []
    for option in options(type(config)):
        if option.env == REDIS_URL_ENV:
            continue
        value = getattr(config, option.name)
        if isinstance(value, bool):
            flags.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{option.flag}={value}")
    return flags


def try_status(client: Client) -> FleetStatus | None:
    """The status of a fleet; None: nobody answers just now."""
    try:
        return client.status()
    except (ConnectionFailed, DeadlineExceeded, NotReady):
        return None


def _describe_end(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def _pipe_of(child: Child) -> IO[bytes]:
    assert child.process.stdin is not None
    return child.process.stdin


def reachable(host: str) -> str:
    """Where a listener on all addresses is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): stop what runs there (another `shoal up`?), "
            "or choose another port, or 0 for any that is free",
            field="port",
        ) from None


def _free_port(host: str) -> int:
    with _listen(host, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path} ({error.strerror}); choose another", field="kv_trace"
        ) from None


def _check_free(host: str, port: int) -> None:
    _listen(host, port).close()
