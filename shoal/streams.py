"""An answer as it comes, for users: `Stream`, and `AsyncStream` for asyncio.

Owns the call to the orchestrator, the cancelling of one that nobody reads any more, and going on with an answer whose stream
broke off (`shoal.resumption` says when): no token comes twice, none is left out. Made by `shoal.client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import grpc

from shoal.errors import RequestCancelled, ShoalError
from shoal.generation import Answer, Delta, Generation
from shoal.resumption import Resumption
from shoal.rpc import error_from_rpc
from shoal.v1 import inference_pb2


@contextmanager
def errors_of(address: str) -> Generator[None, None, None]:
    """Have what the calls inside raise be ShoalErrors."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error, address) from None


@dataclass(frozen=True, slots=True)
class Calls:
    """What a stream calls. stub: of InferenceService. deadline_at: of the whole answer, by the monotonic clock."""

    stub: Any
    address: str
    request: inference_pb2.GenerateRequest
    deadline_at: float | None

    @property
    def _time_left_s(self) -> float | None:
        return None if self.deadline_at is None else max(self.deadline_at - time.monotonic(), 0.0)

    def generate(self) -> Any:
        return self.stub.Generate(self.request, timeout=self._time_left_s)

    def resume(self, answer: Answer) -> Any:
        """Go on behind the tokens of the answer that are there."""
        request = inference_pb2.ResumeRequest(
            request_id=answer.request_id, tenant=self.request.tenant, num_tokens=answer.num_tokens
        )
        return self.stub.Resume(request, timeout=self._time_left_s)


class _Reading:
    """What both kinds of streams know: the answer so far, whether it is over, and how it is gone on with."""

    __slots__ = ("answer", "calls", "is_over", "resumption")

    def __init__(self, calls: Calls, resume_s: float) -> None:
        self.calls = calls
        self.answer = Answer()
        self.resumption = Resumption(resume_s)
        self.is_over = False

    @property
    def is_at_end(self) -> bool:
        return self.answer.is_finished or self.is_over

    def add(self, message: Any) -> Delta | None:
        """Take in an event, of a stream that was begun or gone on with."""
        self.resumption.on_response()
        return self.answer.add(message.response if isinstance(message, inference_pb2.ResumeResponse) else message)

    def wait_s(self, error: ShoalError | None) -> float:
        """How long to wait before going on with a stream that ended, with no error or this one. Raises it if not at all."""
        is_break = error is None
        error = error or RequestCancelled(
            "the answer ended without a finish reason: the orchestrator is going down; ask again"
        )
        if not self.answer.request_id:
            raise error
        return self.resumption.on_error(error, time.monotonic(), is_break=is_break)

    def result(self) -> Generation:
        if not self.is_over:
            raise RuntimeError("the answer is still being read: take its result after the loop")
        return replace(self.answer.to_generation(), num_resumes=self.resumption.num_resumes)


class Stream:
    """An answer as it comes: iterate over it once for its Deltas; afterwards `result` is the Generation.

    Breaking out of the loop, `cancel()` and leaving the `with` block end the call on the server; what had come until
    then is the result, with finish reason CANCELLED.
    """

    __slots__ = ("__weakref__", "_call", "_has_cancelled", "_reading")

    def __init__(self, calls: Calls, resume_s: float) -> None:
        self._reading = _Reading(calls, resume_s)
        self._has_cancelled = threading.Event()
        self._call = calls.generate()

    def __iter__(self) -> Iterator[Delta]:
        reading = self._reading
        try:
            while not reading.is_at_end:
                broken: ShoalError | None = None
                try:
                    with errors_of(reading.calls.address):
                        for message in self._call:
                            delta = reading.add(message)
                            if delta is not None:
                                yield delta
                except ShoalError as error:
                    broken = error
                if not reading.is_at_end:
                    self._go_on(reading.wait_s(broken))
        finally:
            self.cancel()

    def _go_on(self, wait_s: float) -> None:
        if not self._has_cancelled.wait(wait_s):
            self._call = self._reading.calls.resume(self._reading.answer)
        if self._has_cancelled.is_set():
            self._call.cancel()

    @property
    def text(self) -> str:
        """The text so far."""
        return self._reading.answer.text

    @property
    def result(self) -> Generation:
        """The answer; raises RuntimeError while it is still being read."""
        return self._reading.result()

    def cancel(self) -> None:
        """End the call; harmless if it has ended. May be called from another thread."""
        self._reading.is_over = True
        self._has_cancelled.set()
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

    __slots__ = ("__weakref__", "_call", "_has_cancelled", "_reading")

    def __init__(self, calls: Calls, resume_s: float) -> None:
        self._reading = _Reading(calls, resume_s)
        self._has_cancelled = asyncio.Event()
        self._call = calls.generate()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        reading = self._reading
        try:
            while not reading.is_at_end:
                broken: ShoalError | None = None
                try:
                    with errors_of(reading.calls.address):
                        async for message in self._call:
                            delta = reading.add(message)
                            if delta is not None:
                                yield delta
                except ShoalError as error:
                    broken = error
                if not reading.is_at_end:
                    await self._go_on(reading.wait_s(broken))
        except asyncio.CancelledError:
            # grpc.aio raises it too where only the call was cancelled, and that is an end like any other.
            task = asyncio.current_task()
            if not reading.is_over or (task is not None and task.cancelling()):
                raise
        finally:
            self.cancel()

    async def _go_on(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_cancelled.wait(), wait_s)
        if not self._has_cancelled.is_set():
            self._call = self._reading.calls.resume(self._reading.answer)

    @property
    def text(self) -> str:
        """The text so far."""
        return self._reading.answer.text

    @property
    def result(self) -> Generation:
        """The answer; raises RuntimeError while it is still being read."""
        return self._reading.result()

    def cancel(self) -> None:
        """End the call; harmless if it has ended."""
        self._reading.is_over = True
        self._has_cancelled.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
