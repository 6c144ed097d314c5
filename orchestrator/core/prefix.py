"""Which KV blocks a pipeline is believed to hold, by their names.

A belief: learned from prompts that its stages computed and from what they restored, unlearned when they could not. Where
it is wrong, a restore brings less than was asked for. It knows neither devices nor tiers; `restores` keeps one for each
pipeline.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from shoal.kv import BlockHash

# Four million tokens, more than the devices of a home and their Redis keep; some 15 MB.
MAX_BLOCKS = 65_536


class PrefixIndex:
    """Names of blocks, the least recently used first; beyond max_blocks that one is forgotten.

    Invariants: at most max_blocks are known; of two known blocks that follow each other the later one goes first, so a
    prompt is forgotten from its end.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # With the block before it in its prompt.
        self._parents: OrderedDict[BlockHash, BlockHash | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parents)

    def match(self, block_hashes: Seq[BlockHash]) -> int:
        """How many leading blocks of a prompt are known. That somebody asked is no use of them."""
        for index, block_hash in enumerate(block_hashes):
            if block_hash not in self._parents:
                return index
        return len(block_hashes)

    def learn(self, block_hashes: Seq[BlockHash]) -> None:
        """Note that the leading blocks of a prompt were used just now; they must be all of them, from its first."""
        for index in reversed(range(len(block_hashes))):
            self._parents[block_hashes[index]] = block_hashes[index - 1] if index else None
            self._parents.move_to_end(block_hashes[index])
        while len(self._parents) > self._max_blocks:
            self._parents.popitem(last=False)

    def forget(self, block_hashes: Iterable[BlockHash]) -> None:
        """Unlearn blocks, known or not; what follows them is out of reach then, and goes with time."""
        for block_hash in block_hashes:
            self._parents.pop(block_hash, None)

    def check_invariants(self) -> None:
        assert len(self._parents) <= self._max_blocks
        numbers = {block_hash: number for number, block_hash in enumerate(self._parents)}
        for block_hash, parent in self._parents.items():
            assert parent is None or numbers[block_hash] < numbers.get(parent, len(numbers)), "a prompt is not in order"
