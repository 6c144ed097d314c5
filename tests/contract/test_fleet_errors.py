"""What a fleet refuses, and what it says: requests it cannot serve, devices and models it cannot use."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from orchestrator import control, membership
from orchestrator.app import Orchestrator
from shoal import AsyncClient, rpc
from shoal.config import OrchestratorConfig
from shoal.errors import (
    ConfigError,
    ConnectionFailed,
    ContextExceeded,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    ProtocolMismatch,
    RequestNotFound,
    ShoalError,
)
from shoal.status import FleetStatus
from shoal.types import PROTOCOL_VERSION, DeviceProfile
from shoal.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.support.fleet import MODEL, LocalFleet, make_device, start_fleet
from tests.support.shards import TinyModel, make_tokens
from worker import agent, holding
from worker.emulation import check_fits

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Long enough for what a test does meanwhile.
SLOW = make_device(speed=0.05, is_emulated=True)
ENDLESS: dict[str, Any] = {"max_tokens": 240, "ignore_eos": True}
VOCAB, CONTEXT = 288, 256


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(fleet_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    home = tmp_path_factory.mktemp("errors")
    async with start_fleet(fleet_model.store.root, home, [make_device()] * 2) as running:
        yield running


@pytest.fixture
def quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RETRY_S", 0.05)


async def refusal(client: AsyncClient, prompt: Any = "hello", **options: Any) -> ShoalError:
    with pytest.raises(ShoalError) as raised:
        await client.generate(prompt, **options)
    return raised.value


BAD_VALUES: list[tuple[str, dict[str, Any]]] = [
    ("sampling.temperature", {"temperature": -0.1}),
    ("sampling.temperature", {"temperature": 10.5}),
    ("sampling.temperature", {"temperature": float("nan")}),
    ("sampling.top_p", {"top_p": 0.0}),
    ("sampling.top_p", {"top_p": 1.5}),
    ("sampling.min_p", {"min_p": 1.0}),
    ("sampling.repetition_penalty", {"repetition_penalty": 0.0}),
    ("sampling.presence_penalty", {"presence_penalty": 2.5}),
    ("sampling.frequency_penalty", {"frequency_penalty": -2.5}),
    ("sampling.num_logprobs", {"num_logprobs": 21}),
    ("sampling.logit_bias", {"logit_bias": {VOCAB: 1.0}}),
    ("sampling.logit_bias", {"logit_bias": {1: 101.0}}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["x"] * 9}),
    ("stop", {"stop": ["x" * 257]}),
    ("request_id", {"request_id": "x" * 129}),
    ("request_id", {"request_id": "a\nb"}),
    ("tenant", {"tenant": "x" * 65}),
    ("tenant", {"tenant": "a\nb"}),
    ("max_tokens_per_s", {"max_tokens_per_s": -1.0}),
    ("max_tokens_per_s", {"max_tokens_per_s": float("nan")}),
    ("max_tokens_per_s", {"max_tokens_per_s": float("inf")}),
    ("ttft_target_ms", {"ttft_target_ms": 0.0}),
    ("ttft_target_ms", {"ttft_target_ms": float("nan")}),
    ("inter_token_target_ms", {"inter_token_target_ms": -1.0}),
    ("inter_token_target_ms", {"inter_token_target_ms": float("inf")}),
]


@pytest.mark.parametrize(("field", "options"), BAD_VALUES, ids=lambda value: str(value)[:40])
async def test_a_bad_value_is_refused_with_its_field(fleet: LocalFleet, field: str, options: dict[str, Any]) -> None:
    error = await refusal(fleet.client, **options)

    assert isinstance(error, InvalidRequest)
    assert error.field == field


@pytest.mark.parametrize(("prompt", "field"), [("", "prompt"), ([], "tokens")], ids=["text", "tokens"])
async def test_an_empty_prompt_is_refused(fleet: LocalFleet, prompt: Any, field: str) -> None:
    error = await refusal(fleet.client, prompt)

    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert "empty" in error.message


async def test_a_request_without_any_input_is_refused(fleet: LocalFleet) -> None:
    async with grpc.aio.insecure_channel(fleet.address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "input: is missing: give prompt, chat or tokens"


async def test_a_token_outside_the_vocabulary_is_refused(fleet: LocalFleet) -> None:
    error = await refusal(fleet.client, [5, VOCAB])

    assert isinstance(error, InvalidRequest)
    assert error.message == f"tokens.token_ids: {VOCAB} is not in the vocabulary of {VOCAB}"


async def test_messages_that_are_no_conversation_are_refused(fleet: LocalFleet) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await fleet.client.chat([{"role": "king", "content": "hello"}])

    assert raised.value.field == "chat.messages"


async def test_an_unknown_model_is_refused_and_the_served_one_named(fleet: LocalFleet) -> None:
    error = await refusal(fleet.client, model="gpt-5")

    assert isinstance(error, ModelNotFound)
    assert error.message == "model 'gpt-5' is not served here; 'tiny' is"
    assert error.field == "model"


@pytest.mark.parametrize("num_prompt", [CONTEXT, 3 * CONTEXT])
async def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(fleet: LocalFleet, num_prompt: int) -> None:
    error = await refusal(fleet.client, make_tokens(num_prompt, VOCAB))

    assert isinstance(error, ContextExceeded)
    assert f"has {num_prompt} tokens; the context is {CONTEXT}" in error.message
    assert f"to {CONTEXT - 1} tokens" in error.message


async def test_a_request_nobody_knows_cannot_be_explained(fleet: LocalFleet) -> None:
    with pytest.raises(RequestNotFound, match="'never-seen' is not among the last 1000"):
        await fleet.client.explain("never-seen")


async def test_the_story_of_a_refused_request_says_why(fleet: LocalFleet) -> None:
    await refusal(fleet.client, make_tokens(CONTEXT, VOCAB), request_id="too-long")

    story = await fleet.client.explain("too-long")

    assert (story.state, story.finish, story.prompt_tokens) == ("finished", "CONTEXT_EXCEEDED", CONTEXT)
    assert story.routes[0].pipeline_id == ""
    assert "holds 256 tokens" in story.routes[0].candidates[0].ruled_out


async def test_refused_requests_hold_nothing(fleet: LocalFleet) -> None:
    await refusal(fleet.client, top_p=0.0)
    await refusal(fleet.client, make_tokens(CONTEXT, VOCAB))

    status = await fleet.client.status()

    assert (status.num_running, status.num_waiting) == (0, 0)


async def test_a_full_queue_is_refused_with_when_to_try_again(fleet_model: TinyModel, tmp_path: Path) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path, [SLOW], max_sequences=1, max_waiting=2) as full:
        streams = [full.client.stream("hello", **ENDLESS) for _ in range(3)]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await full.until(lambda status: (status.num_running, status.num_waiting) == (1, 2))

        error = await refusal(full.client)
        other = full.client.stream("hello", tenant="another", **ENDLESS)
        reading.append(asyncio.create_task(read(other)))
        await full.until(lambda status: (status.num_running, status.num_waiting) == (1, 3))

        for stream in (*streams, other):
            stream.cancel()
        await asyncio.gather(*reading)

    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    assert "2 requests wait already" in error.message


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_without_devices_a_request_is_told_what_is_waited_for(fleet_model: TinyModel, tmp_path: Path) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path, expect_workers=2) as empty:
        nobody = await refusal(empty.client)
        empty.add_worker("w0")
        status = await empty.until(lambda status: len(status.devices) == 1)
        half = await refusal(empty.client)

    assert isinstance(nobody, NotReady)
    assert nobody.message == "not serving: 0 of 2 devices have joined"
    assert nobody.retry_after_s > 0
    assert "1 of 2 devices have joined" in half.message
    assert (status.ready, status.waiting_for) == (False, "1 of 2 devices have joined")


async def test_a_bad_request_is_refused_as_such_also_without_devices(fleet_model: TinyModel, tmp_path: Path) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path) as empty:
        assert isinstance(await refusal(empty.client, top_p=0.0), InvalidRequest)


async def test_a_worker_of_another_protocol_version_is_refused_for_good(
    fleet_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    async with start_fleet(fleet_model.store.root, tmp_path) as empty:
        worker = empty.add_worker("w0")
        with pytest.raises(ProtocolMismatch) as raised:
            await worker.end_of_itself()
        status = await empty.client.status()

    assert f"'w0' speaks protocol {PROTOCOL_VERSION + 1}, this orchestrator {PROTOCOL_VERSION}" in raised.value.message
    assert status.devices == ()


HELLO = fleet_pb2.Hello(
    protocol_version=PROTOCOL_VERSION,
    worker_id="w9",
    profile=fleet_pb2.DeviceProfile(name="box", kind="box", memory_bytes=1 << 30, speed=1.0, max_batch=4),
    runtime=fleet_pb2.RuntimeSummary(name="onnxruntime", version="1.32.0"),
)
BAD_HELLOS: dict[str, tuple[str, dict[str, Any]]] = {
    "no name": ("hello.worker_id", {"worker_id": ""}),
    "an unprintable name": ("hello.worker_id", {"worker_id": "a\nb"}),
    "a long name": ("hello.worker_id", {"worker_id": "x" * 65}),
    "an old runtime": ("hello.runtime", {"runtime": fleet_pb2.RuntimeSummary(name="onnxruntime", version="1.31.9")}),
    "another runtime": ("hello.runtime", {"runtime": fleet_pb2.RuntimeSummary(name="llama.cpp", version="9.9")}),
    "more memory for blocks than there is": (
        "hello.profile",
        {"profile": fleet_pb2.DeviceProfile(memory_bytes=1 << 20, speed=1.0, max_batch=4, host_kv_bytes=1 << 20)},
    ),
    "no memory": ("hello.profile", {"profile": fleet_pb2.DeviceProfile(speed=1.0, max_batch=4)}),
    "a time that is none": (
        "hello.profile",
        {
            "profile": fleet_pb2.DeviceProfile(
                memory_bytes=1 << 30, speed=1.0, max_batch=4, fallback_timeout_ms=float("nan")
            )
        },
    ),
}


@pytest.mark.parametrize("name", BAD_HELLOS)
async def test_a_worker_that_does_not_say_who_it_is_is_refused(fleet: LocalFleet, name: str) -> None:
    field, change = BAD_HELLOS[name]
    hello = fleet_pb2.Hello()
    hello.CopyFrom(HELLO)
    for key, value in change.items():
        hello.ClearField(key)
        hello.MergeFrom(fleet_pb2.Hello(**{key: value}))
    error = await attach_error(fleet, hello)

    assert isinstance(error, InvalidRequest)
    assert error.field == field


async def attach_error(fleet: LocalFleet, hello: fleet_pb2.Hello) -> ShoalError:
    async with grpc.aio.insecure_channel(fleet.address) as channel:
        call = fleet_pb2_grpc.FleetServiceStub(channel).Attach()
        await call.write(fleet_pb2.AttachRequest(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
    return rpc.error_from_rpc(raised.value, fleet.address)


async def test_a_worker_without_a_data_link_is_not_used(fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "UPLINK_TIMEOUT_S", 0.05)

    error = await attach_error(fleet, HELLO)

    assert isinstance(error, ConnectionFailed)
    assert "w9 attached but opened no link" in error.message
    assert (await fleet.client.status()).ready


async def test_a_device_that_is_too_small_is_named_with_the_bytes_it_lacks(
    fleet_model: TinyModel, tmp_path: Path
) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path) as empty:
        empty.add_worker("w0", make_device(memory_bytes=130 << 20))
        status = await empty.until(lambda status: "lacks" in status.waiting_for)
        error = await refusal(empty.client)

    assert "w0 (box) has 136314880 bytes" in status.waiting_for
    assert isinstance(error, NotReady)
    assert status.waiting_for[:100] in error.message


async def test_a_device_too_small_beside_another_one_is_left_out(fleet_model: TinyModel, tmp_path: Path) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path, expect_workers=2) as mixed:
        mixed.add_worker("w0", make_device(memory_bytes=1 << 20))
        mixed.add_worker("w1")
        status = await mixed.serving(1)

    assert {device.worker_id: device.layers is None for device in status.devices} == {"w0": True, "w1": False}


async def test_a_fault_of_the_orchestrator_in_an_event_is_logged_and_the_worker_attaches_again(
    fleet_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [KeyError("a fault of ours")]
    as_it_is = control.Control.on_event

    def on_event(self: control.Control, *event: Any) -> None:
        if faults and event[1].HasField("heartbeat"):
            raise faults.pop()
        as_it_is(self, *event)

    monkeypatch.setattr(control.Control, "on_event", on_event)
    async with start_fleet(fleet_model.store.root, tmp_path) as mixed:
        mixed.add_worker("w0")
        await mixed.serving(1)
        answer = await mixed.client.generate("hello", max_tokens=2)

    assert not faults
    assert "unexpected_error method=FleetServicer.Attach" in caplog.text
    assert "a fault of ours" in caplog.text
    assert answer.completion_tokens == 2


@pytest.mark.usefixtures("quick_retry")
async def test_a_shard_that_a_device_refuses_is_told_and_goes_to_another(
    fleet_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(profile: DeviceProfile, need: int, what: str) -> None:
        check_fits(replace(profile, memory_bytes=1000) if what.startswith("w0") else profile, need, what)

    monkeypatch.setattr(holding, "check_fits", check)
    async with start_fleet(fleet_model.store.root, tmp_path) as mixed:
        mixed.add_worker("w0")
        status = await mixed.until(lambda status: "lacks" in status.waiting_for)
        error = await refusal(mixed.client)
        mixed.add_worker("w1")
        await mixed.serving(1)
        answer = await mixed.client.generate("hello", max_tokens=2)

    assert status.waiting_for.startswith("w0 could not load its layers: w0: ")
    assert "the device may use 1000, so it lacks" in status.waiting_for
    assert isinstance(error, NotReady)
    assert [stage.worker_id for stage in answer.pipeline] == ["w1"]


@pytest.mark.usefixtures("quick_retry")
@pytest.mark.parametrize("fault", ["changed", "missing"])
async def test_a_corrupt_model_is_told_and_serves_once_it_is_repaired(
    fleet_model: TinyModel, tmp_path: Path, fault: str
) -> None:
    store = tmp_path / "store"
    shutil.copytree(fleet_model.store.root, store)
    blob = store / "blobs" / fleet_model.manifest.layers[1].digest
    sound = blob.read_bytes()
    if fault == "changed":
        blob.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
    else:
        blob.unlink()

    async with start_fleet(store, tmp_path) as fleet:
        fleet.add_worker("w0")
        status = await fleet.until(has_trouble_with(blob.name))
        blob.write_bytes(sound)
        await fleet.serving(1)
        answer = await fleet.client.generate("hello", max_tokens=2)

    assert "import" in status.waiting_for
    assert not status.ready
    assert answer.completion_tokens == 2


def has_trouble_with(digest: str) -> Any:
    def is_so(status: FleetStatus) -> bool:
        return "could not load" in status.waiting_for and digest[:12] in status.waiting_for

    return is_so


async def test_a_model_that_is_not_stored_is_a_clear_error(fleet_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no model other"):
        async with start_fleet(fleet_model.store.root, tmp_path, model="other"):
            pass


async def test_a_port_that_is_taken_is_a_clear_error(fleet: LocalFleet, fleet_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match=f"cannot listen on {fleet.address}: it is taken"):
        async with start_fleet(fleet_model.store.root, tmp_path, port=fleet.config.port, use_sockets=False) as second:
            await second.orchestrator.end_of_itself()


@pytest.mark.parametrize(("split", "message"), [("2,3", "shares 5 layers, the model has 4"), ("2;2", "not a list")])
async def test_a_split_that_can_never_work_is_refused_at_the_start(
    fleet_model: TinyModel, split: str, message: str
) -> None:
    config = OrchestratorConfig(home=fleet_model.store.root, model=MODEL, split=split)

    with pytest.raises(ConfigError, match=message):
        Orchestrator(config)
