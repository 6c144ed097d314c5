"""Arbitrary calls to the tier in memory, against a model which picks victims by looking at every block."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.contract.test_kv_tiers import key, keys, present
from tests.support.clock import FakeClock
from worker.kv.tiers import HostTier, Refusal, TierStats


@dataclass
class ModelBlock:
    data: bytes
    parent: int | None
    cost_s: float
    num_uses: int = 1
    num_readers: int = 0
    pinned_until: float = -math.inf
    score: float = 0.0


@dataclass
class Leaving:
    """A block deleted while it was read."""

    num_bytes: int
    num_readers: int


# Few, so that calls meet the same blocks; together they need twice the budget.
MAX_NUMBER = 8
NUMBERS = st.integers(1, MAX_NUMBER)


class AnyCalls(RuleBasedStateMachine):
    """Arbitrary calls; the model knows what must be there, and which victims are right, by looking at every block."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.tier = HostTier(60, self.clock.now)
        self.blocks: dict[int, ModelBlock] = {}
        self.leaving: dict[int, Leaving] = {}
        self.level = 0.0
        self.expected = TierStats()

    def held(self) -> dict[int, ModelBlock | Leaving]:
        return {**self.blocks, **self.leaving}

    def used_bytes(self) -> int:
        stored = sum(len(block.data) for block in self.blocks.values())
        return stored + sum(block.num_bytes for block in self.leaving.values())

    def score(self, block: ModelBlock) -> None:
        block.score = self.level + block.num_uses * block.cost_s / max(1, len(block.data))

    def may_go(self, number: int, spared: tuple[int | None, ...]) -> bool:
        block = self.blocks[number]
        has_children = any(other.parent == number for other in self.blocks.values())
        is_pinned = block.pinned_until > -math.inf
        return not (has_children or is_pinned or block.num_readers) and number not in spared

    def end_pins(self) -> None:
        for block in self.blocks.values():
            if -math.inf < block.pinned_until <= self.clock.now():
                block.pinned_until = -math.inf
                self.expected.pins_expired += 1

    def make_room(self, spared: tuple[int | None, ...], more_bytes: int) -> bool:
        """Lose blocks as the tier did: always one with the lowest score of those that may go."""
        while self.used_bytes() + more_bytes > self.tier.budget_bytes:
            candidates = [number for number in self.blocks if self.may_go(number, spared)]
            if not candidates:
                return False
            lowest = min(self.blocks[number].score for number in candidates)
            lost = [n for n in candidates if self.blocks[n].score == lowest and not self.tier.contains(key(n))]
            assert lost, f"none of {candidates} with the lowest score {lowest} went"
            # Which of equal ones went first is not known here; that the last one had to go is.
            sizes = [len(self.blocks[number].data) for number in lost]
            assert self.used_bytes() + more_bytes - sum(sizes) + max(sizes) > self.tier.budget_bytes, "too many went"
            self.level = max(self.level, lowest)
            for number in lost:
                del self.blocks[number]
            self.expected.evictions += len(lost)
        return True

    def refusal(self, number: int, parent: int | None, num_bytes: int) -> Refusal | None:
        old = self.blocks.get(number)
        if number in self.leaving or (old is not None and old.num_readers):
            return Refusal.IN_USE
        if num_bytes > self.tier.budget_bytes:
            return Refusal.TOO_LARGE
        self.end_pins()
        more_bytes = num_bytes - (len(old.data) if old else 0)
        return None if self.make_room((number, parent), more_bytes) else Refusal.NO_ROOM

    @rule(
        number=NUMBERS,
        back=st.integers(0, 4),
        data=st.binary(min_size=5, max_size=30) | st.sampled_from([b"", b"x" * 60, b"x" * 61]),
        cost_s=st.sampled_from([0.0, 0.1, 1.0, 2.0, 7.5]),
    )
    def put(self, number: int, back: int, data: bytes, cost_s: float) -> None:
        parent = number - back if 0 < back < number else None
        is_stored = self.tier.put(key(number), data, parent=None if parent is None else key(parent), cost_s=cost_s)
        refusal = self.refusal(number, parent, len(data))
        assert is_stored == (refusal is None)
        if refusal is not None:
            self.expected.refused[refusal] += 1
            return
        block, old = ModelBlock(data, parent, cost_s), self.blocks.get(number)
        self.expected.puts += old is None
        self.expected.replacements += old is not None
        if old is not None:
            block.num_uses, block.pinned_until = old.num_uses, old.pinned_until
        self.score(block)
        self.blocks[number] = block

    @rule(numbers=st.sets(NUMBERS, max_size=4), keeps=st.booleans())
    def get(self, numbers: set[int], keeps: bool) -> None:
        found = self.tier.get(keys(*numbers))
        there = numbers & self.blocks.keys()
        assert found == {key(number): self.blocks[number].data for number in there}
        self.expected.hits += len(there)
        self.expected.misses += len(numbers - there)
        for number in there:
            block = self.blocks[number]
            block.num_uses += 1
            block.num_readers += keeps
            self.score(block)
        if not keeps:
            self.tier.release(found)

    @rule(number=NUMBERS)
    def release(self, number: int) -> None:
        held = self.held().get(number)
        if held is None or held.num_readers == 0:
            return
        self.tier.release(keys(number))
        held.num_readers -= 1
        if number in self.leaving and held.num_readers == 0:
            del self.leaving[number]

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        block = self.blocks.pop(number, None)
        assert self.tier.delete(keys(number)) == (block is not None)
        self.expected.deletions += block is not None
        if block is not None and block.num_readers:
            self.leaving[number] = Leaving(len(block.data), block.num_readers)

    @rule(numbers=st.sets(NUMBERS, max_size=3), ttl_s=st.sampled_from([0.0, 1.0, 5.0]))
    def pin(self, numbers: set[int], ttl_s: float) -> None:
        self.end_pins()
        there = numbers & self.blocks.keys()
        assert self.tier.pin(keys(*numbers), ttl_s) == len(there)
        for number in there:
            block = self.blocks[number]
            block.pinned_until = max(block.pinned_until, self.clock.now() + ttl_s)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.clock.move_to(self.clock.now() + seconds)

    @invariant()
    def the_tier_is_as_the_model(self) -> None:
        self.tier.check_invariants()
        assert present(self.tier, *range(1, MAX_NUMBER + 1)) == sorted(self.blocks)
        assert self.tier.used_bytes == self.used_bytes() <= self.tier.budget_bytes
        assert self.tier.stats == self.expected

    def teardown(self) -> None:
        num_readers = {number: held.num_readers for number, held in (self.held()).items()}
        for number, times in num_readers.items():
            self.tier.release(keys(number) * times)
        assert self.tier.get(keys(*self.blocks)) == {key(number): block.data for number, block in self.blocks.items()}
        self.tier.release(keys(*self.blocks))
        self.tier.delete(keys(*self.blocks))
        assert self.tier.used_bytes == 0
        self.tier.check_invariants()


AnyCalls.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAnyCalls = AnyCalls.TestCase
