"""What becomes of requests while Redis is away, refuses, hangs or loses them, and when the orchestrator ends meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import journal as module
from orchestrator.journal import WRITE_EVERY_S
from orchestrator.record import SEGMENT_TOKENS
from shoal.redis_link import request_index_key, request_key
from tests.support.fake_link import FakeLink
from tests.support.journals import NAME, RECORD, SETTLE_S, CountingLink, loaded, make_journal
from tests.support.requests_kept import make_log
from tests.support.virtual_time import run_virtually


def test_a_list_of_requests_that_was_evicted_is_there_again_with_the_next_token() -> None:
    async def main() -> None:
        link, log = FakeLink(), make_log([4])
        journal = make_journal(link)
        journal.begin(RECORD, log)
        await asyncio.sleep(SETTLE_S)
        link.sets.clear()
        log.append(9, None, 1.0)
        journal.touch(RECORD.record_id)
        await asyncio.sleep(SETTLE_S)

        (entry,) = await loaded(link)
        assert entry.log.token_ids == [4, 9]

    run_virtually(main())


@pytest.mark.parametrize("trouble", ["is_away", "refuses", "hangs"])
def test_what_redis_did_not_take_is_written_whole_when_it_does(trouble: str) -> None:
    async def main() -> None:
        link, log = CountingLink(), make_log([1, 2])
        journal = make_journal(link)
        journal.begin(RECORD, log)
        await asyncio.sleep(SETTLE_S)
        setattr(link, trouble, True)
        log.append(3, None, 1.0)
        journal.touch(RECORD.record_id)
        await asyncio.sleep(SETTLE_S)
        # It may have lost everything, as one that was killed.
        link.hashes.clear()
        setattr(link, trouble, False)
        await asyncio.sleep(SETTLE_S)
        journal.check_invariants()

        (entry,) = await loaded(link)
        assert entry.log.token_ids == [1, 2, 3]
        assert journal.counters.failed_writes > 0

    run_virtually(main())


def test_while_redis_is_away_it_is_not_asked_all_the_time() -> None:
    async def main() -> None:
        link, log = CountingLink(), make_log()
        link.is_away = True
        journal = make_journal(link)
        journal.begin(RECORD, log)
        for token_id in range(1000):
            log.append(token_id, None, 1.0)
            journal.touch(RECORD.record_id)
            await asyncio.sleep(0.01)

        # In ten seconds.
        assert link.num_tried <= 12

    run_virtually(main())


def test_what_redis_has_lost_without_a_word_is_written_again() -> None:
    async def main() -> None:
        link, log = CountingLink(), make_log(range(SEGMENT_TOKENS + 1))
        journal = make_journal(link)
        journal.begin(RECORD, log)
        await asyncio.sleep(SETTLE_S)
        link.hashes.clear()
        link.sets.clear()
        log.append(9, None, 1.0)
        journal.touch(RECORD.record_id)
        await asyncio.sleep(SETTLE_S)

        (entry,) = await loaded(link)
        assert entry.log == log

    run_virtually(main())


def test_stopping_writes_what_is_to_be_written() -> None:
    async def main() -> None:
        link, log = FakeLink(), make_log()
        journal = make_journal(link)
        journal.begin(RECORD, log)
        await asyncio.sleep(WRITE_EVERY_S / 2)
        log.append(7, None, 1.0)
        journal.touch(RECORD.record_id)
        await journal.stop()

        assert (await loaded(link))[0].log.token_ids == [7]

    run_virtually(main())


def test_stopping_amid_a_write_writes_it_again() -> None:
    async def main() -> None:
        link = CountingLink()
        link.hangs = True
        journal = make_journal(link)
        journal.begin(RECORD, make_log([7]))
        await asyncio.sleep(WRITE_EVERY_S / 2)
        link.hangs = False
        await journal.stop()

        assert (await loaded(link))[0].log.token_ids == [7]

    run_virtually(main())


def test_stopping_does_not_wait_for_a_redis_that_hangs() -> None:
    async def main() -> None:
        link = CountingLink()
        link.hangs = True
        journal = make_journal(link)
        journal.begin(RECORD, make_log())
        await asyncio.sleep(WRITE_EVERY_S / 2)
        begun_at = asyncio.get_running_loop().time()
        await journal.stop()

        assert asyncio.get_running_loop().time() - begun_at <= module.STOP_TIMEOUT_S

    run_virtually(main())


def test_without_redis_there_is_no_journal() -> None:
    async def main() -> None:
        journal = make_journal(None)
        journal.begin(RECORD, make_log())
        journal.touch(RECORD.record_id)
        journal.forget(RECORD.record_id)
        journal.check_invariants()
        await journal.stop()

        assert await journal.load() == []

    run_virtually(main())


def test_a_journal_that_cannot_be_read_is_none() -> None:
    async def main() -> None:
        link = FakeLink()
        link.is_away = True

        assert await make_journal(link).load() is None

    run_virtually(main())


def test_what_is_no_request_is_deleted_when_it_is_found() -> None:
    async def main() -> None:
        link = FakeLink()
        gone, damaged = b"g" * 16, b"d" * 16
        link.sets[request_index_key(NAME)] = {gone, damaged}
        link.hashes[request_key(NAME, damaged)] = {b"record": b"rubbish"}
        journal = make_journal(link)

        assert await journal.load() == []
        await asyncio.sleep(SETTLE_S)

        assert (link.hashes, link.sets[request_index_key(NAME)]) == ({}, set())

    run_virtually(main())
