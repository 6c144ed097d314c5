"""What stages are told to fetch while a prompt is being typed: what Redis has of it and of the like, and no more."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from orchestrator import typed_ahead
from orchestrator.block_names import BlockNames
from orchestrator.catalogue import Catalogue
from orchestrator.core.forecast import UNKNOWN_BLOCK_S, UNKNOWN_FETCH_S
from orchestrator.core.shingles import Sketch, make_sketch
from orchestrator.likely_prefixes import MAX_CHAIN_BLOCKS, LikelyPrefixes
from orchestrator.requests import TypedPrompt
from orchestrator.typed_ahead import Prefetched, TypedAhead
from shoal.kv import BLOCK_TOKENS, BlockHash
from tests.support.builders import make_sequence
from tests.support.fake_link import FakeLink, store_blocks
from tests.support.lanes import P2, Harness

NAMES = BlockNames("ab" * 32, b"s" * 32)


def text(seed: int, num_blocks: float) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(49152) for _ in range(int(num_blocks * BLOCK_TOKENS)))


SYSTEM, STORY = text(1, 2), text(2, 6)
WHOLE = SYSTEM + STORY


@dataclass(slots=True)
class Parts:
    harness: Harness
    link: FakeLink = field(default_factory=FakeLink)
    likely: LikelyPrefixes = field(default_factory=LikelyPrefixes)
    has_redis: bool = True

    @property
    def ahead(self) -> TypedAhead:
        catalogue = Catalogue(self.link if self.has_redis else None, num_layers=3)
        return TypedAhead(self.harness.engine, catalogue, self.likely)

    async def learn(self, token_ids: tuple[int, ...], tenant: str = "gold", *, is_stored: bool = True) -> None:
        """Answer a request, whose KV workers then write to Redis."""
        blocks = NAMES.names(tenant, token_ids)
        sequence = replace(make_sequence(), prompt_token_ids=token_ids, block_hashes=blocks, tenant=tenant)
        ahead = self.ahead
        ahead.learn(sequence)
        await ahead.stop()
        self.likely.check_invariants()
        if is_stored:
            store_blocks(self.link, blocks)

    async def type(self, token_ids: tuple[int, ...], tenant: str = "gold") -> Prefetched:
        return await self.ahead.prefetch(TypedPrompt(tenant, token_ids, NAMES.names(tenant, token_ids)))

    def asked(self) -> list[list[BlockHash]]:
        frames = [frame.prefetch for frame in self.harness.p1.sent]
        assert all(frame.is_ahead for frame in frames)
        return [[BlockHash(one) for one in frame.block_hashes] for frame in frames]


def make_parts(**limits: Any) -> Parts:
    return Parts(Harness(**limits))


async def test_the_begin_that_redis_has_is_fetched_by_all_stages() -> None:
    parts = make_parts()
    p2 = parts.harness.add(P2)
    blocks = NAMES.names("gold", WHOLE)
    store_blocks(parts.link, blocks[:3])

    assert await parts.type(WHOLE) == Prefetched(1, 3)

    assert parts.asked() == [list(blocks[:3])]
    assert p2.bodies() == parts.harness.p1.bodies() == ["prefetch"]
    assert p2.sent[0].prefetch.timeout_ms == pytest.approx(1e3 * (UNKNOWN_FETCH_S + 3 * UNKNOWN_BLOCK_S))


async def test_half_a_prompt_that_was_asked_before_brings_all_of_it() -> None:
    parts = make_parts()
    await parts.learn(WHOLE)

    assert await parts.type(WHOLE[: 3 * BLOCK_TOKENS + 10]) == Prefetched(2, 8)

    blocks = list(NAMES.names("gold", WHOLE))
    assert parts.asked() == [blocks[:3], blocks]


async def test_less_than_a_block_is_enough_for_a_guess() -> None:
    parts = make_parts()
    await parts.learn(WHOLE)

    assert await parts.type(WHOLE[:40]) == Prefetched(1, 8)


async def test_what_a_tenant_types_finds_nothing_of_another() -> None:
    parts = make_parts()
    await parts.learn(WHOLE, "gold")

    assert await parts.type(WHOLE, "free") == Prefetched()
    assert parts.asked() == []


async def test_a_guess_is_no_reason_to_believe_that_anything_is_there() -> None:
    parts = make_parts()
    await parts.learn(WHOLE)
    await parts.type(WHOLE)

    assert parts.harness.engine.known_blocks(NAMES.names("gold", WHOLE)) == 0


async def test_what_redis_has_not_is_not_asked_for() -> None:
    parts = make_parts()
    await parts.learn(WHOLE, is_stored=False)

    assert await parts.type(WHOLE) == Prefetched()


async def test_while_redis_is_away_nothing_is_asked_for() -> None:
    parts = make_parts()
    await parts.learn(WHOLE)
    parts.link.is_away = True

    assert await parts.type(WHOLE) == Prefetched()


async def test_nothing_is_learned_or_looked_up_where_no_device_keeps_kv() -> None:
    parts = make_parts(keeps_blocks=False)
    await parts.learn(WHOLE)

    assert await parts.type(WHOLE) == Prefetched()
    assert (len(parts.likely), parts.link.num_calls) == (0, 0)


async def test_a_prompt_that_comes_again_is_not_sketched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, sketched = make_parts(), list[int]()

    def sketch(token_ids: tuple[int, ...]) -> Sketch:
        sketched.append(len(token_ids))
        return make_sketch(token_ids)

    monkeypatch.setattr(typed_ahead, "make_sketch", sketch)
    for _ in range(2):
        # Only what has names is kept, so only that is sketched.
        await parts.learn(WHOLE[: 2 * BLOCK_TOKENS + 10])

    assert sketched == [2 * BLOCK_TOKENS]


async def test_stages_that_keep_nothing_are_told_nothing() -> None:
    parts = make_parts()
    p2 = parts.harness.add(P2, keeps_blocks=False)
    await parts.learn(WHOLE)
    await parts.type(WHOLE)

    assert (len(parts.asked()), p2.sent) == (1, [])


async def test_without_redis_nothing_is_learned_for_nothing_could_be_fetched() -> None:
    parts = Parts(Harness(), has_redis=False)
    await parts.learn(WHOLE)

    assert await parts.type(WHOLE) == Prefetched()
    assert len(parts.likely) == 0


async def test_a_prompt_without_names_teaches_nothing() -> None:
    parts = make_parts()
    await parts.learn(WHOLE[:10])

    assert len(parts.likely) == 0


async def test_no_more_is_fetched_for_a_guess_than_its_bound() -> None:
    parts = make_parts()
    many = text(7, MAX_CHAIN_BLOCKS + 1)
    await parts.learn(many)
    await parts.learn(many[:BLOCK_TOKENS] + text(8, 1))

    assert await parts.type(many) == Prefetched(1, MAX_CHAIN_BLOCKS)
