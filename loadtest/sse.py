"""Server-sent events: bytes as they come off a connection in, the data of complete events out.

Pure. Knows nothing of HTTP or of what the data means. Called by `targets`.
"""

from __future__ import annotations

import re

# No event of a chat is nearly as long; a server that never ends one shall not fill our memory.
MAX_EVENT_BYTES = 1 << 20

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventTooLong(ValueError):
    """An event goes on for more than MAX_EVENT_BYTES."""


class SseParser:
    """Splits a stream into events. Source: HTML standard, 9.2.6 (lines end in LF, CR or CRLF; an empty line ends an event).

    Invariant: what is held is less than one event, and at most MAX_EVENT_BYTES of it.
    """

    __slots__ = ("_data", "_held", "_is_first")

    def __init__(self) -> None:
        self._held = b""
        self._data: list[bytes] = []
        self._is_first = True

    def feed(self, chunk: bytes) -> list[str]:
        """Take in bytes; return the data of the events that they complete. Raises EventTooLong."""
        self._held += chunk
        *lines, rest = _LINE_END.split(self._held)
        # A CR at the very end may be half a CRLF: its line waits for the next byte.
        if lines and self._held.endswith(b"\r"):
            rest = lines.pop() + b"\r"
        self._held = rest
        events = [event for line in lines if (event := self._take(line)) is not None]
        if len(self._held) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _take(self, line: bytes) -> str | None:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data).decode(errors="replace") if data else None
        # Comments begin with a colon and so have an empty name; event, id and retry do not matter to us.
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
