"""The gRPC side of what both sides agree on: channel options, errors as rich statuses, values as messages.

The only place where ShoalErrors become statuses (`unary`, `stream`: put on every servicer method) and statuses become
ShoalErrors again (`error_from_rpc`). Knows no service and no policy. Called by servicers, workers and the client SDK.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar, cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shoal.errors import (
    STATUS_OF_REASON,
    ConnectionFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    ProtocolMismatch,
    RequestCancelled,
    ShoalError,
    rebuild,
)

logger = logging.getLogger(__name__)

ERROR_DOMAIN: Final = "shoal"
MAX_MESSAGE_BYTES: Final = 64 * 2**20
# Statuses travel in headers, which gRPC cuts off at 8 KiB; the message is in there twice and percent-encoded once.
MAX_ERROR_CHARS: Final = 1000

# Pings are answered by threads of gRPC, however long Python or a step takes: who is slow is not lost. ping_timeout finds a
# frozen peer, whose kernel still acknowledges and so satisfies keepalive_timeout.
_COMMON_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 400),
    ("grpc.http2.max_pings_without_data", 0),
)
_PATIENT_OPTIONS: Final = (
    *_COMMON_OPTIONS,
    ("grpc.keepalive_timeout_ms", 800),
    ("grpc.http2.ping_timeout_ms", 900),
)
_DIALLING_OPTIONS: Final = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A fleet lives in one network: a proxy for the web, set in the environment, is never meant for it.
    ("grpc.enable_http_proxy", 0),
)
CHANNEL_OPTIONS: Final = (*_PATIENT_OPTIONS, *_DIALLING_OPTIONS)
# Between the processes of a fleet: who dialled leaves a second between two pings, whatever it is told, so it waits less for
# the answer. Either side misses the other within 1.5 s.
FLEET_OPTIONS: Final = (
    *_COMMON_OPTIONS,
    ("grpc.keepalive_timeout_ms", 500),
    ("grpc.http2.ping_timeout_ms", 500),
    *_DIALLING_OPTIONS,
)
# For weights, over a connection of their own: with the window that a call begins with, no more of them is on the way than a
# link of 1 Mbit/s carries in half a second. Else they fill the queues of a slow link, pings wait behind them, and the device
# is taken for lost.
BULK_OPTIONS: Final = (
    *_PATIENT_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
# Without so_reuseport = 0 a second server on a port starts happily and takes half of the calls.
SERVER_OPTIONS: Final = (
    *_PATIENT_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # Refusing is the scheduler's, which says why and when to come again; gRPC's own limits end calls without a word.
    ("grpc.server.max_pending_requests", 50_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
)

Servicer = TypeVar("Servicer")
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


def error_to_status(error: ShoalError) -> status_pb2.Status:
    """Pack an error with its reason, the field at fault and when to retry."""
    message = error.message if len(error.message) <= MAX_ERROR_CHARS else error.message[: MAX_ERROR_CHARS - 3] + "..."
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field[:100], description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s > 0:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(retry)
    code = grpc.StatusCode[STATUS_OF_REASON[error.reason]]
    return status_pb2.Status(code=code.value[0], message=message, details=[_pack(detail) for detail in details])


def error_from_rpc(error: grpc.RpcError, address: str) -> ShoalError:
    """Make the error that the other side raised, or one that says why there was no other side."""
    outcome = cast(grpc.Call, error)
    return _error_from_details(outcome) or _error_from_code(outcome.code(), outcome.details() or "", address)


def _error_from_details(outcome: grpc.Call) -> ShoalError | None:
    try:
        status = rpc_status.from_call(outcome)
    except ValueError:
        # Code and details of the status disagree: not one of ours.
        return None
    if status is None:
        return None
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for detail in status.details:
        for target in (info, bad_request, retry):
            if detail.Is(target.DESCRIPTOR):
                detail.Unpack(target)
    if info.domain != ERROR_DOMAIN:
        return None
    field = bad_request.field_violations[0].field if bad_request.field_violations else ""
    return rebuild(info.reason, status.message, field=field, retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9)


def _error_from_code(code: grpc.StatusCode, details: str, address: str) -> ShoalError:
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return ConnectionFailed(_unavailable_message(details, address))
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"no complete answer from {address} before the deadline; allow more time")
        case grpc.StatusCode.CANCELLED if "locally cancelled" not in details.lower():
            return ConnectionFailed(
                f"{address} ended the call: it is stopping, or has more calls than it can take; ask again later",
                retry_after_s=1.0,
            )
        case grpc.StatusCode.CANCELLED:
            return RequestCancelled(f"the call to {address} was cancelled")
        case grpc.StatusCode.INTERNAL if "from core" in details.lower():
            # What grpc.aio makes of a connection that breaks while it writes.
            return ConnectionFailed(_unavailable_message(details, address))
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(
                f"{address} does not know this call: it is no Shoal orchestrator, or one of another version ({details})"
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return InvalidRequest("request", f"too large: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(f"{address} takes no more calls now ({details}); try again later", retry_after_s=1.0)
        case _:
            return InternalError(f"{address} failed with {code.name}: {details}")


def _unavailable_message(details: str, address: str) -> str:
    what_to_do = "start a fleet with `shoal up`, or give the address of one that runs"
    if any(sign in details.lower() for sign in ("failed to connect", "resolution failed", "errors resolving")):
        return f"nobody answers at {address}: {what_to_do}"
    return f"the connection to {address} broke ({details}): {what_to_do}"


def _pack(detail: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def unary(
    method: Callable[[Servicer, Request, Context], Awaitable[Response]],
) -> Callable[[Servicer, Request, Context], Awaitable[Response]]:
    """Translate what an aio servicer method with one response raises."""

    @functools.wraps(method)
    async def translated(servicer: Servicer, request: Request, context: Context) -> Response:
        try:
            return await method(servicer, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method.__qualname__)
            raise

    return translated


def stream(
    method: Callable[[Servicer, Request, Context], AsyncGenerator[Response, None]],
) -> Callable[[Servicer, Request, Context], Awaitable[None]]:
    """Translate what an aio servicer method that yields responses raises.

    The generator is closed as soon as the call ends, also when the client left while a response was being written: its
    `finally` blocks may give back what the call held.
    """

    @functools.wraps(method)
    async def translated(servicer: Servicer, request: Request, context: Context) -> None:
        try:
            async with aclosing(method(servicer, request, context)) as responses:
                async for response in responses:
                    await context.write(response)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001
            await _abort(context, error, method.__qualname__)

    return translated


async def _abort(context: Context, error: Exception, method: str) -> None:
    """End the call with the status of an error; always raises unless the client is gone."""
    # What grpc.aio raises where a connection breaks while a response is written.
    if context.cancelled() or isinstance(error, grpc.aio.InternalError):
        logger.debug("call_ended_after_client_left method=%s", method, exc_info=error)
        return
    if not isinstance(error, ShoalError):
        correlation_id = secrets.token_hex(6)
        logger.error("unexpected_error method=%s correlation_id=%s", method, correlation_id, exc_info=error)
        error = InternalError(f"an unexpected error, a bug of Shoal: the log has it under {correlation_id}")
    status = rpc_status.to_status(error_to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
