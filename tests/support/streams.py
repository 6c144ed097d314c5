"""Streams that are read in the background, so that a test can do something to the fleet meanwhile.

Used by the fleet contract tests.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.generation import Generation
from shoal.streams import AsyncStream
from shoal.types import DeviceMode
from tests.support.fleet import WAIT_S, LocalFleet, make_device

# A stream of 240 tokens lasts for seconds on it, so that something can happen to it.
SLOW = make_device(speed=0.05, is_emulated=True)
SLOW_LATENCY = make_device(speed=0.05, is_emulated=True, mode=DeviceMode.LATENCY)
ENDLESS: dict[str, Any] = {"max_tokens": 240, "ignore_eos": True}


class Reader:
    """Reads a stream in the background; `started` is set with its first token."""

    def __init__(self, stream: AsyncStream) -> None:
        self.stream = stream
        self.started = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> Generation:
        async for _ in self.stream:
            self.started.set()
        return self.stream.result

    async def has_started(self) -> None:
        waiting = asyncio.create_task(self.started.wait())
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), self.task

    async def result(self) -> Generation:
        return await asyncio.wait_for(self.task, WAIT_S)

    async def error(self) -> ShoalError:
        with pytest.raises(ShoalError) as raised:
            await self.result()
        return raised.value


async def start_stream(fleet: LocalFleet, **options: Any) -> Reader:
    reader = Reader(fleet.client.stream("hello", **{**ENDLESS, **options}))
    await reader.has_started()
    return reader
