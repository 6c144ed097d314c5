"""The block cache: what it copies when, what it gives back, what it fetches, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.kv import BlockKey
from shoal.types import KVPolicy
from tests.support.kv_cache import (
    COST_S,
    EXACT,
    FORM,
    LOSSLESS_BYTES,
    CacheBench,
    make_arena,
    make_names,
    status_of,
    values_of,
)
from tests.support.lower_tier import MemoryLowerTier
from worker.kv.block import pack
from worker.kv.cache import MAX_PENDING, MAX_PROMOTED, MAX_RELEASE_UNITS, Restored
from worker.kv.codec import KVCodec, encode
from worker.kv.fetches import BlocksFetched, Found
from worker.kv.host import HostBlocks


def test_a_block_comes_back_as_it_was_computed() -> None:
    bench = CacheBench()
    for block in bench.store(make_names(3)):
        restored, values = bench.restore(block)
        assert restored == EXACT
        assert (values == values_of(block.block_hash)).all()


def test_a_block_that_was_never_stored_is_a_miss_and_nothing_is_written() -> None:
    bench = CacheBench()
    restored, values = bench.restore(FORM.chain(make_names(1))[0])
    assert restored is None
    assert np.isnan(values).all()
    assert (status_of(bench).hits, status_of(bench).misses) == (0, 1)


def test_each_unit_of_work_copies_one_block() -> None:
    bench = CacheBench()
    blocks = bench.queue(make_names(3))
    bench.cache.work()
    assert bench.held(blocks) == [True, False, False]
    bench.cache.work()
    assert bench.held(blocks) == [True, True, False]


def test_a_slot_that_ends_has_some_copied_and_the_rest_is_dropped_and_counted() -> None:
    bench = CacheBench()
    bench.arena = make_arena(num_blocks=MAX_RELEASE_UNITS + 3)
    blocks = bench.queue(make_names(MAX_RELEASE_UNITS + 3))
    other = bench.queue(make_names(1, prompt=1), slot=1)

    bench.cache.release(bench.arena, 0)

    assert sum(bench.held(blocks)) == MAX_RELEASE_UNITS
    assert status_of(bench).dropped_writes == 3
    assert bench.held(other) == [False]
    bench.keep_up()
    assert bench.held(other) == [True]


def test_more_than_may_wait_is_dropped_and_counted() -> None:
    bench = CacheBench()
    blocks = FORM.chain(make_names(MAX_PENDING + 2))
    bench.cache.store(blocks, bench.arena, 0, is_exact=True, cost_s=COST_S)
    assert status_of(bench).dropped_writes == 2
    bench.cache.check_invariants()


def test_what_is_stored_already_is_not_copied_again() -> None:
    bench = CacheBench()
    bench.store(make_names(2))
    bench.queue(make_names(2), slot=1)
    assert not bench.cache.has_work
    assert status_of(bench).puts == 2


def test_two_slots_that_computed_the_same_store_it_once() -> None:
    bench = CacheBench()
    bench.queue(make_names(1))
    bench.queue(make_names(1), slot=1)
    bench.keep_up()
    assert status_of(bench).puts == 1


def test_an_exact_computation_replaces_an_inexact_block_and_not_the_other_way_round() -> None:
    bench = CacheBench()
    (block,) = bench.store(make_names(1), is_exact=False)
    assert bench.restore(block)[0] == Restored(KVCodec.LOSSLESS, is_exact=False, is_from_lower=False)
    assert bench.restore(block, is_exact_only=True)[0] is None

    bench.store(make_names(1), is_exact=True)
    assert bench.restore(block, is_exact_only=True)[0] == EXACT
    bench.store(make_names(1), is_exact=False)
    assert bench.restore(block, is_exact_only=True)[0] == EXACT


@pytest.mark.parametrize("at", [0, 20, 40, 127, 128, 4000, -1])
def test_a_damaged_block_is_a_miss_is_counted_and_is_deleted(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CacheBench()
    (block,) = bench.store(make_names(1))
    _damage_in_memory(bench, block.key, at, monkeypatch)

    restored, values = bench.restore(block)

    assert restored is None
    assert np.isnan(values).all()
    assert sum(status_of(bench).mismatches.values()) == 1
    assert not bench.cache.holds(block.key)
    assert status_of(bench).used_bytes == 0


def _damage_in_memory(bench: CacheBench, key: BlockKey, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = bench.cache._host
    assert isinstance(host, HostBlocks)
    entry = host._tier._entries[key]
    data = bytearray(entry.data)
    data[at] ^= 1
    monkeypatch.setattr(entry, "data", bytes(data))


def test_a_sound_block_with_a_payload_of_another_length_is_a_mismatch() -> None:
    lower = MemoryLowerTier()
    bench = CacheBench(lower=lower)
    (block,) = FORM.chain(make_names(1))
    lower.values[block.key] = pack(block.block.label, "f32", b"1234", is_exact=True)

    assert bench.cache.fetch([block], 1.0, lambda found: None)
    bench.settle()

    assert not bench.cache.holds(block.key)
    assert bench.cache.lower_status(bench.cache.snapshot()).mismatches == {"other_shape": 1}


def test_what_is_stored_is_given_to_the_tier_below_in_its_codec() -> None:
    lower = MemoryLowerTier()
    bench = CacheBench(policy=KVPolicy.BALANCED, lower=lower)
    blocks = bench.store(make_names(3))
    stored = [lower.values[block.key][8:12] for block in blocks]
    assert stored == [b"f32\0", b"int8", b"f32\0"]


def test_what_the_tier_below_refused_is_offered_again_when_it_is_used_and_when_it_is_lost() -> None:
    lower = MemoryLowerTier()
    bench = CacheBench(num_blocks=2, lower=lower)
    lower.takes_writes = False
    used, lost = bench.store(make_names(2))
    lower.takes_writes = True

    bench.restore(used)
    assert list(lower.values) == [used.key]
    bench.store(make_names(1, prompt=1))
    assert lost.key in lower.values


def test_fetched_blocks_are_kept_in_memory() -> None:
    lower = MemoryLowerTier()
    names = make_names(MAX_PROMOTED + 2)
    blocks = FORM.chain(names)
    for block in blocks:
        payload = encode(values_of(block.block_hash), KVCodec.LOSSLESS)
        lower.values[block.key] = pack(block.block.label, "f32", payload, is_exact=True)
    bench = CacheBench(lower=lower)
    ready: list[Found] = []

    assert bench.cache.fetch(blocks, 1.0, ready.append)
    assert ready == []
    bench.settle()

    assert [len(found) for found in ready] == [len(blocks)]
    restored, values = bench.restore(blocks[-1])
    assert restored == Restored(KVCodec.LOSSLESS, is_exact=True, is_from_lower=True)
    assert (values == values_of(names[-1])).all()
    assert bench.restore(blocks[-1])[0] == EXACT


def test_blocks_that_are_on_their_way_are_waited_for_and_not_asked_for_twice() -> None:
    lower = MemoryLowerTier(answers_at_once=False)
    stored = CacheBench(lower=lower)
    blocks = stored.store(make_names(2))
    bench = CacheBench(lower=lower)
    ready: list[Found] = []

    bench.cache.prefetch(blocks, 1.0)
    assert bench.cache.fetch(blocks, 1.0, ready.append)
    lower.settle()
    bench.settle()

    assert lower.num_fetches == 1
    assert [set(found) for found in ready] == [{block.key for block in blocks}]


@pytest.mark.parametrize("is_wanted_meanwhile", [False, True])
def test_a_block_counts_as_fetched_if_a_request_came_before_it_was_there(is_wanted_meanwhile: bool) -> None:
    lower = MemoryLowerTier(answers_at_once=False)
    (block,) = CacheBench(lower=lower).store(make_names(1))
    bench = CacheBench(lower=lower)

    bench.cache.prefetch([block], 1.0, is_ahead=True)
    if is_wanted_meanwhile:
        assert bench.cache.fetch([block], 1.0, lambda found: None)
        bench.cache.prefetch([block], 1.0, is_ahead=True)
    lower.settle()
    bench.settle()

    restored, _ = bench.restore(block)
    assert restored == Restored(KVCodec.LOSSLESS, is_exact=True, is_from_lower=is_wanted_meanwhile)
    assert (lower.num_fetches, bench.restore(block)[0]) == (1, EXACT)


def test_no_more_is_fetched_at_a_time_than_memory_could_hold() -> None:
    lower = MemoryLowerTier(answers_at_once=False)
    bench = CacheBench(num_blocks=2.5, lower=lower)
    bench.cache.prefetch(FORM.chain(make_names(5)), 1.0)
    bench.cache.prefetch(FORM.chain(make_names(5, prompt=1)), 1.0)
    assert [len(blocks) for blocks, _, _ in lower.asked] == [2]


def test_a_fetch_that_was_answered_twice_counts_once() -> None:
    lower = MemoryLowerTier()
    CacheBench(lower=lower).store(make_names(1))
    bench = CacheBench(lower=lower)
    (block,) = FORM.chain(make_names(1))
    ready: list[Found] = []
    bench.cache.fetch([block], 1.0, ready.append)
    bench.posted.append(bench.posted[0])
    bench.settle()
    assert len(ready) == 1


def test_forgotten_blocks_do_not_come_back_from_a_queue_or_a_fetch() -> None:
    lower = MemoryLowerTier(answers_at_once=False)
    CacheBench(lower=lower).store(make_names(2))
    bench = CacheBench(lower=lower)
    names = make_names(2)
    blocks = FORM.chain(names)
    ready: list[Found] = []
    bench.cache.fetch(blocks, 1.0, ready.append)
    bench.queue(names)

    bench.cache.forget(names)
    assert ready == [{}]
    lower.settle()
    bench.settle()
    bench.keep_up()

    assert bench.held(blocks) == [False, False]
    assert status_of(bench).num_blocks == 0


def test_ages_are_those_of_the_last_use() -> None:
    bench = CacheBench()
    blocks = bench.store(make_names(2))
    bench.clock.move_to(10.0)
    bench.restore(blocks[0])
    bench.clock.move_to(30.0)
    assert (status_of(bench).oldest_s, status_of(bench).mean_age_s) == (30.0, 25.0)


def test_a_cache_without_a_budget_does_nothing() -> None:
    lower = MemoryLowerTier()
    bench = CacheBench(num_blocks=0, lower=lower)
    blocks = bench.queue(make_names(2))
    assert not bench.cache.has_work
    assert not bench.cache.fetch(blocks, 1.0, lambda found: None)
    assert (lower.values, lower.num_fetches) == ({}, 0)
    assert status_of(bench).state == "off"


def test_the_life_of_blocks_is_written_down(tmp_path: Path) -> None:
    lower = MemoryLowerTier()
    bench = CacheBench(num_blocks=2, policy=KVPolicy.BALANCED, lower=lower, trace=tmp_path / "trace")
    blocks = bench.store(make_names(2))
    bench.restore(blocks[0])
    bench.store(make_names(2, prompt=1))
    bench.cache.forget(make_names(2, prompt=1))
    bench.cache.close()

    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    lives: dict[str, list[str]] = {}
    for line in lines:
        lives.setdefault(line["block"], []).append(f"{line['event']} {line['tier']}")
    first, second = (block.block_hash.hex() for block in blocks)
    assert lives[first] == ["allocated host", "demoted redis", "hit host", "evicted host"]
    assert lives[second] == ["allocated host", "demoted redis", "evicted host"]
    assert lives[make_names(1, prompt=1)[0].hex()] == ["allocated host", "demoted redis", "forgotten host"]
    assert {line["bytes"] for line in lines if line["tier"] == "host"} == {LOSSLESS_BYTES}


def test_a_result_for_a_cache_without_a_tier_below_is_ignored() -> None:
    bench = CacheBench()
    bench.cache.fetched(BlocksFetched((FORM.chain(make_names(1))[0].key,), {}))
    assert status_of(bench).num_blocks == 0
