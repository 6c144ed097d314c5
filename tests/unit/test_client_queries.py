"""What the SDK tells of a fleet and of requests: models, status, explanations, made from an orchestrator's messages."""

from __future__ import annotations

from shoal import AsyncClient, Client
from shoal.types import LayerRange, QosClass
from shoal.v1 import admin_pb2, fleet_pb2, types_pb2
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
