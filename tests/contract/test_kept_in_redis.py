"""What the orchestrator keeps in Redis, against a real server and against the fake that its unit tests use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from launch.redis_server import EmbeddedRedis
from orchestrator.block_names import BlockNames
from orchestrator.catalogue import Catalogue
from orchestrator.conversation import SessionKey
from orchestrator.session_homes import RedisHome
from orchestrator.sessions import SessionStore
from shoal.kv import BlockHash, layer_key
from shoal.redis_link import AsyncRedisLink, block_manifest_key, block_value_key
from shoal.types import LayerRange
from tests.support.fake_link import FakeLink
from tests.support.redis import PATIENCE_S, redis_server

__all__ = ["redis_server"]

MODEL = "ab" * 32
KEY = SessionKey("gold/ü", "talk")


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


def make_store(link: AsyncRedisLink) -> SessionStore:
    return SessionStore(None, RedisHome(link), MODEL, 100.0)


async def test_sessions_are_written_read_listed_and_deleted(link: AsyncRedisLink) -> None:
    store = make_store(link)
    session = replace(await store.begin(KEY), token_ids=(1, 2**32 - 1), num_turns=1, blocks=(BlockHash(b"\0" * 32),))
    store.keep(session)
    store.release(KEY)
    assert await store.write(KEY)

    restarted = make_store(link)
    assert await restarted.sessions(KEY.tenant) == [session]
    assert await restarted.begin(KEY) == session
    restarted.release(KEY)
    await restarted.tend()
    restarted.check_invariants()
    assert await restarted.take(KEY) == session
    await restarted.delete(session)
    assert await make_store(link).sessions(KEY.tenant) == []


async def test_blocks_are_found_and_deleted(link: AsyncRedisLink) -> None:
    blocks = [BlockHash(bytes([number]) * 32) for number in range(100)]
    values = []
    for block in blocks:
        values += [block_value_key(layer_key(block, layers)) for layers in (LayerRange(0, 2), LayerRange(2, 4))]
        await link.call(("HSET", block_manifest_key(block), b"0-2", b"f32:1", b"2-4", b"f32:1"))
    for value in values:
        await link.set(value, b"kv", 60.0)
    catalogue = Catalogue(link, num_layers=4)

    # On a machine that is busy, a lookup may take longer than lookups may.
    assert await catalogue.stored_prefix(blocks) in (0, len(blocks))
    assert await catalogue.delete(blocks)

    assert await catalogue.stored_prefix(blocks) == 0
    assert await link.mget(values, timeout_s=PATIENCE_S) == [None] * len(values)


async def test_public_blocks_are_known_to_the_next_orchestrator(link: AsyncRedisLink) -> None:
    tokens = range(128)
    await BlockNames(MODEL, b"s" * 32, link).make_public(tokens)
    restarted = BlockNames(MODEL, b"s" * 32, link)

    await restarted.tend()

    assert [restarted.is_public(block) for block in restarted.names("gold", tokens)] == [True, True]
