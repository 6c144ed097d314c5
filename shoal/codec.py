"""The bytes of a frame on a link: protobuf, and a four-byte little-endian length before it on a plain socket.

Used by every link of the data plane, on both sides. Knows no sockets and no streams.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from shoal.errors import InternalError, ProtocolMismatch
from shoal.v1 import flow_pb2

MAX_FRAME_BYTES = 64 << 20
# Of the first frame of a link, when nobody knows yet whose it is.
MAX_HELLO_BYTES = 4 << 10
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


def pack_frame(frame: flow_pb2.Frame) -> bytes:
    """Encode a frame with its length before it."""
    body = frame.SerializeToString()
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frames.

    first_max_bytes: the most that the first frame may have.

    Invariant: `_pending` holds less than one whole frame after each call of feed.
    """

    __slots__ = ("_max_bytes", "_pending")

    def __init__(self, first_max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._pending = bytearray()
        self._max_bytes = first_max_bytes

    def feed(self, chunk: bytes) -> list[flow_pb2.Frame]:
        """Take bytes as they came; return the frames they complete. Raises ProtocolMismatch on what is no frame."""
        self._pending += chunk
        frames: list[flow_pb2.Frame] = []
        start = 0
        with memoryview(self._pending) as view:
            while (stop := self._frame_stop(view, start)) is not None:
                frames.append(_parse(bytes(view[start + HEADER_BYTES : stop])))
                start = stop
        del self._pending[:start]
        return frames

    def _frame_stop(self, view: memoryview, start: int) -> int | None:
        if len(view) - start < HEADER_BYTES:
            return None
        stop = start + HEADER_BYTES + body_bytes(view[start : start + HEADER_BYTES], self._max_bytes)
        if stop > len(view):
            return None
        self._max_bytes = MAX_FRAME_BYTES
        return stop


def body_bytes(header: bytes | memoryview, max_bytes: int = MAX_FRAME_BYTES) -> int:
    """The length of the frame behind a header of HEADER_BYTES; raises ProtocolMismatch if it is absurd."""
    num_bytes = int(_LENGTH.unpack(header)[0])
    if num_bytes > max_bytes:
        raise ProtocolMismatch(f"a frame of {num_bytes} bytes was announced; at most {max_bytes} are allowed")
    return num_bytes


def _parse(body: bytes) -> flow_pb2.Frame:
    try:
        return flow_pb2.Frame.FromString(body)
    except DecodeError as error:
        raise ProtocolMismatch(f"bytes on a link are not a frame: {error}") from error


def pack_activations(hidden: npt.NDArray[np.float32]) -> bytes:  # [T, E]
    """Encode activations as little-endian float32, row-major."""
    return np.ascontiguousarray(hidden, dtype="<f4").tobytes()


def unpack_activations(payload: bytes, num_tokens: int, hidden_size: int) -> npt.NDArray[np.float32]:
    """Decode what pack_activations wrote, as a read-only [T, E]; raises InternalError if the size does not match."""
    if len(payload) != num_tokens * hidden_size * 4:
        raise InternalError(f"{len(payload)} bytes of activations do not hold {num_tokens} x {hidden_size} float32")
    return np.frombuffer(payload, dtype="<f4").reshape(num_tokens, hidden_size)  # [T, E]
