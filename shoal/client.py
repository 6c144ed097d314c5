"""The SDK: `Client` and, for asyncio, `AsyncClient`; both with `generate`, `chat`, `stream`, `list_models`,
`status`, `explain`, `anticipate`, `warm`, `sessions`, `delete_session`.

Owns channels and the cancelling of calls that nobody reads any more. Requests and answers are built and folded in
`shoal.generation`, errors rebuilt in `shoal.rpc`. Checks nothing that the server checks. Called by users and the CLI.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from shoal.config import DEFAULT_PORT
from shoal.errors import RequestCancelled
from shoal.explanation import Explanation, explanation_from_proto
from shoal.generation import (
    Answer,
    Delta,
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
from shoal.rpc import CHANNEL_OPTIONS, error_from_rpc
from shoal.status import FleetStatus, ModelSummary, model_from_proto, status_from_proto
from shoal.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"

Response = TypeVar("Response")


@contextmanager
def _errors_of(address: str) -> Generator[None, None, None]:
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error, address) from None


class Stream:
    """An answer as it comes: iterate over it once for its Deltas; afterwards `result` is the Generation.

    Breaking out of the loop, `cancel()` and leaving the `with` block end the call on the server; what had come until
    then is the result, with finish reason CANCELLED.
    """

    __slots__ = ("__weakref__", "_address", "_answer", "_call", "_is_cancelled", "_is_over")

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._answer = Answer()
        self._is_cancelled = False
        self._is_over = False

    def __iter__(self) -> Iterator[Delta]:
        try:
            with _errors_of(self._address):
                for response in self._call:
                    delta = self._answer.add(response)
                    if delta is not None:
                        yield delta
            _check_finished(self._answer, self._is_cancelled)
        except RequestCancelled:
            if not self._is_cancelled:
                raise
        finally:
            self.cancel()

    @property
    def text(self) -> str:
        """The text so far."""
        return self._answer.text

    @property
    def result(self) -> Generation:
        """The answer; raises RuntimeError while it is still being read."""
        return _result(self._answer, self._is_over)

    def cancel(self) -> None:
        """End the call; harmless if it has ended. May be called from another thread."""
        self._is_cancelled = self._is_cancelled or not self._answer.is_finished
        self._is_over = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class AsyncStream:
    """Stream for asyncio: `async for` over it once for its Deltas; afterwards `result` is the Generation."""

    __slots__ = ("__weakref__", "_address", "_answer", "_call", "_is_cancelled", "_is_over")

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._answer = Answer()
        self._is_cancelled = False
        self._is_over = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            with _errors_of(self._address):
                async for response in self._call:
                    delta = self._answer.add(response)
                    if delta is not None:
                        yield delta
            _check_finished(self._answer, self._is_cancelled)
        except asyncio.CancelledError:
            # grpc.aio raises it too where only the call was cancelled, and that is an end like any other.
            task = asyncio.current_task()
            if not self._is_cancelled or (task is not None and task.cancelling()):
                raise
        finally:
            self.cancel()

    @property
    def text(self) -> str:
        """The text so far."""
        return self._answer.text

    @property
    def result(self) -> Generation:
        """The answer; raises RuntimeError while it is still being read."""
        return _result(self._answer, self._is_over)

    def cancel(self) -> None:
        """End the call; harmless if it has ended."""
        self._is_cancelled = self._is_cancelled or not self._answer.is_finished
        self._is_over = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


def _check_finished(answer: Answer, is_cancelled: bool) -> None:
    if not answer.is_finished and not is_cancelled:
        raise RequestCancelled("the answer ended without a finish reason: the orchestrator is going down; ask again")


def _result(answer: Answer, is_over: bool) -> Generation:
    if not is_over:
        raise RuntimeError("the answer is still being read: take its result after the loop")
    return answer.to_generation()


class Client:
    """A synchronous client of an orchestrator; may be used by several threads.

    timeout_s: the most that one call may take, a whole answer included; None waits for as long as it takes.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, timeout_s: float | None = None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    def stream(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Continue a prompt (text or token ids) or answer a chat, delta by delta. Iterating raises the errors."""
        request = build_request(prompt, messages, options)
        timeout_s = deadline_s(options, self._timeout_s)
        stream = Stream(self._inference.Generate(request, timeout=timeout_s), self._address)
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
        with _errors_of(self._address):
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

    timeout_s: the most that one call may take, a whole answer included; None waits for as long as it takes.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, timeout_s: float | None = None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    def stream(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Continue a prompt (text or token ids) or answer a chat, delta by delta. Iterating raises the errors."""
        request = build_request(prompt, messages, options)
        timeout_s = deadline_s(options, self._timeout_s)
        method = inference_pb2_grpc.InferenceServiceStub(self._open()).Generate
        stream = AsyncStream(method(request, timeout=timeout_s), self._address)
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
        with _errors_of(self._address):
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
