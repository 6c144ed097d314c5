"""Prompts that are told as they are typed, to whole fleets with a Redis: what is in memory when the request comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from shoal.errors import ContextExceeded, InvalidRequest, ShoalError
from shoal.kept import Anticipated, CacheUse
from shoal.rpc import error_from_rpc
from shoal.status import FleetStatus
from shoal.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fleet import LOOK_S, WAIT_S, LocalFleet, make_device, start_fleet
from tests.support.redis import running_redis
from tests.support.shards import TinyModel, make_tokens

KEEPS = make_device(host_kv_bytes=64 << 20)
TURN: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
PROMPT, NEXT = make_tokens(150, 280, seed=1), make_tokens(20, 280, seed=2)
IN_MEMORY = CacheUse(128, 0, "f32", is_exact=True)


@pytest.fixture
def store(fleet_model: TinyModel) -> Path:
    return fleet_model.store.root


@asynccontextmanager
async def fleet_with_redis(store: Path, home: Path) -> AsyncIterator[LocalFleet]:
    with running_redis() as redis:
        async with start_fleet(store, home, [KEEPS, KEEPS], redis_url=redis.url) as fleet:
            yield fleet


async def restart_workers(fleet: LocalFleet, *, num_written: int = 4) -> None:
    """Start all of them anew, with empty memory, once they have written so many blocks together."""
    await fleet.until(lambda status: count(status, "redis", "puts") >= num_written)
    for worker in fleet.workers.values():
        await worker.end()
    for name in ("w0", "w1"):
        fleet.add_worker(name, KEEPS)
    await fleet.serving(2)
    assert count(await fleet.client.status(), "host", "num_blocks") == 0


def count(status: FleetStatus, name: str, what: str) -> int:
    tiers = [tier for device in status.devices for tier in device.telemetry.kv_tiers if tier.tier == name]
    return sum(getattr(tier, what) for tier in tiers)


async def anticipate(fleet: LocalFleet, *args: Any, **options: Any) -> Anticipated:
    """Wait until Redis answers again and blocks have come of it, at both stages."""
    async with asyncio.timeout(WAIT_S):
        while (found := await fleet.client.anticipate(*args, **options)).num_blocks == 0:
            await asyncio.sleep(LOOK_S)
        while count(await fleet.client.status(), "host", "num_blocks") < 2 * found.num_blocks:
            await asyncio.sleep(LOOK_S)
            await fleet.client.anticipate(*args, **options)
    return found


async def refusal(fleet: LocalFleet, *args: Any, **options: Any) -> ShoalError:
    with pytest.raises(ShoalError) as raised:
        await fleet.client.anticipate(*args, **options)
    return raised.value


async def test_what_was_told_ahead_is_in_memory_when_the_request_comes(store: Path, tmp_path: Path) -> None:
    async with fleet_with_redis(store, tmp_path) as fleet:
        first = await fleet.client.generate(PROMPT, **TURN)
        await restart_workers(fleet)

        # Less than a block of it: the tenant asked for a prompt like it before.
        assert await anticipate(fleet, PROMPT[:50]) == Anticipated(1, 2)
        again = await fleet.client.generate(PROMPT, **TURN)

    assert (again.cache, again.token_ids) == (IN_MEMORY, first.token_ids)


async def test_a_session_that_somebody_comes_back_to_is_brought_into_memory(store: Path, tmp_path: Path) -> None:
    async with fleet_with_redis(store, tmp_path) as fleet:
        await fleet.client.generate(PROMPT, session_id="talk", **TURN)
        await restart_workers(fleet)
        await fleet.restart_orchestrator()
        await fleet.serving(2)

        assert await anticipate(fleet, session_id="talk") == Anticipated(1, 2)
        assert (await fleet.client.anticipate(NEXT[:5], session_id="talk")).num_blocks == 2
        again = await fleet.client.generate(NEXT, session_id="talk", **TURN)

    assert again.cache == IN_MEMORY


async def test_nobody_is_told_of_what_another_tenant_asked_for(store: Path, tmp_path: Path) -> None:
    async with fleet_with_redis(store, tmp_path) as fleet:
        await fleet.client.generate(PROMPT, tenant="gold", session_id="talk", **TURN)
        await fleet.until(lambda status: count(status, "redis", "puts") >= 4)

        assert await fleet.client.anticipate(PROMPT, tenant="free") == Anticipated(0, 0)
        assert await fleet.client.anticipate(PROMPT[:5], tenant="free", session_id="talk") == Anticipated(0, 0)
        assert (await fleet.client.anticipate(PROMPT, tenant="gold")).num_blocks == 2


async def test_a_deleted_session_is_not_guessed_any_more(store: Path, tmp_path: Path) -> None:
    async with fleet_with_redis(store, tmp_path) as fleet:
        await fleet.client.generate(PROMPT, session_id="talk", **TURN)
        await fleet.until(lambda status: count(status, "redis", "puts") >= 4)
        await fleet.client.delete_session("talk")

        assert await fleet.client.anticipate(PROMPT) == Anticipated(0, 0)


async def test_without_redis_there_is_nothing_to_fetch(store: Path, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [KEEPS]) as fleet:
        await fleet.client.generate(PROMPT, **TURN)

        assert await fleet.client.anticipate(PROMPT) == Anticipated(0, 0)


async def test_what_cannot_be_a_prompt_is_refused_by_its_field(store: Path, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path) as fleet:
        assert await fleet.client.anticipate(PROMPT) == Anticipated(0, 0)  # no device has joined: no error
        fields = [
            (await refusal(fleet, [9999])).field,
            (await refusal(fleet, "")).field,
            (await refusal(fleet, "a", tenant="\n")).field,
            (await refusal(fleet, "a", session_id="a b")).field,
        ]
        too_long = await refusal(fleet, "x" * 1_000_000)

    assert fields == ["tokens.token_ids", "prompt", "tenant", "session_id"]
    assert isinstance(too_long, ContextExceeded)


async def test_neither_text_nor_session_is_no_prompt(store: Path, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path) as fleet:
        stub = inference_pb2_grpc.InferenceServiceStub(fleet.client._open())
        with pytest.raises(grpc.RpcError) as raised:
            await stub.Anticipate(inference_pb2.AnticipateRequest())
    error = error_from_rpc(raised.value, fleet.address)
    assert isinstance(error, InvalidRequest)
    assert error.field == "input"
