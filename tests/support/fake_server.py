"""An orchestrator that plays back a script: real gRPC on loopback, no model, no workers.

Runs in a thread of its own. Used by the tests of the client and of the command line.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from shoal.errors import RequestNotFound, SessionNotFound, ShoalError
from shoal.rpc import SERVER_OPTIONS, stream, unary
from shoal.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from tests.support.server_thread import ServerThread

Context = grpc.aio.ServicerContext[Any, Any]


class Hang:
    """A script entry: wait until the call is cancelled."""


HANG = Hang()
Script = Sequence[inference_pb2.GenerateResponse | Exception | Hang]


def accepted(**fields: Any) -> inference_pb2.GenerateResponse:
    defaults = {"request_id": "r-1", "model": "tiny", "prompt_tokens": 3, "seed": 7}
    return inference_pb2.GenerateResponse(accepted=inference_pb2.Accepted(**{**defaults, **fields}))


def delta(index: int, text: str, token_ids: Sequence[int], **fields: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(index=index, text=text, token_ids=token_ids, **fields)
    )


def finished(**fields: Any) -> inference_pb2.GenerateResponse:
    layers = types_pb2.LayerRange(start=0, stop=30)
    defaults: dict[str, Any] = {
        "finish_reason": types_pb2.FINISH_REASON_STOP,
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "ttft_ms": 12.5,
        "tokens_per_s": 40.0,
        "pipeline": [inference_pb2.StageSummary(worker_id="phone-1", device="phone", layers=layers)],
    }
    return inference_pb2.GenerateResponse(finished=inference_pb2.Finished(**{**defaults, **fields}))


HELLO: Script = (accepted(), delta(0, "Hel", [10]), delta(1, "lo", [11]), finished())
ENDLESS: Script = (accepted(), delta(0, "Hel", [10]), HANG)


class FakeOrchestrator(
    inference_pb2_grpc.InferenceServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """Answers every Generate with the next script (the last one again and again), and keeps the requests.

    resume_scripts: what each Resume is answered with; without one left there is nothing to resume. next_statuses: what
    `status` is once it was asked for, and again; the last one stays.
    """

    def __init__(self, scripts: Sequence[Script], status: admin_pb2.GetStatusResponse | ShoalError) -> None:
        self.scripts = list(scripts)
        self.status = status
        self.next_statuses: list[admin_pb2.GetStatusResponse] = []
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.resume_scripts: list[Script] = []
        self.resumes: list[inference_pb2.ResumeRequest] = []
        self.deadlines_s: list[float | None] = []
        self.explanation: admin_pb2.ExplainResponse | ShoalError = admin_pb2.ExplainResponse(request_id="r-1")
        self.explained: list[str] = []
        self.drain: admin_pb2.DrainResponse | ShoalError = admin_pb2.DrainResponse()
        self.drained: list[str] = []
        self.cordons: list[tuple[str, bool]] = []
        self.anticipated: list[inference_pb2.AnticipateRequest] = []
        self.warmed: list[admin_pb2.WarmRequest] = []
        self.sessions = [
            admin_pb2.SessionStatus(
                session_id="talk", num_turns=3, num_tokens=530, kept_tokens=512, idle_s=90.0, expires_in_s=600_000.0
            )
        ]
        self.listed: list[admin_pb2.ListSessionsRequest] = []
        self.deleted: list[admin_pb2.DeleteSessionRequest] = []
        self.is_hanging = threading.Event()
        self.is_released = threading.Event()

    @stream
    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        async for response in self._play(script):
            yield response

    @stream
    async def Resume(  # noqa: N802
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.ResumeResponse, None]:
        self.resumes.append(request)
        self.deadlines_s.append(context.time_remaining())
        if not self.resume_scripts:
            raise RequestNotFound(f"there is no request {request.request_id!r}")
        async for response in self._play(self.resume_scripts.pop(0)):
            yield inference_pb2.ResumeResponse(response=response)

    async def _play(self, script: Script) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            for entry in script:
                if isinstance(entry, Exception):
                    raise entry
                if isinstance(entry, Hang):
                    self.is_hanging.set()
                    await asyncio.Event().wait()
                else:
                    yield entry
        finally:
            self.is_released.set()

    @unary
    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        summary = inference_pb2.ModelSummary(
            name="tiny", digest="ab" * 32, num_layers=30, context_tokens=2048, ready=True
        )
        return inference_pb2.ListModelsResponse(models=[summary])

    @unary
    async def Anticipate(  # noqa: N802
        self, request: inference_pb2.AnticipateRequest, context: Context
    ) -> inference_pb2.AnticipateResponse:
        self.anticipated.append(request)
        return inference_pb2.AnticipateResponse(num_prefixes=2, num_blocks=5)

    @unary
    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        if isinstance(self.status, ShoalError):
            raise self.status
        status = self.status
        if self.next_statuses:
            self.status = self.next_statuses.pop(0)
        return status

    @unary
    async def Explain(  # noqa: N802
        self, request: admin_pb2.ExplainRequest, context: Context
    ) -> admin_pb2.ExplainResponse:
        self.explained.append(request.request_id)
        if isinstance(self.explanation, ShoalError):
            raise self.explanation
        return self.explanation

    @unary
    async def Drain(  # noqa: N802
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        self.drained.append(request.worker_id)
        if isinstance(self.drain, ShoalError):
            raise self.drain
        return self.drain

    @unary
    async def Cordon(  # noqa: N802
        self, request: admin_pb2.CordonRequest, context: Context
    ) -> admin_pb2.CordonResponse:
        self.cordons.append((request.worker_id, request.is_cordoned))
        return admin_pb2.CordonResponse()

    @unary
    async def Warm(  # noqa: N802
        self, request: admin_pb2.WarmRequest, context: Context
    ) -> admin_pb2.WarmResponse:
        self.warmed.append(request)
        return admin_pb2.WarmResponse(prompt_tokens=530, kept_tokens=512, cached_tokens=64)

    @unary
    async def ListSessions(  # noqa: N802
        self, request: admin_pb2.ListSessionsRequest, context: Context
    ) -> admin_pb2.ListSessionsResponse:
        self.listed.append(request)
        return admin_pb2.ListSessionsResponse(sessions=self.sessions)

    @unary
    async def DeleteSession(  # noqa: N802
        self, request: admin_pb2.DeleteSessionRequest, context: Context
    ) -> admin_pb2.DeleteSessionResponse:
        self.deleted.append(request)
        if not self.sessions:
            raise SessionNotFound(f"tenant 'default' has no session {request.session_id!r}")
        return admin_pb2.DeleteSessionResponse(num_blocks_deleted=7, num_blocks_shared=1)


class FakeServer:
    """Serves a FakeOrchestrator while its `with` block runs; `address` is where."""

    def __init__(
        self, *scripts: Script, status: admin_pb2.GetStatusResponse | ShoalError | None = None, port: int = 0
    ) -> None:
        self.orchestrator = FakeOrchestrator(scripts or (HELLO,), status or admin_pb2.GetStatusResponse(ready=True))
        self.address = f"127.0.0.1:{port}"
        self._thread = ServerThread(self._serving)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.orchestrator, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.orchestrator, server)
        self.address = f"127.0.0.1:{server.add_insecure_port(self.address)}"
        await server.start()
        yield
        await server.stop(grace=None)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.stop()


def chat_of(server: FakeServer, index: int = 0) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in server.orchestrator.requests[index].chat.messages]
