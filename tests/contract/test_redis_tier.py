"""What the Redis tier of a worker keeps to: blocks come back as they were written, or not at all.

Against an embedded Valkey, and a Redis of the system where there is one; with values that were damaged or evicted, and tiers
that are stopped.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.redis_server import EmbeddedRedis
from shoal.redis_link import block_manifest_key, block_value_key
from shoal.types import LayerRange, LinkProfile
from tests.support.kv_blocks import make_blocks, pack_stage
from tests.support.redis import PATIENCE_S, command, redis_server, server_url
from tests.support.redis_tier import fetch, manifest, started, until, values_of, write
from worker.kv.codec import KVCodec
from worker.kv.fetches import Found
from worker.kv.groups import Entry

__all__ = ["redis_server", "server_url"]


@pytest.mark.parametrize("codec", KVCodec)
def test_blocks_come_back_as_they_were_written(server_url: str, codec: KVCodec) -> None:
    blocks = make_blocks(5, name=f"back {codec.value}")
    with started(server_url) as tier:
        write(tier, blocks, codec)
        assert fetch(tier, blocks) == {block.key: pack_stage(block, codec) for block in blocks}
        assert (tier.status().hits, tier.status().misses) == (5, 0)


def test_what_nobody_wrote_is_not_there(server_url: str) -> None:
    with started(server_url) as tier:
        assert fetch(tier, make_blocks(3, name="nobody")) == {}
        assert tier.status().misses == 3


def test_nothing_asked_for_is_answered_too(server_url: str) -> None:
    with started(server_url) as tier:
        assert fetch(tier, []) == {}


def test_what_follows_a_missing_block_is_not_fetched(server_url: str) -> None:
    blocks = make_blocks(4, name="gap")
    with started(server_url) as tier:
        write(tier, [blocks[0], blocks[1], blocks[3]])
        assert fetch(tier, blocks).keys() == {blocks[0].key, blocks[1].key}


def test_stages_that_cut_the_layers_otherwise_find_them(server_url: str) -> None:
    first, second = (make_blocks(2, LayerRange(*cut), name="cuts") for cut in ((0, 9), (9, 24)))
    others = [make_blocks(2, LayerRange(*cut), name="cuts") for cut in ((0, 5), (5, 20), (0, 24), (20, 24))]
    with started(server_url) as tier:
        write(tier, [*first, *second])
        for wanted in others:
            assert fetch(tier, wanted) == {block.key: pack_stage(block) for block in wanted}


def test_values_are_of_a_size_that_redis_does_well_with_and_expire(server_url: str) -> None:
    block = make_blocks(1, LayerRange(0, 30), name="size")[0]
    with started(server_url) as tier:
        write(tier, [block])

    values = values_of(server_url, block)
    assert all(128 * 1024 <= len(value) <= 256 * 1024 - 64 for value in list(values.values())[:-1])
    keys = [*values, block_manifest_key(block.block_hash)]
    assert all(0 < command(server_url, "TTL", key) <= 30 * 24 * 3600 for key in keys)


def test_what_is_there_is_not_sent_again_and_lives_longer(redis_server: EmbeddedRedis) -> None:
    block = make_blocks(1, name="again")[0]
    with started(redis_server.url) as tier:
        write(tier, [block])
        keys = [*values_of(redis_server.url, block), block_manifest_key(block.block_hash)]
        for key in keys:
            command(redis_server.url, "EXPIRE", key, 100)
        before = command(redis_server.url, "INFO", "commandstats")
        write(tier, [block])
        after = command(redis_server.url, "INFO", "commandstats")

    assert calls_of(after, b"set") == calls_of(before, b"set")
    assert all(command(redis_server.url, "TTL", key) > 100 for key in keys)


def calls_of(statistics: bytes, name: bytes) -> int:
    return int(statistics.split(b"cmdstat_%b:calls=" % name)[1].split(b",")[0])


def test_a_coarser_copy_does_not_replace_a_better_one_but_a_better_one_does(server_url: str) -> None:
    exact, coarse = make_blocks(2, LayerRange(0, 3), name="better")
    with started(server_url) as tier:
        write(tier, [exact])
        write(tier, [coarse], KVCodec.INT8)
        write(tier, [exact], KVCodec.INT8)
        write(tier, [coarse])
        assert fetch(tier, [exact, coarse]) == {block.key: pack_stage(block) for block in (exact, coarse)}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda value: value[:-1] + bytes([value[-1] ^ 1]), "bad_checksum"),
        (lambda value: value[:-1], "truncated"),
        (lambda value: value[:10], "truncated"),
        (lambda value: value + b"\0", "trailing_bytes"),
        (lambda _: b"", "truncated"),
        (lambda value: b"X" + value[1:], "not_a_block"),
    ],
)
def test_a_damaged_value_is_a_miss_and_is_taken_out(
    redis_server: EmbeddedRedis, damage: Callable[[bytes], bytes], reason: str
) -> None:
    url = redis_server.url
    blocks = make_blocks(3, name="damaged")
    with started(url) as tier:
        write(tier, blocks)
        key, value = list(values_of(url, blocks[1]).items())[-1]
        command(url, "SET", key, damage(value), "EX", 1000)

        assert fetch(tier, blocks).keys() == {blocks[0].key}
        assert tier.status().mismatches == {reason: 1}
        until(lambda: len(manifest(url, blocks[1].block_hash)) == 1)
        write(tier, blocks)
        assert len(fetch(tier, blocks)) == 3


def test_a_value_of_another_block_is_a_miss(redis_server: EmbeddedRedis) -> None:
    url = redis_server.url
    one, other = make_blocks(2, name="swapped")
    with started(url) as tier:
        write(tier, [one, other])
        values = list(values_of(url, one))
        command(url, "SET", values[0], next(iter(values_of(url, other).values())), "EX", 1000)

        assert fetch(tier, [one]) == {}
        assert tier.status().mismatches == {"other_key": 1}


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        ({"position": 64}, "other_position"),
        ({"model_digest": "ab" * 32}, "other_model"),
        ({"head_dim": 16}, "other_shape"),
    ],
)
def test_who_takes_a_sound_block_for_another_one_does_not_have_it_deleted(
    server_url: str, mistake: dict[str, Any], reason: str
) -> None:
    (block,) = make_blocks(1, name="sound")
    mistaken = replace(block, label=replace(block.label, **mistake))
    with started(server_url) as tier:
        write(tier, [block])

        assert fetch(tier, [mistaken]) == {}
        assert tier.status().mismatches == {reason: 1}
        assert fetch(tier, [block]).keys() == {block.key}


def test_a_value_that_was_evicted_is_a_miss_and_promised_no_more(redis_server: EmbeddedRedis) -> None:
    url = redis_server.url
    block = make_blocks(1, name="evicted")[0]
    with started(url) as tier:
        write(tier, [block])
        command(url, "DEL", next(iter(values_of(url, block))))

        assert fetch(tier, [block]) == {}
        assert tier.status().mismatches == {"missing_value": 1}
        until(lambda: len(manifest(url, block.block_hash)) == 1)


def test_a_key_of_another_type_is_a_miss(redis_server: EmbeddedRedis) -> None:
    block = make_blocks(1, name="type")[0]
    command(redis_server.url, "SET", block_manifest_key(block.block_hash), b"x", "EX", 1000)
    with started(redis_server.url) as tier:
        assert fetch(tier, [block]) == {}


def test_a_writer_that_ends_half_way_leaves_no_manifest(redis_server: EmbeddedRedis) -> None:
    """The link takes 2 s for each of the values, so the tier is stopped before the second is written."""
    block = make_blocks(1, name="half")[0]
    with started(redis_server.url, LinkProfile(rate_mbit_s=1.0)) as tier:
        tier.write(block, pack_stage(block))
        first = Entry(LayerRange(0, 7), "f32", True, 0)
        until(lambda: bool(command(redis_server.url, "EXISTS", block_value_key(first.key(block.block_hash)))))
        tier.stop(0.1)

    assert manifest(redis_server.url, block.block_hash) == []


def test_stopping_writes_what_waits(redis_server: EmbeddedRedis) -> None:
    blocks = make_blocks(20, name="flush")
    with started(redis_server.url) as tier:
        until(lambda: tier.status().state == "ok")
        for block in blocks:
            assert tier.write(block, pack_stage(block))

    with started(redis_server.url) as tier:
        assert len(fetch(tier, blocks)) == 20


def test_a_tier_that_has_ended_takes_nothing_and_answers_at_once(redis_server: EmbeddedRedis) -> None:
    block = make_blocks(1, name="ended")[0]
    with started(redis_server.url) as tier:
        write(tier, [block])

    assert not tier.write(block, pack_stage(block))
    assert fetch(tier, [block]) == {}
    assert tier.status().dropped_writes == 1


def test_on_done_is_called_once_by_a_tier_that_is_stopped_meanwhile(redis_server: EmbeddedRedis) -> None:
    blocks = make_blocks(2, name="stopped")
    answers: list[Found] = []
    with started(redis_server.url) as tier:
        write(tier, blocks)
    with started(redis_server.url, LinkProfile(rate_mbit_s=1.0)) as tier:
        until(lambda: tier.status().state == "ok")
        tier.fetch(blocks, PATIENCE_S, answers.append)
        tier.stop(PATIENCE_S)

    assert answers == [{}]


def test_on_done_is_called_by_the_tier_s_own_thread(redis_server: EmbeddedRedis) -> None:
    threads: queue.Queue[str] = queue.Queue()
    with started(redis_server.url) as tier:
        tier.fetch(make_blocks(1), 1.0, lambda _: threads.put(threading.current_thread().name))

        assert threads.get(timeout=PATIENCE_S) == "kv-redis"


OTHER_PROCESS = """
import sys
from tests.support.kv_blocks import make_blocks, pack_stage
from tests.support.redis_tier import fetch, started, write
url, verb = sys.argv[1:]
blocks = make_blocks(3, name="other process")
with started(url) as tier:
    if verb == "write":
        write(tier, blocks)
    else:
        assert fetch(tier, blocks) == {block.key: pack_stage(block) for block in blocks}
print("done")
"""


@pytest.mark.parametrize("seeds", [("1", "2"), ("2", "1")])
def test_processes_with_other_hash_seeds_find_each_other_s_blocks(
    redis_server: EmbeddedRedis, seeds: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(redis_server.url, "FLUSHALL")
    for seed, verb in zip(seeds, ("write", "fetch"), strict=True):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        ended = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, redis_server.url, verb],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.stdout == "done\n", ended.stderr
