"""One worker's Attach stream as the orchestrator holds it: who it is, what it said last, and the commands for it.

Made by `control`, which sends; read by `membership`, which writes the commands to the stream.
"""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator.core.reunion import Held
from shoal import messages
from shoal.types import LayerRange, PipelineId, WorkerId
from shoal.v1 import fleet_pb2

# Why the session of a worker ended that wanted to go.
LEFT = "it left"


class WorkerSession:
    """One worker's Attach stream: its commands wait here until they are written."""

    def __init__(self, hello: fleet_pb2.Hello) -> None:
        self.hello = hello
        self.worker_id = WorkerId(hello.worker_id)
        self.link_to_next = ""
        # What it has loaded, in force or not; None: nothing, or something that it was told to replace.
        self.held = hello.held if hello.HasField("held") else None
        self.loading: fleet_pb2.LoadShard | None = None
        self.execution_provider = ""
        # As far as it was us who ended the stream.
        self.ended_because = ""
        self._commands: asyncio.Queue[fleet_pb2.AttachResponse | None] = asyncio.Queue()

    def load(self, command: fleet_pb2.LoadShard) -> None:
        """Have it load a shard, in place of what it holds."""
        self.held, self.loading = None, command
        self.send(load_shard=command)

    def loaded(self, pipeline_id: str, epoch: int) -> None:
        """Note that it holds what it was told to load, if that is what it says."""
        command = self.loading
        if command is None or (command.pipeline_id, command.epoch) != (pipeline_id, epoch):
            return
        self.held = fleet_pb2.HeldShard(
            pipeline_id=pipeline_id, layers=command.layers, model_digest=command.model_digest, shape=command.shape
        )

    def unload(self, epoch: int) -> None:
        """Have it hold nothing; what was placed after this epoch stays."""
        self.held = self.loading = None
        self.send(unload_shard=fleet_pb2.UnloadShard(epoch=epoch))

    def send(self, **command: Any) -> None:
        self._commands.put_nowait(fleet_pb2.AttachResponse(**command))

    def close(self, why: str = "") -> None:
        """End the stream after what was sent."""
        self.ended_because = self.ended_because or why
        self._commands.put_nowait(None)

    async def next_command(self) -> fleet_pb2.AttachResponse | None:
        """The next command; None at the end."""
        return await self._commands.get()


def held_of(session: WorkerSession, model_digest: str) -> Held | None:
    """What a worker holds of a model; None if that is nothing, or not sound."""
    held = session.held
    if held is None or held.model_digest != model_digest or held.layers.start >= held.layers.stop:
        return None
    shape = messages.shape_from_proto(held.shape)
    layers = LayerRange(held.layers.start, held.layers.stop)
    return Held(
        session.worker_id, PipelineId(held.pipeline_id), layers, shape.num_slots, shape.slot_tokens, shape.kv_tokens
    )
