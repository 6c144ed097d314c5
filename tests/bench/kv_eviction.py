"""How much of what a full Redis holds can still be used: a prefix ends at the first value that was evicted.

Writes prefixes like those of workers into an embedded Valkey that is too small for them, goes on using a few, and counts
afterwards. Prints a row for each eviction policy, as markdown. Run it with `python -m tests.bench.kv_eviction`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from launch.redis_server import EmbeddedRedis
from shoal.redis_link import AsyncRedisLink
from tests.bench.report import table

POLICIES = ("volatile-lfu", "volatile-lru")
MEMORY_BYTES = 64 * 2**20
# As many values a block as 30 layers of SmolLM2 make; smaller ones, so that there are many prefixes.
NUM_VALUES, NUM_BLOCKS, VALUE_BYTES = 15, 8, 16_000
PREFIX_BYTES = NUM_VALUES * NUM_BLOCKS * VALUE_BYTES
TTL_S = 30 * 24 * 3600
TIMEOUT_S = 10.0
# Prefixes that are used again and again, each time so many others were written.
NUM_HOT, HOT_EVERY = 3, 4


def keys_of(prefix: int) -> list[bytes]:
    return [b"%d:%d:%d" % (prefix, block, one) for block in range(NUM_BLOCKS) for one in range(NUM_VALUES)]


async def fill(link: AsyncRedisLink, num_prefixes: int, pause_s: float) -> None:
    draw = random.Random(1)
    for prefix in range(num_prefixes):
        for key in keys_of(prefix):
            await link.call(("SET", key, draw.randbytes(VALUE_BYTES), "EX", TTL_S), timeout_s=TIMEOUT_S)
        if prefix % HOT_EVERY == 0:
            for hot in range(min(NUM_HOT, prefix + 1)):
                await link.call(("MGET", *keys_of(hot)), timeout_s=TIMEOUT_S)
        # LRU tells times that are a second apart.
        await asyncio.sleep(pause_s)


async def held_of(link: AsyncRedisLink, prefix: int) -> list[bool]:
    replies = await link.call(*(("EXISTS", key) for key in keys_of(prefix)), timeout_s=TIMEOUT_S)
    assert replies is not None
    return [bool(reply) for reply in replies]


async def measure(policy: str, overcommit: float, pause_s: float) -> dict[str, str]:
    num_prefixes = int(overcommit * MEMORY_BYTES / PREFIX_BYTES)
    with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
        server = EmbeddedRedis(Path(directory), MEMORY_BYTES)
        server.start()
        link = AsyncRedisLink(server.url)
        try:
            await link.call(("CONFIG", "SET", "maxmemory-policy", policy), timeout_s=TIMEOUT_S)
            # Counts of uses that are alike, as they are five minutes after writing.
            await link.call(("CONFIG", "SET", "lfu-decay-time", 0), timeout_s=TIMEOUT_S)
            await fill(link, num_prefixes, pause_s)
            held = [await held_of(link, prefix) for prefix in range(num_prefixes)]
        finally:
            await link.close()
            server.stop()
    num_usable = sum((one.index(False) if False in one else len(one)) // NUM_VALUES * NUM_VALUES for one in held)
    return {
        "policy": policy,
        "written, of the room": f"{overcommit:g} x",
        "usable, of what is held": f"{num_usable / sum(map(sum, held)):.0%}",
        "whole prefixes": f"{sum(map(all, held))} of {num_prefixes}",
        "hot ones whole": f"{sum(map(all, held[:NUM_HOT]))} of {NUM_HOT}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overcommit", type=float, default=2.0)
    parser.add_argument("--pause-s", type=float, default=0.3, help="after each prefix")
    arguments = parser.parse_args()
    rows = [asyncio.run(measure(policy, arguments.overcommit, arguments.pause_s)) for policy in POLICIES]
    sys.stdout.write("\n".join([*table(rows), ""]))


if __name__ == "__main__":
    main()
