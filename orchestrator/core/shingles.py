"""Which kept prefixes a prompt is likely to have in common, also one that is still being typed: MinHash over token shingles.

Decides what is worth prefetching, and nothing else: an estimate never says that KV may be used, names of blocks do. Scopes
keep tenants apart. The same in every process: it hashes by constants. Source: Broder, On the resemblance and containment of
documents (1997), with the s least hashes of one function for a sketch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from shoal.kv import BlockHash

SHINGLE_TOKENS = 4
# An estimate over all of them errs by 1 / sqrt(192) at most, that is 7 %, as a rule by half of it.
SKETCH_HASHES = 192
# Fewer hashes below what both sketches know to the end are no evidence.
MIN_EVIDENCE = 3
LEAST_CONTAINMENT = 0.5

_MASK = 2**64 - 1
# Odd, with bits all over: the golden ratio's, and the multipliers of SplitMix64's last steps.
# Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Sketch:
    """The least hashes of a text's distinct shingles. bound: below it there is no other; 2^64 if these are all."""

    hashes: frozenset[int]
    bound: int
    num_shingles: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of two texts, estimated. resemblance: shared shingles of all; containment: of those of the smaller; both 0..1."""

    resemblance: float
    containment: float
    num_shared: float
    num_evidence: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kept prefix that a prompt may go on from, or grow to."""

    prefix: BlockHash
    overlap: Overlap


def make_sketch(token_ids: Sequence[int]) -> Sketch:
    """Sketch a text in time linear in it; one that is shorter than a shingle is one."""
    width = min(SHINGLE_TOKENS, len(token_ids))
    windows = zip(*(token_ids[start:] for start in range(width)), strict=False)
    hashes = {_hash(shingle) for shingle in windows}
    least = nsmallest(SKETCH_HASHES, hashes)
    bound = least[-1] + 1 if len(hashes) > SKETCH_HASHES else _MASK + 1
    return Sketch(frozenset(least), bound, len(hashes))


def compare(one: Sketch, other: Sketch) -> Overlap:
    """Compare two texts by the hashes below both bounds, of which each sketch has all."""
    bound = min(one.bound, other.bound)
    ours, theirs = (sketch.hashes if sketch.bound == bound else _below(sketch, bound) for sketch in (one, other))
    num_shared, num_least = len(ours & theirs), min(len(ours), len(theirs))
    if num_least == 0:
        return Overlap(0.0, 0.0, 0.0, 0)
    containment = num_shared / num_least
    resemblance = num_shared / (len(ours) + len(theirs) - num_shared)
    return Overlap(resemblance, containment, containment * min(one.num_shingles, other.num_shingles), num_least)


class PrefixSketches:
    """The sketches of prefixes that are kept somewhere, at most max_prefixes; the longest unused are forgotten.

    Takes some 15 KB a prefix of at least SKETCH_HASHES shingles.

    Invariants: each prefix of a scope stands once in the order of use; there are at most max_prefixes; no scope is empty.
    """

    def __init__(self, max_prefixes: int) -> None:
        self._max_prefixes = max_prefixes
        self._scopes: dict[str, dict[BlockHash, Sketch]] = {}
        # Last used last.
        self._order: dict[tuple[str, BlockHash], None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: tuple[str, BlockHash]) -> bool:
        return key in self._order

    def add(self, scope: str, prefix: BlockHash, sketch: Sketch) -> list[tuple[str, BlockHash]]:
        """Note that the KV of a text, whose last full block prefix names, is kept; returns what is forgotten for it."""
        self.remove(scope, [prefix])
        self._scopes.setdefault(scope, {})[prefix] = sketch
        self._order[scope, prefix] = None
        forgotten = list(self._order)[: max(0, len(self._order) - self._max_prefixes)]
        for oldest_scope, oldest in forgotten:
            self.remove(oldest_scope, [oldest])
        return forgotten

    def use(self, scope: str, prefix: BlockHash) -> bool:
        """Note a use of a prefix; False if it is not known."""
        if (scope, prefix) not in self._order:
            return False
        self._order[scope, prefix] = self._order.pop((scope, prefix))
        return True

    def remove(self, scope: str, prefixes: Iterable[BlockHash]) -> None:
        """Forget prefixes; those that are not known are passed over."""
        for prefix in prefixes:
            if (scope, prefix) in self._order:
                del self._order[scope, prefix]
                del self._scopes[scope][prefix]
                if not self._scopes[scope]:
                    del self._scopes[scope]

    def find(self, scope: str, sketch: Sketch, max_candidates: int) -> list[Candidate]:
        """Find the prefixes of a scope that share most with a prompt; finding one is a use of it."""
        found = [
            Candidate(prefix, compare(sketch, kept))
            for prefix, kept in self._scopes.get(scope, {}).items()
            if not kept.hashes.isdisjoint(sketch.hashes)
        ]
        likely = [
            one
            for one in found
            if one.overlap.num_evidence >= MIN_EVIDENCE and one.overlap.containment >= LEAST_CONTAINMENT
        ]
        # Of equal ones the smallest text: the rest of a larger one is less likely to be needed.
        likely.sort(key=lambda one: (-one.overlap.num_shared, -one.overlap.resemblance, one.prefix))
        for one in reversed(likely[:max_candidates]):
            self.use(scope, one.prefix)
        return likely[:max_candidates]

    def check_invariants(self) -> None:
        known = {(scope, prefix) for scope, prefixes in self._scopes.items() for prefix in prefixes}
        assert known == self._order.keys()
        assert len(known) <= self._max_prefixes
        assert all(self._scopes.values()), "a scope without prefixes is kept"


def _hash(shingle: tuple[int, ...]) -> int:
    state = len(shingle)
    for token_id in shingle:
        state = ((state ^ token_id) * _STEP + 1) & _MASK
        state ^= state >> 32
    state = (state ^ state >> 30) * _FIRST & _MASK
    state = (state ^ state >> 27) * _SECOND & _MASK
    return state ^ state >> 31


def _below(sketch: Sketch, bound: int) -> frozenset[int]:
    return frozenset(one for one in sketch.hashes if one < bound)
