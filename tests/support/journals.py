"""Journals over a fake Redis that counts, refuses and hangs as a test says. Used by the tests of the journal."""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator.journal import Journal, JournalEntry
from shoal.redis_connection import Command, RedisRefusal, RefusalKind
from shoal.redis_link import request_key
from tests.support.fake_link import FakeLink
from tests.support.requests_kept import make_record

NAME = b"n" * 16
# Long enough for everything to be written that can be.
SETTLE_S = 5.0
RECORD = make_record()
KEY = request_key(NAME, RECORD.record_id)


class CountingLink(FakeLink):
    """commands: all that were carried out. num_tried: calls. refuses: they give a refusal; hangs: they
    time out."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []
        self.refuses = False
        self.hangs = False
        self.num_tried = 0

    async def call(self, *commands: Command, timeout_s: float = 0.05) -> list[Any] | None:
        self.num_tried += 1
        if self.hangs:
            await asyncio.sleep(timeout_s)
            return None
        if self.refuses:
            return [RedisRefusal(RefusalKind.FULL, "OOM") for _ in commands]
        replies = await super().call(*commands, timeout_s=timeout_s)
        if replies is not None:
            self.commands.extend(commands)
        return replies

    def written(self) -> list[set[str]]:
        """The fields of each HSET."""
        return [
            {str(name, "ascii") for name in command[2::2] if isinstance(name, bytes)}
            for command in self.commands
            if command[0] == "HSET"
        ]


def make_journal(link: FakeLink | None) -> Journal:
    return Journal(link, NAME, lambda: 1000.0)


async def loaded(link: FakeLink) -> list[JournalEntry]:
    """What the next orchestrator finds."""
    entries = await make_journal(link).load()
    assert entries is not None
    return entries
