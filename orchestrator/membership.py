"""FleetService: how workers become members, hear commands, tell events, and fetch weights.

Decodes and checks, then calls `control`, which decides. Blobs are served from the model store, by digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from orchestrator.control import Control
from orchestrator.flow import FlowHub
from orchestrator.worker_session import WorkerSession
from shoal import rpc
from shoal.errors import CorruptBlob, InvalidRequest, ProtocolMismatch
from shoal.types import PROTOCOL_VERSION
from shoal.v1 import fleet_pb2, fleet_pb2_grpc

# Small, so that a slow link is not filled: a call lets as much be on the way as its next message has.
CHUNK_BYTES = 32 << 10
UPLINK_TIMEOUT_S = 5.0
MAX_ID_CHARS = 64
# As in device profiles.
MAX_SPEED = 100
MAX_FALLBACK_MS = 600_000
# The graphs that the store emits need ragged batches, which onnxruntime has from this version on.
RUNTIME = "onnxruntime"
MIN_RUNTIME_VERSION = (1, 32)


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """socket_port: of the plain socket link, 0 for none; known once the hub listens."""

    def __init__(
        self, control: Control, hub: FlowHub, manifest: Manifest, store: ModelStore, heartbeat_interval_s: float
    ) -> None:
        self._control = control
        self._hub = hub
        self._model = manifest.name
        self._digests = frozenset(blob.digest for blob in manifest.blobs)
        self._store = store
        self._heartbeat_interval_s = heartbeat_interval_s
        self.socket_port = 0

    @rpc.stream
    async def Attach(  # noqa: N802 - servicer methods are named as in the proto
        self, request_iterator: AsyncIterator[fleet_pb2.AttachRequest], context: Any
    ) -> AsyncGenerator[fleet_pb2.AttachResponse, None]:
        first = await anext(request_iterator, fleet_pb2.AttachRequest())
        session = self._control.take_in(_checked_hello(first))
        reading = asyncio.create_task(self._read(session, request_iterator))
        try:
            yield self._welcome(session)
            await self._hub.connected(session.worker_id, UPLINK_TIMEOUT_S)
            self._control.joined(session.worker_id)
            while (command := await session.next_command()) is not None:
                yield command
            # A fault of ours in an event ends the call, and is logged with it; the worker attaches again.
            if reading.done() and not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            self._control.left(session)

    @rpc.stream
    async def FetchBlob(  # noqa: N802
        self, request: fleet_pb2.FetchBlobRequest, context: Any
    ) -> AsyncGenerator[fleet_pb2.FetchBlobResponse, None]:
        if request.digest not in self._digests:
            raise InvalidRequest("digest", f"{request.digest[:80]!r} is not a blob of {self._model}")
        path = self._store.blob_path(request.digest)
        if not path.is_file():
            raise CorruptBlob(f"blob {request.digest[:12]} of {self._model} is missing: pull or import it again")
        if request.offset > path.stat().st_size:
            raise InvalidRequest("offset", f"{request.offset} is beyond the end of blob {request.digest[:12]}")
        async with aclosing(_read_chunks(path, request.offset)) as chunks:
            async for chunk in chunks:
                yield fleet_pb2.FetchBlobResponse(chunk=chunk)

    def _welcome(self, session: WorkerSession) -> fleet_pb2.AttachResponse:
        welcome = fleet_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            heartbeat_interval_s=self._heartbeat_interval_s,
            socket_port=self.socket_port,
            link_token=self._hub.expect(session.worker_id),
        )
        return fleet_pb2.AttachResponse(welcome=welcome)

    async def _read(self, session: WorkerSession, requests: AsyncIterator[fleet_pb2.AttachRequest]) -> None:
        try:
            async for request in requests:
                self._control.on_event(session, request)
        finally:
            session.close()


def _checked_hello(request: fleet_pb2.AttachRequest) -> fleet_pb2.Hello:
    hello = request.hello
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"worker {hello.worker_id!r} speaks protocol {hello.protocol_version}, this orchestrator {PROTOCOL_VERSION}: "
            "install the same version of Shoal on both"
        )
    if not hello.worker_id or not hello.worker_id.isprintable() or len(hello.worker_id) > MAX_ID_CHARS:
        raise InvalidRequest("hello.worker_id", f"must have 1 to {MAX_ID_CHARS} printable characters")
    if not hello.profile.memory_bytes or not 0 < hello.profile.speed <= MAX_SPEED or not hello.profile.max_batch:
        raise InvalidRequest(
            "hello.profile", f"memory_bytes and max_batch must be more than 0, speed too, and at most {MAX_SPEED}"
        )
    if hello.profile.host_kv_bytes >= hello.profile.memory_bytes:
        raise InvalidRequest("hello.profile", "host_kv_bytes is a part of memory_bytes, so it must be less")
    if not 0 <= hello.profile.fallback_timeout_ms <= MAX_FALLBACK_MS:
        raise InvalidRequest("hello.profile", f"fallback_timeout_ms must be from 0 to {MAX_FALLBACK_MS}")
    for name in ("flow_address", "socket_address"):
        address = getattr(hello, name)
        if address and not address.rpartition(":")[2].isdecimal():
            raise InvalidRequest(f"hello.{name}", f"{address[:100]!r} is not HOST:PORT")
    if hello.runtime.name != RUNTIME or _version(hello.runtime.version) < MIN_RUNTIME_VERSION:
        wanted = ".".join(map(str, MIN_RUNTIME_VERSION))
        raise InvalidRequest(
            "hello.runtime",
            f"{hello.runtime.name} {hello.runtime.version} cannot run the shards; install {RUNTIME} {wanted} or later",
        )
    return hello


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


async def _read_chunks(path: Path, offset: int) -> AsyncGenerator[bytes, None]:
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
