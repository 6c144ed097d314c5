"""What is remembered of tenants' prompts: found again by a part of their text, in bounded memory, each tenant's own."""

from __future__ import annotations

import random

from orchestrator.core.shingles import Sketch, make_sketch
from orchestrator.likely_prefixes import MAX_CANDIDATES, MAX_CHAIN_BLOCKS, LikelyPrefixes
from shoal.kv import BLOCK_TOKENS, BlockHash, KVScope, chain


def text(seed: int, num_blocks: int = 4) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(49152) for _ in range(num_blocks * BLOCK_TOKENS)]


def blocks_of(token_ids: list[int]) -> tuple[BlockHash, ...]:
    return chain(KVScope("ab" * 32, "test"), token_ids)


def learn(likely: LikelyPrefixes, token_ids: list[int], tenant: str = "gold") -> tuple[BlockHash, ...]:
    blocks = blocks_of(token_ids)
    likely.learn(tenant, blocks, make_sketch(token_ids))
    likely.check_invariants()
    return blocks


def typed(token_ids: list[int], num_tokens: int = 100) -> Sketch:
    return make_sketch(token_ids[:num_tokens])


def test_what_is_typed_again_is_found_whole() -> None:
    likely = LikelyPrefixes()
    blocks = learn(likely, text(1))
    learn(likely, text(2))

    assert likely.find("gold", typed(text(1))) == [blocks]
    assert likely.find("gold", typed(text(3))) == []


def test_a_tenant_finds_nothing_of_another() -> None:
    likely = LikelyPrefixes()
    learn(likely, text(1), "gold")

    assert likely.find("free", typed(text(1))) == []


def test_of_many_that_are_alike_a_few_are_found() -> None:
    likely = LikelyPrefixes()
    for seed in range(6):
        learn(likely, text(1, 3) + text(10 + seed, 1))

    assert len(likely.find("gold", typed(text(1)))) == MAX_CANDIDATES


def test_the_longest_unused_is_forgotten_first() -> None:
    likely = LikelyPrefixes(max_prefixes=2)
    first, _ = learn(likely, text(1)), learn(likely, text(2))
    assert likely.use("gold", first)
    learn(likely, text(3), "free")

    assert len(likely) == 2
    assert likely.find("gold", typed(text(1))) == [first]
    assert not likely.use("gold", blocks_of(text(2)))


def test_a_prompt_that_is_asked_for_again_takes_no_more_room() -> None:
    likely = LikelyPrefixes()
    learn(likely, text(1))
    learn(likely, text(1))

    assert len(likely) == 1


def test_of_a_very_long_prompt_the_begin_is_remembered() -> None:
    likely = LikelyPrefixes()
    whole = text(1, MAX_CHAIN_BLOCKS + 2)

    blocks = learn(likely, whole)

    assert likely.find("gold", typed(whole, 2000)) == [blocks[:MAX_CHAIN_BLOCKS]]


def test_what_is_deleted_is_not_found_and_another_tenants_stays() -> None:
    likely = LikelyPrefixes()
    blocks = learn(likely, text(1), "gold")
    learn(likely, text(1), "free")

    likely.forget("gold", blocks)

    likely.check_invariants()
    assert likely.find("gold", typed(text(1))) == []
    assert likely.find("free", typed(text(1))) == [blocks]
