"""Who may link to a worker: a hello with the right token and version opens a link, anything else is hung up on."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator

import grpc
import pytest

from shoal import rpc
from shoal.codec import MAX_FRAME_BYTES, pack_frame
from shoal.errors import ConnectionFailed, InvalidRequest, ShoalError
from shoal.types import PROTOCOL_VERSION
from shoal.v1 import flow_pb2, flow_pb2_grpc
from tests.support.peers import (
    HOST,
    PIPELINE_ID,
    TOKEN,
    WAIT_S,
    Peer,
    dial_raw,
    is_hung_up,
    listening_peer,
    make_frame,
    make_hello,
)
from worker import listener
from worker.listener import PeerListener

REFUSED = {
    "wrong token": make_hello(token=b"fedcba9876543210"),
    "no token": make_hello(token=b""),
    "token of another pipeline": make_hello(pipeline_id="p2"),
    "wrong version": make_hello(version=PROTOCOL_VERSION + 1),
    "no hello": make_frame(1),
    "nothing": flow_pb2.Frame(),
}
GARBAGE = {
    "an absurd length": struct.pack("<I", MAX_FRAME_BYTES + 1),
    "no frame": struct.pack("<I", 4) + b"\xff\xff\xff\xff",
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with listening_peer() as listening:
        listening.reads_sockets = False
        yield listening


async def said(peer: Peer, *pieces: bytes) -> socket.socket:
    """A connection on which these bytes were sent."""
    connection = await dial_raw(peer.socket_address)
    for piece in pieces:
        await asyncio.get_running_loop().sock_sendall(connection, piece)
    return connection


async def flow_error(peer: Peer, hello: flow_pb2.Frame) -> ShoalError:
    """What a link is refused with; nothing follows its hello, for a write after the end would hide the reason."""
    async with grpc.aio.insecure_channel(peer.flow_address, options=rpc.CHANNEL_OPTIONS) as channel:
        call = flow_pb2_grpc.FlowServiceStub(channel).Flow(timeout=WAIT_S)
        await call.write(flow_pb2.FlowRequest(frame=hello))
        with pytest.raises(grpc.RpcError) as raised:
            async for _ in call:
                pass
    return rpc.error_from_rpc(raised.value, peer.flow_address)


async def test_a_socket_with_the_right_hello_is_handed_over(peer: Peer) -> None:
    with await said(peer, pack_frame(make_hello())):
        pipeline_id, connection = await asyncio.wait_for(peer.sockets.get(), WAIT_S)

    assert pipeline_id == PIPELINE_ID
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_what_follows_the_hello_is_left_in_the_socket(peer: Peer) -> None:
    with await said(peer, pack_frame(make_hello()) + pack_frame(make_frame(1))):
        _, connection = await asyncio.wait_for(peer.sockets.get(), WAIT_S)
        received = await asyncio.get_running_loop().sock_recv(connection, 4096)

    assert received == pack_frame(make_frame(1))


async def test_a_hello_may_come_byte_by_byte(peer: Peer) -> None:
    with await said(peer, *(bytes([byte]) for byte in pack_frame(make_hello()))):
        assert (await asyncio.wait_for(peer.sockets.get(), WAIT_S))[0] == PIPELINE_ID


@pytest.mark.parametrize("hello", REFUSED.values(), ids=REFUSED)
async def test_a_socket_with_another_hello_is_hung_up_on(peer: Peer, hello: flow_pb2.Frame) -> None:
    with await said(peer, pack_frame(hello)) as connection:
        assert await is_hung_up(connection)

    assert peer.sockets.empty()


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_a_socket_that_sends_garbage_is_hung_up_on(peer: Peer, garbage: bytes) -> None:
    with await said(peer, garbage) as connection:
        assert await is_hung_up(connection)

    assert peer.sockets.empty()


async def test_a_socket_that_ends_in_its_hello_does_no_harm(peer: Peer) -> None:
    (await said(peer, pack_frame(make_hello())[:-1])).close()

    with await said(peer, pack_frame(make_hello())):
        assert (await asyncio.wait_for(peer.sockets.get(), WAIT_S))[0] == PIPELINE_ID


async def test_a_peer_that_only_tried_whether_it_is_answered_is_nothing_to_warn_of(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (await said(peer)).close()

    async with asyncio.timeout(WAIT_S):
        while "no_link" not in caplog.text:
            await asyncio.sleep(0.001)

    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


async def test_a_socket_that_says_nothing_is_hung_up_on(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 0.05)

    with await said(peer) as connection:
        assert await is_hung_up(connection)


async def test_a_silent_socket_does_not_hold_up_others(peer: Peer) -> None:
    with await said(peer), await said(peer, pack_frame(make_hello())):
        assert (await asyncio.wait_for(peer.sockets.get(), WAIT_S))[0] == PIPELINE_ID


async def test_a_listener_that_stops_hangs_up_on_those_that_said_nothing(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 10 * WAIT_S)
    with await said(peer, pack_frame(make_hello())[:5]) as silent, await said(peer, pack_frame(make_hello())):
        await asyncio.wait_for(peer.sockets.get(), WAIT_S)

        await peer.listener.stop()

        assert await is_hung_up(silent)


async def test_a_token_is_worth_nothing_once_its_pipeline_is_gone(peer: Peer) -> None:
    del peer.listener.tokens[PIPELINE_ID]

    with await said(peer, pack_frame(make_hello())) as connection:
        assert await is_hung_up(connection)


async def test_frames_of_a_grpc_link_with_the_right_hello_come_through(peer: Peer) -> None:
    frames = [make_hello(), make_frame(1), make_frame(2)]
    async with grpc.aio.insecure_channel(peer.flow_address, options=rpc.CHANNEL_OPTIONS) as channel:
        requests = (flow_pb2.FlowRequest(frame=frame) for frame in frames)
        answers = [one async for one in flow_pb2_grpc.FlowServiceStub(channel).Flow(requests, timeout=WAIT_S)]

    assert answers == []
    assert await peer.receive(2) == frames[1:]


@pytest.mark.parametrize("hello", REFUSED.values(), ids=REFUSED)
async def test_a_grpc_link_with_another_hello_is_refused_with_the_field(peer: Peer, hello: flow_pb2.Frame) -> None:
    error = await flow_error(peer, hello)

    assert isinstance(error, InvalidRequest)
    assert error.field in ("link_hello.link_token", "link_hello.protocol_version")
    assert peer.frames.empty()


async def test_a_grpc_link_that_ends_without_a_word_is_refused(peer: Peer) -> None:
    async with grpc.aio.insecure_channel(peer.flow_address, options=rpc.CHANNEL_OPTIONS) as channel:
        call = flow_pb2_grpc.FlowServiceStub(channel).Flow(timeout=WAIT_S)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_versions_are_named_to_a_peer_of_another_one(peer: Peer) -> None:
    error = await flow_error(peer, make_hello(version=PROTOCOL_VERSION + 1, token=TOKEN))

    assert f"{PROTOCOL_VERSION + 1}, want {PROTOCOL_VERSION}" in error.message


async def test_a_port_that_is_taken_is_a_clear_error(peer: Peer) -> None:
    port = int(peer.flow_address.rpartition(":")[2])
    other = PeerListener(HOST, lambda _: None, lambda *_: None)

    with pytest.raises(ConnectionFailed, match=f"cannot listen on {HOST}:{port}: choose another port"):
        await other.start(port, use_sockets=True)
    await other.stop()


async def test_without_sockets_there_is_no_socket_port() -> None:
    other = PeerListener(HOST, lambda _: None, lambda *_: None)

    flow_port, socket_port = await other.start(0, use_sockets=False)
    await other.stop()

    assert flow_port > 0
    assert socket_port == 0
