"""Does parts of some work beside each other in processes of this machine, a process each.

So one that dies, be it for want of memory, takes its own part with it and no other, and all can be ended at once. Knows
nothing of the work; `ray_cluster` does the same on other machines. Called by the command line.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

from shoal.errors import LaunchFailed

Part = TypeVar("Part")
Result = TypeVar("Result")

_Under = tuple[int, ForkServerProcess]


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(
    work: Callable[[Part], Result], parts: Sequence[Part], num_at_once: int
) -> Generator[tuple[int, Result | LaunchFailed]]:
    """Do each part; yield its place and its result as they come, LaunchFailed where its process ended without one.

    work: a function of an importable module, which sends its result whole or ends. Ends all processes when it is closed.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once, by the process that all others are made of.
    context.set_forkserver_preload([work.__module__])
    left = iter(enumerate(parts))
    under_way: dict[Connection, _Under] = {}
    try:
        while True:
            while len(under_way) < num_at_once and (following := next(left, None)) is not None:
                index, part = following
                receiving, sending = context.Pipe(duplex=False)
                process = context.Process(target=_do, args=(work, part, sending), daemon=True)
                process.start()
                sending.close()
                under_way[receiving] = index, process
            if not under_way:
                return
            for ready in wait(list(under_way)):
                assert isinstance(ready, Connection)
                index, process = under_way.pop(ready)
                yield index, _result(ready, process)
    finally:
        for _, process in under_way.values():
            process.kill()
        for receiving, (_, process) in under_way.items():
            process.join()
            receiving.close()


def _do(work: Callable[[Part], Result], part: Part, sending: Connection) -> None:
    # Ctrl-C goes to all processes of a terminal; who is to end is told by the one that started us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sending.send(work(part))


def _result(receiving: Connection, process: ForkServerProcess) -> Any:
    try:
        result = receiving.recv()
    except (EOFError, OSError):
        # OSError: in the middle of what it sent.
        process.join()
        return LaunchFailed(f"the process that did it ended with {process.exitcode}")
    finally:
        receiving.close()
    process.join()
    return result
