"""Redis as the stages of a simulated fleet see it: blocks and trails by layer, and that it is away, forgets, or is late.

What is written arrives later, in the order in which a device wrote it; what a device had not sent dies with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.kv import BLOCK_TOKENS
from shoal.types import LayerRange
from worker.kv.trail import Segment


@dataclass(slots=True)
class SimulatedRedis:
    """blocks: by name and layer. trails: by trail, segments and what their layers were given. is_away: it answers nobody."""

    blocks: dict[tuple[bytes, int], list[int]] = field(default_factory=dict)
    trails: dict[bytes, dict[Segment, list[list[int]]]] = field(default_factory=dict)
    is_away: bool = False

    def flush(self) -> None:
        self.blocks.clear()
        self.trails.clear()

    def write_block(self, name: bytes, layer: int, inputs: list[int]) -> None:
        if not self.is_away:
            self.blocks[name, layer] = inputs

    def write_segment(self, trail_id: bytes, segment: Segment, inputs: list[list[int]]) -> None:
        if not self.is_away:
            self.trails.setdefault(trail_id, {})[segment] = inputs

    def cut_trail(self, trail_id: bytes, layers: LayerRange, position: int) -> None:
        """Forget what reaches beyond a position at any of some layers."""
        if self.is_away or trail_id not in self.trails:
            return
        self.trails[trail_id] = {
            segment: inputs
            for segment, inputs in self.trails[trail_id].items()
            if segment.stop <= position or segment.layers.stop <= layers.start or layers.stop <= segment.layers.start
        }

    def end_trail(self, trail_id: bytes) -> None:
        if not self.is_away:
            self.trails.pop(trail_id, None)

    def read_block(self, name: bytes, layers: LayerRange) -> list[list[int]] | None:
        """The block at all these layers, or nothing."""
        found = [self.blocks.get((name, layer)) for layer in range(layers.start, layers.stop)]
        return None if self.is_away or None in found else [inputs for inputs in found if inputs is not None]

    def read_trail(self, trail_id: bytes, layers: LayerRange, start: int, stop: int) -> list[list[int]]:
        """The tokens from `start` on that a trail has at all these layers without a gap, at most up to `stop`."""
        known: dict[int, dict[int, int]] = {layer: {} for layer in range(layers.start, layers.stop)}
        for segment, inputs in ({} if self.is_away else self.trails.get(trail_id, {})).items():
            for layer, values in enumerate(inputs, segment.layers.start):
                if layer in known:
                    known[layer].update(enumerate(values, segment.start))
        at = start
        while at < stop and all(at in values for values in known.values()):
            at += 1
        return [[values[position] for position in range(start, at)] for values in known.values()]


class WriteBehind:
    """What one device writes: later, in order; what was not sent when it dies is lost with it.

    Invariant: nothing is written before what was written earlier.
    """

    def __init__(self, redis: SimulatedRedis | None, after: Callable[[float, Callable[[], None]], None]) -> None:
        """after: lets something happen in the device after a while; in order, if it is the same while."""
        self.redis = redis
        self._after = after
        self.delay_s = 0.02

    def write(self, action: Callable[[SimulatedRedis], None]) -> None:
        if self.redis is not None:
            redis = self.redis
            self._after(self.delay_s, lambda: action(redis))


class HostBlocks:
    """Blocks in the memory of one device, by name and layer: the least used go first.

    Invariant: no more than max_blocks; a block is of BLOCK_TOKENS tokens.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[tuple[bytes, int], list[int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, name: bytes, layer: int, inputs: list[int]) -> bool:
        """Keep a block; False if it was there already."""
        assert len(inputs) == BLOCK_TOKENS
        is_new = self._blocks.pop((name, layer), None) is None
        if self._max_blocks:
            self._blocks[name, layer] = inputs
        while len(self._blocks) > self._max_blocks:
            del self._blocks[next(iter(self._blocks))]
        return is_new

    def get(self, name: bytes, layers: LayerRange) -> list[list[int]] | None:
        found = [self._blocks.get((name, layer)) for layer in range(layers.start, layers.stop)]
        return None if None in found else [inputs for inputs in found if inputs is not None]

    def forget(self, name: bytes) -> None:
        for key in [key for key in self._blocks if key[0] == name]:
            del self._blocks[key]
