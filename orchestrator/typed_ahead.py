"""Has workers fetch what a prompt will probably begin with while it is still being typed, so that it is in memory then.

What was typed so far, with its session before it, is looked for by the names of its blocks, and what the tenant asked for
before by likeness. Nothing is computed, and nothing believed: requests find what there is by names, as ever. Owns nothing
but the tasks that sketch long prompts. Called by `server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.catalogue import Catalogue
from orchestrator.core.sequence import Sequence as AnswerSequence
from orchestrator.core.shingles import Sketch, make_sketch
from orchestrator.engine import Engine
from orchestrator.likely_prefixes import MAX_CHAIN_BLOCKS, LikelyPrefixes
from orchestrator.requests import TypedPrompt
from shoal.kv import BLOCK_TOKENS, BlockHash

# Sketching more tokens than this takes milliseconds, which others' tokens would wait for.
LONG_TEXT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What stages were asked to fetch as far as they lack it: different blocks, of so many prefixes."""

    num_prefixes: int = 0
    num_blocks: int = 0


class TypedAhead:
    def __init__(self, engine: Engine, catalogue: Catalogue, likely: LikelyPrefixes) -> None:
        self._engine = engine
        self._catalogue = catalogue
        self._likely = likely
        self._learning: set[asyncio.Task[None]] = set()

    @property
    def _is_of_use(self) -> bool:
        """Stages fetch from Redis alone, so without one there is nothing to guess for."""
        return self._catalogue.has_redis and self._engine.keeps_blocks

    def learn(self, sequence: AnswerSequence) -> None:
        """Remember the prompt of a request that was answered, if its KV may be kept; a long one some moments later."""
        blocks = sequence.block_hashes
        if not blocks or not self._is_of_use or self._likely.use(sequence.tenant, blocks):
            return
        task = asyncio.create_task(self._learn(sequence.tenant, sequence.prompt_token_ids, blocks))
        self._learning.add(task)
        task.add_done_callback(self._learning.discard)

    async def _learn(self, tenant: str, token_ids: Sequence[int], blocks: Sequence[BlockHash]) -> None:
        sketch = await _sketched(token_ids[: len(blocks) * BLOCK_TOKENS])
        self._likely.learn(tenant, blocks, sketch)

    async def prefetch(self, typed: TypedPrompt) -> Prefetched:
        """Have what Redis has of the likely prefixes fetched, at most MAX_CHAIN_BLOCKS in all; the certain one first."""
        if not self._is_of_use:
            return Prefetched()
        chains = [typed.blocks[:MAX_CHAIN_BLOCKS]]
        chains += self._likely.find(typed.tenant, await _sketched(typed.token_ids))
        counts = await asyncio.gather(*map(self._catalogue.stored_prefix, chains))
        asked: set[BlockHash] = set()
        num_prefixes = 0
        for chain, num_stored in zip(chains, counts, strict=True):
            stored = chain[:num_stored]
            if asked.issuperset(stored) or len(asked.union(stored)) > MAX_CHAIN_BLOCKS:
                continue
            # All of them: stages pass over what they have, and go on with the first that they lack.
            self._engine.prefetch_blocks(stored)
            asked.update(stored)
            num_prefixes += 1
        return Prefetched(num_prefixes, len(asked))

    async def stop(self) -> None:
        """Wait for what is being learned."""
        await asyncio.gather(*self._learning)


async def _sketched(token_ids: Sequence[int]) -> Sketch:
    is_long = len(token_ids) > LONG_TEXT_TOKENS
    return await asyncio.to_thread(make_sketch, token_ids) if is_long else make_sketch(token_ids)
