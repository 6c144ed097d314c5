"""Keeps one worker running on this machine, as a process that outlives whoever keeps it.

The worker is nobody's child and has a session of its own; it knows by the end of its standard input that its keeper is
gone, and then lasts as long as it has an orchestrator. A keeper that comes later finds it by a note on the disk and keeps it
on. So what becomes of a keeper is nothing to the tokens. Knows nothing of who asks: `ray_cluster` has one in each actor.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.backoff import Backoff
from launch.local import REDIS_URL_ENV, to_flags
from shoal.config import WorkerConfig, default_home
from shoal.errors import LaunchFailed

# Without a keeper and without an orchestrator: longer than either takes to come back, and no process is left for ever.
LINGER_S = 30.0
# Leaving in order: a worker ends what it computes and says so.
STOP_S = 5.0
SPAWN_TIMEOUT_S = 20.0
# Of a log in which nothing is wrong at the end.
_ORDINARY = re.compile(r"^\S+ \S+ (DEBUG|INFO) ")
# Starts its arguments as a process of nobody, says which, and ends.
_DETACH = (
    "import subprocess, sys; "
    "print(subprocess.Popen(sys.argv[1:], stdin=0, stdout=2, stderr=2, start_new_session=True).pid)"
)


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """A worker to be run somewhere, in values that can be sent there.

    profile: the name of a shipped one, or "" where profile_text is the content of its file. home, "": this machine's own.
    host: where it listens to its peers. redis_url: may have a password, and goes by the environment.
    """

    worker_id: str
    join: str
    profile: str
    profile_text: str = ""
    mode: str = ""
    home: str = ""
    host: str = "127.0.0.1"
    use_sockets: bool = True
    redis_url: str = ""


@dataclass(frozen=True, slots=True)
class Tended:
    """What a look found. pid: 0 while nothing runs; news: what the operator should know, "" for nothing."""

    worker_id: str
    pid: int
    news: str = ""


Clock = Callable[[], float]


class Keeper:
    """Starts, watches and starts again one worker.

    Invariant: what it keeps is written down before it is told of, so that the next keeper of this machine finds it.
    """

    def __init__(
        self,
        order: WorkerOrder,
        command: Sequence[str] = (sys.executable, "-m", "cli.main", "worker"),
        clock: Clock = time.monotonic,
    ) -> None:
        self._order = order
        self._command = command
        self._clock = clock
        self._home = Path(order.home) if order.home else default_home()
        fleet = re.sub(r"[^A-Za-z0-9_.-]", "-", order.join)
        self.note_path = self._home / "run" / fleet / f"{order.worker_id}.json"
        self.log_path = self._home / "logs" / fleet / f"{order.worker_id}.log"
        self._backoff = Backoff()
        self._process: psutil.Process | None = None
        self._stdin = -1
        self._start_at: float | None = clock()

    def tend(self, *, may_start: bool = True) -> Tended:
        """Look after the worker: find or start it the first time, start it again when it has ended and its time has come.

        may_start: False while it may still run elsewhere.
        """
        if self._process is not None and not _is_running(self._process):
            return self._on_end()
        if self._process is not None or self._start_at is None or self._clock() < self._start_at:
            return self._tended()
        found = self._find()
        if found is None and not may_start:
            return self._tended()
        self._start_at = None
        try:
            self._keep(found or self._spawn())
        except LaunchFailed as error:
            self._start_at = self._backoff.ended(self._clock())
            return self._tended(error.message)
        return self._tended("runs" if found is None else "goes on under a new keeper")

    def _keep(self, process: psutil.Process) -> None:
        self._process = process
        self._backoff.began(self._clock())

    def _on_end(self) -> Tended:
        self._process = None
        self.forsake()
        now = self._clock()
        self._start_at = self._backoff.ended(now)
        return self._tended(f"has ended, and is started again in {self._start_at - now:g} s {self._last_words()}")

    def _tended(self, news: str = "") -> Tended:
        pid = 0 if self._process is None else self._process.pid
        return Tended(self._order.worker_id, pid, news)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End the worker, by force if it takes too long, and start it no more."""
        process, self._process, self._start_at = self._process, None, None
        if process is not None and _is_running(process):
            _signal(process, signal.SIGTERM)
            deadline = time.monotonic() + timeout_s
            while _is_running(process) and time.monotonic() < deadline:
                time.sleep(0.02)
            _signal(process, signal.SIGKILL)
        self.note_path.unlink(missing_ok=True)
        self.forsake()

    def forsake(self) -> None:
        """Let the worker know that nobody keeps it any more, as it learns too when this process ends."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def _spawn(self) -> psutil.Process:
        """Start it, write it down. Raises LaunchFailed."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.note_path.parent.mkdir(parents=True, exist_ok=True)
        reading, self._stdin = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                done = subprocess.run(
                    [sys.executable, "-I", "-S", "-c", _DETACH, *self._command, *self._arguments()],
                    stdin=reading, stdout=subprocess.PIPE, stderr=log, text=True, check=True, timeout=SPAWN_TIMEOUT_S,
                    env={**os.environ, REDIS_URL_ENV: self._order.redis_url},
                )  # fmt: skip
            process = psutil.Process(int(done.stdout))
            note = {"pid": process.pid, "created": process.create_time()}
        except (OSError, ValueError, subprocess.SubprocessError, psutil.Error) as error:
            self.forsake()
            raise LaunchFailed(f"cannot be started: {error}") from error
        finally:
            os.close(reading)
        self.note_path.write_text(json.dumps(note), encoding="utf-8")
        return process

    def _arguments(self) -> list[str]:
        order = self._order
        config = WorkerConfig(
            join=order.join, worker_id=order.worker_id, home=self._home, host=order.host, mode=order.mode,
            use_sockets=order.use_sockets,
        )  # fmt: skip
        return [f"--profile={self._profile()}", f"--linger-s={LINGER_S:g}", *to_flags(config)]

    def _profile(self) -> str:
        if not self._order.profile_text:
            return self._order.profile
        path = self._home / "devices" / self._order.worker_id / "profile.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._order.profile_text, encoding="utf-8")
        return str(path)

    def _find(self) -> psutil.Process | None:
        """The worker that an earlier keeper of this machine has left, if it still runs."""
        try:
            note = json.loads(self.note_path.read_text(encoding="utf-8"))
            process = psutil.Process(note["pid"])
            # A number may have come to another process since.
            is_same = process.create_time() == note["created"] and _is_running(process)
        except (OSError, ValueError, KeyError, TypeError, psutil.Error):
            return None
        return process if is_same else None

    def _last_words(self) -> str:
        """What its log ends with, if that is trouble; who is killed has no time to say anything."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        if not lines or _ORDINARY.search(lines[-1]):
            return f"(log: {self.log_path})"
        return f"(it said: {lines[-1]})"


def _is_running(process: psutil.Process) -> bool:
    """Whether it computes; one that nobody has reaped yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
