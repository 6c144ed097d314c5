"""Whether requests are taken, as health and waiting requests see it.

`control`, its owner, says when a pipeline is up; requests that come while one is being built wait here, within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from shoal.errors import NotReady

# A request that comes while no pipeline is up, but one is being built, waits for it this long.
SERVING_TIMEOUT_S = 15.0
# So often it is looked whether one still is.
LOOK_S = 0.25


class Serving:
    """Invariant: `is_on` exactly while a pipeline takes requests."""

    def __init__(
        self, show: Callable[[bool], Awaitable[None]], is_building: Callable[[], bool], waiting_for: Callable[[], str]
    ) -> None:
        """show: tells health. is_building: a pipeline is likely soon. waiting_for: what for, if none is up."""
        self._show = show
        self._is_building = is_building
        self._waiting_for = waiting_for
        self._event = asyncio.Event()
        self._shown: bool | None = None

    @property
    def is_on(self) -> bool:
        return self._event.is_set()

    def note(self, is_on: bool) -> None:
        """Requests are taken from now on, or no longer."""
        if is_on:
            self._event.set()
        else:
            self._event.clear()

    async def show(self) -> None:
        """Let health tell of it, if that has changed."""
        if self._shown != self.is_on:
            self._shown = self.is_on
            await self._show(self._shown)

    async def wait(self) -> None:
        """Return when a pipeline takes requests; waits while one is being built. Raises NotReady if none will soon."""
        deadline = time.monotonic() + SERVING_TIMEOUT_S
        while not self.is_on and self._is_building() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), LOOK_S)
        if not self.is_on:
            raise NotReady(f"not serving: {self._waiting_for()}", retry_after_s=1.0)
