"""What Redis holds of KV blocks: how much of a prompt could be fetched, and the deletion of blocks.

Reads the manifests that workers write after the values; knows no bytes of KV. Has what a prompt begins with count as used,
all of it: Redis evicts what was not used for longest, and a prefix is worth nothing without its head. An answer is a belief:
what is there now may be evicted before it is fetched. No trouble with Redis is an error here, and none takes longer than a
lookup may. Called by `server` and `conversations`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from shoal.kv import BlockHash, layer_key
from shoal.redis_link import AsyncRedisLink, block_manifest_key, block_value_key
from shoal.types import LayerRange

# A lookup that takes longer is given up: about what computing a few tokens takes.
LOOKUP_TIMEOUT_S = 0.020
# Deleting is nobody's wait.
DELETE_TIMEOUT_S = 1.0
# Blocks whose keys go into one command.
_DELETE_BATCH = 64
# Of a layer's number; longer ones take time to read, or are refused by Python.
MAX_DIGITS = 9
# Nobody waits for it.
TOUCH_TIMEOUT_S = 1.0


class Catalogue:
    """The blocks of one model in Redis; without Redis there are none."""

    def __init__(self, link: AsyncRedisLink | None, num_layers: int) -> None:
        self._link = link
        self._num_layers = num_layers
        self._touching: asyncio.Task[object] | None = None

    @property
    def has_redis(self) -> bool:
        """Whether there is one, be it away just now."""
        return self._link is not None

    async def stored_prefix(self, blocks: Sequence[BlockHash]) -> int:
        """Return how many leading blocks have all their layers in Redis; 0 on any trouble."""
        if self._link is None or not blocks:
            return 0
        manifests = await self._link.hkeys_many(
            [block_manifest_key(block) for block in blocks], timeout_s=LOOKUP_TIMEOUT_S
        )
        whole = list(itertools.takewhile(lambda fields: _covers(fields, self._num_layers), manifests or ()))
        named = zip(blocks, whole, strict=False)
        self._touch(self._link, [key for block, fields in named for key in _keys(block, fields)])
        return len(whole)

    def _touch(self, link: AsyncRedisLink, values: Sequence[bytes]) -> None:
        """Have values count as used now, though workers may have those of the first blocks in memory and not read them."""
        if values and (self._touching is None or self._touching.done()):
            self._touching = asyncio.create_task(link.call(("TOUCH", *values), timeout_s=TOUCH_TIMEOUT_S))

    async def delete(self, blocks: Sequence[BlockHash]) -> bool:
        """Delete blocks, their manifests first, so that no manifest promises what is gone; False if Redis is away."""
        if self._link is None:
            return True
        for start in range(0, len(blocks), _DELETE_BATCH):
            if not await self._delete_some(self._link, blocks[start : start + _DELETE_BATCH]):
                return False
        return True

    @staticmethod
    async def _delete_some(link: AsyncRedisLink, blocks: Sequence[BlockHash]) -> bool:
        manifest_keys = [block_manifest_key(block) for block in blocks]
        manifests = await link.hkeys_many(manifest_keys, timeout_s=DELETE_TIMEOUT_S)
        if manifests is None:
            return False
        values = [key for block, fields in zip(blocks, manifests, strict=True) for key in _keys(block, fields)]
        return await link.delete(*manifest_keys, *values, timeout_s=DELETE_TIMEOUT_S) is not None


def _keys(block: BlockHash, fields: Iterable[bytes]) -> list[bytes]:
    """Of the values that a manifest names."""
    return [block_value_key(layer_key(block, layers)) for layers in _layer_ranges(fields)]


def _covers(fields: Iterable[bytes], num_layers: int) -> bool:
    stop = 0
    for layers in sorted(_layer_ranges(fields), key=lambda layers: layers.start):
        if layers.start > stop:
            return False
        stop = max(stop, layers.stop)
    return stop >= num_layers


def _layer_ranges(fields: Iterable[bytes]) -> list[LayerRange]:
    """The layers that a manifest's fields name, as b"0-4"; what is no range was not written by a worker and is skipped."""
    ranges = []
    for field in fields:
        start, _, stop = field.partition(b"-")
        is_range = all(number.isdigit() and len(number) <= MAX_DIGITS for number in (start, stop))
        if is_range and int(start) < int(stop):
            ranges.append(LayerRange(int(start), int(stop)))
    return ranges
