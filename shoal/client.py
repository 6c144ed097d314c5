"""The SDK: `Client` and, for asyncio, `AsyncClient`; both with `generate`, `chat`, `stream`, `list_models`,
`status`, `explain`, `drain`, `cordon`, `plan`, `anticipate`, `warm`, `sessions`, `delete_session`.

Owns channels. Requests and answers are built and folded in `shoal.generation`, answers as they come are `shoal.streams`,
errors are rebuilt in `shoal.rpc`. Checks nothing that the server checks. Called by users and the CLI.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from shoal.config import DEFAULT_PORT
from shoal.explanation import Explanation, explanation_from_proto
from shoal.generation import (
    GenerateOptions,
    Generation,
    Messages,
    Prompt,
    build_anticipate_request,
    build_request,
    build_warm_request,
    deadline_s,
)
from shoal.kept import (
    Anticipated,
    DeletedSession,
    SessionStatus,
    Warmed,
    anticipated_from_proto,
    deleted_from_proto,
    sessions_from_proto,
    warmed_from_proto,
)
from shoal.resumption import DEFAULT_RESUME_S
from shoal.rpc import CHANNEL_OPTIONS
from shoal.status import (
    Drained,
    FleetStatus,
    ModelSummary,
    drained_from_proto,
    model_from_proto,
    status_from_proto,
)
from shoal.streams import AsyncStream, Calls, Stream, errors_of
from shoal.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"

Response = TypeVar("Response")


def _calls(
    stub: Any,
    address: str,
    prompt: Prompt | None,
    messages: Messages | None,
    options: GenerateOptions,
    timeout_s: float | None,
) -> Calls:
    request = build_request(prompt, messages, options)
    time_s = deadline_s(options, timeout_s)
    return Calls(stub, address, request, None if time_s is None else time.monotonic() + time_s)


class Client:
    """A synchronous client of an orchestrator; may be used by several threads.

    timeout_s: the most that one call may take, a whole answer included; None waits for as long as it takes. resume_s: how
    long to try to go on with an answer whose stream broke off, from the break on; 0: it ends with an error at once.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        timeout_s: float | None = None,
        *,
        resume_s: float = DEFAULT_RESUME_S,
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._resume_s = resume_s
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    def stream(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Continue a prompt (text or token ids) or answer a chat, delta by delta. Iterating raises the errors."""
        stream = Stream(
            _calls(self._inference, self._address, prompt, messages, options, self._timeout_s), self._resume_s
        )
        self._streams.add(stream)
        return stream

    def generate(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Continue a prompt (text or token ids) or answer a chat; return the whole answer."""
        stream = self.stream(prompt, messages=messages, **options)
        for _ in stream:
            pass
        return stream.result

    def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Generation:
        """Answer a conversation of {"role": "system" | "user" | "assistant", "content": text} messages."""
        return self.generate(messages=messages, **options)

    def list_models(self) -> tuple[ModelSummary, ...]:
        response = self._call(self._inference.ListModels, inference_pb2.ListModelsRequest())
        return tuple(model_from_proto(model) for model in response.models)

    def status(self) -> FleetStatus:
        return status_from_proto(self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest()))

    def plan(self) -> admin_pb2.GetPlanResponse:
        """Return what the orchestrator knows of its devices and links, as a message: for tools that plan themselves."""
        response: admin_pb2.GetPlanResponse = self._call(self._admin.GetPlan, admin_pb2.GetPlanRequest())
        return response

    def drain(self, worker_id: str) -> Drained:
        """Move all layers off a device and cordon it; returns when that is done, and no answer ends for it.

        Raises PlacementImpossible, with the numbers, if no other devices can hold them: nothing has changed then.
        """
        return drained_from_proto(self._call(self._admin.Drain, admin_pb2.DrainRequest(worker_id=worker_id)))

    def cordon(self, worker_id: str, is_cordoned: bool = True) -> None:
        """Keep a device from being given layers, or let it again; what it computes goes on."""
        self._call(self._admin.Cordon, admin_pb2.CordonRequest(worker_id=worker_id, is_cordoned=is_cordoned))

    def explain(self, request_id: str = "") -> Explanation:
        """Why a recent request ran where and when it did; empty: the newest. Raises RequestNotFound."""
        request = admin_pb2.ExplainRequest(request_id=request_id)
        return explanation_from_proto(self._call(self._admin.Explain, request))

    def anticipate(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, tenant: str = "", session_id: str = ""
    ) -> Anticipated:
        """Have workers fetch KV from Redis that a prompt, as far as it is typed, will probably begin with; compute nothing.

        With a session what is typed is its next turn, and may be left out. Raises InvalidRequest and ContextExceeded.
        """
        request = build_anticipate_request(prompt, messages, tenant, session_id)
        return anticipated_from_proto(self._call(self._inference.Anticipate, request))

    def warm(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        tenant: str = "",
        ttl_s: float = 0.0,
        is_public: bool = False,
    ) -> Warmed:
        """Have the KV of a prompt, or of the beginning of a chat, computed ahead.

        ttl_s: how long it is pinned in workers' memory. is_public: all tenants may use it, and can tell that it is there.
        """
        request = build_warm_request(prompt, messages, tenant, ttl_s, is_public=is_public)
        return warmed_from_proto(self._call(self._admin.Warm, request))

    def sessions(self, tenant: str = "") -> tuple[SessionStatus, ...]:
        """The conversations of a tenant that are kept."""
        request = admin_pb2.ListSessionsRequest(tenant=tenant)
        return sessions_from_proto(self._call(self._admin.ListSessions, request))

    def delete_session(self, session_id: str, tenant: str = "") -> DeletedSession:
        """Delete a conversation, and its KV that no other one shares. Raises SessionNotFound, SessionBusy."""
        request = admin_pb2.DeleteSessionRequest(tenant=tenant, session_id=session_id)
        return deleted_from_proto(self._call(self._admin.DeleteSession, request))

    def _call(self, method: Callable[..., Response], request: object) -> Response:
        with errors_of(self._address):
            return method(request, timeout=self._timeout_s)

    def close(self) -> None:
        """Cancel the streams that are open and leave."""
        for stream in tuple(self._streams):
            stream.cancel()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """An asyncio client of an orchestrator, for the event loop of its first call.

    timeout_s: the most that one call may take, a whole answer included; None waits for as long as it takes. resume_s: how
    long to try to go on with an answer whose stream broke off, from the break on; 0: it ends with an error at once.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        timeout_s: float | None = None,
        *,
        resume_s: float = DEFAULT_RESUME_S,
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._resume_s = resume_s
        self._channel: grpc.aio.Channel | None = None
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    def stream(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Continue a prompt (text or token ids) or answer a chat, delta by delta. Iterating raises the errors."""
        stub = inference_pb2_grpc.InferenceServiceStub(self._open())
        stream = AsyncStream(_calls(stub, self._address, prompt, messages, options, self._timeout_s), self._resume_s)
        self._streams.add(stream)
        return stream

    async def generate(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Continue a prompt (text or token ids) or answer a chat; return the whole answer."""
        stream = self.stream(prompt, messages=messages, **options)
        async for _ in stream:
            pass
        return stream.result

    async def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Generation:
        """Answer a conversation of {"role": "system" | "user" | "assistant", "content": text} messages."""
        return await self.generate(messages=messages, **options)

    async def list_models(self) -> tuple[ModelSummary, ...]:
        method = inference_pb2_grpc.InferenceServiceStub(self._open()).ListModels
        response = await self._call(method, inference_pb2.ListModelsRequest())
        return tuple(model_from_proto(model) for model in response.models)

    async def status(self) -> FleetStatus:
        method = admin_pb2_grpc.AdminServiceStub(self._open()).GetStatus
        return status_from_proto(await self._call(method, admin_pb2.GetStatusRequest()))

    async def plan(self) -> admin_pb2.GetPlanResponse:
        """Return what the orchestrator knows of its devices and links, as a message: for tools that plan themselves."""
        method = admin_pb2_grpc.AdminServiceStub(self._open()).GetPlan
        response: admin_pb2.GetPlanResponse = await self._call(method, admin_pb2.GetPlanRequest())
        return response

    async def drain(self, worker_id: str) -> Drained:
        """Move all layers off a device and cordon it; returns when that is done, and no answer ends for it.

        Raises PlacementImpossible, with the numbers, if no other devices can hold them: nothing has changed then.
        """
        method = admin_pb2_grpc.AdminServiceStub(self._open()).Drain
        return drained_from_proto(await self._call(method, admin_pb2.DrainRequest(worker_id=worker_id)))

    async def cordon(self, worker_id: str, is_cordoned: bool = True) -> None:
        """Keep a device from being given layers, or let it again; what it computes goes on."""
        method = admin_pb2_grpc.AdminServiceStub(self._open()).Cordon
        await self._call(method, admin_pb2.CordonRequest(worker_id=worker_id, is_cordoned=is_cordoned))

    async def explain(self, request_id: str = "") -> Explanation:
        """Why a recent request ran where and when it did; empty: the newest. Raises RequestNotFound."""
        method = admin_pb2_grpc.AdminServiceStub(self._open()).Explain
        return explanation_from_proto(await self._call(method, admin_pb2.ExplainRequest(request_id=request_id)))

    async def anticipate(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, tenant: str = "", session_id: str = ""
    ) -> Anticipated:
        """Have workers fetch KV from Redis that a prompt, as far as it is typed, will probably begin with; compute nothing.

        With a session what is typed is its next turn, and may be left out. Raises InvalidRequest and ContextExceeded.
        """
        request = build_anticipate_request(prompt, messages, tenant, session_id)
        method = inference_pb2_grpc.InferenceServiceStub(self._open()).Anticipate
        return anticipated_from_proto(await self._call(method, request))

    async def warm(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        tenant: str = "",
        ttl_s: float = 0.0,
        is_public: bool = False,
    ) -> Warmed:
        """Have the KV of a prompt, or of the beginning of a chat, computed ahead.

        ttl_s: how long it is pinned in workers' memory. is_public: all tenants may use it, and can tell that it is there.
        """
        request = build_warm_request(prompt, messages, tenant, ttl_s, is_public=is_public)
        method = admin_pb2_grpc.AdminServiceStub(self._open()).Warm
        return warmed_from_proto(await self._call(method, request))

    async def sessions(self, tenant: str = "") -> tuple[SessionStatus, ...]:
        """The conversations of a tenant that are kept."""
        request = admin_pb2.ListSessionsRequest(tenant=tenant)
        method = admin_pb2_grpc.AdminServiceStub(self._open()).ListSessions
        return sessions_from_proto(await self._call(method, request))

    async def delete_session(self, session_id: str, tenant: str = "") -> DeletedSession:
        """Delete a conversation, and its KV that no other one shares. Raises SessionNotFound, SessionBusy."""
        request = admin_pb2.DeleteSessionRequest(tenant=tenant, session_id=session_id)
        method = admin_pb2_grpc.AdminServiceStub(self._open()).DeleteSession
        return deleted_from_proto(await self._call(method, request))

    async def _call(self, method: Callable[..., Any], request: object) -> Any:
        with errors_of(self._address):
            return await cast(Awaitable[Any], method(request, timeout=self._timeout_s))

    def _open(self) -> grpc.aio.Channel:
        # Not in __init__: a channel belongs to the loop it was made in, and a client may be made before there is one.
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        return self._channel

    async def close(self) -> None:
        """Cancel the streams that are open and leave."""
        for stream in tuple(self._streams):
            stream.cancel()
        if self._channel is not None:
            await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
