"""Measures links by echoes: how long a small message is under way, and how fast a larger one.

The same links that steps take, behind the same emulation: an echo to a peer goes over a socket or a gRPC stream of its own,
one to the orchestrator over the uplink, sent and taken by the compute thread. Some milliseconds lie between two of them, as
between steps: threads that slept take longer to wake. `surveying` decides when, and never while the worker serves.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal.codec import FrameBuffer
from shoal.errors import ConnectionFailed, ShoalError
from shoal.types import LinkProfile
from shoal.v1 import fleet_pb2, flow_pb2
from worker.emulation import LinkShaper
from worker.links import DelayLine, Link, SocketLink, shaped

# Stands in the hello of a link that is opened to be measured, where others name their pipeline.
PROBES = "probes"
NUM_SMALL = 7
GAP_S = 0.002
# The second one only if the first is through before its time can be told from that of a small message.
PAYLOADS_BYTES = (32 << 10, 256 << 10)
CLEAR_S = 0.001
# Less than this for a payload says no more than that the link does not limit anything.
LEAST_S = 1e-4
ECHO_TIMEOUT_S = 2.0

# (bytes of payload) -> seconds there and back. Raises ConnectionFailed.
EchoCall = Callable[[int], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class SendEcho:
    """Tells the compute thread to send an echo with so many bytes over the uplink."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class EchoCame:
    """The answer to an echo over the uplink."""

    round_trip_s: float


def echo_frame(num_bytes: int, now_ns: int, to_stage: int = 0) -> flow_pb2.Frame:
    return flow_pb2.Frame(to_stage=to_stage, echo=flow_pb2.Echo(sent_ns=now_ns, payload=bytes(num_bytes)))


def reply_to(frame: flow_pb2.Frame) -> flow_pb2.Frame:
    return flow_pb2.Frame(echo=flow_pb2.Echo(sent_ns=frame.echo.sent_ns, is_reply=True))


async def measure_link(echo: EchoCall, worker_id: str, kind: str) -> fleet_pb2.LinkFigures:
    """Figures of a link. Raises ConnectionFailed."""
    trips = []
    for _ in range(NUM_SMALL):
        await asyncio.sleep(GAP_S)
        trips.append(await echo(0))
    round_trip_s, extra_s, num_bytes = statistics.median(trips), 0.0, 0
    for num_bytes in PAYLOADS_BYTES:
        # Of the quickest one: what others were late by is no time of the payload's.
        extra_s = await echo(num_bytes) - min(trips)
        if extra_s >= CLEAR_S:
            break
    mbit_s = num_bytes * 8 / extra_s / 1e6 if extra_s > LEAST_S else 0.0
    return fleet_pb2.LinkFigures(worker_id=worker_id, rtt_ms=round_trip_s * 1e3, mbit_s=mbit_s, kind=kind)


class UplinkEcho:
    """Echoes by way of the compute thread, one at a time. Belongs to the event loop."""

    def __init__(self, send: Callable[[int], None]) -> None:
        """send: has an echo with so many bytes sent over the uplink."""
        self._send = send
        self._waiting: asyncio.Future[float] | None = None

    async def __call__(self, num_bytes: int) -> float:
        waiting: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        self._send(num_bytes)
        try:
            return await asyncio.wait_for(waiting, ECHO_TIMEOUT_S)
        except TimeoutError as error:
            raise ConnectionFailed("no echo from the orchestrator") from error

    def came(self, echo: EchoCame) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(echo.round_trip_s)


class PeerEcho:
    """Echoes over a link to a peer; replies of a gRPC stream are put into `replies`, those of a socket are read here."""

    def __init__(self) -> None:
        self.replies: queue.SimpleQueue[flow_pb2.Frame] = queue.SimpleQueue()

    def over(self, link: Link, connection: socket.socket | None) -> EchoCall:
        """Echo over this link; connection: the socket to read replies from, if it has one."""
        buffer = FrameBuffer()

        def echo(num_bytes: int) -> float:
            started = time.monotonic()
            link.send(echo_frame(num_bytes, time.monotonic_ns()))
            try:
                if connection is None:
                    self.replies.get(timeout=ECHO_TIMEOUT_S)
                else:
                    _read_frame(connection, buffer)
            except (OSError, queue.Empty) as error:
                raise ConnectionFailed(f"no echo from a peer: {error}") from error
            return time.monotonic() - started

        return lambda num_bytes: asyncio.to_thread(echo, num_bytes)


def answer_echoes(connection: socket.socket, profile: LinkProfile) -> None:
    """Answer on a socket that a peer opened, until it closes it or is silent; runs in a thread of its own."""
    link = shaped(SocketLink(connection), profile)
    buffer = FrameBuffer()
    try:
        while True:
            link.send(reply_to(_read_frame(connection, buffer)))
    except (OSError, ShoalError):
        link.close()


class EchoStream:
    """Answers echoes of a gRPC stream, as slowly as the device's link does. Belongs to the event loop."""

    def __init__(self, profile: LinkProfile) -> None:
        self._due: asyncio.Queue[flow_pb2.Frame] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._line = DelayLine(self._deliver, LinkShaper(profile))

    def _deliver(self, frame: flow_pb2.Frame) -> None:
        self._loop.call_soon_threadsafe(self._due.put_nowait, frame)

    async def answer(self, frame: flow_pb2.Frame) -> flow_pb2.Frame:
        self._line.push(reply_to(frame))
        return await self._due.get()

    def close(self) -> None:
        self._line.close()


def _read_frame(connection: socket.socket, buffer: FrameBuffer) -> flow_pb2.Frame:
    """The next frame; raises OSError, or ConnectionFailed at the end."""
    while True:
        chunk = connection.recv(1 << 18)
        if not chunk:
            raise ConnectionFailed("the peer closed it")
        frames = buffer.feed(chunk)
        if frames:
            return frames[0]
