"""How frames leave a worker: a plain socket, a gRPC stream, or either of them behind an emulated slow link.

Every link has `send(frame)`, callable from the compute thread, in order and without waiting for the peer's answer, and
`close()`. Relaying through the orchestrator is no link of its own: it is the link to the orchestrator. Knows nothing of
pipelines; `agent` opens links, `compute` sends on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from shoal import sockets
from shoal.codec import HEADER_BYTES, MAX_HELLO_BYTES, FrameBuffer, body_bytes, pack_frame
from shoal.errors import ConnectionFailed, ShoalError
from shoal.types import LinkProfile
from shoal.v1 import flow_pb2, flow_pb2_grpc
from worker.emulation import LinkShaper

# A peer that takes nothing for this long is lost; credits keep what is in flight far below a socket buffer.
SEND_TIMEOUT_S = 5.0


class Link(Protocol):
    kind: str

    def send(self, frame: flow_pb2.Frame) -> None:
        """Hand a frame over; raises ConnectionFailed if the link is known to be broken."""

    def close(self) -> None: ...


class SocketLink:
    """Frames over a connected TCP socket; the caller's thread writes them itself."""

    kind = "socket"

    def __init__(self, connection: socket.socket) -> None:
        sockets.tune(connection)
        connection.settimeout(SEND_TIMEOUT_S)
        self.connection = connection

    def send(self, frame: flow_pb2.Frame) -> None:
        try:
            self.connection.sendall(pack_frame(frame))
        except OSError as error:
            raise ConnectionFailed(f"socket link broke: {error}") from error

    def close(self) -> None:
        # First, so that a thread that reads from it wakes up.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class GrpcLink:
    """Frames over a long-lived gRPC stream; a task of the event loop writes them."""

    kind = "grpc"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[flow_pb2.Frame | None] = asyncio.Queue()
        self._is_closed = False

    def send(self, frame: flow_pb2.Frame) -> None:
        if self._is_closed:
            raise ConnectionFailed("gRPC link is closed")
        self._loop.call_soon_threadsafe(self._queue.put_nowait, frame)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)

    async def requests(self) -> AsyncIterator[flow_pb2.FlowRequest]:
        """What the stream's call is opened with: every frame sent, until close()."""
        while (frame := await self._queue.get()) is not None:
            yield flow_pb2.FlowRequest(frame=frame)


async def run_grpc_link(link: GrpcLink, channel: grpc.aio.Channel, on_frame: Callable[[flow_pb2.Frame], None]) -> None:
    """Carry a GrpcLink over a channel until it ends; frames that come back go to on_frame. Raises grpc.RpcError."""
    call = flow_pb2_grpc.FlowServiceStub(channel).Flow(link.requests())
    try:
        async for response in call:
            on_frame(response.frame)
    finally:
        link.close()
        call.cancel()


class DelayLine:
    """Passes items on when they are due, from a thread of its own (an event loop's timers are too coarse).

    Invariant: items with equal due time leave in the order they came.
    """

    def __init__(self, deliver: Callable[[flow_pb2.Frame], None], shaper: LinkShaper) -> None:
        self._deliver = deliver
        self._shaper = shaper
        self._heap: list[tuple[float, int, flow_pb2.Frame]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._error: ShoalError | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="delay-line", daemon=True)
        self._thread.start()

    def push(self, frame: flow_pb2.Frame) -> None:
        if self._error is not None:
            raise self._error
        due = self._shaper.due(frame.ByteSize(), time.monotonic())
        with self._wake:
            if self._is_closed:
                raise ConnectionFailed("the link is closed")
            heapq.heappush(self._heap, (due, next(self._numbers), frame))
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def _run(self) -> None:
        while (frame := self._next_due()) is not None:
            try:
                self._deliver(frame)
            except ShoalError as error:
                self._error = error
                return

    def _next_due(self) -> flow_pb2.Frame | None:
        with self._wake:
            while not self._is_closed:
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._wake.wait(wait_s)
        return None


class ShapedLink:
    """A link as slow as an emulated device's."""

    def __init__(self, link: Link, shaper: LinkShaper) -> None:
        self.kind = link.kind
        self._link = link
        self._line = DelayLine(link.send, shaper)

    def send(self, frame: flow_pb2.Frame) -> None:
        self._line.push(frame)

    def close(self) -> None:
        self._line.close()
        self._link.close()


def shaped(link: Link, profile: LinkProfile) -> Link:
    """The link as slow as a device's."""
    return link if profile == LinkProfile() else ShapedLink(link, LinkShaper(profile))


def dial_socket(address: str, hello: flow_pb2.Frame, timeout_s: float) -> SocketLink:
    """Connect to host:port and introduce ourselves. Raises ConnectionFailed. Blocks: call it off the event loop."""
    host, _, port = address.rpartition(":")
    try:
        link = SocketLink(socket.create_connection((host, int(port)), timeout_s))
    except (OSError, ValueError) as error:
        raise ConnectionFailed(f"nothing answers at {address}: {error}") from error
    try:
        link.send(hello)
    except ConnectionFailed:
        link.close()
        raise
    return link


async def dial(address: str, hello: flow_pb2.Frame, timeout_s: float) -> SocketLink | None:
    """dial_socket off the event loop; None if nothing answers. A link that comes when we are cancelled is closed."""
    dialling = asyncio.ensure_future(asyncio.to_thread(dial_socket, address, hello, timeout_s))
    try:
        return await asyncio.shield(dialling)
    except ConnectionFailed:
        return None
    except asyncio.CancelledError:
        dialling.add_done_callback(_close_unwanted)
        raise


async def answers(address: str, timeout_s: float) -> bool:
    """Whether the system at host:port says anything to a dial, be it a refusal; needs no thread to wait in."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, int(port))
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    except (OSError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def _close_unwanted(dialling: asyncio.Future[SocketLink]) -> None:
    if dialling.exception() is None:
        dialling.result().close()


def read_shaped(link: SocketLink, line: DelayLine, on_closed: Callable[[str], None]) -> None:
    """Read a socket's frames into a delay line until it ends; runs in a thread of its own."""
    buffer = FrameBuffer()
    while True:
        try:
            chunk = link.connection.recv(1 << 20)
            for frame in buffer.feed(chunk):
                line.push(frame)
        except TimeoutError:
            continue
        except (OSError, ShoalError) as error:
            on_closed(str(error))
            return
        if not chunk:
            on_closed("the peer closed it")
            return


async def read_hello(connection: socket.socket, timeout_s: float) -> flow_pb2.Frame:
    """Read just the first frame of an accepted, non-blocking socket. Raises ConnectionFailed."""
    loop = asyncio.get_running_loop()

    async def read_exactly(num_bytes: int) -> bytes:
        received = b""
        while len(received) < num_bytes:
            chunk = await loop.sock_recv(connection, num_bytes - len(received))
            if not chunk:
                raise ConnectionFailed("the peer closed the link before it said who it is")
            received += chunk
        return received

    try:
        async with asyncio.timeout(timeout_s):
            header = await read_exactly(HEADER_BYTES)
            frames = FrameBuffer().feed(header + await read_exactly(body_bytes(header, MAX_HELLO_BYTES)))
    except (OSError, ShoalError) as error:
        raise ConnectionFailed(f"no hello on a link: {error}") from error
    return frames[0]
