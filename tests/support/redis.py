"""Redis for tests: an embedded Valkey a module in a folder of its own, others with options, and faults done to them.

`redis_server` is what most tests need, and `server_url` what holds for any Redis: import them into a module. Every server is
ended by its fixture.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.redis_server import EmbeddedRedis, find_server
from shoal.redis_link import AsyncRedisLink

# For what takes milliseconds: a deadline of the test, not of what it tests.
PATIENCE_S = 20.0
SYSTEM_REDIS = shutil.which("redis-server")


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


@pytest.fixture(scope="module", params=["valkey", "system"])
def server_url(request: pytest.FixtureRequest, redis_server: EmbeddedRedis) -> Iterator[str]:
    if request.param == "valkey":
        yield redis_server.url
        return
    if SYSTEM_REDIS is None:
        pytest.skip("no redis-server is installed")
    with running_redis(program=Path(SYSTEM_REDIS)) as server:
        yield server.url


def asked(url: str, ask: Callable[[AsyncRedisLink], Awaitable[Any]]) -> Any:
    """What Redis says to the test itself."""

    async def run() -> Any:
        link = AsyncRedisLink(url)
        assert await link.connect(PATIENCE_S)
        try:
            return await ask(link)
        finally:
            await link.close()

    return asyncio.run(run())


def command(url: str, *words: bytes | str | int) -> Any:
    replies = asked(url, lambda link: link.call(words, timeout_s=PATIENCE_S))
    assert replies is not None
    return replies[0]
