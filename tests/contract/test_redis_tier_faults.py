"""Nobody waits for a worker's Redis tier: not with a Redis that is off, killed, hanging or full, nor over slow links."""

from __future__ import annotations

import queue
import signal
import time

import pytest

from launch.redis_server import EmbeddedRedis
from shoal.types import LinkProfile
from tests.support.kv_blocks import make_blocks, pack_stage
from tests.support.redis import PATIENCE_S, command, redis_server, running_redis
from tests.support.redis_tier import fetch, started, until, write
from worker.kv.fetches import Found

__all__ = ["redis_server"]


def test_a_tier_without_an_url_is_off() -> None:
    block = make_blocks(1)[0]
    with started("") as tier:
        assert not tier.write(block, pack_stage(block))
        assert fetch(tier, [block]) == {}
        assert (tier.status().state, tier.status().dropped_writes) == ("off", 1)


def test_more_than_the_queue_holds_is_dropped_and_counted() -> None:
    blocks = make_blocks(8, name="queue")
    packed = [pack_stage(block) for block in blocks]
    with running_redis() as server:
        server.process.send_signal(signal.SIGSTOP)
        with started(server.url, max_queued_bytes=3 * len(packed[0])) as tier:
            taken = [tier.write(block, data) for block, data in zip(blocks, packed, strict=True)]
            assert taken == [True] * 3 + [False] * 5
            assert tier.status().dropped_writes == 5
            assert tier.queued_bytes == 3 * len(packed[0])
            tier.stop(0.1)
            until(lambda: tier.status().dropped_writes == 8)


def test_redis_that_is_killed_fails_nobody_and_is_used_again() -> None:
    blocks = make_blocks(2, name="killed")
    with running_redis() as server, started(server.url) as tier:
        write(tier, blocks)
        server.kill()
        until(lambda: tier.status().state == "open")
        assert fetch(tier, blocks) == {}
        assert not tier.write(blocks[0], pack_stage(blocks[0]))
        assert tier.status().dropped_writes == 1
        server.restart()
        until(lambda: tier.status().state == "ok")
        write(tier, blocks)
        assert len(fetch(tier, blocks)) == 2


def test_redis_that_hangs_is_given_up_long_before_the_time_that_computing_takes() -> None:
    blocks = make_blocks(2, name="hangs")
    with running_redis() as server, started(server.url) as tier:
        write(tier, blocks)
        assert len(fetch(tier, blocks)) == 2
        server.process.send_signal(signal.SIGSTOP)
        began_at = time.monotonic()
        assert [fetch(tier, blocks, timeout_s=30.0) for _ in range(20)] == [{}] * 20
        assert time.monotonic() - began_at < 10.0  # of 600 s
        server.process.send_signal(signal.SIGCONT)
        until(lambda: len(fetch(tier, blocks)) == 2)


def test_a_full_redis_takes_no_more_and_gives_what_it_has() -> None:
    blocks = make_blocks(40, name="full")
    with (
        running_redis("--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as server,
        started(server.url) as tier,
    ):
        for block in blocks:
            tier.write(block, pack_stage(block))
        until(lambda: tier.status().puts + tier.status().dropped_writes == len(blocks))
        num_stored = tier.status().puts
        assert 0 < num_stored < len(blocks)
        assert len(fetch(tier, blocks)) == num_stored
        assert tier.status().state == "ok"


def test_sessions_stay_when_blocks_have_to_go(redis_server: EmbeddedRedis) -> None:
    with running_redis("--maxmemory", "6mb", "--maxmemory-policy", "volatile-lru") as server:
        command(server.url, "SET", b"session", bytes(1000))
        with started(server.url) as tier:
            write(tier, make_blocks(40, name="evict"))

        assert command(server.url, "GET", b"session") == bytes(1000)
        assert b"evicted_keys:0\r" not in command(server.url, "INFO", "stats")


def test_a_slow_link_turns_fetching_off_by_itself(redis_server: EmbeddedRedis) -> None:
    """At 8 Mbit/s a block of 320 KiB takes a third of a second."""
    blocks = make_blocks(2, name="slow")
    with started(redis_server.url) as fast:
        write(fast, blocks)
    with started(redis_server.url, LinkProfile(rate_mbit_s=8.0)) as tier:
        assert len(fetch(tier, blocks)) == 2
        began_at = time.monotonic()
        assert fetch(tier, blocks, timeout_s=0.1) == {}
        assert tier.status().state == "slow"
        assert time.monotonic() - began_at < PATIENCE_S
        assert tier.status().read_mb_s == pytest.approx(1.0, rel=0.5)
        assert len(fetch(tier, blocks)) == 2
        assert tier.status().state == "ok"


def test_blocks_that_are_wanted_at_the_same_time_come_over_a_slow_link_one_after_the_other(
    redis_server: EmbeddedRedis,
) -> None:
    """Each takes a third of a second of it: all at once, each would seem to hang."""
    blocks = make_blocks(8, name="at once")
    with started(redis_server.url) as fast:
        write(fast, blocks)
    answers: queue.Queue[Found] = queue.Queue()
    with started(redis_server.url, LinkProfile(rate_mbit_s=8.0)) as tier:
        until(lambda: tier.status().state == "ok")
        for block in blocks:
            tier.fetch([block], PATIENCE_S, answers.put)
        found = [answers.get(timeout=2 * PATIENCE_S) for _ in blocks]

    assert [len(one) for one in found] == [1] * len(blocks)


def test_a_link_of_which_too_much_was_hoped_gives_the_leading_blocks(redis_server: EmbeddedRedis) -> None:
    """Ten blocks take 3.3 s at 8 Mbit/s: what has come by then is worth having."""
    blocks = make_blocks(10, name="partly")
    with started(redis_server.url) as fast:
        write(fast, blocks)
    with started(redis_server.url, LinkProfile(rate_mbit_s=8.0)) as tier:
        fetch(tier, blocks[:1])
        found = fetch(tier, blocks, timeout_s=1.5)

    assert 0 < len(found) < 10
    assert found.keys() == {block.key for block in blocks[: len(found)]}


def test_a_link_that_became_fast_again_is_found_out(redis_server: EmbeddedRedis) -> None:
    """What was measured while Redis hung is not the last word, though no fetch is tried on it."""
    blocks = make_blocks(1, name="fast again")
    with started(redis_server.url) as tier:
        write(tier, blocks)
        assert len(fetch(tier, blocks)) == 1
        tier._transfers.reading.bytes_per_s = 1.0
        assert fetch(tier, blocks, timeout_s=1.0) == {}
        until(lambda: len(fetch(tier, blocks, timeout_s=1.0)) == 1)
