"""Errors as statuses and back, and the translation around servicer methods."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from shoal import errors, rpc

ADDRESS = "10.0.0.7:50070"


class FakeRpcError(grpc.RpcError):
    """What a client catches: a status code, its text and the trailing metadata."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        super().__init__()
        self._outcome = (code, details, trailing_metadata)

    def code(self) -> grpc.StatusCode:
        return self._outcome[0]

    def details(self) -> str:
        return self._outcome[1]

    def trailing_metadata(self) -> Any:
        return self._outcome[2]


class FakeContext:
    """The part of a servicer context that the translation uses."""

    def __init__(self, *, is_cancelled: bool = False) -> None:
        self.written: list[str] = []
        self.aborted: FakeRpcError | None = None
        self._is_cancelled = is_cancelled

    def cancelled(self) -> bool:
        return self._is_cancelled

    async def write(self, response: str) -> None:
        self.written.append(response)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        self.aborted = FakeRpcError(code, details, trailing_metadata)
        raise grpc.aio.AbortError("aborted")


def cross_the_wire(error: errors.ShoalError) -> errors.ShoalError:
    status = rpc_status.to_status(rpc.error_to_status(error))
    return rpc.error_from_rpc(FakeRpcError(status.code, status.details, status.trailing_metadata), ADDRESS)


ONE_OF_EACH = [
    kind("something is wrong") for kind in errors.ShoalError.__subclasses__() if kind is not errors.InvalidRequest
]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: error.reason)
def test_an_error_arrives_as_the_kind_that_was_raised(error: errors.ShoalError) -> None:
    arrived = cross_the_wire(error)

    assert type(arrived) is type(error)
    assert arrived.message == "something is wrong"


def test_the_field_at_fault_arrives() -> None:
    arrived = cross_the_wire(errors.InvalidRequest("sampling.top_p", "2 is out of range"))

    assert (type(arrived), arrived.field) == (errors.InvalidRequest, "sampling.top_p")
    assert arrived.message == "sampling.top_p: 2 is out of range"


def test_the_time_to_retry_after_arrives() -> None:
    assert cross_the_wire(errors.Overloaded("queue full", retry_after_s=2.5)).retry_after_s == 2.5


def test_an_error_has_the_status_code_of_its_reason() -> None:
    assert rpc.error_to_status(errors.ModelNotFound("no")).code == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_message_of_any_length_fits_into_headers() -> None:
    status = rpc.error_to_status(errors.ModelNotFound("ü" * 100_000))

    assert len(status.SerializeToString()) < 4096
    assert status.message.endswith("...")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.ConnectionFailed),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.ConnectionFailed),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ProtocolMismatch),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
)
def test_a_status_that_is_not_ours_names_the_address(code: grpc.StatusCode, kind: type[errors.ShoalError]) -> None:
    error = rpc.error_from_rpc(FakeRpcError(code, "some text"), ADDRESS)

    assert type(error) is kind
    assert ADDRESS in error.message


def test_only_a_call_that_we_cancelled_counts_as_cancelled() -> None:
    error = rpc.error_from_rpc(FakeRpcError(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"), ADDRESS)
    assert type(error) is errors.RequestCancelled


def test_a_connection_that_breaks_during_a_write_is_no_bug_of_the_orchestrator() -> None:
    details = "Internal error from Core"
    assert type(rpc.error_from_rpc(FakeRpcError(grpc.StatusCode.INTERNAL, details), ADDRESS)) is errors.ConnectionFailed


def test_a_refused_connection_says_how_to_start_a_fleet() -> None:
    refused = FakeRpcError(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: refused")

    assert rpc.error_from_rpc(refused, ADDRESS).message == (
        f"nobody answers at {ADDRESS}: start a fleet with `shoal up`, or give the address of one that runs"
    )


def test_a_deadline_that_passes_is_told_as_such() -> None:
    passed = FakeRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    assert rpc.error_from_rpc(passed, ADDRESS).message == (
        f"no complete answer from {ADDRESS} before the deadline; allow more time"
    )


def test_a_message_over_the_limit_is_the_requests_fault() -> None:
    too_large = FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)")

    assert type(rpc.error_from_rpc(too_large, ADDRESS)) is errors.InvalidRequest


def test_details_of_another_domain_are_not_taken_for_ours() -> None:
    status = rpc.error_to_status(errors.Overloaded("full"))
    status.details[0].value = status.details[0].value.replace(b"shoal", b"other")
    foreign = rpc_status.to_status(status)

    error = rpc.error_from_rpc(FakeRpcError(foreign.code, foreign.details, foreign.trailing_metadata), ADDRESS)

    assert ADDRESS in error.message


class Servicer:
    """One method of each kind, wrapped as real ones are; each ends as it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.is_closed = False

    @rpc.unary
    async def Unary(self, request: str, context: Any) -> str:  # noqa: N802
        if self.error:
            raise self.error
        return request.upper()

    @rpc.stream
    async def Stream(self, request: str, context: Any) -> AsyncGenerator[str, None]:  # noqa: N802
        try:
            for letter in request:
                yield letter
            if self.error:
                raise self.error
        finally:
            self.is_closed = True


async def test_a_method_that_succeeds_is_left_alone() -> None:
    context: Any = FakeContext()

    assert await Servicer().Unary("abc", context) == "ABC"
    await Servicer().Stream("abc", context)

    assert context.written == ["a", "b", "c"]
    assert context.aborted is None


@pytest.mark.parametrize("method", ["Unary", "Stream"])
async def test_an_error_of_ours_ends_a_call_with_its_status(method: str) -> None:
    context = FakeContext()

    with pytest.raises(grpc.aio.AbortError):
        await getattr(Servicer(errors.NotReady("no workers yet")), method)("abc", context)

    assert context.aborted is not None
    assert context.aborted.code() is grpc.StatusCode.UNAVAILABLE
    assert type(rpc.error_from_rpc(context.aborted, ADDRESS)) is errors.NotReady


@pytest.mark.parametrize("method", ["Unary", "Stream"])
async def test_a_bug_is_logged_under_the_id_the_client_is_told(method: str, caplog: pytest.LogCaptureFixture) -> None:
    context = FakeContext()

    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AbortError):
        await getattr(Servicer(KeyError("secret")), method)("abc", context)

    assert context.aborted is not None
    (record,) = caplog.records
    assert record.exc_info is not None
    assert context.aborted.details().rsplit(" ", 1)[1] in record.getMessage()
    assert "secret" not in context.aborted.details()


@pytest.mark.parametrize("method", ["Unary", "Stream"])
async def test_cancellation_passes_through(method: str) -> None:
    context = FakeContext()

    with pytest.raises(asyncio.CancelledError):
        await getattr(Servicer(asyncio.CancelledError()), method)("abc", context)

    assert context.aborted is None


async def test_a_stream_is_closed_at_once_when_its_client_leaves_during_a_write() -> None:
    class LeavingContext(FakeContext):
        async def write(self, response: str) -> None:
            raise asyncio.CancelledError

    context: Any = LeavingContext()
    servicer = Servicer()

    with pytest.raises(asyncio.CancelledError):
        await servicer.Stream("abc", context)

    assert servicer.is_closed


async def test_what_a_write_raises_after_the_client_left_is_nobodys_error(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = FakeContext(is_cancelled=True)

    with caplog.at_level(logging.INFO):
        await Servicer(RuntimeError("stream is gone")).Stream("abc", context)

    assert context.aborted is None
    assert not caplog.records


async def test_a_write_that_a_broken_connection_ends_is_nobodys_error(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = FakeContext()

    with caplog.at_level(logging.INFO):
        await Servicer(grpc.aio.InternalError("Failed to send")).Stream("abc", context)

    assert context.aborted is None
    assert not caplog.records
