"""A link to a Redis that is a dictionary: it answers at once, and is away while a test says so.

Knows the commands that the orchestrator sends; the contract suite of what the orchestrator keeps ties it to a real server.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from shoal.kv import BlockHash, layer_key
from shoal.redis_connection import Command
from shoal.redis_link import AsyncRedisLink, block_manifest_key, block_value_key
from shoal.types import LayerRange


class FakeLink(AsyncRedisLink):
    """is_away: calls give None. num_calls: those that were answered."""

    def __init__(self) -> None:
        super().__init__("")
        self.is_away = False
        self.num_calls = 0
        self.values: dict[bytes, bytes] = {}
        self.touched: list[bytes] = []
        self.sets: dict[bytes, set[bytes]] = {}
        self.hashes: dict[bytes, dict[bytes, bytes]] = {}
        # As they were said last; nothing expires.
        self.ttls_ms: dict[bytes, int] = {}

    async def call(self, *commands: Command, timeout_s: float = 0.05) -> list[Any] | None:
        if self.is_away:
            return None
        self.num_calls += 1
        return [self._answer(*command) for command in commands]

    def _answer(self, name: Any, *arguments: Any) -> Any:
        match name, *arguments:
            case "GET", key:
                return self.values.get(key)
            case "MGET", *keys:
                return [self.values.get(key) for key in keys]
            case "SET", key, value, *_:
                self.values[key] = value
                return b"OK"
            case "TOUCH", *keys:
                self.touched.extend(keys)
                return sum(key in self.values for key in keys)
            case "DEL" | "UNLINK", *keys:
                return sum(self._remove(key) for key in keys)
            case "HSET", key, *pairs:
                fields = self.hashes.setdefault(key, {})
                num_before = len(fields)
                fields.update(zip(pairs[::2], pairs[1::2], strict=True))
                return len(fields) - num_before
            case "HGETALL", key:
                return [part for pair in self.hashes.get(key, {}).items() for part in pair]
            case "PEXPIRE", key, ttl_ms:
                self.ttls_ms[key] = ttl_ms
                return 1
            case "HKEYS", key:
                return list(self.hashes.get(key, {}))
            case "SADD", key, *members:
                return self._change(key, self.sets.get(key, set()).union(members))
            case "SREM", key, *members:
                return -self._change(key, self.sets.get(key, set()).difference(members))
            case "SMEMBERS", key:
                return list(self.sets.get(key, ()))
        raise AssertionError(f"not a command the fake knows: {name}")

    def _change(self, key: bytes, members: set[bytes]) -> int:
        num_before = len(self.sets.get(key, ()))
        self.sets[key] = members
        return len(members) - num_before

    def _remove(self, key: bytes) -> int:
        kinds: tuple[dict[bytes, Any], ...] = (self.values, self.sets, self.hashes)
        return sum(kind.pop(key, None) is not None for kind in kinds)


def store_blocks(link: FakeLink, blocks: Seq[BlockHash], ranges: Seq[tuple[int, int]] = ((0, 3),)) -> None:
    """What workers write of blocks."""
    for block in blocks:
        fields = {f"{start}-{stop}".encode(): b"f32:1" for start, stop in ranges}
        link.hashes[block_manifest_key(block)] = fields
        for start, stop in ranges:
            link.values[block_value_key(layer_key(block, LayerRange(start, stop)))] = b"kv"
