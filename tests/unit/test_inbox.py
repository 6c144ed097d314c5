"""The inbox of the compute thread: items of other threads and frames of its sockets, over real socket pairs."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from shoal.codec import MAX_FRAME_BYTES, pack_frame
from shoal.v1 import flow_pb2
from worker.anticipation import Wait
from worker.inbox import Inbox, SocketClosed

WAIT_S = 10.0
SocketPair = tuple[socket.socket, socket.socket]


def make_frame(step: int, num_bytes: int = 0) -> flow_pb2.Frame:
    return flow_pb2.Frame(pipeline_id="p1", step=flow_pb2.Step(step=step, activations=bytes(num_bytes)))


@pytest.fixture
def inbox() -> Iterator[Inbox[str]]:
    box: Inbox[str] = Inbox()
    yield box
    box.close()


@pytest.fixture
def pair(inbox: Inbox[str]) -> Iterator[SocketPair]:
    """Ours, watched by the inbox, and the peer's."""
    ours, theirs = socket.socketpair()
    inbox.add_socket(ours)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_items_come_in_the_order_they_were_posted(inbox: Inbox[str]) -> None:
    for item in ("one", "two", "three"):
        inbox.post(item)

    assert [inbox.get() for _ in range(3)] == ["one", "two", "three"]


def test_a_post_of_another_thread_wakes_the_owner(inbox: Inbox[str]) -> None:
    received: list[object] = []
    owner = threading.Thread(target=lambda: received.append(inbox.get()))
    owner.start()

    inbox.post("work")
    owner.join(WAIT_S)

    assert received == ["work"]


def test_no_item_of_many_threads_is_lost(inbox: Inbox[str]) -> None:
    def post(name: str) -> None:
        for number in range(500):
            inbox.post(f"{name}{number}")

    threads = [threading.Thread(target=post, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    received = [str(inbox.get()) for _ in range(1500)]
    for thread in threads:
        thread.join(WAIT_S)

    for name in "abc":
        assert [item for item in received if item[0] == name] == [f"{name}{number}" for number in range(500)]


def test_more_wake_ups_than_a_pipe_holds_do_not_block_the_poster(inbox: Inbox[str]) -> None:
    count = 50_000
    for _ in range(count):
        inbox.post("x")

    assert {inbox.get() for _ in range(count)} == {"x"}


def test_frames_of_a_socket_come_out_in_order(inbox: Inbox[str], pair: SocketPair) -> None:
    pair[1].sendall(b"".join(pack_frame(make_frame(step)) for step in range(3)))

    assert [inbox.get() for _ in range(3)] == [make_frame(step) for step in range(3)]


def test_a_frame_larger_than_one_read_comes_out_whole(inbox: Inbox[str], pair: SocketPair) -> None:
    frame = make_frame(1, num_bytes=3 << 20)
    sender = threading.Thread(target=pair[1].sendall, args=(pack_frame(frame),))
    sender.start()

    assert inbox.get() == frame
    sender.join(WAIT_S)


def test_what_came_over_sockets_goes_before_what_was_posted(inbox: Inbox[str], pair: SocketPair) -> None:
    inbox.post("posted first")
    pair[1].sendall(pack_frame(make_frame(1)))

    assert [inbox.get(), inbox.get()] == [make_frame(1), "posted first"]


def test_the_end_of_a_socket_is_told_once_and_after_its_frames(inbox: Inbox[str], pair: SocketPair) -> None:
    ours, theirs = pair
    theirs.sendall(pack_frame(make_frame(1)))
    theirs.close()

    assert inbox.get() == make_frame(1)
    assert inbox.get() == SocketClosed(ours, "the peer closed it")
    inbox.post("next")
    assert inbox.get() == "next"


@pytest.mark.parametrize("garbage", [struct.pack("<I", MAX_FRAME_BYTES + 1), b"\x02\x00\x00\x00\xff\xff"])
def test_a_socket_that_carries_no_frames_is_given_up(inbox: Inbox[str], pair: SocketPair, garbage: bytes) -> None:
    pair[1].sendall(garbage)

    closed = inbox.get()

    assert isinstance(closed, SocketClosed)
    assert closed.connection is pair[0]
    assert "frame" in closed.message


def test_a_reset_socket_is_told_with_the_reason(inbox: Inbox[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours:
        inbox.add_socket(ours)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()

        closed = inbox.get()

    assert isinstance(closed, SocketClosed)
    assert "reset" in closed.message.lower()


def test_half_a_frame_of_one_socket_does_not_hold_up_another(inbox: Inbox[str], pair: SocketPair) -> None:
    pair[1].sendall(pack_frame(make_frame(1))[:-1])
    others = socket.socketpair()
    with others[0], others[1]:
        inbox.add_socket(others[0])
        others[1].sendall(pack_frame(make_frame(2)))
        assert inbox.get() == make_frame(2)

        pair[1].sendall(pack_frame(make_frame(1))[-1:])
        assert inbox.get() == make_frame(1)


def test_a_removed_socket_is_read_no_more(inbox: Inbox[str], pair: SocketPair) -> None:
    inbox.remove_socket(pair[0])
    pair[1].sendall(pack_frame(make_frame(1)))
    inbox.post("posted")

    assert inbox.get() == "posted"
    assert pair[0].recv(4096) == pack_frame(make_frame(1))


def test_removing_a_socket_that_is_not_watched_does_nothing(inbox: Inbox[str], pair: SocketPair) -> None:
    closed, other = socket.socketpair()
    with other:
        inbox.remove_socket(closed)
        closed.close()
        inbox.remove_socket(closed)

    pair[1].sendall(pack_frame(make_frame(1)))
    assert inbox.get() == make_frame(1)


def test_a_post_to_a_closed_inbox_does_nothing() -> None:
    closed: Inbox[str] = Inbox()
    closed.close()

    closed.post("too late")


def test_a_new_socket_with_the_number_of_a_removed_one_starts_afresh(inbox: Inbox[str]) -> None:
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    inbox.add_socket(ours)
    theirs.sendall(pack_frame(make_frame(1)) + pack_frame(make_frame(2))[:5])
    assert inbox.get() == make_frame(1)
    inbox.remove_socket(ours)
    ours.close()
    theirs.close()

    again, peer = socket.socketpair()
    with again, peer:
        assert number in (again.fileno(), peer.fileno())
        ours, theirs = (again, peer) if again.fileno() == number else (peer, again)
        inbox.add_socket(ours)
        theirs.sendall(pack_frame(make_frame(3)))

        assert inbox.get() == make_frame(3)


def test_waiting_awake_finds_items_and_frames_and_falls_asleep_in_the_end(inbox: Inbox[str]) -> None:
    inbox.post("early")
    assert inbox.get(Wait(sleep_s=0.0, poll_s=0.0)) == "early"

    later = threading.Timer(0.02, inbox.post, ["late"])
    later.start()
    assert inbox.get(Wait(sleep_s=0.001, poll_s=0.001)) == "late"
    later.join()


def test_a_look_at_an_idle_inbox_finds_nothing_and_does_not_wait(inbox: Inbox[str]) -> None:
    assert inbox.poll() is None


def test_a_look_finds_frames_before_items_and_takes_them(inbox: Inbox[str], pair: SocketPair) -> None:
    inbox.post("work")
    pair[1].sendall(pack_frame(make_frame(1)))

    assert [inbox.poll() for _ in range(3)] == [make_frame(1), "work", None]
