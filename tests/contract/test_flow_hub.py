"""The orchestrator's end of the data plane, by plain socket and by gRPC: who is let in, what goes where, who is lost."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal.codec import MAX_FRAME_BYTES, MAX_HELLO_BYTES
from shoal.errors import ConnectionFailed, InvalidRequest, ProtocolMismatch
from shoal.types import PROTOCOL_VERSION, PipelineId, WorkerId
from shoal.v1 import flow_pb2
from tests.support.hub import GrpcUplink, HubBench, SocketUplink
from tests.support.peers import HOST, WAIT_S, make_frame, make_hello

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
P1, P2 = PipelineId("p1"), PipelineId("p2")


@pytest.fixture
async def bench() -> AsyncIterator[HubBench]:
    bench = HubBench()
    await bench.start()
    bench.hub.routes = {P1: (W0,)}
    yield bench
    await bench.close()


both = pytest.mark.parametrize("kind", ["socket", "grpc"])


def make_result(step: int, pipeline_id: PipelineId = P1) -> flow_pb2.Frame:
    return flow_pb2.Frame(pipeline_id=pipeline_id, epoch=1, to_stage=-1, step_result=flow_pb2.StepResult(step=step))


ours = [make_result(step) for step in range(3)]


@both
async def test_frames_for_the_orchestrator_come_in_order(bench: HubBench, kind: str) -> None:
    uplink = await bench.join(kind)

    await uplink.send(*ours)

    assert [await bench.next_frame() for _ in ours] == ours


@both
async def test_who_asks_how_far_we_are_gets_its_echo_back_and_nobody_else_hears_of_it(
    bench: HubBench, kind: str
) -> None:
    uplink = await bench.join(kind)

    await uplink.send(flow_pb2.Frame(echo=flow_pb2.Echo(sent_ns=7)), ours[0])

    assert await uplink.receive() == flow_pb2.Frame(echo=flow_pb2.Echo(sent_ns=7, is_reply=True))
    assert await bench.next_frame() == ours[0]


@both
async def test_frames_that_follow_the_hello_at_once_are_not_lost(bench: HubBench, kind: str) -> None:
    uplink = await bench.dial(kind)

    await uplink.send(make_hello(token=bench.hub.expect(W0)), *ours)

    assert [await bench.next_frame() for _ in ours] == ours


@both
async def test_frames_for_a_worker_come_in_order(bench: HubBench, kind: str) -> None:
    uplink = await bench.join(kind)
    frames = [make_frame(step, num_bytes=100_000) for step in range(20)]

    for frame in frames:
        bench.hub.send(W0, frame)

    assert [await uplink.receive() for _ in frames] == frames


@pytest.mark.parametrize(("sender", "receiver"), [("socket", "socket"), ("socket", "grpc"), ("grpc", "socket")])
async def test_frames_between_stages_are_relayed_in_order(bench: HubBench, sender: str, receiver: str) -> None:
    first, second = await bench.join(sender, W0), await bench.join(receiver, W1)
    bench.hub.routes = {P1: (W0, W1)}
    frames = [make_frame(step, to_stage=1, num_bytes=10_000) for step in range(20)]

    await first.send(*frames)

    assert [await second.receive() for _ in frames] == frames
    assert bench.frames.empty()


def of_kind(to_stage: int = -1, **body: Any) -> flow_pb2.Frame:
    return flow_pb2.Frame(pipeline_id="p1", epoch=1, to_stage=to_stage, **body)


@both
async def test_what_stages_keep_is_told_from_stage_to_stage_and_by_the_last_one(bench: HubBench, kind: str) -> None:
    bench.hub.routes = {P1: (W0, W1)}
    first, last = await bench.join(kind, W0), await bench.join(kind, W1)
    relayed = [
        of_kind(1, restore=flow_pb2.Restore(sequence_id=1)),
        of_kind(1, prefetch=flow_pb2.Prefetch(timeout_ms=1)),
        of_kind(1, keep_blocks=flow_pb2.KeepBlocks(ttl_s=1)),
        of_kind(1, forget_blocks=flow_pb2.ForgetBlocks(block_hashes=[b"x" * 32])),
    ]
    restored = of_kind(restored=flow_pb2.Restored(sequence_id=1))

    await first.send(*relayed)
    assert [await last.receive() for _ in relayed] == relayed
    await last.send(restored)

    assert await bench.next_frame() == restored


@both
async def test_what_the_last_stage_has_to_say_is_for_the_orchestrator_alone(bench: HubBench, kind: str) -> None:
    bench.hub.routes = {P1: (W0, W1)}
    first, last = await bench.join(kind, W0), await bench.join(kind, W1)

    await last.send(of_kind(0, restored=flow_pb2.Restored(sequence_id=1)), make_frame(9, to_stage=0))

    assert await first.receive() == make_frame(9, to_stage=0)


def forged_frames() -> dict[str, flow_pb2.Frame]:
    """What only another stage may send: W1 is the second of three."""
    return {
        "a result": make_result(1),
        "the next step of a burst": make_frame(1, to_stage=0),
        "a step for the stage after another": make_frame(1, to_stage=1),
        "a cancel for the first": flow_pb2.Frame(pipeline_id="p1", epoch=1, to_stage=0, cancel=flow_pb2.Cancel()),
        "a report of what was restored": of_kind(restored=flow_pb2.Restored(sequence_id=1)),
        "a report of what was restored to a stage": of_kind(2, restored=flow_pb2.Restored(sequence_id=1)),
        "a restore to the orchestrator": of_kind(restore=flow_pb2.Restore(sequence_id=1)),
        "blocks to forget for the first": of_kind(0, forget_blocks=flow_pb2.ForgetBlocks()),
        "blocks to keep for the first": of_kind(0, keep_blocks=flow_pb2.KeepBlocks()),
        "blocks to fetch for the first": of_kind(0, prefetch=flow_pb2.Prefetch()),
        "a failure to another stage": of_kind(2, step_failed=flow_pb2.StepFailed(step=1)),
        "nothing": of_kind(),
    }


@both
@pytest.mark.parametrize("name", forged_frames())
async def test_a_stage_cannot_speak_for_another(bench: HubBench, kind: str, name: str) -> None:
    bench.hub.routes = {P1: (W0, W1, W2)}
    others = [await bench.join(kind, worker_id) for worker_id in (W0, W2)]
    forger = await bench.join(kind, W1)

    await forger.send(forged_frames()[name], make_frame(9, to_stage=2))

    assert await others[1].receive() == make_frame(9, to_stage=2)
    assert bench.frames.empty()


@both
async def test_a_worker_without_a_stage_cannot_speak_at_all(bench: HubBench, kind: str) -> None:
    member, stranger = await bench.join(kind, W0), await bench.join(kind, W1)

    failed = flow_pb2.Frame(pipeline_id="p1", epoch=1, to_stage=-1, step_failed=flow_pb2.StepFailed(step=1))
    await stranger.send(make_result(7), failed)
    await stranger.close()
    await bench.next_lost()
    await member.send(ours[0])

    assert await bench.next_frame() == ours[0]


def of_pipeline(frame: flow_pb2.Frame, pipeline_id: PipelineId) -> flow_pb2.Frame:
    frame.pipeline_id = pipeline_id
    return frame


async def test_frames_of_two_pipelines_are_relayed_each_to_its_own_stage(bench: HubBench) -> None:
    worker_ids = [WorkerId(f"w{index}") for index in range(4)]
    first, second, third, fourth = [await bench.join("socket", worker_id) for worker_id in worker_ids]
    bench.hub.routes = {P1: tuple(worker_ids[:2]), P2: tuple(worker_ids[2:])}
    frames = [make_frame(step, to_stage=1) for step in range(10)]
    others = [of_pipeline(make_frame(step, to_stage=1), P2) for step in range(100, 110)]

    for frame, other in zip(frames, others, strict=True):
        await first.send(frame)
        await third.send(other)
    await second.send(ours[0])
    await fourth.send(make_result(100, P2))

    assert [await second.receive() for _ in frames] == frames
    assert [await fourth.receive() for _ in others] == others
    results = [await bench.next_frame() for _ in range(2)]
    assert sorted(frame.pipeline_id for frame in results) == ["p1", "p2"]


@both
@pytest.mark.parametrize("name", ["a result", "a step", "a failure", "a result of a pipeline nobody knows"])
async def test_a_stage_cannot_speak_for_another_pipeline(bench: HubBench, kind: str, name: str) -> None:
    bench.hub.routes = {P1: (W0, W1), P2: (W2,)}
    member, forger = await bench.join(kind, W1), await bench.join(kind, W2)
    failed = flow_pb2.Frame(pipeline_id="p1", epoch=1, to_stage=-1, step_failed=flow_pb2.StepFailed(step=1))
    forged = {
        "a result": make_result(7),
        "a step": make_frame(7, to_stage=1),
        "a failure": failed,
        "a result of a pipeline nobody knows": make_result(7, PipelineId("p3")),
    }

    await forger.send(forged[name], make_result(1, P2))
    assert await bench.next_frame() == make_result(1, P2)
    bench.hub.send(W1, make_frame(9))

    assert await member.receive() == make_frame(9)
    assert bench.frames.empty()


@both
async def test_a_pipeline_that_has_ended_is_silent(bench: HubBench, kind: str) -> None:
    bench.hub.routes = {P1: (W0,), P2: (W1,)}
    uplink, other = await bench.join(kind, W0), await bench.join(kind, W1)

    del bench.hub.routes[P1]
    await uplink.send(*ours)
    await uplink.close()
    await bench.next_lost()
    await other.send(make_result(5, P2))

    assert await bench.next_frame() == make_result(5, P2)


async def test_a_socket_that_announces_a_long_hello_is_hung_up_on(bench: HubBench) -> None:
    uplink = await bench.dial("socket")
    assert isinstance(uplink, SocketUplink)

    uplink.writer.write(struct.pack("<I", MAX_HELLO_BYTES + 1))

    assert await uplink.receive() is None


@pytest.mark.parametrize("num_bytes", [0, 1, 3])
async def test_a_socket_that_does_not_say_who_it_is_is_hung_up_on(
    bench: HubBench, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.flow.HELLO_TIMEOUT_S", 0.05)
    uplink = await bench.dial("socket")
    assert isinstance(uplink, SocketUplink)

    uplink.writer.write(bytes(num_bytes))

    assert await uplink.receive() is None


@both
async def test_a_frame_for_a_stage_nobody_holds_is_dropped(bench: HubBench, kind: str) -> None:
    uplink = await bench.join(kind)

    await uplink.send(make_frame(1, to_stage=5), ours[0])

    assert await bench.next_frame() == ours[0]


async def test_a_frame_for_a_worker_without_a_link_is_dropped(bench: HubBench) -> None:
    bench.hub.send(W0, make_frame(1))
    bench.hub.expect(W0)
    bench.hub.send(W0, make_frame(1))


def refused_hellos(token: bytes) -> dict[str, flow_pb2.Frame]:
    return {
        "wrong token": make_hello(token=b"x" * 16),
        "empty token": make_hello(token=b""),
        "token of another": make_hello(worker_id="w1", token=token),
        "wrong version": make_hello(token=token, version=PROTOCOL_VERSION + 1),
        "no hello": make_frame(1, to_stage=-1),
    }


@pytest.mark.parametrize("name", refused_hellos(b""))
async def test_a_socket_without_the_right_hello_is_hung_up_on(bench: HubBench, name: str) -> None:
    bench.hub.expect(W1)
    uplink = await bench.dial("socket")

    await uplink.send(refused_hellos(bench.hub.expect(W0))[name], *ours)

    assert await uplink.receive() is None
    assert bench.frames.empty()
    assert bench.lost.empty()


@pytest.mark.parametrize("name", refused_hellos(b""))
async def test_a_stream_without_the_right_hello_is_refused(bench: HubBench, name: str) -> None:
    bench.hub.expect(W1)
    uplink = await bench.dial("grpc")
    assert isinstance(uplink, GrpcUplink)

    await uplink.send(refused_hellos(bench.hub.expect(W0))[name])

    is_other_version = name in ("wrong version", "no hello")
    assert isinstance(await uplink.error(), ProtocolMismatch if is_other_version else InvalidRequest)
    assert bench.lost.empty()


async def test_a_socket_that_sends_garbage_is_hung_up_on(bench: HubBench) -> None:
    uplink = await bench.dial("socket")
    assert isinstance(uplink, SocketUplink)

    uplink.writer.write(struct.pack("<I", MAX_FRAME_BYTES + 1))

    assert await uplink.receive() is None


async def test_garbage_after_the_hello_loses_the_worker(bench: HubBench) -> None:
    uplink = await bench.join("socket")
    assert isinstance(uplink, SocketUplink)

    uplink.writer.write(struct.pack("<I", MAX_FRAME_BYTES + 1))

    assert (await bench.next_lost())[0] == W0


@both
async def test_the_newest_link_of_a_worker_wins_and_the_earlier_is_closed(bench: HubBench, kind: str) -> None:
    token = bench.hub.expect(W0)
    earlier = await bench.join(kind, token=token)
    newest = await bench.join(kind, token=token)
    await newest.send(ours[0])
    assert await bench.next_frame() == ours[0]

    bench.hub.send(W0, make_frame(7))

    assert await newest.receive() == make_frame(7)
    assert await earlier.receive() is None
    assert bench.lost.empty()


@both
async def test_a_new_token_closes_the_link_of_the_old_one_without_a_loss(bench: HubBench, kind: str) -> None:
    earlier = await bench.join(kind)

    await bench.join(kind)

    assert await earlier.receive() is None
    assert bench.lost.empty()


@both
async def test_a_link_that_ends_is_told_once(bench: HubBench, kind: str) -> None:
    uplink = await bench.join(kind)

    await uplink.close()

    assert (await bench.next_lost())[0] == W0
    bench.hub.forget(W0)
    other = await bench.join(kind, W1)
    await other.close()
    assert (await bench.next_lost())[0] == W1


@both
async def test_a_worker_that_is_forgotten_is_hung_up_on_without_a_loss(bench: HubBench, kind: str) -> None:
    uplink = await bench.join(kind)

    bench.hub.forget(W0)

    assert await uplink.receive() is None
    assert bench.lost.empty()


async def test_the_token_of_a_forgotten_worker_is_worth_nothing(bench: HubBench) -> None:
    token = bench.hub.expect(W0)
    bench.hub.forget(W0)
    uplink = await bench.dial("socket")

    await uplink.send(make_hello(token=token))

    assert await uplink.receive() is None


async def test_a_worker_that_opens_no_link_in_time_is_a_clear_error(bench: HubBench) -> None:
    bench.hub.expect(W0)

    with pytest.raises(ConnectionFailed, match=r"w0 attached but opened no link within 0\.01 s"):
        await bench.hub.connected(W0, 0.01)


async def test_tokens_are_drawn_anew_for_each_worker(bench: HubBench) -> None:
    tokens = {bench.hub.expect(worker_id) for worker_id in (W0, W1, W0)}

    assert len(tokens) == 3
    assert {len(token) for token in tokens} == {16}


async def test_a_hub_that_stops_hangs_up_on_those_that_said_nothing(bench: HubBench) -> None:
    reader, writer = await asyncio.open_connection(HOST, bench.socket_port)
    # One that has said who it is came after it, so the silent one is known too.
    await bench.join("socket")

    await bench.hub.stop()

    assert await asyncio.wait_for(reader.read(1), WAIT_S) == b""
    writer.close()
