"""What every link promises, for each kind against a real listener; and how emulated slow links pass frames on."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from shoal import rpc
from shoal.codec import pack_frame
from shoal.errors import ConnectionFailed
from shoal.types import LinkProfile
from shoal.v1 import flow_pb2
from tests.support.peers import WAIT_S, Peer, dial_raw, listening_peer, make_frame, make_hello
from worker import links
from worker.emulation import LinkShaper
from worker.links import DelayLine, GrpcLink, Link, ShapedLink, SocketLink, answers, dial, read_shaped, run_grpc_link

LARGE_BYTES = 5 << 20


class Opened:
    """A link to a peer that has taken it in."""

    def __init__(self, link: Link, peer: Peer) -> None:
        self.link = link
        self.peer = peer

    async def send(self, *frames: flow_pb2.Frame) -> None:
        """As the compute thread does: from a thread that is not the event loop's."""
        await asyncio.to_thread(self._send_all, frames)

    def _send_all(self, frames: Sequence[flow_pb2.Frame]) -> None:
        for frame in frames:
            self.link.send(frame)


async def open_socket(peer: Peer) -> AsyncIterator[Link]:
    link = await dial(peer.socket_address, make_hello(), WAIT_S)
    assert link is not None
    yield link
    link.close()


async def open_grpc(peer: Peer) -> AsyncIterator[Link]:
    async with grpc.aio.insecure_channel(peer.flow_address, options=rpc.CHANNEL_OPTIONS) as channel:
        link = GrpcLink(asyncio.get_running_loop())
        link.send(make_hello())
        carrying = asyncio.create_task(run_grpc_link(link, channel, lambda _: None))
        yield link
        link.close()
        # A call that the peer ended is an error to whoever carries it.
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({carrying})
        assert carrying.exception() is None or isinstance(carrying.exception(), grpc.RpcError)


OPENERS = {"socket": open_socket, "grpc": open_grpc}


@pytest.fixture(params=["socket", "grpc", "shaped socket", "shaped grpc"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    kind = request.param.removeprefix("shaped ")
    async with listening_peer() as peer:
        async for link in OPENERS[kind](peer):
            is_shaped = request.param != kind
            shaped = ShapedLink(link, LinkShaper(LinkProfile(delay_ms=1.0))) if is_shaped else link
            assert shaped.kind == kind
            yield Opened(shaped, peer)
            shaped.close()


async def test_frames_arrive_in_the_order_they_were_sent(opened: Opened) -> None:
    frames = [make_frame(step) for step in range(100)]

    await opened.send(*frames)

    assert await opened.peer.receive(100) == frames


async def test_a_large_frame_arrives_whole_and_in_order(opened: Opened) -> None:
    frames = [make_frame(1), make_frame(2, num_bytes=LARGE_BYTES), make_frame(3)]

    await opened.send(*frames)

    assert await opened.peer.receive(3) == frames


async def test_a_closed_link_refuses_frames_in_the_end(opened: Opened) -> None:
    opened.link.close()

    with pytest.raises(ConnectionFailed):
        await send_until_refused(opened.link)


async def test_a_link_may_be_closed_twice(opened: Opened) -> None:
    opened.link.close()
    opened.link.close()


async def test_the_peers_end_breaks_the_link_for_the_sender(opened: Opened) -> None:
    await opened.send(make_frame(1))
    await opened.peer.receive(1)

    await opened.peer.close()

    with pytest.raises(ConnectionFailed):
        await send_until_refused(opened.link)


async def send_until_refused(link: Link) -> None:
    """Shaped links learn of an end from the first frame that could not be passed on."""
    async with asyncio.timeout(WAIT_S):
        while True:
            await asyncio.to_thread(link.send, make_frame(9))


@pytest.mark.parametrize("kind", ["socket", "grpc"])
async def test_what_was_sent_before_a_link_was_closed_arrives(kind: str) -> None:
    frames = [make_frame(step, num_bytes=10_000) for step in range(20)]
    async with listening_peer() as peer:
        async for link in OPENERS[kind](peer):
            for frame in frames:
                link.send(frame)
            link.close()

            assert await peer.receive(20) == frames


async def test_a_peer_sees_the_end_of_a_closed_socket() -> None:
    async with listening_peer() as peer:
        link = await dial(peer.socket_address, make_hello(), WAIT_S)
        assert link is not None
        link.close()

        assert await peer.receive(1) == [None]


async def test_an_address_where_nobody_listens_gives_no_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

    assert await dial(address, make_hello(), WAIT_S) is None


async def test_a_system_answers_with_a_refusal_too() -> None:
    async with listening_peer() as peer:
        assert await answers(peer.socket_address, WAIT_S)
    assert await answers(peer.socket_address, WAIT_S)


async def test_a_system_that_takes_no_notice_of_a_dial_does_not_answer() -> None:
    """One that drops dials, as a listener does to whose queue no more can be added."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with socket.create_connection(address, WAIT_S):
            assert not await answers(f"127.0.0.1:{address[1]}", 0.2)


async def test_a_system_that_nothing_leads_to_does_not_answer() -> None:
    assert not await answers("255.255.255.255:1", WAIT_S)


async def test_a_link_that_comes_after_its_dialling_was_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    is_dialling, may_answer = threading.Event(), threading.Event()

    class UnwantedLink:
        def close(self) -> None:
            ours.close()

    def answer_late(*_: object) -> UnwantedLink:
        is_dialling.set()
        may_answer.wait(WAIT_S)
        return UnwantedLink()

    monkeypatch.setattr(links, "dial_socket", answer_late)
    dialling = asyncio.create_task(dial("10.0.0.1:1", make_hello(), WAIT_S))
    await asyncio.to_thread(is_dialling.wait, WAIT_S)

    dialling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dialling
    may_answer.set()

    with theirs:
        theirs.settimeout(WAIT_S)
        assert await asyncio.to_thread(theirs.recv, 1) == b""


class Schedule:
    """A shaper with given due times, relative to when the line was made."""

    def __init__(self, *due_s: float) -> None:
        self._start = time.monotonic()
        self._due = [self._start + due for due in due_s]

    def due(self, num_bytes: int, now: float) -> float:
        return self._due.pop(0)


class Arrivals:
    """Collects what a delay line delivers, and when."""

    def __init__(self, count: int) -> None:
        self.steps: list[int] = []
        self.times: list[float] = []
        self._count = count
        self._is_complete = threading.Event()

    def __call__(self, frame: flow_pb2.Frame) -> None:
        self.times.append(time.monotonic())
        self.steps.append(frame.step.step)
        if len(self.steps) == self._count:
            self._is_complete.set()

    def wait(self) -> list[int]:
        assert self._is_complete.wait(WAIT_S), self.steps
        return self.steps


def pass_through(arrivals: Arrivals, shaper: Schedule | LinkShaper, count: int) -> list[int]:
    line = DelayLine(arrivals, shaper)  # type: ignore[arg-type]
    for step in range(count):
        line.push(make_frame(step))
    steps = arrivals.wait()
    line.close()
    return steps


def test_frames_with_equal_due_times_leave_in_the_order_they_came() -> None:
    assert pass_through(Arrivals(50), Schedule(*[0.05] * 50), 50) == list(range(50))


def test_frames_leave_in_the_order_they_are_due() -> None:
    assert pass_through(Arrivals(3), Schedule(0.15, 0.05, 0.1), 3) == [1, 2, 0]


def test_no_frame_leaves_before_it_is_due() -> None:
    arrivals, start = Arrivals(3), time.monotonic()

    pass_through(arrivals, LinkShaper(LinkProfile(delay_ms=20.0)), 3)

    assert all(at >= start + 0.020 for at in arrivals.times)


def test_a_closed_delay_line_delivers_no_more() -> None:
    arrivals = Arrivals(1)
    line = DelayLine(arrivals, Schedule(0.0, 0.0))  # type: ignore[arg-type]
    line.push(make_frame(1))
    arrivals.wait()
    line.close()
    with pytest.raises(ConnectionFailed):
        line.push(make_frame(2))

    line._thread.join(WAIT_S)

    assert not line._thread.is_alive()
    assert arrivals.steps == [1]


def test_a_frame_that_could_not_be_delivered_is_told_to_the_next_sender() -> None:
    def deliver(_: flow_pb2.Frame) -> None:
        raise ConnectionFailed("socket link broke")

    line = DelayLine(deliver, LinkShaper(LinkProfile()))
    with pytest.raises(ConnectionFailed, match="socket link broke"):
        push_until_refused(line)


def push_until_refused(line: DelayLine) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        line.push(make_frame(1))


def test_frames_read_from_a_slow_link_come_in_order_and_then_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = SocketLink(socket.create_connection(listener.getsockname()))
        theirs, _ = listener.accept()
    arrivals = Arrivals(2)
    ends: list[str] = []
    line = DelayLine(arrivals, LinkShaper(LinkProfile(delay_ms=1.0)))
    reader = threading.Thread(target=read_shaped, args=(link, line, ends.append))
    reader.start()

    theirs.sendall(pack_frame(make_frame(0)) + pack_frame(make_frame(1)))
    assert arrivals.wait() == [0, 1]
    theirs.close()
    reader.join(WAIT_S)

    assert ends == ["the peer closed it"]
    line.close()
    link.close()


def test_closing_a_link_wakes_the_thread_that_reads_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = SocketLink(socket.create_connection(listener.getsockname()))
        theirs, _ = listener.accept()
    arrivals = Arrivals(1)
    ends: list[str] = []
    line = DelayLine(arrivals, LinkShaper(LinkProfile()))
    reader = threading.Thread(target=read_shaped, args=(link, line, ends.append))
    reader.start()
    theirs.sendall(pack_frame(make_frame(1)))
    arrivals.wait()

    link.close()
    reader.join(links.SEND_TIMEOUT_S / 2)

    assert not reader.is_alive()
    assert len(ends) == 1
    line.close()
    theirs.close()


async def test_a_peer_that_takes_nothing_is_lost_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SEND_TIMEOUT_S", 0.05)
    async with listening_peer() as peer:
        peer.reads_sockets = False
        link = SocketLink(await dial_raw(peer.socket_address))
        link.send(make_hello())
        with pytest.raises(ConnectionFailed, match="timed out"):
            await asyncio.to_thread(link.send, make_frame(1, num_bytes=60 << 20))
        link.close()
