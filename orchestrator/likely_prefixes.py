"""Which prefixes tenants have asked for, so that one may be guessed while its next use is still being typed.

Owns the sketches of these prefixes and the names of their blocks, in bounded memory. A guess is worth a prefetch and nothing
else: what KV a request uses, the names of its own blocks decide. Knows no clock, no engine and no Redis. Called by
`typed_ahead`, and by `conversations` for what is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.shingles import PrefixSketches, Sketch
from shoal.kv import BlockHash

# Some 5 MB, and a few milliseconds for looking through all of them.
MAX_PREFIXES = 128
# 16,384 tokens: more blocks than this are not fetched for a guess, so no more are remembered.
MAX_CHAIN_BLOCKS = 256
MAX_CANDIDATES = 3


class LikelyPrefixes:
    """At most max_prefixes over all tenants; the longest unused are forgotten.

    Invariant: a chain is known of exactly the prefixes that have a sketch, and has MAX_CHAIN_BLOCKS at most.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._sketches = PrefixSketches(max_prefixes)
        self._chains: dict[tuple[str, BlockHash], tuple[BlockHash, ...]] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def use(self, tenant: str, blocks: Sequence[BlockHash]) -> bool:
        """Note that a prompt with these full blocks was asked for; False if it has to be learned."""
        return self._sketches.use(tenant, blocks[-1])

    def learn(self, tenant: str, blocks: Sequence[BlockHash], sketch: Sketch) -> None:
        """Remember the full blocks of a prompt, at least one, with the sketch of their tokens."""
        self._chains[tenant, blocks[-1]] = tuple(blocks[:MAX_CHAIN_BLOCKS])
        for forgotten in self._sketches.add(tenant, blocks[-1], sketch):
            del self._chains[forgotten]

    def find(self, tenant: str, sketch: Sketch) -> list[tuple[BlockHash, ...]]:
        """The blocks of the prefixes of a tenant that a text is likeliest to go on from, or to grow to."""
        found = self._sketches.find(tenant, sketch, MAX_CANDIDATES)
        return [self._chains[tenant, one.prefix] for one in found]

    def forget(self, tenant: str, blocks: Sequence[BlockHash]) -> None:
        """Forget the prefixes of a tenant that end with one of these blocks."""
        self._sketches.remove(tenant, blocks)
        for block in blocks:
            self._chains.pop((tenant, block), None)

    def check_invariants(self) -> None:
        self._sketches.check_invariants()
        assert len(self._chains) == len(self._sketches)
        assert all(key in self._sketches for key in self._chains)
        assert all(0 < len(chain) <= MAX_CHAIN_BLOCKS for chain in self._chains.values())
