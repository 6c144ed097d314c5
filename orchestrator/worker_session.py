"""One worker's Attach stream as the orchestrator holds it: who it is, what it said last, and the commands for it.

Made by `control`, which sends; read by `membership`, which writes the commands to the stream.
"""

from __future__ import annotations

import asyncio
from typing import Any

from shoal.types import WorkerId
from shoal.v1 import fleet_pb2


class WorkerSession:
    """One worker's Attach stream: its commands wait here until they are written."""

    def __init__(self, hello: fleet_pb2.Hello) -> None:
        self.hello = hello
        self.worker_id = WorkerId(hello.worker_id)
        self.link_to_next = ""
        self.execution_provider = ""
        self._commands: asyncio.Queue[fleet_pb2.AttachResponse | None] = asyncio.Queue()

    def send(self, **command: Any) -> None:
        self._commands.put_nowait(fleet_pb2.AttachResponse(**command))

    def close(self) -> None:
        """End the stream after what was sent."""
        self._commands.put_nowait(None)

    async def next_command(self) -> fleet_pb2.AttachResponse | None:
        """The next command; None at the end."""
        return await self._commands.get()
