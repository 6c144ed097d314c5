"""Every error Shoal tells anybody about: one base class, a stable reason, and a table reason -> gRPC status.

Raised where the fault is found; turned into a status once, at the servicer, and back once, in the client (`shoal.rpc`).
Knows nothing of gRPC's runtime: status names are plain strings.
"""

from __future__ import annotations


class ShoalError(Exception):
    """Base of all errors that reach a user: says what is wrong and what to do.

    reason: stable, upper-case; the client gets it as ErrorInfo.reason. field: what in the request is at fault.
    """

    reason = "INTERNAL"
    is_retryable = False

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InternalError(ShoalError):
    """A bug of ours; carries a correlation id that is also in the log."""


class InvalidRequest(ShoalError):
    """A field of a request has a value that cannot be served."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str]]:
        # An exception that is sent is made again of its arguments, which are not those of its base.
        return type(self), (self.field, self.message.removeprefix(f"{self.field}: "))


class ContextExceeded(ShoalError):
    """A prompt is longer than the context or than all KV room; waiting would not help."""

    reason = "CONTEXT_EXCEEDED"


class ModelNotFound(ShoalError):
    reason = "MODEL_NOT_FOUND"


class UnsupportedModel(ShoalError):
    """A model file is sound, but its architecture or quantisation is not supported."""

    reason = "UNSUPPORTED_MODEL"


class BadModelFile(ShoalError):
    """A model file is truncated or malformed."""

    reason = "BAD_MODEL_FILE"


class CorruptBlob(ShoalError):
    """Bytes do not have the digest they are stored under."""

    reason = "CORRUPT_BLOB"


class PullFailed(ShoalError):
    """A model's source cannot be reached or gave something else."""

    reason = "PULL_FAILED"
    is_retryable = True


class LicenseNotAccepted(ShoalError):
    """A model has terms that somebody must accept first; the message says which, and how."""

    reason = "LICENSE_NOT_ACCEPTED"


class StorageFull(ShoalError):
    """A disk lacks room; the message has the bytes that lack."""

    reason = "STORAGE_FULL"


class PlacementImpossible(ShoalError):
    """No way of sharing the layers fits the devices; the message has the bytes that lack."""

    reason = "PLACEMENT_IMPOSSIBLE"


class ShardDoesNotFit(ShoalError):
    """A device lacks memory for the shard it was told to load; the message names it and the bytes."""

    reason = "SHARD_DOES_NOT_FIT"


class ProtocolMismatch(ShoalError):
    """Worker and orchestrator speak different protocol versions."""

    reason = "PROTOCOL_MISMATCH"


class NotReady(ShoalError):
    """Nothing serves yet, or no more: the message says what is waited for."""

    reason = "NOT_READY"
    is_retryable = True


class WorkerLost(ShoalError):
    """A device that was computing an answer is gone."""

    reason = "WORKER_LOST"
    is_retryable = True


class Overloaded(ShoalError):
    """A queue is full."""

    reason = "OVERLOADED"
    is_retryable = True


class DeadlineExceeded(ShoalError):
    reason = "DEADLINE_EXCEEDED"


class DeadlineUnmeetable(ShoalError):
    """A request would miss its deadline, as far as can be predicted when it comes; the message has the numbers."""

    reason = "DEADLINE_UNMEETABLE"
    is_retryable = True


class RequestNotFound(ShoalError):
    """No request of that id is known (any more)."""

    reason = "REQUEST_NOT_FOUND"


class RequestCancelled(ShoalError):
    reason = "CANCELLED"


class SessionBusy(ShoalError):
    """A turn of this session is still being answered; one comes after the other."""

    reason = "SESSION_BUSY"
    is_retryable = True


class SessionUnavailable(ShoalError):
    """Where sessions are kept cannot be reached now, so a conversation cannot be told from a new one."""

    reason = "SESSION_UNAVAILABLE"
    is_retryable = True


class SessionNotFound(ShoalError):
    """No session of that id is kept (any more)."""

    reason = "SESSION_NOT_FOUND"


class TooManySessions(ShoalError):
    """As many sessions are kept as may be; deleting one makes room."""

    reason = "TOO_MANY_SESSIONS"


class ConfigError(ShoalError):
    """An option, profile or environment value is wrong."""

    reason = "CONFIG"


class LaunchFailed(ShoalError):
    """A process of a fleet did not start or ended by itself; the message names it and has its last log lines."""

    reason = "LAUNCH_FAILED"


class ConnectionFailed(ShoalError):
    """Nobody answers at an address (raised by clients and workers only)."""

    reason = "CONNECTION_FAILED"
    is_retryable = True


STATUS_OF_REASON = {
    InternalError.reason: "INTERNAL",
    InvalidRequest.reason: "INVALID_ARGUMENT",
    ContextExceeded.reason: "INVALID_ARGUMENT",
    ModelNotFound.reason: "NOT_FOUND",
    UnsupportedModel.reason: "UNIMPLEMENTED",
    BadModelFile.reason: "INVALID_ARGUMENT",
    CorruptBlob.reason: "DATA_LOSS",
    PullFailed.reason: "UNAVAILABLE",
    LicenseNotAccepted.reason: "FAILED_PRECONDITION",
    StorageFull.reason: "RESOURCE_EXHAUSTED",
    PlacementImpossible.reason: "FAILED_PRECONDITION",
    ShardDoesNotFit.reason: "FAILED_PRECONDITION",
    ProtocolMismatch.reason: "FAILED_PRECONDITION",
    NotReady.reason: "UNAVAILABLE",
    WorkerLost.reason: "UNAVAILABLE",
    Overloaded.reason: "RESOURCE_EXHAUSTED",
    DeadlineExceeded.reason: "DEADLINE_EXCEEDED",
    DeadlineUnmeetable.reason: "RESOURCE_EXHAUSTED",
    RequestNotFound.reason: "NOT_FOUND",
    RequestCancelled.reason: "CANCELLED",
    SessionBusy.reason: "ABORTED",
    SessionUnavailable.reason: "UNAVAILABLE",
    SessionNotFound.reason: "NOT_FOUND",
    TooManySessions.reason: "RESOURCE_EXHAUSTED",
    ConfigError.reason: "FAILED_PRECONDITION",
    LaunchFailed.reason: "FAILED_PRECONDITION",
    ConnectionFailed.reason: "UNAVAILABLE",
}


def rebuild(reason: str, message: str, *, field: str = "", retry_after_s: float = 0.0) -> ShoalError:
    """Make the error that was raised on the other side; an unknown reason becomes an InternalError."""
    kinds: dict[str, type[ShoalError]] = {kind.reason: kind for kind in ShoalError.__subclasses__()}
    error = kinds.get(reason, InternalError).__new__(kinds.get(reason, InternalError))
    ShoalError.__init__(error, message, field=field, retry_after_s=retry_after_s)
    return error
