"""What both ends of a plain socket link ask of the system: to send at once, and to look after a silent peer.

A peer that is killed closes its sockets, one that is frozen is missed by gRPC's pings (`rpc`). Only one that is cut off, and
that from us alone, has to be found here. There is no time-out of what was sent: the peer's compute thread reads between two
steps, and a slow step is no loss. Used by workers and the orchestrator's hub.
"""

from __future__ import annotations

import socket
import sys
from typing import Final

# Silent for so long, a peer is asked whether it is there; its system answers, whatever its threads do. One question or
# answer of a hundred may get lost on a bad link: only several in a row tell.
IDLE_S: Final = 1
ANSWER_S: Final = 1
NUM_QUESTIONS: Final = 3


def tune(connection: socket.socket) -> None:
    """Prepare a connected socket."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ANSWER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_QUESTIONS)
