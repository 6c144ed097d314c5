"""How a Shoal process lives: logs on stderr, a stop event for its main coroutine, and an exit code.

SIGTERM and SIGINT set the stop event once; a second one ends the process at once. A child of a launcher also stops when its
standard input ends, so that it never outlives a parent that was killed. Used by orchestrator and worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from shoal.errors import ShoalError

logger = logging.getLogger(__name__)


def run(main: Callable[[asyncio.Event], Awaitable[None]], *, stop_on_stdin_eof: bool) -> int:
    """Run a process's main coroutine until it returns; 0, or 1 after a ShoalError (one line on stderr)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_run(main, stop_on_stdin_eof))
    except ShoalError as error:
        logger.error("stopped reason=%s message=%s", error.reason, error.message)
        return 1
    return 0


async def _run(main: Callable[[asyncio.Event], Awaitable[None]], stop_on_stdin_eof: bool) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if stop_on_stdin_eof:
        when_stdin_ends(stopping.set)
    await main(stopping)


def when_stdin_ends(call: Callable[[], None]) -> None:
    """Have the running event loop call this once standard input has ended: whoever held its other end is gone."""
    loop, number = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(number, 4096):
            loop.remove_reader(number)
            call()

    loop.add_reader(number, read)
