"""Measures the harness itself while it runs: how late its event loop is, and how much of a processor it takes.

So that a report can tell a slow server from a slow harness. Knows nothing of requests. Used by `runner`.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time

# Often enough to meet a stall of a few milliseconds, and too rarely to be one.
LAG_PERIOD_S = 0.02
MAX_LAGS = 20_000


def machine() -> str:
    """The harness's own machine, in a line."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


class Meter:
    """Runs from its making to stop(), in the event loop that it measures.

    cpu_s: processor time of this process so far. Invariant: at most MAX_LAGS lags; where a run is longer, each is the worst
    of several neighbours.
    """

    __slots__ = ("_cpu_start_s", "_due_s", "_lags_s", "_loop", "_period_s", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._cpu_start_s = time.process_time()
        self._lags_s: list[float] = []
        self._period_s = LAG_PERIOD_S
        self._set_timer()

    def _set_timer(self) -> None:
        self._due_s = self._loop.time() + self._period_s
        self._timer = self._loop.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        self.add_lag(self._loop.time() - self._due_s)
        self._set_timer()

    def add_lag(self, lag_s: float) -> None:
        self._lags_s.append(max(0.0, lag_s))
        if len(self._lags_s) >= MAX_LAGS:
            self._lags_s = [max(pair) for pair in zip(self._lags_s[::2], self._lags_s[1::2], strict=True)]
            self._period_s *= 2

    @property
    def lags_s(self) -> tuple[float, ...]:
        return tuple(self._lags_s)

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._cpu_start_s

    def stop(self) -> None:
        self._timer.cancel()
