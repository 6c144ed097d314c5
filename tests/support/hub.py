"""A FlowHub on loopback, and workers' uplinks to it by plain socket and by gRPC, driven frame by frame."""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc
import pytest

from orchestrator.flow import FlowHub
from shoal import rpc
from shoal.codec import FrameBuffer, pack_frame
from shoal.errors import ShoalError
from shoal.types import WorkerId
from shoal.v1 import flow_pb2, flow_pb2_grpc
from tests.support.peers import HOST, WAIT_S, make_hello

W0 = WorkerId("w0")


class Uplink(Protocol):
    async def send(self, *frames: flow_pb2.Frame) -> None: ...

    async def receive(self) -> flow_pb2.Frame | None:
        """The next frame, None at the end."""

    async def close(self) -> None: ...


class SocketUplink:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._buffer = FrameBuffer()
        self._frames: list[flow_pb2.Frame] = []

    async def send(self, *frames: flow_pb2.Frame) -> None:
        self.writer.write(b"".join(pack_frame(frame) for frame in frames))
        await self.writer.drain()

    async def receive(self) -> flow_pb2.Frame | None:
        while not self._frames:
            chunk = await asyncio.wait_for(self._reader.read(1 << 16), WAIT_S)
            if not chunk:
                return None
            self._frames += self._buffer.feed(chunk)
        return self._frames.pop(0)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


class GrpcUplink:
    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=rpc.CHANNEL_OPTIONS)
        self._call = flow_pb2_grpc.FlowServiceStub(self._channel).Flow(timeout=WAIT_S)

    async def send(self, *frames: flow_pb2.Frame) -> None:
        for frame in frames:
            await self._call.write(flow_pb2.FlowRequest(frame=frame))

    async def receive(self) -> flow_pb2.Frame | None:
        response = await self._call.read()
        return response.frame if isinstance(response, flow_pb2.FlowResponse) else None

    async def error(self) -> ShoalError:
        """What the hub ended the call with."""
        with pytest.raises(grpc.RpcError) as raised:
            async for _ in self._call:
                pass
        return rpc.error_from_rpc(raised.value, HOST)

    async def close(self) -> None:
        await self._channel.close(None)


class HubBench:
    """A hub that listens both ways, and what it told its owners."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[flow_pb2.Frame] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[WorkerId, str]] = asyncio.Queue()
        self.hub = FlowHub(self.frames.put_nowait, lambda worker_id, why: self.lost.put_nowait((worker_id, why)))
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        self._opened: list[Uplink] = []
        self._flow_port = self.socket_port = 0

    async def start(self) -> None:
        flow_pb2_grpc.add_FlowServiceServicer_to_server(self.hub, self._server)
        self._flow_port = self._server.add_insecure_port(f"{HOST}:0")
        await self._server.start()
        self.socket_port = await self.hub.listen(HOST)

    async def dial(self, kind: str) -> Uplink:
        uplink: Uplink
        if kind == "socket":
            uplink = SocketUplink(*await asyncio.open_connection(HOST, self.socket_port))
        else:
            uplink = GrpcUplink(f"{HOST}:{self._flow_port}")
        self._opened.append(uplink)
        return uplink

    async def join(self, kind: str, worker_id: WorkerId = W0, token: bytes | None = None) -> Uplink:
        """An uplink that the hub has taken in."""
        uplink = await self.dial(kind)
        await uplink.send(make_hello(worker_id=worker_id, token=token or self.hub.expect(worker_id)))
        await self.hub.connected(worker_id, WAIT_S)
        return uplink

    async def next_lost(self) -> tuple[WorkerId, str]:
        return await asyncio.wait_for(self.lost.get(), WAIT_S)

    async def next_frame(self) -> flow_pb2.Frame:
        return await asyncio.wait_for(self.frames.get(), WAIT_S)

    async def close(self) -> None:
        for uplink in self._opened:
            await uplink.close()
        await self.hub.stop()
        await self._server.stop(None)
