"""The time as the engine sees it, and calls at a later time: the event loop's, or in tests one that they set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Alarm(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The time, and a call at a later time; tests have one that they set."""

    def now(self) -> float: ...

    def call_at(self, at: float, ring: Callable[[], None]) -> Alarm: ...


class LoopClock:
    """The clock of the running event loop."""

    def now(self) -> float:
        return time.monotonic()

    def call_at(self, at: float, ring: Callable[[], None]) -> Alarm:
        return asyncio.get_running_loop().call_later(max(at - time.monotonic(), 0.0), ring)
