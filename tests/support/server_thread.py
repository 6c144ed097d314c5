"""A server in an event loop of its own thread, so that synchronous and asyncio clients may be tested against it alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

WAIT_S = 20.0


class ServerThread:
    """serving: accepts from when it is entered until it is left, both in that thread."""

    def __init__(self, serving: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._serving = serving
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._serving():
            self._is_up.set()
            await self._stop.wait()

    def start(self) -> None:
        """Return when it accepts."""
        self._thread.start()
        assert self._is_up.wait(WAIT_S)

    def stop(self) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
