"""What the compute thread waits on: items posted by other threads, and frames that arrive on its own sockets.

Reading sockets in the compute thread itself saves a hand-over between threads for each message (facts: an idle thread
takes 0.1-0.15 ms to wake). Knows nothing of shards or pipelines; used by `compute` only.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.codec import FrameBuffer
from shoal.errors import ProtocolMismatch
from shoal.v1 import flow_pb2
from worker.anticipation import Wait

T = TypeVar("T")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SocketClosed:
    """A socket of the inbox ended; it is no longer watched."""

    connection: socket.socket
    message: str


class Inbox(Generic[T]):
    """A queue with sockets in it. post() may be called from any thread, all else from the owner's alone.

    Invariant: an item is in `_posted` or in `_ready`, never in both; a watched socket has a buffer in the selector.
    """

    __slots__ = ("_posted", "_ready", "_selector", "_wake_read", "_wake_write")

    def __init__(self) -> None:
        self._posted: deque[T] = deque()
        self._ready: deque[T | flow_pb2.Frame | SocketClosed] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    def post(self, item: T) -> None:
        """Add an item and wake the owner; nothing happens once it has closed the inbox."""
        self._posted.append(item)
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            return  # enough wake-ups are pending already
        except OSError:
            if self._wake_write.fileno() >= 0:
                raise

    def add_socket(self, connection: socket.socket) -> None:
        """Watch a connected socket; its frames come out of get()."""
        self._selector.register(connection, selectors.EVENT_READ, FrameBuffer())

    def remove_socket(self, connection: socket.socket) -> None:
        """Watch a socket no more, if it was watched."""
        if connection.fileno() >= 0 and connection in self._selector.get_map():
            self._selector.unregister(connection)

    def get(self, wait: Wait | None = None) -> T | flow_pb2.Frame | SocketClosed:
        """Wait, as told, for the next item, frame, or end of a socket; what came over sockets goes first."""
        self._look(0 if self._ready or self._posted else None if wait is None else wait.sleep_s)
        if wait is not None:
            deadline = time.monotonic() + wait.poll_s
            while not (self._ready or self._posted) and time.monotonic() < deadline:
                self._look(0)
        while not (self._ready or self._posted):
            self._look(None)
        return self._ready.popleft() if self._ready else self._posted.popleft()

    def poll(self) -> T | flow_pb2.Frame | SocketClosed | None:
        """The next item, frame, or end of a socket, as get() would give it; None if there is none now."""
        self._look(0)
        if self._ready:
            return self._ready.popleft()
        return self._posted.popleft() if self._posted else None

    def _look(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            self._read(key)

    def close(self) -> None:
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _read(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            self._wake_read.recv(4096)
            return
        connection: socket.socket = key.fileobj  # type: ignore[assignment]
        try:
            chunk = connection.recv(_READ_BYTES)
            self._ready.extend(key.data.feed(chunk))
            message = "" if chunk else "the peer closed it"
        except BlockingIOError:
            return  # woken for nothing
        except (OSError, ProtocolMismatch) as error:
            message = str(error)
        if message:
            self._selector.unregister(connection)
            self._ready.append(SocketClosed(connection, message))
