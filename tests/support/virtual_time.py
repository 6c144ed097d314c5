"""An event loop whose clock jumps to the next timer as soon as nothing else is to do: hours pass in milliseconds.

Times are exact, so that tests may compare them. For code that waits for timers and for itself alone: no sockets, no threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.SelectSelector):
    """Never sleeps: tells how long it should have slept instead."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing to do, and no timer to wait for: this would hang"
        self.slept_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 1000 s, so that code which takes times for durations is found out."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._skipped_s = 0.0
        super().__init__(self._jumping)

    def time(self) -> float:
        return 1000.0 + self._jumping.slept_s + self._skipped_s

    def block(self, duration_s: float) -> None:
        """Let time pass as in a call that does not give the loop its turn."""
        self._skipped_s += duration_s


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run with such a loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
