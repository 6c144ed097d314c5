"""A worker's listener with what it took in, for tests of links and of the listener itself.

Real sockets and real gRPC on loopback. Knows how to introduce a stage, and how to wait, within a bound, for what arrives.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shoal.codec import FrameBuffer
from shoal.types import PROTOCOL_VERSION
from shoal.v1 import flow_pb2
from worker.listener import PeerListener

HOST = "127.0.0.1"
PIPELINE_ID = "p1"
TOKEN = b"0123456789abcdef"
WAIT_S = 10.0


def make_hello(
    *, pipeline_id: str = PIPELINE_ID, token: bytes = TOKEN, version: int = PROTOCOL_VERSION, worker_id: str = "w0"
) -> flow_pb2.Frame:
    hello = flow_pb2.LinkHello(protocol_version=version, worker_id=worker_id, incarnation=1, link_token=token)
    return flow_pb2.Frame(pipeline_id=pipeline_id, link_hello=hello)


def make_frame(step: int, *, num_bytes: int = 0, to_stage: int = 1) -> flow_pb2.Frame:
    step_message = flow_pb2.Step(step=step, activations=bytes(num_bytes))
    return flow_pb2.Frame(pipeline_id=PIPELINE_ID, epoch=1, to_stage=to_stage, step=step_message)


class Peer:
    """A listener that expects stages of one pipeline; frames of both kinds of link end in one queue."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[flow_pb2.Frame | None] = asyncio.Queue()
        self.sockets: asyncio.Queue[tuple[str, socket.socket]] = asyncio.Queue()
        self.listener = PeerListener(HOST, self.frames.put_nowait, self._on_socket)
        self.listener.tokens[PIPELINE_ID] = TOKEN
        self.reads_sockets = True
        self.flow_address = self.socket_address = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._connections: list[socket.socket] = []

    async def start(self) -> None:
        flow_port, socket_port = await self.listener.start(0, use_sockets=True)
        self.flow_address, self.socket_address = f"{HOST}:{flow_port}", f"{HOST}:{socket_port}"

    async def receive(self, count: int) -> list[flow_pb2.Frame | None]:
        """The next frames; None is the end of a socket."""
        async with asyncio.timeout(WAIT_S):
            return [await self.frames.get() for _ in range(count)]

    async def close(self) -> None:
        await self.listener.stop()
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for connection in self._connections:
            connection.close()

    def _on_socket(self, pipeline_id: str, connection: socket.socket) -> None:
        self._connections.append(connection)
        self.sockets.put_nowait((pipeline_id, connection))
        if self.reads_sockets:
            self._tasks.append(asyncio.create_task(self._read(connection)))

    async def _read(self, connection: socket.socket) -> None:
        loop, buffer = asyncio.get_running_loop(), FrameBuffer()
        while chunk := await loop.sock_recv(connection, 1 << 16):
            for frame in buffer.feed(chunk):
                self.frames.put_nowait(frame)
        self.frames.put_nowait(None)


@asynccontextmanager
async def listening_peer() -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.start()
    try:
        yield peer
    finally:
        await peer.close()


async def dial_raw(address: str) -> socket.socket:
    """A connected, non-blocking socket that has said nothing yet."""
    host, _, port = address.rpartition(":")
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    return connection


async def is_hung_up(connection: socket.socket) -> bool:
    """Wait until the other side has closed a socket, within the bound."""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(WAIT_S):
            return await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    return True
