"""What plain socket links ask of the system."""

from __future__ import annotations

import socket
import sys

import pytest

from shoal import sockets


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such times")
def test_a_silent_peer_is_asked_after_a_second_and_missed_after_three_questions() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        sockets.tune(link)
        options = [
            link.getsockopt(socket.IPPROTO_TCP, name)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        is_kept_alive = link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    assert (is_kept_alive, options) == (1, [1, 1, 3])


def test_a_small_message_is_sent_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        sockets.tune(link)
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such time")
def test_a_peer_that_reads_nothing_for_long_is_not_missed_for_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        sockets.tune(link)
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
