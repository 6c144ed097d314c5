"""What the SDK tells of a fleet and of requests: models, status, explanations, made from an orchestrator's messages."""

from __future__ import annotations

import pytest

from shoal import AsyncClient, Client
from shoal.errors import InvalidRequest, SessionNotFound
from shoal.kept import Anticipated, CacheUse, DeletedSession, SessionStatus, Warmed
from shoal.types import KVReuse, LayerRange, QosClass
from shoal.v1 import admin_pb2, fleet_pb2, inference_pb2, types_pb2
from tests.support.fake_server import accepted, finished
from tests.unit.conftest import Serve


def test_an_explanation_has_routes_and_events(serve: Serve) -> None:
    server = serve()
    candidate = admin_pb2.RouteCandidate(pipeline_id="p1", score_ms=40.0, queue_ms=5.0, num_stages=2)
    route = admin_pb2.RouteDecision(pipeline_id="p1", reason="arrived", candidates=[candidate])
    server.orchestrator.explanation = admin_pb2.ExplainResponse(
        request_id="r-1",
        tenant="gold",
        qos_class=types_pb2.QOS_CLASS_LATENCY,
        state="finished",
        finish="stop",
        routes=[route],
        events=[admin_pb2.RequestEvent(at_ms=3.0, what="admitted", detail="slot 0")],
    )
    with Client(server.address) as client:
        story = client.explain("r-1")

    assert server.orchestrator.explained == ["r-1"]
    assert (story.tenant, story.qos_class, story.finish) == ("gold", QosClass.LATENCY, "stop")
    assert (story.routes[0].reason, story.routes[0].candidates[0].queue_ms) == ("arrived", 5.0)
    assert (story.events[0].what, story.events[0].detail) == ("admitted", "slot 0")


async def test_the_async_client_explains_the_newest_request(serve: Serve) -> None:
    server = serve()
    async with AsyncClient(server.address) as client:
        assert (await client.explain()).request_id == "r-1"

    assert server.orchestrator.explained == [""]


def test_models_are_listed(serve: Serve) -> None:
    with Client(serve().address) as client:
        (model,) = client.list_models()

    assert (model.name, model.num_layers, model.context_tokens, model.ready) == ("tiny", 30, 2048, True)


async def test_models_are_listed_in_asyncio(serve: Serve) -> None:
    async with AsyncClient(serve().address) as client:
        assert [model.name for model in await client.list_models()] == ["tiny"]


def test_a_status_has_its_devices_and_pipeline(serve: Serve) -> None:
    device = admin_pb2.DeviceStatus(
        worker_id="phone-1",
        profile=fleet_pb2.DeviceProfile(name="phone", kind="phone", memory_bytes=1000),
        state="ready",
        layers=types_pb2.LayerRange(start=0, stop=10),
        telemetry=fleet_pb2.Telemetry(rss_bytes=320, weight_bytes=200, kv_bytes=20),
    )
    message = admin_pb2.GetStatusResponse(
        model="tiny", ready=True, devices=[device], pipelines=[admin_pb2.PipelineStatus(pipeline_id="p-1", num_slots=8)]
    )
    with Client(serve(status=message).address) as client:
        status = client.status()

    assert status.pipeline is not None
    assert status.pipeline.num_slots == 8
    (phone,) = status.devices
    assert (phone.worker_id, phone.layers, phone.used_bytes, phone.memory_bytes) == (
        "phone-1",
        LayerRange(0, 10),
        320,
        1000,
    )


def test_a_status_before_the_first_placement_has_neither(serve: Serve) -> None:
    message = admin_pb2.GetStatusResponse(waiting_for="workers", devices=[admin_pb2.DeviceStatus(worker_id="phone-1")])
    with Client(serve(status=message).address) as client:
        status = client.status()

    assert (status.ready, status.waiting_for, status.pipeline, status.devices[0].layers) == (
        False,
        "workers",
        None,
        None,
    )


def test_a_request_names_its_session_and_what_it_wants_reused(serve: Serve) -> None:
    server = serve()
    with Client(server.address) as client:
        client.generate("hi", session_id="talk", kv_reuse="exact")
        client.generate("hi", kv_reuse=KVReuse.NONE)

    first, second = server.orchestrator.requests
    assert (first.session_id, first.kv_reuse) == ("talk", inference_pb2.KV_REUSE_EXACT)
    assert (second.session_id, second.kv_reuse) == ("", inference_pb2.KV_REUSE_NONE)


def test_a_way_of_reuse_that_there_is_not_is_refused_before_it_is_sent(serve: Serve) -> None:
    with Client(serve().address) as client, pytest.raises(InvalidRequest, match="none of: policy, exact, none"):
        client.generate("hi", kv_reuse="all")  # type: ignore[arg-type]


def test_an_answer_says_what_was_reused(serve: Serve) -> None:
    use = inference_pb2.CacheUse(cached_tokens=512, from_redis_tokens=64, codec="int8", is_exact=False)
    with Client(serve([accepted(), finished(cache=use)]).address) as client:
        assert client.generate("hi").cache == CacheUse(512, 64, "int8", is_exact=False)


def test_an_answer_of_a_server_that_says_nothing_of_reuse_was_computed(serve: Serve) -> None:
    with Client(serve().address) as client:
        assert client.generate("hi").cache == CacheUse(0, 0, "", is_exact=True)


SESSION = SessionStatus("talk", 3, 530, 512, 90.0, 600_000.0)


def test_prompts_are_warmed(serve: Serve) -> None:
    server = serve()
    with Client(server.address) as client:
        assert client.warm("hi", tenant="gold", ttl_s=5, is_public=True) == Warmed(530, 512, 64)
        client.warm(messages=[{"role": "system", "content": "be"}])
        client.warm([1, 2])

    text, chat, tokens = server.orchestrator.warmed
    assert (text.prompt, text.tenant, text.ttl_s, text.is_public) == ("hi", "gold", 5.0, True)
    assert [(message.role, message.content) for message in chat.chat.messages] == [("system", "be")]
    assert list(tokens.tokens.token_ids) == [1, 2]


def test_what_is_typed_is_told_ahead(serve: Serve) -> None:
    server = serve()
    with Client(server.address) as client:
        assert client.anticipate("hi", tenant="gold") == Anticipated(2, 5)
        client.anticipate(session_id="talk")
        with pytest.raises(TypeError, match="either a prompt or messages"):
            client.anticipate()

    text, session = server.orchestrator.anticipated
    assert (text.prompt, text.tenant) == ("hi", "gold")
    assert (session.WhichOneof("input"), session.session_id) == (None, "talk")


async def test_the_async_client_tells_ahead_too(serve: Serve) -> None:
    async with AsyncClient(serve().address) as client:
        assert await client.anticipate(messages=[{"role": "user", "content": "h"}]) == Anticipated(2, 5)


def test_sessions_are_listed_and_deleted(serve: Serve) -> None:
    server = serve()
    with Client(server.address) as client:
        assert client.sessions("gold") == (SESSION,)
        assert client.delete_session("talk", "gold") == DeletedSession(7, 1)
        server.orchestrator.sessions.clear()
        with pytest.raises(SessionNotFound):
            client.delete_session("talk")

    assert server.orchestrator.listed[0].tenant == "gold"
    assert [(one.session_id, one.tenant) for one in server.orchestrator.deleted] == [("talk", "gold"), ("talk", "")]


async def test_the_async_client_warms_lists_and_deletes(serve: Serve) -> None:
    server = serve()
    async with AsyncClient(server.address) as client:
        assert await client.warm("hi") == Warmed(530, 512, 64)
        assert await client.sessions() == (SESSION,)
        assert await client.delete_session("talk") == DeletedSession(7, 1)
