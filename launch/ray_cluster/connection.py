"""Being a driver of a Ray cluster, and what Ray says when something is wrong, in a line.

Called by `dispatcher` and `work`.
"""

from __future__ import annotations

import logging
import signal
import socket

import ray
from ray.exceptions import RayError

from shoal.errors import LaunchFailed

START_HINT = "start one with `ray start --head`, or give the address of its head, HOST:PORT"
CONNECT_S = 5.0


def connect(address: str) -> None:
    """Be a driver of the cluster at an address; from the main thread. Raises LaunchFailed."""
    _check_reachable(address)
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace="shoal", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise LaunchFailed(f"no Ray at {address!r}: {_first_sentence(error)}; {START_HINT}") from error
    # Ray's handler prints where in its code the process was.
    signal.signal(signal.SIGTERM, on_term)


def _check_reachable(address: str) -> None:
    """Raise LaunchFailed if nobody listens at HOST:PORT; Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise LaunchFailed(f"no Ray at {address}: {error}; {START_HINT}") from None


def last_line(error: Exception) -> str:
    """What was raised, of a traceback of the other side."""
    return str(error).strip().rpartition("\n")[2]


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _first_sentence(error: Exception) -> str:
    """Without the advice that Ray adds."""
    return first_line(error).partition(". ")[0].removesuffix(".")
