"""Sessions, warmed prompts and reused KV of whole fleets in one process, as their clients meet them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.redis_server import EmbeddedRedis
from orchestrator.app import SESSIONS_FILE
from orchestrator.conversation import SessionKey, unpack
from orchestrator.session_homes import RedisHome
from shoal.errors import ContextExceeded, InvalidRequest, SessionBusy, SessionNotFound, ShoalError
from shoal.generation import Generation
from shoal.kept import CacheUse, SessionStatus
from shoal.redis_link import AsyncRedisLink
from shoal.status import FleetStatus
from tests.support.fleet import LOOK_S, WAIT_S, LocalFleet, make_device, start_fleet
from tests.support.redis import redis_server, running_redis
from tests.support.shards import TinyModel, make_tokens
from tests.support.streams import Reader

__all__ = ["redis_server"]

KEEPS = make_device(host_kv_bytes=64 << 20)
SLOW = make_device(host_kv_bytes=64 << 20, speed=0.05, is_emulated=True)
TURN: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
FIRST, SECOND, THIRD = make_tokens(100, 280, seed=1), make_tokens(20, 280, seed=2), make_tokens(10, 280, seed=3)
NOT_SETTLED: dict[str, Any] = {"kv_reuse": "none"}


@pytest.fixture
def store(fleet_model: TinyModel) -> Path:
    return fleet_model.store.root


@asynccontextmanager
async def fleet_of(store: Path, home: Path, *devices: Any, **options: Any) -> AsyncIterator[LocalFleet]:
    async with start_fleet(store, home, devices or [KEEPS, KEEPS], **options) as fleet:
        yield fleet


async def session_of(fleet: LocalFleet, session_id: str = "talk") -> SessionStatus:
    return next(one for one in await fleet.client.sessions() if one.session_id == session_id)


async def settled(fleet: LocalFleet, kept_tokens: int, session_id: str = "talk") -> SessionStatus:
    """Wait until the KV of so many tokens of a session is kept."""
    async with asyncio.timeout(WAIT_S):
        while (session := await session_of(fleet, session_id)).kept_tokens < kept_tokens:
            await asyncio.sleep(LOOK_S)
    return session


async def refusal(fleet: LocalFleet, prompt: Any = None, **options: Any) -> ShoalError:
    with pytest.raises(ShoalError) as raised:
        await fleet.client.generate(prompt, **options)
    return raised.value


def outcome(answer: Generation) -> tuple[tuple[int, ...], int]:
    return answer.token_ids, answer.prompt_tokens


async def test_a_turn_is_answered_as_the_whole_conversation_would_be(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        first = await fleet.client.generate(FIRST, session_id="talk", **TURN)
        second = await fleet.client.generate(SECOND, session_id="talk", **TURN)
        third = await fleet.client.generate(THIRD, session_id="talk", **TURN)

        whole = [*FIRST, *first.token_ids, *SECOND]
        assert outcome(second) == outcome(await fleet.client.generate(whole, **TURN, **NOT_SETTLED))
        whole += [*second.token_ids, *THIRD]
        assert outcome(third) == outcome(await fleet.client.generate(whole, **TURN, **NOT_SETTLED))
        session = await session_of(fleet)
        assert (session.num_turns, session.num_tokens) == (3, len(whole) + 8)


async def test_the_turns_of_a_chat_are_those_of_the_template(store: Path, tmp_path: Path) -> None:
    system, hello, bye = (
        {"role": role, "content": text} for role, text in (("system", "be"), ("user", "hello"), ("user", "bye"))
    )
    async with fleet_of(store, tmp_path) as fleet:
        first = await fleet.client.chat([system, hello], session_id="talk", **TURN)
        second = await fleet.client.chat([bye], session_id="talk", **TURN)

        assert first.prompt_tokens + 8 < second.prompt_tokens
        refused = await refusal(fleet, messages=[system, bye], session_id="talk")
    assert isinstance(refused, InvalidRequest)
    assert "a system message comes with the first turn" in refused.message


async def test_what_came_before_is_settled_and_not_computed_again(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        first = await fleet.client.generate(FIRST, session_id="talk", max_tokens=40, ignore_eos=True)
        assert first.cache == CacheUse()
        await settled(fleet, kept_tokens=128)

        second = await fleet.client.generate(SECOND, session_id="talk", **TURN)
        whole = [*FIRST, *first.token_ids, *SECOND]
        computed = await fleet.client.generate(whole, **TURN, **NOT_SETTLED)

    assert second.cache == CacheUse(128, 0, "f32", is_exact=True)
    assert computed.cache == CacheUse()
    assert outcome(second) == outcome(computed)


async def test_two_turns_of_a_session_at_the_same_time_are_one_too_many(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path, SLOW) as fleet:
        reader = Reader(fleet.client.stream(THIRD, session_id="talk", max_tokens=200, ignore_eos=True))
        await reader.has_started()

        refused = await refusal(fleet, SECOND, session_id="talk")
        with pytest.raises(SessionBusy):
            await fleet.client.delete_session("talk")
        await fleet.client.generate(SECOND, session_id="another", max_tokens=1)
        await fleet.client.generate(SECOND, session_id="talk", tenant="another", max_tokens=1)

        reader.stream.cancel()
        await reader.result()
    assert isinstance(refused, SessionBusy)
    assert (refused.is_retryable, refused.retry_after_s, refused.field) == (True, 1.0, "session_id")


async def test_a_client_that_leaves_has_what_it_received_in_its_session(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path, SLOW) as fleet:
        reader = Reader(fleet.client.stream(THIRD, session_id="talk", max_tokens=200, ignore_eos=True))
        await reader.has_started()
        reader.stream.cancel()
        received = await reader.result()
        await fleet.until(lambda status: status.num_running == 0)

        session = await session_of(fleet)
        assert session.num_turns == 1
        assert len(THIRD) + received.completion_tokens <= session.num_tokens < len(THIRD) + 200
        assert (await fleet.client.generate(SECOND, session_id="talk", max_tokens=1)).prompt_tokens > session.num_tokens


async def test_a_refused_turn_leaves_the_session_as_it_was(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        await fleet.client.generate(FIRST, session_id="talk", **TURN)

        refused = await refusal(fleet, [9999], session_id="talk")
        await fleet.client.generate(THIRD, session_id="talk", **TURN)

        assert (await session_of(fleet)).num_tokens == len(FIRST) + 8 + len(THIRD) + 8
    assert isinstance(refused, InvalidRequest)


async def test_a_turn_that_ended_by_an_error_did_not_happen(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path, SLOW) as fleet:
        reader = Reader(fleet.client.stream(THIRD, session_id="talk", max_tokens=200, ignore_eos=True))
        await reader.has_started()
        await fleet.workers["w0"].vanish()
        assert (await reader.error()).reason == "WORKER_LOST"
        fleet.add_worker("w0", KEEPS)
        await fleet.serving(1)

        assert await fleet.client.sessions() == ()
        assert (await fleet.client.generate(THIRD, session_id="talk", **TURN)).prompt_tokens == len(THIRD)


async def test_a_conversation_is_not_settled_where_a_request_would_wait_for_it(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path, SLOW, max_sequences=1) as fleet:
        await fleet.client.generate(FIRST, session_id="talk", max_tokens=60, ignore_eos=True)
        await fleet.until(lambda status: status.num_running == 1)

        # One of its own class, which does not take its slot.
        await fleet.client.generate(THIRD, qos_class="throughput", **TURN)
        await fleet.until(lambda status: (status.num_running, status.num_waiting) == (0, 0))

        assert (await session_of(fleet)).kept_tokens == 64


async def test_a_conversation_longer_than_the_context_is_refused_with_the_numbers(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        await fleet.client.generate(FIRST, session_id="talk", **TURN)

        refused = await refusal(fleet, make_tokens(150, 280, seed=5), session_id="talk")

        assert (await session_of(fleet)).num_turns == 1
    assert isinstance(refused, ContextExceeded)
    assert refused.field == "session_id"
    assert (
        "session 'talk' has 108 tokens, and this turn adds 150: the prompt has 258 tokens; the context is 256"
        in refused.message
    )
    assert "or begin a new one" in refused.message


async def test_a_session_that_outgrows_its_pipeline_may_go_on_with_its_first_and_last_tokens(
    store: Path, tmp_path: Path
) -> None:
    turn = make_tokens(60, 280, seed=6)
    async with fleet_of(store, tmp_path, context_tokens=160) as fleet:
        first = await fleet.client.generate(FIRST, session_id="talk", **TURN)
        second = await fleet.client.generate(turn, session_id="talk", context_overflow="window", **TURN)

        before = [*FIRST, *first.token_ids]
        kept = [*before[:64], *before[-16:], *turn]
        assert (first.dropped_tokens, second.dropped_tokens) == (0, len(before) - 80)
        assert outcome(second) == outcome(await fleet.client.generate(kept, **TURN, **NOT_SETTLED))
        assert (await session_of(fleet)).num_tokens == len(kept) + 8


@pytest.mark.parametrize("session_id", ["a b", "ä", "a/b", "x" * 129, "a\n"])
async def test_a_session_has_a_plain_name(store: Path, tmp_path: Path, session_id: str) -> None:
    async with fleet_of(store, tmp_path, KEEPS) as fleet:
        refused = await refusal(fleet, THIRD, session_id=session_id)

    assert isinstance(refused, InvalidRequest)
    assert "letters, digits and characters of - _ . :" in refused.message


async def test_a_deleted_session_is_computed_anew(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        await fleet.client.generate(FIRST, session_id="talk", **TURN)
        deleted = await fleet.client.delete_session("talk")
        again = await fleet.client.generate(FIRST, session_id="talk", **TURN)

        assert (deleted.num_blocks_deleted, deleted.num_blocks_shared) == (1, 0)
        assert (again.prompt_tokens, again.cache) == (len(FIRST), CacheUse())
        with pytest.raises(SessionNotFound):
            await fleet.client.delete_session("never")


async def test_a_warmed_prompt_is_not_computed_again(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        warmed = await fleet.client.warm(FIRST, ttl_s=60.0)
        again = await fleet.client.warm([*FIRST, *FIRST])
        answer = await fleet.client.generate(FIRST, **TURN)
        of_another = await fleet.client.generate(FIRST, tenant="another", **TURN)

    assert (warmed.prompt_tokens, warmed.kept_tokens, warmed.cached_tokens) == (100, 64, 0)
    assert (again.kept_tokens, again.cached_tokens) == (192, 64)
    assert answer.cache == CacheUse(64, 0, "f32", is_exact=True)
    assert of_another.cache == CacheUse()
    assert answer.token_ids == of_another.token_ids


async def test_pinned_blocks_outlive_the_sessions_that_use_them(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        await fleet.client.warm(FIRST, ttl_s=60.0)
        await fleet.client.generate(FIRST, session_id="talk", **TURN)
        deleted = await fleet.client.delete_session("talk")

        assert (deleted.num_blocks_deleted, deleted.num_blocks_shared) == (0, 1)
        assert (await fleet.client.generate(FIRST, **TURN)).cache.cached_tokens == 64


async def test_what_is_warmed_for_all_is_used_by_all(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        await fleet.client.warm(FIRST, is_public=True)

        for tenant in ("gold", "free"):
            assert (await fleet.client.generate(FIRST, tenant=tenant, **TURN)).cache.cached_tokens == 64


async def test_a_system_message_is_warmed_for_the_chats_that_begin_with_it(store: Path, tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief, be kind, and be sure of what you say " * 4}
    async with fleet_of(store, tmp_path) as fleet:
        warmed = await fleet.client.warm(messages=[system])
        answer = await fleet.client.chat([system, {"role": "user", "content": "hello"}], **TURN)

    assert answer.cache.cached_tokens == warmed.kept_tokens >= 64


async def test_less_than_a_block_cannot_be_kept(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path, KEEPS) as fleet:
        warmed = await fleet.client.warm(SECOND)

    assert (warmed.prompt_tokens, warmed.kept_tokens) == (20, 0)


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan"), 1e9])
async def test_a_time_that_is_none_is_refused(store: Path, tmp_path: Path, ttl_s: float) -> None:
    async with fleet_of(store, tmp_path, KEEPS) as fleet:
        with pytest.raises(InvalidRequest, match=r"ttl_s: .* must be from 0"):
            await fleet.client.warm(FIRST, ttl_s=ttl_s)


async def test_without_devices_that_keep_kv_sessions_go_on_all_the_same(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path, make_device()) as fleet:
        await fleet.client.generate(FIRST, session_id="talk", **TURN)
        second = await fleet.client.generate(SECOND, session_id="talk", **TURN)

    assert (second.prompt_tokens, second.cache) == (128, CacheUse())


@pytest.mark.parametrize("with_redis", [False, True], ids=["file", "redis"])
async def test_a_session_outlives_the_orchestrator(
    store: Path, tmp_path: Path, redis_server: EmbeddedRedis, with_redis: bool
) -> None:
    options = {"redis_url": redis_server.url} if with_redis else {}
    async with fleet_of(store, tmp_path, KEEPS, **options) as fleet:
        first = await fleet.client.generate(FIRST, session_id="restarted", **TURN)
        if with_redis:
            (store / SESSIONS_FILE).unlink()
        await fleet.restart_orchestrator()
        await fleet.serving(1)

        second = await fleet.client.generate(SECOND, session_id="restarted", **TURN)
        whole = [*FIRST, *first.token_ids, *SECOND]
        assert outcome(second) == outcome(await fleet.client.generate(whole, **TURN, **NOT_SETTLED))


async def test_after_all_processes_were_restarted_what_was_kept_is_not_computed_again(
    store: Path, tmp_path: Path
) -> None:
    with running_redis() as redis:
        async with fleet_of(store, tmp_path, KEEPS, KEEPS, redis_url=redis.url) as fleet:
            first = await fleet.client.generate(FIRST, session_id="talk", max_tokens=40, ignore_eos=True)
            await settled(fleet, 128)
            await fleet.until(lambda status: written(status) >= 4)
            for worker in fleet.workers.values():
                await worker.end()
            await fleet.restart_orchestrator()
            for name in ("w0", "w1"):
                fleet.add_worker(name, KEEPS)
            await fleet.serving(2)

            second = await fleet.client.generate(SECOND, session_id="talk", **TURN)
            whole = [*FIRST, *first.token_ids, *SECOND]
            assert outcome(second) == outcome(await fleet.client.generate(whole, **TURN, **NOT_SETTLED))
    assert second.cache == CacheUse(128, 128, "f32", is_exact=True)


async def test_a_deleted_session_leaves_nothing_in_redis(store: Path, tmp_path: Path) -> None:
    with running_redis() as redis:
        async with fleet_of(store, tmp_path, KEEPS, KEEPS, redis_url=redis.url) as fleet:
            await fleet.client.generate(FIRST, session_id="talk", **TURN)
            await fleet.until(lambda status: written(status) >= 2)

            await fleet.client.delete_session("talk")

            link = AsyncRedisLink(redis.url)
            await link.connect(WAIT_S)
            (keys,) = await link.call(("KEYS", "*"), timeout_s=WAIT_S) or [None]
            await link.close()
    # Requests are there for a minute more, for clients that lost the end of their answer; and of whom there were sessions.
    assert [key for key in keys if not key.startswith(b"shoal:request")] == [b"shoal:session-tenants"]


def written(status: FleetStatus) -> int:
    """Values and blocks that workers have written to Redis."""
    tiers = [tier for device in status.devices for tier in device.telemetry.kv_tiers if tier.tier == "redis"]
    return sum(tier.puts for tier in tiers)


async def test_a_session_goes_on_though_redis_is_away_at_the_start_and_redis_hears_of_it_later(
    store: Path, tmp_path: Path
) -> None:
    with running_redis("--appendonly", "yes", "--appendfsync", "always") as redis:
        async with fleet_of(store, tmp_path, KEEPS, redis_url=redis.url) as fleet:
            await fleet.client.generate(FIRST, session_id="talk", **TURN)
            await fleet.client.generate(FIRST, session_id="over", **TURN)
            redis.kill()
            await fleet.restart_orchestrator()
            await fleet.serving(1)

            second = await fleet.client.generate(SECOND, session_id="talk", **TURN)
            await fleet.client.generate(SECOND, session_id="new", **TURN)
            await fleet.client.delete_session("over")
            assert [one.session_id for one in await fleet.client.sessions()] == ["new", "talk"]
            redis.restart()
            async with asyncio.timeout(WAIT_S):
                while await sessions_in(redis.url) != {"talk": 2, "new": 1}:
                    await asyncio.sleep(LOOK_S)
            assert [one.session_id for one in await fleet.client.sessions()] == ["new", "talk"]

    assert second.prompt_tokens == len(FIRST) + 8 + len(SECOND)


async def sessions_in(url: str) -> dict[str, int]:
    """The turns of the sessions that Redis has."""
    link = AsyncRedisLink(url)
    await link.connect(WAIT_S)
    home = RedisHome(link)
    keys = [SessionKey("default", one) for one in await home.session_ids("default") or ()]
    records = await home.get(keys) or {}
    await link.close()
    return {key.session_id: unpack(key, record).num_turns for key, record in records.items()}
