"""The orchestrator's end of the data plane: every worker keeps one link here, by gRPC or by a plain socket.

Frames for the orchestrator go to `on_frame`; frames between stages that cannot reach each other are relayed. Knows workers
and routes, not what steps mean. `control` says whom to expect and which worker is which stage; `engine` sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from shoal import rpc, sockets
from shoal.codec import MAX_HELLO_BYTES, FrameBuffer, pack_frame
from shoal.errors import ConnectionFailed, InvalidRequest, ProtocolMismatch, ShoalError
from shoal.types import PROTOCOL_VERSION, PipelineId, WorkerId
from shoal.v1 import flow_pb2, flow_pb2_grpc

logger = logging.getLogger(__name__)

ORCHESTRATOR = -1
HELLO_TIMEOUT_S = 5.0


class Uplink(Protocol):
    def send(self, frame: flow_pb2.Frame) -> None: ...

    def close(self) -> None: ...


class FlowHub(flow_pb2_grpc.FlowServiceServicer):
    """All links between workers and the orchestrator.

    Invariants: an uplink belongs to the worker whose token its hello carried; a worker has at most one, the newest, and
    earlier ones are closed.
    """

    def __init__(self, on_frame: Callable[[flow_pb2.Frame], None], on_lost: Callable[[WorkerId, str], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._tokens: dict[WorkerId, bytes] = {}
        self._uplinks: dict[WorkerId, Uplink] = {}
        self._connected: dict[WorkerId, asyncio.Event] = {}
        self._server: asyncio.Server | None = None
        # All that are open, also those that have not said who they are.
        self._sockets: set[_SocketUplink] = set()
        # The workers of each pipeline in force, in the order of their stages.
        self.routes: dict[PipelineId, tuple[WorkerId, ...]] = {}

    async def listen(self, host: str) -> int:
        """Open the plain socket port and return it."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _SocketUplink(self, self._sockets), host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        for worker_id in list(self._uplinks):
            self.forget(worker_id)
        if self._server is not None:
            self._server.close()
            for uplink in list(self._sockets):
                uplink.close()
            await self._server.wait_closed()

    def expect(self, worker_id: WorkerId) -> bytes:
        """Draw the token that a worker's link has to carry; links with an earlier one are closed."""
        self.forget(worker_id)
        self._connected[worker_id] = asyncio.Event()
        self._tokens[worker_id] = secrets.token_bytes(16)
        return self._tokens[worker_id]

    async def connected(self, worker_id: WorkerId, timeout_s: float) -> None:
        """Wait for a worker's link. Raises ConnectionFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected[worker_id].wait()
        except TimeoutError as error:
            raise ConnectionFailed(f"{worker_id} attached but opened no link within {timeout_s} s") from error

    def forget(self, worker_id: WorkerId) -> None:
        """Close a worker's link; its token is worth nothing any more."""
        self._tokens.pop(worker_id, None)
        self._connected.pop(worker_id, None)
        uplink = self._uplinks.pop(worker_id, None)
        if uplink is not None:
            uplink.close()

    def send(self, worker_id: WorkerId, frame: flow_pb2.Frame) -> None:
        """Send a frame to a worker; if it has no link the frame is lost, which on_lost has told or is about to tell."""
        uplink = self._uplinks.get(worker_id)
        if uplink is not None:
            uplink.send(frame)

    def receive(self, worker_id: WorkerId, frame: flow_pb2.Frame) -> None:
        """Take a frame from a worker's uplink: ours, or to be relayed. Only stages may speak, and each for itself.

        Anybody may ask how far we are.
        """
        if frame.HasField("echo"):
            self.send(worker_id, flow_pb2.Frame(echo=flow_pb2.Echo(sent_ns=frame.echo.sent_ns, is_reply=True)))
            return
        stages = self.routes.get(PipelineId(frame.pipeline_id), ())
        if not _may_send(worker_id, frame, stages):
            logger.warning(
                "frame_refused worker=%s pipeline=%r body=%s", worker_id, frame.pipeline_id, frame.WhichOneof("body")
            )
        elif frame.to_stage == ORCHESTRATOR:
            self._on_frame(frame)
        elif 0 <= frame.to_stage < len(stages):
            self.send(stages[frame.to_stage], frame)

    def register(self, frame: flow_pb2.Frame, uplink: Uplink) -> WorkerId:
        """Give an uplink to the worker whose hello it began with. Raises InvalidRequest, ProtocolMismatch."""
        hello = frame.link_hello
        worker_id = WorkerId(hello.worker_id)
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"link of protocol {hello.protocol_version}, this orchestrator has {PROTOCOL_VERSION}"
            )
        token = self._tokens.get(worker_id, b"")
        if not token or not hmac.compare_digest(token, hello.link_token):
            raise InvalidRequest("link_hello.link_token", f"not the token that {worker_id!r} was given")
        earlier = self._uplinks.get(worker_id)
        self._uplinks[worker_id] = uplink
        if earlier is not None:
            earlier.close()
        self._connected[worker_id].set()
        return worker_id

    def lost(self, worker_id: WorkerId, uplink: Uplink, message: str) -> None:
        """An uplink ended by itself."""
        if self._uplinks.get(worker_id) is uplink:
            del self._uplinks[worker_id]
            self._on_lost(worker_id, message)

    @rpc.stream
    async def Flow(  # noqa: N802 - named as in the proto
        self, request_iterator: AsyncIterator[flow_pb2.FlowRequest], context: Any
    ) -> AsyncGenerator[flow_pb2.FlowResponse, None]:
        uplink = _GrpcUplink()
        first = await anext(request_iterator, flow_pb2.FlowRequest())
        worker_id = self.register(first.frame, uplink)
        reading = asyncio.create_task(self._read(worker_id, request_iterator, uplink))
        try:
            while (frame := await uplink.queue.get()) is not None:
                yield flow_pb2.FlowResponse(frame=frame)
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            self.lost(worker_id, uplink, "its stream ended")

    async def _read(
        self, worker_id: WorkerId, request_iterator: AsyncIterator[flow_pb2.FlowRequest], uplink: _GrpcUplink
    ) -> None:
        try:
            async for request in request_iterator:
                self.receive(worker_id, request.frame)
        finally:
            uplink.close()


def _may_send(worker_id: WorkerId, frame: flow_pb2.Frame, stages: Sequence[WorkerId]) -> bool:
    """Whether a frame is one that the worker's stage in this pipeline has to send."""
    if worker_id not in stages:
        return False
    match frame.WhichOneof("body"):
        case "step_result" | "restored":
            return frame.to_stage == ORCHESTRATOR and worker_id == stages[-1]
        case "step" if frame.to_stage == 0:
            return worker_id == stages[-1]
        case "step" | "cancel" | "restore" | "prefetch" | "keep_blocks" | "forget_blocks":
            return 0 < frame.to_stage <= len(stages) and worker_id == stages[frame.to_stage - 1]
        case "step_failed":
            return frame.to_stage == ORCHESTRATOR
        case _:
            return False


class _GrpcUplink:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[flow_pb2.Frame | None] = asyncio.Queue()

    def send(self, frame: flow_pb2.Frame) -> None:
        self.queue.put_nowait(frame)

    def close(self) -> None:
        self.queue.put_nowait(None)


class _SocketUplink(asyncio.Protocol):
    """A plain socket; frames are handled as they arrive, with no hand-over to a task."""

    def __init__(self, hub: FlowHub, open_sockets: set[_SocketUplink]) -> None:
        self._hub = hub
        self._open_sockets = open_sockets
        self._buffer = FrameBuffer(MAX_HELLO_BYTES)
        self._worker_id: WorkerId | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open_sockets.add(self)
        asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._close_if_silent)
        sockets.tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._buffer.feed(data):
                if self._worker_id is None:
                    self._worker_id = self._hub.register(frame, self)
                else:
                    self._hub.receive(self._worker_id, frame)
        except ShoalError as error:
            logger.warning("link_refused error=%s", error.message)
            self.close()

    def _close_if_silent(self) -> None:
        if self._worker_id is None:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_sockets.discard(self)
        if self._worker_id is not None:
            self._hub.lost(self._worker_id, self, str(exc or "the worker closed it"))

    def send(self, frame: flow_pb2.Frame) -> None:
        assert self._transport is not None
        self._transport.write(pack_frame(frame))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
