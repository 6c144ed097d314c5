"""The journal of requests against a real server and against the fake of its unit tests, and with a Redis in trouble."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from launch.redis_server import EmbeddedRedis
from orchestrator.journal import TTL_S, Journal
from shoal.redis_link import AsyncRedisLink, request_index_key, request_key
from shoal.types import FinishReason
from tests.support.fake_link import FakeLink
from tests.support.redis import PATIENCE_S, redis_server, running_redis
from tests.support.requests_kept import full_record, make_log, make_record

__all__ = ["redis_server"]

NAME = b"n" * 16
LOOK_S = 0.01


@pytest_asyncio.fixture(params=["fake", "valkey"])
async def link(request: pytest.FixtureRequest, redis_server: EmbeddedRedis) -> AsyncIterator[AsyncRedisLink]:
    if request.param == "fake":
        yield FakeLink()
        return
    link = AsyncRedisLink(redis_server.url)
    assert await link.connect(PATIENCE_S)
    await link.call(("FLUSHALL",), timeout_s=PATIENCE_S)
    yield link
    await link.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(LOOK_S)


async def test_a_request_is_found_with_all_that_was_known(link: AsyncRedisLink) -> None:
    journal, log = Journal(link, NAME), make_log(range(150), has_logprobs=True)
    journal.begin(full_record(), log)
    await journal.stop()

    entries = await Journal(link, NAME).load()

    assert entries is not None
    assert [(entry.record, entry.log) for entry in entries] == [(full_record(), log)]


async def test_a_request_that_grows_and_ends_is_found_as_it_ended(link: AsyncRedisLink) -> None:
    journal, log, record = Journal(link, NAME), make_log(), make_record()
    journal.begin(record, log)
    for token_id in range(70):
        log.append(token_id, None, 1.0)
        journal.touch(record.record_id)
        await asyncio.sleep(0)
    log.finish, log.finished = FinishReason.LENGTH, b"said"
    journal.touch(record.record_id)
    await journal.stop()

    entries = await Journal(link, NAME).load()

    assert entries is not None
    assert [entry.log for entry in entries] == [log]


async def test_what_redis_loses_without_a_word_is_written_again(link: AsyncRedisLink) -> None:
    journal, log, record = Journal(link, NAME), make_log(range(70)), make_record()
    journal.begin(record, log)
    await until(lambda: not journal._has_more)
    await link.delete(request_key(NAME, record.record_id), timeout_s=PATIENCE_S)
    journal.touch(record.record_id)
    await until(lambda: not journal._has_more)
    await journal.stop()

    entries = await Journal(link, NAME).load()

    assert entries is not None
    assert [entry.log.token_ids for entry in entries] == [list(range(70))]


async def test_a_forgotten_request_leaves_nothing(link: AsyncRedisLink) -> None:
    journal, record = Journal(link, NAME), make_record()
    journal.begin(record, make_log([1]))
    await until(lambda: not journal._has_more)
    journal.forget(record.record_id)
    await journal.stop()

    assert await link.smembers(request_index_key(NAME), timeout_s=PATIENCE_S) == frozenset()
    assert await link.call(("HGETALL", request_key(NAME, record.record_id)), timeout_s=PATIENCE_S) == [[]]


async def test_what_nobody_forgets_expires(redis_server: EmbeddedRedis) -> None:
    link = AsyncRedisLink(redis_server.url)
    assert await link.connect(PATIENCE_S)
    journal, record = Journal(link, NAME), make_record()
    journal.begin(record, make_log([1]))
    await journal.stop()

    keys = (request_key(NAME, record.record_id), request_index_key(NAME))
    replies = await link.call(*(("TTL", key) for key in keys), timeout_s=PATIENCE_S)
    await link.close()

    assert replies is not None
    assert len(replies) == 2
    assert all(TTL_S - 60 < ttl_s <= TTL_S for ttl_s in replies)


@pytest.mark.parametrize("trouble", ["killed", "hangs", "full"])
async def test_with_redis_in_trouble_nobody_waits_and_all_is_written_when_it_is_well(trouble: str) -> None:
    with running_redis("--maxmemory", "64mb", "--maxmemory-policy", "noeviction") as server:
        link = AsyncRedisLink(server.url)
        assert await link.connect(PATIENCE_S)
        journal, log, record = Journal(link, NAME), make_log(), make_record()
        journal.begin(record, log)
        await until(lambda: not journal._has_more)
        match trouble:
            case "killed":
                server.kill()
            case "hangs":
                server.process.send_signal(signal.SIGSTOP)
            case "full":
                assert await link.call(("CONFIG", "SET", "maxmemory", "1"), timeout_s=PATIENCE_S) == [b"OK"]
        for token_id in range(100):
            log.append(token_id, None, 1.0)
            journal.touch(record.record_id)
        await until(lambda: journal.counters.failed_writes > 0)
        journal.check_invariants()
        match trouble:
            case "killed":
                server.restart()
            case "hangs":
                server.process.send_signal(signal.SIGCONT)
            case "full":
                assert await link.call(("CONFIG", "SET", "maxmemory", "0"), timeout_s=PATIENCE_S) == [b"OK"]
        await until(lambda: not journal._has_more)
        await journal.stop()

        entries = await Journal(link, NAME).load()
        await link.close()

    assert entries is not None
    assert [entry.log.token_ids for entry in entries] == [list(range(100))]
