"""What the engine delivers of one request: its tokens in order, then nothing, or the error that ended it.

Made and filled by `engine`, read by whoever asked. Knows token ids, not text.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from orchestrator.core.sequence import Sequence
from orchestrator.explain import Story
from orchestrator.pipeline import Pipeline
from shoal.errors import DeadlineExceeded, ShoalError, rebuild
from shoal.types import FinishReason, PipelineId
from shoal.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """An answer token; finish says why it is the last one."""

    index: int
    token_id: int
    logprobs: types_pb2.TokenLogprobs | None
    finish: FinishReason | None


class Answer:
    """What the engine delivers of one sequence: tokens in order, then nothing, or an error.

    pipeline: where it is computed, or was last; None before it has been taken by one.
    """

    def __init__(self, sequence: Sequence, pipeline: Pipeline | None, story: Story) -> None:
        self.sequence = sequence
        self.pipeline = pipeline
        self.story = story
        self._queue: asyncio.Queue[TokenEvent | ShoalError] = asyncio.Queue()

    @property
    def pipeline_id(self) -> PipelineId:
        """Empty before a pipeline has taken it."""
        return PipelineId("") if self.pipeline is None else self.pipeline.pipeline_id

    async def next(self) -> TokenEvent:
        """Wait for the next token. Raises the error that ended the sequence, if one did."""
        event = await self._queue.get()
        if isinstance(event, ShoalError):
            raise event
        return event

    def put(self, event: TokenEvent | ShoalError) -> None:
        self._queue.put_nowait(event)


def missed_deadline(sequence: Sequence, now: float) -> DeadlineExceeded:
    """The error of one that came too late, with what there is of it."""
    num_tokens, waited_s = len(sequence.output_token_ids), now - sequence.arrived_at
    what = f"{num_tokens} of at most {sequence.max_tokens} answer tokens" if num_tokens else "no token"
    return DeadlineExceeded(
        f"the deadline passed {waited_s:.1f} s after the request came, with {what} computed; allow more time"
    )


def poisonous(error: ShoalError, num_times: int) -> ShoalError:
    """The error of one that pipelines are lost with again and again."""
    message = f"{error.message}; that happened {num_times} times without a token between, so it is given up"
    return rebuild(error.reason, message)
