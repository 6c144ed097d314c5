"""Sessions over an engine whose stages are played by a model that keeps blocks by their names, and over a fake Redis.

Used by the tests of conversations and of warming.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from orchestrator.block_names import BlockNames
from orchestrator.catalogue import Catalogue
from orchestrator.conversation import Session, SessionKey
from orchestrator.conversations import Conversations
from orchestrator.core.sequence import Sequence
from orchestrator.likely_prefixes import LikelyPrefixes
from orchestrator.session_homes import FileHome, RedisHome
from orchestrator.sessions import SessionStore
from orchestrator.warming import Warmer
from shoal.types import FinishReason
from tests.support.builders import make_sequence
from tests.support.fake_link import FakeLink
from tests.support.lanes import Harness

MODEL = "ab" * 32
TTL_S = 100.0
KEY = SessionKey("gold", "talk")
# As many turns of the event loop as any of this takes.
TURNS = 50


@dataclass(slots=True)
class Parts:
    """Conversations and what they are made of."""

    harness: Harness
    link: FakeLink
    names: BlockNames
    warmer: Warmer
    conversations: Conversations
    likely: LikelyPrefixes
    now: float = 1000.0

    async def take_turn(self, num_new: int, num_answer: int = 3, key: SessionKey = KEY, **end: Any) -> Sequence:
        """A turn that adds so many tokens, whose answer is computed elsewhere."""
        turn = await self.conversations.begin(key)
        sequence = self.sequence_of(turn.session, num_new, key.tenant)
        answer = [900 + index for index in range(num_answer)]
        await self.conversations.end(turn, sequence, answer, end.get("why", FinishReason.LENGTH))
        return sequence

    def sequence_of(self, session: Session, num_new: int, tenant: str = KEY.tenant) -> Sequence:
        num_before = len(session.token_ids)
        prompt = session.token_ids + tuple(range(100 + num_before, 100 + num_before + num_new))
        sequence = make_sequence(num_prompt=len(prompt))
        sequence.prompt_token_ids = prompt
        sequence.block_hashes = self.names.names(tenant, prompt)
        return sequence

    async def look(self, key: SessionKey = KEY) -> Session:
        turn = await self.conversations.begin(key)
        self.conversations.leave(turn)
        return turn.session

    async def run(self) -> None:
        """Let the stages compute, and everybody act on it, until nothing happens any more."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
            self.harness.p1.compute_all()
            self.harness.engine.check_invariants()


def make_parts(link: FakeLink | None = None, file: FileHome | None = None, **limits: Any) -> Parts:
    harness, link = Harness(**{"num_slots": 2, **limits}), link or FakeLink()
    names = BlockNames(MODEL, b"s" * 32, link)
    warmer = Warmer(harness.engine)
    store, likely = SessionStore(file, RedisHome(link), MODEL, TTL_S, lambda: parts.now), LikelyPrefixes()
    conversations = Conversations(store, names, Catalogue(link, num_layers=3), harness.engine, warmer, likely)
    parts = Parts(harness, link, names, warmer, conversations, likely)
    return parts
