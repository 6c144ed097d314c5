"""Whatever is stored, lost, damaged, late and forgotten: a block cache gives a block's own bytes, or nothing."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.kv import BlockHash, BlockKey
from shoal.types import KVPolicy
from tests.support.kv_cache import COST_S, FORM, SHAPE, CacheBench, make_names, values_of
from tests.support.lower_tier import MemoryLowerTier
from worker.kv.cache import Restored
from worker.kv.codec import Block, KVCodec, decode, encode
from worker.kv.fetches import Found

NUM_PROMPTS = 3
MAX_BLOCKS = 4
PROMPTS = st.integers(0, NUM_PROMPTS - 1)
COUNTS = st.integers(1, MAX_BLOCKS)
# What computing a block from lossy ones gives, in these tests.
INEXACT = np.float32(0.5)


def is_right(block_hash: BlockHash, restored: Restored, values: Block) -> bool:
    """Whether these are a block's values, as exact and in the codec that is claimed."""
    exact = values_of(block_hash)
    if restored.is_exact:
        return restored.codec is KVCodec.LOSSLESS and bool((values == exact).all())
    candidates = [exact + INEXACT]
    if restored.codec is not KVCodec.LOSSLESS:
        candidates.append(exact)
    if restored.codec is KVCodec.K4V4:
        # Stored in 8 bits first, and in 4 as it went on growing colder.
        candidates += [decode(encode(one, KVCodec.INT8), KVCodec.INT8, SHAPE) for one in candidates]
    return any((values == decode(encode(one, restored.codec), restored.codec, SHAPE)).all() for one in candidates)


class CacheMachine(RuleBasedStateMachine):
    policy = KVPolicy.BALANCED

    def __init__(self) -> None:
        super().__init__()
        self.lower = MemoryLowerTier(answers_at_once=False)
        self.bench = CacheBench(3.5, self.policy, lower=self.lower)
        self.num_waiting = 0
        self.num_told = 0
        self.ready: list[Found] = []

    def tell(self, found: Found) -> None:
        self.num_told += 1
        self.ready.append(found)

    @rule(prompt=PROMPTS, count=COUNTS, slot=st.integers(0, 1), is_exact=st.booleans())
    def compute(self, prompt: int, count: int, slot: int, is_exact: bool) -> None:
        bench = self.bench
        bench.cache.release(bench.arena, slot)
        bench.arena.release(slot)
        blocks = bench.fill(make_names(count, prompt), slot)
        if not is_exact:
            for block in blocks:
                bench.arena.block(slot, block.index)[...] += INEXACT
        bench.cache.store(blocks, bench.arena, slot, is_exact=is_exact, cost_s=COST_S)

    @rule()
    def work(self) -> None:
        self.bench.cache.work()

    @rule()
    def idle(self) -> None:
        self.bench.idle()

    @rule(slot=st.integers(0, 1))
    def end_slot(self, slot: int) -> None:
        self.bench.cache.release(self.bench.arena, slot)
        self.bench.arena.release(slot)

    @rule(prompt=PROMPTS, is_exact_only=st.booleans())
    def restore(self, prompt: int, is_exact_only: bool) -> None:
        found = self.ready.pop() if self.ready else {}
        for block in FORM.chain(make_names(MAX_BLOCKS, prompt)):
            restored, values = self.bench.restore(block, is_exact_only=is_exact_only, fetched=found)
            if restored is None:
                assert np.isnan(values).all(), "a miss has written something"
                continue
            assert is_right(block.block_hash, restored, values)
            assert restored.is_exact or not is_exact_only

    @rule(prompt=PROMPTS, count=COUNTS, waits=st.booleans())
    def fetch(self, prompt: int, count: int, waits: bool) -> None:
        blocks = FORM.chain(make_names(count, prompt))
        if waits:
            self.num_waiting += self.bench.cache.fetch(blocks, 1.0, self.tell)
        else:
            self.bench.cache.prefetch(blocks, 1.0)

    @precondition(lambda self: self.lower.asked)
    @rule(finds=st.booleans())
    def answer(self, finds: bool) -> None:
        self.lower.settle(finds=finds)

    @precondition(lambda self: self.bench.posted)
    @rule(twice=st.booleans())
    def take_in(self, twice: bool) -> None:
        result = self.bench.posted.popleft()
        for _ in range(1 + twice):
            self.bench.cache.fetched(result)

    @precondition(lambda self: self.lower.values)
    @rule(seed=st.integers(0, 2**16), how=st.sampled_from(["flip", "cut", "swap", "lose"]))
    def spoil_below(self, seed: int, how: str) -> None:
        random = Random(seed)
        keys = sorted(self.lower.values)
        key = random.choice(keys)
        if how == "lose":
            del self.lower.values[key]
        elif how == "swap":
            self.lower.values[key] = self.lower.values[random.choice(keys)]
        else:
            self.lower.values[key] = spoiled(self.lower.values[key], random, cuts=how == "cut")

    @rule(seed=st.integers(0, 2**16))
    def spoil_memory(self, seed: int) -> None:
        entries = self.bench.cache._host._tier._entries
        if not entries:
            return
        random = Random(seed)
        key: BlockKey = random.choice(sorted(entries))
        # As many bytes as before: how many they are is known of memory.
        entries[key].data = spoiled(entries[key].data, random, cuts=False)

    @rule(takes_writes=st.booleans())
    def change_reach(self, takes_writes: bool) -> None:
        self.lower.takes_writes = takes_writes

    @rule(prompt=PROMPTS, begin=st.integers(0, MAX_BLOCKS - 1))
    def forget(self, prompt: int, begin: int) -> None:
        names = make_names(MAX_BLOCKS, prompt)[begin:]
        self.bench.cache.forget(names)
        assert not any(self.bench.held(FORM.chain(make_names(MAX_BLOCKS, prompt))[begin:]))

    @rule(prompt=PROMPTS, count=COUNTS)
    def keep(self, prompt: int, count: int) -> None:
        self.bench.cache.keep(make_names(count, prompt), 30.0)

    @rule(seconds=st.sampled_from([1.0, 31.0, 400.0]), is_hot=st.booleans())
    def pass_time(self, seconds: float, is_hot: bool) -> None:
        self.bench.clock.move_to(self.bench.clock.now() + seconds)
        self.bench.cache.is_hot = is_hot

    @invariant()
    def holds(self) -> None:
        self.bench.cache.check_invariants()
        status = self.bench.cache.snapshot().status
        assert status.used_bytes <= status.budget_bytes

    def teardown(self) -> None:
        """Whoever waits is told, once everything that was asked for is answered."""
        while self.lower.asked:
            self.lower.settle()
        self.bench.settle()
        assert self.num_told == self.num_waiting
        self.bench.keep_up()


def spoiled(data: bytes, random: Random, *, cuts: bool) -> bytes:
    if cuts:
        return data[: random.randrange(len(data))]
    damaged = bytearray(data)
    at = random.randrange(len(data) * 8)
    damaged[at // 8] ^= 1 << at % 8
    return bytes(damaged)


class ExactCacheMachine(CacheMachine):
    policy = KVPolicy.EXACT

    @invariant()
    def nothing_is_lossy(self) -> None:
        held = self.bench.cache._host._held.values()
        assert all(one.codec is KVCodec.LOSSLESS for one in held)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
ExactCacheMachine.TestCase.settings = CacheMachine.TestCase.settings
TestCache = CacheMachine.TestCase
TestExactCache = ExactCacheMachine.TestCase
