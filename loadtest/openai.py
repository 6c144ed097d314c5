"""What servers with OpenAI's HTTP interface say: chunks of an answer, and errors in their many shapes.

Pure: JSON text and status codes in, tokens and ShoalErrors out, so that their reasons count alike beside our own server's.
Opens no connection. Called by `targets`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from loadtest.answers import End
from shoal.errors import (
    ContextExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    ProtocolMismatch,
    RequestCancelled,
    ShoalError,
)

MAX_MESSAGE_CHARS = 300
# What garbage makes of reading it: RecursionError where it is nested too deeply, OverflowError of a count that is infinite.
UNREADABLE = (ValueError, AttributeError, TypeError, LookupError, RecursionError, OverflowError)


class ForeignModelNotFound(ModelNotFound):
    """The same of a server that is not Shoal's: a kind of its own, for our commands know nothing of its models."""


class StreamedAnswer:
    """Folds the chunks of one streamed completion.

    Invariant: num_tokens is what add() has returned in all.
    """

    __slots__ = ("_completion_tokens", "_finish", "_prompt_tokens", "_where", "num_tokens")

    def __init__(self, where: str) -> None:
        self._where = where
        self.num_tokens = 0
        self._finish = ""
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def add(self, data: str) -> int:
        """Take in a chunk; return how many tokens it seems to have brought: one if it has text."""
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise _error_of_object(chunk["error"], status=0, where=self._where)
            usage = chunk.get("usage") or {}
            self._prompt_tokens = int(usage.get("prompt_tokens") or self._prompt_tokens)
            self._completion_tokens = int(usage.get("completion_tokens") or self._completion_tokens)
            choices = chunk.get("choices") or []
            num_tokens = int(any(_has_text(choice) for choice in choices))
            finishes = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        except UNREADABLE:
            raise ProtocolMismatch(f"{self._where} sent what is no completion chunk: {_short(data)}") from None
        self._finish = str(finishes[0]) if finishes else self._finish
        self.num_tokens += num_tokens
        return num_tokens

    def end(self) -> End:
        if not self._finish:
            raise RequestCancelled(f"{self._where} ended an answer without a finish reason")
        return End(self._finish, self._prompt_tokens, self._completion_tokens or self.num_tokens)


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    # Thinking aloud is text too: servers name it differently.
    return any((delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"), choice.get("text")))


def error_of_response(status: int, retry_after: str, body: bytes, where: str) -> ShoalError:
    """Say why a request was refused; retry_after: that header, or ""."""
    try:
        described = json.loads(body)
    except (ValueError, RecursionError):
        described = body.decode(errors="replace")
    if isinstance(described, Mapping):
        described = described.get("error", described)
    if status == 404 and not (isinstance(described, Mapping) and described.get("message")):
        return _no_such_path(described, where)
    error = _error_of_object(described, status=status, where=where)
    error.retry_after_s = _retry_after_s(retry_after)
    return error


def _no_such_path(described: object, where: str) -> ShoalError:
    """A 404 without an error object: not of the model, for of that such a server would speak."""
    said = described.get("detail") if isinstance(described, Mapping) else described
    quoted = f" ({_short(str(said))})" if said else ""
    return InvalidRequest(
        "url", f"{where} says 404{quoted}: there is no such path; does the URL end as it should, usually in /v1?"
    )


def _error_of_object(error: object, *, status: int, where: str) -> ShoalError:
    """Read an error object {message, type, param, code}, or whatever a server sends in its place."""
    fields = error if isinstance(error, Mapping) else {"message": error}
    code = fields.get("code")
    status = status or (code if isinstance(code, int) else 0)
    kind = f"{fields.get('type')} {code}"
    said = _short(str(fields.get("message") or fields.get("detail") or "no message"))
    message = f"{where} says{f' {status}' if status else ''}: {said}"
    if "context_length" in kind:
        return ContextExceeded(message)
    if status == 429 or "rate_limit" in kind or "overloaded" in kind:
        return Overloaded(message)
    return _error_of_status(status, message, str(fields.get("param") or "request"))


def _error_of_status(status: int, message: str, field: str) -> ShoalError:
    match status:
        case 401 | 403:
            return InvalidRequest("api key", message)
        case 404:
            return ForeignModelNotFound(message)
        case 408 | 504:
            return DeadlineExceeded(message)
        case 502 | 503:
            return NotReady(message)
        case _ if 400 <= status < 500:
            return InvalidRequest(field, message)
        case _ if 100 <= status < 400:
            return ProtocolMismatch(message)
        case _:
            return InternalError(message)


def _retry_after_s(value: str) -> float:
    """Retry-After in seconds, also where it is a date; 0 where there is none or nobody can read it."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 3] + "..."
