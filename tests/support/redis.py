"""Redis for tests: an embedded Valkey a module in a folder of its own, others with options, and faults done to them.

`redis_server` is what most tests need: import it into a module. Every server is ended by its fixture.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.redis_server import EmbeddedRedis, find_server

# For what takes milliseconds: a deadline of the test, not of what it tests.
PATIENCE_S = 20.0


@contextmanager
def short_directory() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    directory = Path(tempfile.mkdtemp(prefix="shoal-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A running server with 64 MiB for the module's tests, which share what is in it."""
    with short_directory() as directory:
        server = EmbeddedRedis(directory, 64 * 2**20)
        server.start()
        yield server
        server.stop()


class RawRedis:
    """A server process with any options, to be killed, stopped and started again."""

    def __init__(self, directory: Path, *options: str, program: Path | None = None) -> None:
        self.socket_path = directory / "raw.sock"
        self.url = f"unix://{self.socket_path}"
        self._command = [
            *(str(program or find_server()), "--unixsocket", str(self.socket_path), "--dir", str(directory)),
            *("--save", "", "--loglevel", "warning", *(() if "--port" in options else ("--port", "0")), *options),
        ]
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it listens, be it to refuse."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(self.socket_path))
                return
            except OSError:
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.005)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = self._spawn()
        self.wait()


@contextmanager
def running_redis(*options: str, program: Path | None = None) -> Iterator[RawRedis]:
    with short_directory() as directory:
        server = RawRedis(directory, *options, program=program)
        try:
            server.wait()
            yield server
        finally:
            server.kill()
