"""Whether and when a client tries to go on with an answer whose stream broke off, and which error it gives up with.

Pure: told what happened and when. The streams of `shoal.streams` act on it.
"""

from __future__ import annotations

from shoal.errors import ConnectionFailed, InternalError, NotReady, ProtocolMismatch, RequestNotFound, ShoalError

# An orchestrator that was killed is back in a second or two, and a connection at once.
DEFAULT_RESUME_S = 30.0
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 0.25

# A stream that ends so may be gone on with: the connection broke, or the orchestrator ended and may be started again.
_BREAKS = (ConnectionFailed, NotReady)
# What an orchestrator says that cannot go on with it: then what broke the stream is what its reader has to know.
_REFUSALS = (RequestNotFound, ProtocolMismatch, InternalError)


class Resumption:
    """The attempts of one stream. resume_s: how long after a break they go on; 0: none is made. num_resumes: that worked."""

    __slots__ = ("_broken_at", "_cause", "_resume_s", "_wait_s", "num_resumes")

    def __init__(self, resume_s: float) -> None:
        self._resume_s = resume_s
        self._cause: ShoalError | None = None
        self._broken_at = 0.0
        self._wait_s = FIRST_WAIT_S
        self.num_resumes = 0

    def on_error(self, error: ShoalError, now: float, *, is_break: bool = False) -> float:
        """Take what ended a stream, or an attempt to go on with it; return after how many seconds to try (again).

        is_break: whatever error it is. Raises the error that is to reach the reader if there is nothing to try.
        """
        cause, self._cause = self._cause, self._cause or error
        if not (is_break or isinstance(error, _BREAKS)):
            raise (cause if cause is not None and isinstance(error, _REFUSALS) else error)
        if cause is None:
            self._broken_at, self._wait_s = now, FIRST_WAIT_S
        if now + self._wait_s > self._broken_at + self._resume_s:
            raise self._cause
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, LONGEST_WAIT_S)
        return wait_s

    def on_response(self) -> None:
        """Take note that there is a stream: after the first response of each."""
        self.num_resumes += self._cause is not None
        self._cause = None
