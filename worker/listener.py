"""Where peers reach a worker: a gRPC FlowService and a plain socket port, both open to stages of its own pipelines only.

Accepts links whose hello carries the token of a pipeline that the worker has a shard of, and hands over what comes in.
Knows tokens and frames; `agent` owns it, frames go to `compute`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from shoal import rpc, sockets
from shoal.errors import ConnectionFailed, InvalidRequest, ShoalError
from shoal.types import PROTOCOL_VERSION, LinkProfile
from shoal.v1 import flow_pb2, flow_pb2_grpc
from worker.links import read_hello
from worker.probing import PROBES, EchoStream

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
UNLIMITED = LinkProfile()


class PeerListener(flow_pb2_grpc.FlowServiceServicer):
    """Accepts links from other stages.

    Invariant: a link is handed over only after its hello carried a token in `tokens`.
    """

    def __init__(
        self,
        host: str,
        on_frame: Callable[[flow_pb2.Frame], None],
        on_socket: Callable[[str, socket.socket], None],
        link: LinkProfile = UNLIMITED,
    ) -> None:
        """link: how slowly echoes over gRPC are to be answered."""
        self._host = host
        self._on_frame = on_frame
        self._on_socket = on_socket
        self._link = link
        self._server: grpc.aio.Server | None = None
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        # pipeline id -> link token
        self.tokens: dict[str, bytes] = {}

    async def start(self, port: int, *, use_sockets: bool) -> tuple[int, int]:
        """Listen; return the gRPC port and the socket port (0: none). Raises ConnectionFailed if the port is taken."""
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        flow_pb2_grpc.add_FlowServiceServicer_to_server(self, self._server)
        try:
            flow_port = self._server.add_insecure_port(f"{self._host}:{port}")
        except RuntimeError as error:
            raise ConnectionFailed(f"cannot listen on {self._host}:{port}: choose another port ({error})") from error
        await self._server.start()
        if not use_sockets:
            return flow_port, 0
        self._socket = socket.create_server((self._host, 0))
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept_all(self._socket))
        return flow_port, self._socket.getsockname()[1]

    async def stop(self) -> None:
        if self._accepting is not None:
            tasks = [self._accepting, *self._handshakes]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            await self._server.stop(0.2)

    @rpc.stream
    async def Flow(  # noqa: N802 - named as in the proto
        self, request_iterator: AsyncIterator[flow_pb2.FlowRequest], context: Any
    ) -> AsyncGenerator[flow_pb2.FlowResponse, None]:
        first = await anext(request_iterator, flow_pb2.FlowRequest())
        self._check(first.frame)
        if first.frame.pipeline_id != PROBES:
            # Frames go one way between stages.
            async for request in request_iterator:
                if self.tokens.get(first.frame.pipeline_id) != first.frame.link_hello.link_token:
                    return  # its epoch is over
                self._on_frame(request.frame)
            return
        echoes = EchoStream(self._link)
        try:
            async for request in request_iterator:
                yield flow_pb2.FlowResponse(frame=await echoes.answer(request.frame))
        finally:
            echoes.close()

    def _check(self, frame: flow_pb2.Frame) -> None:
        """Raise InvalidRequest unless the frame is a hello with the token of one of our pipelines."""
        token = self.tokens.get(frame.pipeline_id, b"")
        hello = frame.link_hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise InvalidRequest("link_hello.protocol_version", f"{hello.protocol_version}, want {PROTOCOL_VERSION}")
        if not token or not hmac.compare_digest(token, hello.link_token):
            raise InvalidRequest("link_hello.link_token", "this worker has no such pipeline")

    async def _accept_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(self._accept(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _accept(self, connection: socket.socket) -> None:
        try:
            hello = await read_hello(connection, HELLO_TIMEOUT_S)
            self._check(hello)
        except ConnectionFailed as error:
            # A peer that only wanted to know whether we answer, for one.
            logger.debug("no_link error=%s", error.message)
            connection.close()
            return
        except ShoalError as error:
            logger.warning("link_refused error=%s", error.message)
            connection.close()
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        sockets.tune(connection)
        self._on_socket(hello.pipeline_id, connection)
