"""What the link to Redis gives its callers: answers while Redis is there, and None in time whatever is wrong with it.

Against an embedded Valkey, and a Redis of the system where there is one; faults are done to processes of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.breaker import LinkState
from shoal.errors import ConfigError
from shoal.redis_connection import RedisRefusal, RefusalKind, without_secrets
from shoal.redis_link import AsyncRedisLink, session_key
from tests.support.redis import PATIENCE_S, RawRedis, redis_server, running_redis, server_url, short_directory

__all__ = ["redis_server", "server_url"]

# A call that waits for Redis gives up after 0.05 s; a machine that is busy may make us notice later.
SOON_S = 5.0


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[AsyncRedisLink]:
    link = AsyncRedisLink(url)
    await link.connect(PATIENCE_S)
    try:
        yield link
    finally:
        await link.close()
        link.check_invariants()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The events that the link told of, in order."""
    return [record.getMessage().split()[0] for record in caplog.records if record.name == "shoal.redis_link"]


async def test_what_was_set_is_there_until_it_is_deleted(server_url: str) -> None:
    async with linked(server_url) as link:
        assert await link.set(b"a", b"\0\r\n\xff", None)
        assert await link.get(b"a") == b"\0\r\n\xff"
        assert await link.mget([b"a", b"nothing"]) == [b"\0\r\n\xff", None]
        assert await link.delete(b"a", b"nothing") == 1
        assert await link.get(b"a") is None


async def test_a_value_with_a_time_to_live_goes(server_url: str) -> None:
    async with linked(server_url) as link:
        assert await link.set(b"short", b"x", 0.001)
        async with asyncio.timeout(PATIENCE_S):
            while await link.get(b"short") is not None:
                await asyncio.sleep(0.001)


async def test_sets_keep_their_members(server_url: str) -> None:
    async with linked(server_url) as link:
        assert await link.sadd(b"set", b"x", b"y") == 2
        assert await link.srem(b"set", b"x") == 1
        assert await link.smembers(b"set") == frozenset({b"y"})


async def test_the_fields_of_many_hashes_come_in_their_order(server_url: str) -> None:
    async with linked(server_url) as link:
        await link.call(("HSET", b"hash", b"0-4", b"x"))
        assert await link.hkeys_many([b"nothing", b"hash"]) == [[], [b"0-4"]]


async def test_nothing_to_ask_for_is_no_call(server_url: str) -> None:
    async with linked(server_url) as link:
        assert (await link.mget([]), await link.hkeys_many([]), await link.delete()) == ([], [], 0)
        assert link.counters.calls == 0


async def test_a_command_that_redis_refuses_is_told_from_one_without_an_answer(server_url: str) -> None:
    async with linked(server_url) as link:
        await link.set(b"text", b"x", None)
        replies = await link.call(("SADD", b"text", b"y"), ("GET", b"text"))

        assert replies is not None
        assert isinstance(replies[0], RedisRefusal)
        assert (replies[0].kind, replies[1]) == (RefusalKind.OTHER, b"x")
        assert await link.sadd(b"text", b"y") is None
        assert link.state is LinkState.OK


async def test_many_tasks_share_a_connection_and_each_gets_its_own_reply(server_url: str) -> None:
    async with linked(server_url) as link:
        for number in range(64):
            await link.set(b"n%d" % number, bytes([number]) * (1 + 1000 * number), None, timeout_s=PATIENCE_S)
        values = await asyncio.gather(*(link.get(b"n%d" % number, timeout_s=PATIENCE_S) for number in range(64)))

    assert values == [bytes([number]) * (1 + 1000 * number) for number in range(64)]


async def test_a_caller_that_is_cancelled_costs_the_others_nothing(server_url: str) -> None:
    async with linked(server_url) as link:
        await link.set(b"a", b"1", None)
        waiting = [asyncio.create_task(link.get(b"a", timeout_s=PATIENCE_S)) for _ in range(10)]
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)

    assert results[1::2] == [b"1"] * 5


def test_a_link_to_nothing_is_off() -> None:
    assert AsyncRedisLink("").state is LinkState.OFF


async def test_a_link_that_is_off_answers_without_being_asked() -> None:
    link = AsyncRedisLink("")

    assert await link.get(b"a") is None
    assert not await link.set(b"a", b"x", None)
    assert not await link.connect(PATIENCE_S)
    await link.close()


@pytest.mark.parametrize(
    "url", ["http://host", "host:6379", "unix://", "redis://", "rediss:///2", "redis://h:port", "redis://h?db=x"]
)
def test_an_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        AsyncRedisLink(url)


@pytest.mark.parametrize(
    "url",
    ["redis://:se%20cret@h:1/2", "rediss://user:se%20cret@h/2", "redis://h/?password=se%20cret", "redis://:se cret@["],
)
def test_a_password_is_not_shown(url: str) -> None:
    assert "cret" not in without_secrets(url)


def test_no_two_sessions_share_a_key() -> None:
    keys = {session_key(tenant, name) for tenant, name in [("a:b", "c"), ("a", "b:c"), ("a%3Ab", "c"), ("", "a:b:c")]}

    assert len(keys) == 4


async def test_redis_that_is_not_there_is_said_once_and_found_when_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with short_directory() as directory:
        async with linked(f"unix://{directory}/raw.sock") as link:
            assert [await link.get(b"a") for _ in range(5)] == [None] * 5
            assert link.state is LinkState.OPEN
            server = RawRedis(directory)
            try:
                await until(lambda: link.state is LinkState.OK)
                assert await link.set(b"a", b"x", None)
            finally:
                server.kill()

    assert lines(caplog)[:2] == ["redis_away", "redis_ok"]


async def test_redis_that_is_killed_and_comes_back_is_said_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running_redis() as server:
        async with linked(server.url) as link:
            server.kill()
            await until(lambda: link.state is LinkState.OPEN)
            assert await link.get(b"a") is None
            server.restart()
            await until(lambda: link.state is LinkState.OK)
            assert await link.set(b"a", b"x", None, timeout_s=PATIENCE_S)

    assert lines(caplog) == ["redis_ok", "redis_away", "redis_ok"]


async def test_calls_under_way_when_redis_is_killed_give_nothing_at_once() -> None:
    with running_redis() as server:
        async with linked(server.url) as link:
            server.process.send_signal(signal.SIGSTOP)
            waiting = [asyncio.create_task(link.get(b"a", timeout_s=PATIENCE_S * 10)) for _ in range(5)]
            await asyncio.sleep(0.01)
            server.kill()
            async with asyncio.timeout(PATIENCE_S):
                assert await asyncio.gather(*waiting) == [None] * 5


async def test_redis_that_hangs_costs_three_timeouts_and_nothing_more() -> None:
    with running_redis() as server:
        async with linked(server.url) as link:
            server.process.send_signal(signal.SIGSTOP)
            began_at = time.monotonic()
            assert [await link.get(b"a") for _ in range(200)] == [None] * 200

            assert time.monotonic() - began_at < SOON_S  # 200 timeouts would be 10 s
            assert (link.state, link.counters.timeouts) == (LinkState.OPEN, 3)
            server.process.send_signal(signal.SIGCONT)
            await until(lambda: link.state is LinkState.OK)
            assert await link.set(b"a", b"x", None, timeout_s=PATIENCE_S)


async def test_redis_that_hangs_is_noticed_while_nobody_asks() -> None:
    with running_redis() as server:
        async with linked(server.url) as link:
            server.process.send_signal(signal.SIGSTOP)
            await until(lambda: link.state is LinkState.OPEN)

            assert link.counters.calls == 0


async def test_a_full_redis_refuses_writes_and_goes_on_answering(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running_redis("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        async with linked(server.url) as link:
            await link.set(b"first", b"x", None)
            stored = [await link.set(b"k%d" % i, bytes(256 * 1024), None, timeout_s=PATIENCE_S) for i in range(40)]

            assert stored[0]
            assert not stored[-1]
            was_full = link.is_full
            assert await link.get(b"first", timeout_s=PATIENCE_S) == b"x"
            assert link.state is LinkState.OK
            await link.delete(*(b"k%d" % i for i in range(40)), timeout_s=PATIENCE_S)
            assert await link.set(b"k", b"x", None, timeout_s=PATIENCE_S)
            assert (was_full, link.is_full) == (True, False)

    assert lines(caplog) == ["redis_ok", "redis_full", "redis_has_room"]


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:secret@"])
async def test_wrong_credentials_are_said_once_and_turn_the_link_off(
    login: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running_redis("--requirepass", "secret") as server:
        url = server.url.replace("unix://", f"unix://{login}")
        async with linked(url) as link:
            assert link.state is LinkState.OFF
            assert [await link.get(b"a") for _ in range(3)] == [None] * 3

    assert lines(caplog) == ["redis_off"]
    assert "wrong" not in caplog.text
    assert ":secret" not in caplog.text


async def test_the_right_password_is_taken_from_the_url() -> None:
    with running_redis("--requirepass", "se:cret/") as server:
        async with linked(server.url.replace("unix://", "unix://:se%3Acret%2F@")) as link:
            assert await link.set(b"a", b"x", None)


class LoadingRedis:
    """Listens, and says to whatever is asked that it is loading its data."""

    def __init__(self, directory: Path) -> None:
        self.url = f"unix://{directory}/loading.sock"
        self.num_asked = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{directory}/loading.sock")
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # A link that gives it up may not have read all of what was said.
            with connection, contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    self.num_asked += 1
                    connection.sendall(b"-LOADING Redis is loading the dataset in memory\r\n")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


async def test_redis_that_loads_its_data_is_away_and_asked_again() -> None:
    with short_directory() as directory:
        server = LoadingRedis(directory)
        async with linked(server.url) as link:
            assert link.state is LinkState.OPEN
            assert await link.get(b"a") is None
            await until(lambda: server.num_asked >= 3)
            assert link.state is LinkState.OPEN
        server.close()


async def test_a_network_that_answers_nothing_does_not_hold_up_the_first_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = AsyncRedisLink(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        async with asyncio.timeout(PATIENCE_S):
            assert await link.get(b"a") is None
        assert link.state is LinkState.CONNECTING
        await link.close()


async def test_closing_ends_calls_under_way_and_later_ones() -> None:
    with running_redis() as server:
        async with linked(server.url) as link:
            server.process.send_signal(signal.SIGSTOP)
            waiting = asyncio.create_task(link.get(b"a", timeout_s=PATIENCE_S * 10))
            await asyncio.sleep(0.01)
            await link.close()
            assert await waiting is None
            assert await link.get(b"a") is None


@pytest.fixture(scope="module")
def certificate() -> Iterator[tuple[Path, Path]]:
    """A key, and a certificate of 127.0.0.1 that is signed by nobody else."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl is installed")
    with short_directory() as directory:
        key, certificate = directory / "key.pem", directory / "certificate.pem"
        subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
        kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        subprocess.run(
            [openssl, "req", "-x509", *kind, "-keyout", str(key), "-out", str(certificate), *subject],
            check=True,
            capture_output=True,
        )
        yield key, certificate


@asynccontextmanager
async def behind_tls(socket_path: Path, certificate: tuple[Path, Path]) -> AsyncIterator[int]:
    """The port of a relay that speaks TLS and leads to a server: Valkey as it is packaged does not speak it itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key, own = certificate
    context.load_cert_chain(own, key)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(str(socket_path))
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_tls_is_spoken_with_whom_we_trust_alone(certificate: tuple[Path, Path], is_trusted: bool) -> None:
    with running_redis("--requirepass", "secret") as redis:
        async with behind_tls(redis.socket_path, certificate) as port:
            trust = f"?ssl_ca_certs={certificate[1]}" if is_trusted else ""
            async with linked(f"rediss://:secret@127.0.0.1:{port}/0{trust}") as link:
                assert (link.state is LinkState.OK) == is_trusted
                assert await link.set(b"a", bytes(300_000), None, timeout_s=PATIENCE_S) == is_trusted
                assert (await link.get(b"a", timeout_s=PATIENCE_S) == bytes(300_000)) == is_trusted
