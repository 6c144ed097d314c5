"""Orchestrators that keep what is known of their requests, killed and followed by the next, and streams that read answers.

Used by the tests of requests that are served.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.conversations import Turn
from orchestrator.journal import Journal
from orchestrator.served import Served, ServedRequests
from orchestrator.trails import Trails
from shoal.errors import ShoalError
from shoal.types import FinishReason
from tests.support.builders import make_sequence
from tests.support.conversations import KEY, TURNS, make_parts
from tests.support.fake_link import FakeLink
from tests.support.lanes import expected_answer

NAME = b"n" * 16
WALL_S = 5000.0
NUM_PROMPT, NUM_TOKENS = 8, 12
ANSWER = expected_answer(NUM_PROMPT, NUM_TOKENS)
# A session whose first turn it was.
WHOLE = (*make_sequence(num_prompt=NUM_PROMPT).prompt_token_ids, *ANSWER)


class Orchestrator:
    """One with a pipeline, whose stages compute when they are told to. now: by the clock of this process."""

    def __init__(self, link: FakeLink | None = None, now: float = 0.0) -> None:
        self.parts = make_parts(link)
        self.engine = self.parts.harness.engine
        self.now = now
        self.journal = Journal(self.parts.link, NAME, lambda: WALL_S + self.now)
        self.trails = Trails(self.parts.link)
        self.served = ServedRequests(
            self.engine, self.journal, self.parts.conversations, self.parts.names, self.trails,
            lambda: self.now, lambda: WALL_S + self.now,
        )  # fmt: skip

    def accept(self, request_id: str = "r", *, turn: Turn | None = None, **fields: Any) -> Served:
        sequence = make_sequence(self.engine.new_sequence_id(), num_prompt=NUM_PROMPT, max_tokens=NUM_TOKENS)
        sequence = replace(sequence, **fields)
        if turn is not None:
            sequence.prompt_token_ids = turn.session.token_ids + sequence.prompt_token_ids
        return self.served.add(self.engine.submit(sequence, request_id), request_id, (), turn=turn)

    def read(self, served: Served, num_known: int = 0) -> Reader:
        return Reader(self, served, num_known)

    def compute(self, num_frames: int = 1000) -> None:
        self.parts.harness.p1.compute(num_frames)

    async def compute_until(self, reader: Reader, num_tokens: int) -> None:
        """Compute as little as it takes for a client to get so many tokens."""
        async with asyncio.timeout(5.0):
            while len(reader.token_ids) < num_tokens:
                self.compute(1)
                await asyncio.sleep(0)

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.served.check_invariants()
        self.engine.check_invariants()

    async def run(self) -> None:
        """Let everybody act, and the stages compute what there is."""
        await self.settle()
        self.compute()
        await self.settle()

    async def resumed(self, num_known: int, tenant: str = "default") -> Reader:
        """Another stream of request r, whose client knows so many tokens, as far as it came."""
        again = self.read(self.served.find(tenant, "r"), num_known)
        await self.run()
        return again

    async def killed(self) -> Orchestrator:
        """The next one, which finds what was written of this one's requests."""
        await self.journal.stop()
        following = Orchestrator(self.parts.link, self.now)
        await following.served.load()
        following.served.check_invariants()
        return following


class Reader:
    """A stream as the server has it, without its text; token_ids: those that its client got."""

    def __init__(self, orchestrator: Orchestrator, served: Served, num_known: int) -> None:
        self._served = orchestrator.served
        self._request = served
        self._num_known = num_known
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        served, request = self._served, self._request
        try:
            await served.claim(request)
            await served.revive(request)
            index = 0
            while self.finish is None:
                event = await served.token(request, index)
                index += 1
                if event.finish is not None:
                    served.complete(request, index, event.finish, b"said")
                if index > self._num_known:
                    self.token_ids.append(event.token_id)
                    request.num_sent = max(request.num_sent, index)
                self.finish = event.finish
            served.end_turn(request)
        except ShoalError as error:
            served.fail(request, error)
            raise
        finally:
            served.release(request)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def error(self) -> ShoalError:
        with pytest.raises(ShoalError) as raised:
            await asyncio.wait_for(self.task, 5.0)
        return raised.value


async def begun(orchestrator: Orchestrator, num_tokens: int = 3, **fields: Any) -> tuple[Served, Reader]:
    """A request whose client has got so many tokens of it."""
    request = orchestrator.accept(**fields)
    reader = orchestrator.read(request)
    await orchestrator.compute_until(reader, num_tokens)
    return request, reader


async def begun_turn(orchestrator: Orchestrator, num_tokens: int = 3) -> tuple[Served, Reader]:
    """As begun, of a request that is a turn of a session."""
    turn = await orchestrator.parts.conversations.begin(KEY)
    return await begun(orchestrator, num_tokens, turn=turn, tenant=KEY.tenant)


async def finish_turn(orchestrator: Orchestrator, num_known: int) -> None:
    """Have its client come back, and read it to its end."""
    orchestrator.parts.now += 1
    again = await orchestrator.resumed(num_known, KEY.tenant)
    assert again.finish is FinishReason.LENGTH
