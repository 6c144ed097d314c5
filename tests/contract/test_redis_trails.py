"""Trails in Redis: written behind, read whoever wrote them, deleted in order, and never in the way of anything."""

from __future__ import annotations

import queue
from collections.abc import Callable

import numpy as np
import pytest

from launch.redis_server import EmbeddedRedis
from shoal.redis_link import trail_key
from shoal.types import LayerRange, LinkProfile
from shoal.v1 import flow_pb2
from tests.support.compute import Bench, model, start
from tests.support.kv_blocks import MODEL_DIGEST
from tests.support.redis import PATIENCE_S, command, redis_server, running_redis
from tests.support.redis_tier import started, until
from tests.support.shards import make_tokens
from tests.support.stages import make_cancel, make_restore, make_row, make_start, make_step
from worker.kv import redis_tier
from worker.kv.block import BlockForm
from worker.kv.codec import Block
from worker.kv.redis_tier import RedisTier
from worker.kv.trail import FoundTrail, Segment, TrailPart, pack_segment

__all__ = ["model", "redis_server", "start"]

PROMPT = make_tokens(40, 280, seed=5)
KEEPING = {"host_kv_bytes": 1 << 26}


@pytest.fixture
def trail_id() -> bytes:
    return np.random.default_rng().bytes(16)


def form(start: int = 0, stop: int = 6) -> BlockForm:
    return BlockForm(MODEL_DIGEST, LayerRange(start, stop), num_kv_heads=2, head_dim=32)


def values(layers: LayerRange, first: int, last: int) -> Block:
    """The same for a layer and a token, whoever writes them: [L, 2, 2, T, 32]."""
    grid = 1000.0 * np.arange(layers.start, layers.stop)[:, None] + np.arange(first, last)  # [L, T]
    shape = (len(layers), 2, 2, last - first, 32)
    return np.broadcast_to(grid[:, None, None, :, None], shape).astype(np.float32)


def write(tier: RedisTier, trail_id: bytes, of: BlockForm, first: int, last: int) -> list[int]:
    """Write a segment; what was lost is put into the list."""
    lost: list[int] = []
    segment = Segment(of.layers, first, last)
    packed = pack_segment(trail_id, of, segment, values(of.layers, first, last), is_exact=True)
    tier.write_segment(trail_id, segment, packed, lambda: lost.append(first))
    return lost


def fetch(tier: RedisTier, part: TrailPart, timeout_s: float = PATIENCE_S) -> FoundTrail:
    answers: queue.Queue[FoundTrail] = queue.Queue()
    tier.fetch_trail(part, timeout_s, answers.put)
    found = answers.get(timeout=2 * PATIENCE_S)
    assert answers.empty()
    return found


def fields(url: str, trail_id: bytes) -> set[bytes]:
    return set(command(url, "HKEYS", trail_key(trail_id)))


def connected(tier: RedisTier) -> RedisTier:
    until(lambda: tier.takes_segment(1))
    return tier


@pytest.mark.parametrize("cut", [(0, 6), (0, 3), (2, 5), (5, 6)])
def test_stages_that_cut_the_layers_otherwise_read_what_others_wrote(
    redis_server: EmbeddedRedis, trail_id: bytes, cut: tuple[int, int]
) -> None:
    with started(redis_server.url) as tier:
        connected(tier)
        for layers in ((0, 4), (4, 6)):
            for first in range(64, 112, 16):
                write(tier, trail_id, form(*layers), first, first + 16)
        until(lambda: len(fields(redis_server.url, trail_id)) == 6)

        found = fetch(tier, TrailPart(trail_id, form(*cut), 64, 105))

    assert (found.stop, found.is_exact) == (105, True)
    for one in found.segments:
        expected = values(one.segment.layers, one.segment.start, one.segment.stop)
        assert bytes(one.payload.data) == expected.tobytes()


def test_trails_that_are_wanted_at_the_same_time_come_whole_over_a_slow_link(
    redis_server: EmbeddedRedis, trail_id: bytes
) -> None:
    """A segment takes 50 ms of it: all at once, each would seem to hang."""
    trail_ids = [trail_id[:15] + bytes([number]) for number in range(12)]
    with started(redis_server.url) as tier:
        connected(tier)
        for one in trail_ids:
            write(tier, one, form(), 0, 16)
            write(tier, one, form(), 16, 32)
        until(lambda: all(len(fields(redis_server.url, one)) == 2 for one in trail_ids))

    answers: queue.Queue[FoundTrail] = queue.Queue()
    with started(redis_server.url, LinkProfile(rate_mbit_s=8.0)) as tier:
        connected(tier)
        for one in trail_ids:
            tier.fetch_trail(TrailPart(one, form(), 0, 32), PATIENCE_S, answers.put)
        found = [answers.get(timeout=2 * PATIENCE_S) for _ in trail_ids]

    assert [one.stop for one in found] == [32] * len(trail_ids)


def test_who_waits_behind_a_long_trail_gives_up_at_its_own_deadline(
    redis_server: EmbeddedRedis, trail_id: bytes
) -> None:
    """The first one's segments take seconds of this link, the second has a tenth of one."""
    with started(redis_server.url) as tier:
        connected(tier)
        for start in range(0, 512, 16):
            write(tier, trail_id, form(), start, start + 16)
        until(lambda: len(fields(redis_server.url, trail_id)) == 32)

    order: queue.Queue[str] = queue.Queue()
    with started(redis_server.url, LinkProfile(rate_mbit_s=8.0)) as tier:
        connected(tier)
        tier.fetch_trail(TrailPart(trail_id, form(), 0, 512), PATIENCE_S, lambda found: order.put("long"))
        tier.fetch_trail(TrailPart(trail_id, form(), 0, 512), 0.1, lambda found: order.put(f"short {found.stop}"))
        assert [order.get(timeout=2 * PATIENCE_S) for _ in range(2)] == ["short 0", "long"]


def test_a_trail_expires(redis_server: EmbeddedRedis, trail_id: bytes) -> None:
    with started(redis_server.url) as tier:
        write(connected(tier), trail_id, form(), 0, 8)
        until(lambda: len(fields(redis_server.url, trail_id)) == 1)

    assert 0 < command(redis_server.url, "TTL", trail_key(trail_id)) <= 15 * 60


def test_what_nobody_wrote_is_not_there(redis_server: EmbeddedRedis, trail_id: bytes) -> None:
    with started(redis_server.url) as tier:
        part = TrailPart(trail_id, form(), 64, 100)

        assert fetch(tier, part) == FoundTrail(part, (), 64)


def test_a_trail_is_deleted_behind_its_last_write_and_cut_behind_those_before(
    redis_server: EmbeddedRedis, trail_id: bytes
) -> None:
    other = trail_id[::-1]
    with started(redis_server.url) as tier:
        connected(tier)
        for one in (trail_id, other):
            write(tier, one, form(0, 3), 64, 80)
            write(tier, one, form(0, 3), 80, 96)
            write(tier, one, form(3, 6), 80, 96)
        tier.end_trail(trail_id)
        tier.cut_trail(other, LayerRange(2, 3), 90)
        write(tier, other, form(0, 3), 80, 88)
        tier.stop(PATIENCE_S)

    assert fields(redis_server.url, trail_id) == set()
    assert fields(redis_server.url, other) == {b"0-3:64-80", b"3-6:80-96", b"0-3:80-88"}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda value: value[:-1] + bytes([value[-1] ^ 1]), "bad_checksum"),
        (lambda value: value[:50], "truncated"),
        (lambda _: b"", "truncated"),
    ],
)
def test_a_damaged_segment_ends_what_is_found_and_is_taken_out(
    redis_server: EmbeddedRedis, trail_id: bytes, damage: Callable[[bytes], bytes], reason: str
) -> None:
    url, key = redis_server.url, trail_key(trail_id)
    with started(url) as tier:
        connected(tier)
        for first in (64, 80, 96):
            write(tier, trail_id, form(), first, first + 16)
        until(lambda: len(fields(url, trail_id)) == 3)
        command(url, "HSET", key, b"0-6:80-96", damage(command(url, "HGET", key, b"0-6:80-96")))

        assert fetch(tier, TrailPart(trail_id, form(), 64, 112)).stop == 80
        until(lambda: fields(url, trail_id) == {b"0-6:64-80", b"0-6:96-112"})
        assert tier.status().mismatches == {reason: 1}


@pytest.mark.parametrize(
    ("name", "content"), [("SET", [b"a string"]), ("HSET", [b"what is this", b"x", b"9-3:0-8", b"y"])]
)
def test_what_is_no_trail_is_not_read(
    redis_server: EmbeddedRedis, trail_id: bytes, name: str, content: list[bytes]
) -> None:
    command(redis_server.url, name, trail_key(trail_id), *content)
    with started(redis_server.url) as tier:
        assert fetch(tier, TrailPart(trail_id, form(), 0, 8)).stop == 0


def test_only_so_many_bytes_are_on_their_way(redis_server: EmbeddedRedis, trail_id: bytes) -> None:
    with started(redis_server.url) as tier:
        connected(tier)
        assert tier.takes_segment(redis_tier.MAX_TRAIL_BYTES, is_urgent=True)
        assert not tier.takes_segment(redis_tier.MAX_TRAIL_BYTES + 1, is_urgent=True)

        write(tier, trail_id, form(), 0, 16)
        until(lambda: tier.takes_segment(redis_tier.MAX_TRAIL_BYTES, is_urgent=True))


def test_trails_take_no_more_than_their_share_of_a_slow_link(redis_server: EmbeddedRedis, trail_id: bytes) -> None:
    """A segment takes 48 KiB: 50 ms of 8 Mbit/s, a quarter of which it may have."""
    with started(redis_server.url, LinkProfile(rate_mbit_s=8.0)) as tier:
        connected(tier)
        write(tier, trail_id, form(), 0, 16)
        until(lambda: tier.status().write_mb_s > 0.0)
        write(tier, trail_id, form(), 16, 32)

        assert not tier.takes_segment(50_000)
        assert tier.takes_segment(50_000, is_urgent=True)
        until(lambda: tier.takes_segment(50_000))


def test_while_redis_is_away_nothing_is_taken_and_what_was_on_its_way_is_lost(trail_id: bytes) -> None:
    with running_redis() as server, started(server.url) as tier:
        connected(tier)
        server.kill()
        lost = write(tier, trail_id, form(), 0, 16)
        until(lambda: lost == [0])

        assert not tier.takes_segment(1, is_urgent=True)
        assert fetch(tier, TrailPart(trail_id, form(), 0, 16)).stop == 0
        server.restart()
        connected(tier)


def test_redis_that_refuses_to_write_is_not_sent_the_same_again_at_once(trail_id: bytes) -> None:
    with running_redis("--min-replicas-to-write", "1") as server, started(server.url) as tier:
        lost = write(connected(tier), trail_id, form(), 0, 16)
        until(lambda: lost == [0])

        assert tier.status().state == "ok"
        assert not tier.takes_segment(1, is_urgent=True)


def test_without_redis_nothing_is_taken_or_found(trail_id: bytes) -> None:
    with started("unix:///nowhere/redis.sock") as tier:
        assert not tier.takes_segment(1)
        tier.end_trail(trail_id)
        assert fetch(tier, TrailPart(trail_id, form(), 0, 16), timeout_s=0.1).stop == 0


def test_a_tier_that_has_stopped_answers_at_once(redis_server: EmbeddedRedis, trail_id: bytes) -> None:
    with started(redis_server.url) as tier:
        connected(tier)
    assert write(tier, trail_id, form(), 0, 16) == [0]
    assert fetch(tier, TrailPart(trail_id, form(), 0, 16)).stop == 0


def test_a_worker_that_is_killed_leaves_what_another_goes_on_with(
    start: Callable[..., Bench], redis_server: EmbeddedRedis, trail_id: bytes
) -> None:
    def fed(bench: Bench, position: int, token_id: int, begin: flow_pb2.SequenceStart | None = None) -> tuple[int, str]:
        bench.compute.post(make_step(position, [make_row(1, position=position, start=begin)], [token_id]))
        (token,) = bench.uplink.next().step_result.tokens
        return token.token_id, str(token.logprobs)

    first = start(lower=RedisTier(redis_server.url), **KEEPING)
    first.load()
    begin = make_start(trail_id=trail_id)
    first.compute.post(make_step(1, [make_row(1, num_tokens=40, start=begin)], PROMPT))
    (token,) = first.uplink.next().step_result.tokens
    drawn = [(token.token_id, str(token.logprobs))]
    for position in range(40, 60):
        drawn.append(fed(first, position, drawn[-1][0]))
    until(lambda: len(fields(redis_server.url, trail_id)) == 7)

    second = start(lower=RedisTier(redis_server.url), **KEEPING)
    second.load()
    restore = make_restore(1, (), fetch_timeout_ms=1e3 * PATIENCE_S, trail_id=trail_id, num_tokens=60)
    second.compute.post(restore)
    restored = second.uplink.next().restored.restored
    assert restored == flow_pb2.RestoredBlocks(num_tokens=56, is_exact=True)
    again = [fed(second, 56, drawn[16][0], begin)]
    for position in range(57, 60):
        again.append(fed(second, position, again[-1][0]))

    assert again == drawn[17:]
    second.compute.post(make_cancel((1, 0)))
    until(lambda: fields(redis_server.url, trail_id) == set())
