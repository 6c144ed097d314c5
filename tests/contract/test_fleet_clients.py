"""Clients that leave, how a fleet shows its health, and how an orchestrator ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from orchestrator.app import SERVICES
from shoal.errors import NotReady
from shoal.status import FleetStatus
from shoal.types import FinishReason
from tests.support.fleet import WAIT_S, start_fleet
from tests.support.shards import TinyModel
from tests.support.streams import ENDLESS, SLOW, Reader, start_stream

QUICK_BEATS: dict[str, Any] = {"heartbeat_s": 0.05}

Store = Path


@pytest.fixture
def store(fleet_model: TinyModel) -> Store:
    return fleet_model.store.root


def is_empty(status: FleetStatus) -> bool:
    held = [(pipeline.used_slots, pipeline.used_kv_tokens) for pipeline in status.pipelines]
    return set(held) == {(0, 0)} and status.num_waiting == 0


@pytest.mark.parametrize("options", [{}, {"qos_class": "latency"}], ids=["shared", "solo"])
async def test_a_client_that_leaves_frees_slot_and_kv_everywhere(
    store: Store, tmp_path: Path, options: dict[str, Any]
) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, **QUICK_BEATS) as fleet:
        reader = await start_stream(fleet, **options)
        await fleet.until(lambda status: all(one.telemetry.kv_bytes > 0 for one in status.devices))

        reader.stream.cancel()

        await fleet.until(is_empty, bound_s=1.0)
        await fleet.until(lambda status: not any(one.telemetry.kv_bytes for one in status.devices), bound_s=1.0)
        assert (await reader.result()).completion_tokens < 240


async def test_a_client_that_closes_its_connection_frees_slot_and_kv(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        other = fleet.another_client()
        reader = Reader(other.stream("hello", **ENDLESS))
        await reader.has_started()

        await other.close()

        await fleet.until(is_empty, bound_s=1.0)
        await asyncio.wait({reader.task})


async def test_a_client_that_leaves_the_queue_is_forgotten(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW], max_sequences=1) as fleet:
        running = await start_stream(fleet)
        waiting = Reader(fleet.client.stream("hello", **ENDLESS))
        await fleet.until(lambda status: status.num_waiting == 1)

        waiting.stream.cancel()

        await fleet.until(lambda status: (status.num_running, status.num_waiting) == (1, 0), bound_s=1.0)
        running.stream.cancel()
        await asyncio.wait({running.task, waiting.task})


async def test_a_freed_slot_goes_to_the_one_that_waits(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW], max_sequences=1) as fleet:
        running = await start_stream(fleet)
        waiting = Reader(fleet.client.stream("hello", max_tokens=2))
        await fleet.until(lambda status: status.num_waiting == 1)

        running.stream.cancel()

        assert (await waiting.result()).completion_tokens == 2
        await asyncio.wait({running.task})


async def health_of(channel: grpc.aio.Channel, service: str = "") -> str:
    request = health_pb2.HealthCheckRequest(service=service)
    response = await health_pb2_grpc.HealthStub(channel).Check(request)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def watch_health(channel: grpc.aio.Channel) -> AsyncIterator[str]:
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    async for response in call:
        yield str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def test_health_follows_whether_a_pipeline_serves(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path) as fleet, grpc.aio.insecure_channel(fleet.address) as channel:
        states = watch_health(channel)
        async with asyncio.timeout(WAIT_S):
            assert await anext(states) == "NOT_SERVING"
            fleet.add_worker("w0")
            assert await anext(states) == "SERVING"
            assert await health_of(channel, "shoal.v1.InferenceService") == "SERVING"
            await fleet.workers["w0"].end()
            assert await anext(states) == "NOT_SERVING"
        assert await health_of(channel, "shoal.v1.AdminService") == "SERVING"
        await states.aclose()  # type: ignore[attr-defined]


async def test_reflection_lists_all_services(store: Store, tmp_path: Path) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with start_fleet(store, tmp_path) as fleet, grpc.aio.insecure_channel(fleet.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        (response,) = [one async for one in call]

    names = {service.name for service in response.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_an_orchestrator_that_drains_refuses_the_new_and_ends_the_running(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW], drain_s=WAIT_S) as fleet:
        reader = await start_stream(fleet, max_tokens=60)
        async with grpc.aio.insecure_channel(fleet.address) as channel:
            fleet.orchestrator.stopping.set()
            async with asyncio.timeout(WAIT_S):
                async for state in watch_health(channel):
                    if state == "NOT_SERVING":
                        break
        with pytest.raises(NotReady) as raised:
            await fleet.client.generate("hello")

        result = await reader.result()
        await fleet.orchestrator.end()

    assert "shutting down" in raised.value.message
    assert (result.completion_tokens, result.finish_reason) == (60, FinishReason.LENGTH)


async def test_answers_that_outlast_the_drain_end_with_an_error(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW], drain_s=0.0) as fleet:
        reader = await start_stream(fleet)

        await fleet.orchestrator.end()
        error = await reader.error()

    assert isinstance(error, NotReady)
    assert "shut down" in error.message
