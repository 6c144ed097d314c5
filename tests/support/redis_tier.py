"""A Redis tier for tests: started and ended, asked and written to as its worker does; and what Redis has of a block."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal.kv import BlockHash
from shoal.redis_link import block_manifest_key, block_value_key
from shoal.types import LinkProfile
from tests.support.kv_blocks import pack_stage
from tests.support.redis import PATIENCE_S, command
from worker.kv.block import StageBlock
from worker.kv.codec import KVCodec
from worker.kv.fetches import Found, LowerTier
from worker.kv.groups import Entry, read_manifest
from worker.kv.redis_tier import RedisTier


@contextmanager
def started(url: str, link: LinkProfile | None = None, **options: Any) -> Iterator[RedisTier]:
    tier = RedisTier(url, link, **options)
    tier.start()
    try:
        yield tier
    finally:
        tier.stop(PATIENCE_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def fetch(tier: LowerTier, blocks: Sequence[StageBlock], timeout_s: float = PATIENCE_S) -> Found:
    answers: queue.Queue[Found] = queue.Queue()
    tier.fetch(blocks, timeout_s, answers.put)
    found = answers.get(timeout=2 * PATIENCE_S)
    assert answers.empty()
    return found


def write(tier: RedisTier, blocks: Sequence[StageBlock], codec: KVCodec = KVCodec.LOSSLESS) -> None:
    """Write blocks and wait until they are stored."""
    num_stored = tier.status().puts + len(blocks)
    for block in blocks:
        assert tier.write(block, pack_stage(block, codec))
    until(lambda: tier.status().puts == num_stored)


def manifest(url: str, block_hash: BlockHash) -> list[Entry]:
    reply = command(url, "HGETALL", block_manifest_key(block_hash))
    return read_manifest(dict(zip(reply[::2], reply[1::2], strict=True)))


def values_of(url: str, block: StageBlock) -> dict[bytes, bytes]:
    """The values that a block's manifest promises, by their keys."""
    keys = [block_value_key(entry.key(block.block_hash)) for entry in manifest(url, block.block_hash)]
    return {key: command(url, "GET", key) for key in keys}
