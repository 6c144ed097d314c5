"""What is written of requests, when, and what becomes of it while Redis is away: over a fake Redis, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator import journal as module
from orchestrator.journal import ENDED_TTL_S, TTL_S, WRITE_EVERY_S, Journal, JournalEntry, name_of
from orchestrator.record import SEGMENT_TOKENS
from shoal.redis_connection import Command, RedisRefusal, RefusalKind
from shoal.redis_link import request_index_key, request_key
from shoal.types import FinishReason
from tests.support.fake_link import FakeLink
from tests.support.requests_kept import make_log, make_record
from tests.support.virtual_time import run_virtually

NAME = b"n" * 16
# Long enough for everything to be written that can be.
SETTLE_S = 5.0
RECORD = make_record()
KEY = request_key(NAME, RECORD.record_id)


class CountingLink(FakeLink):
    """commands: all that were carried out. num_tried: calls. refuses: they give a refusal; hangs: they
    time out."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []
        self.refuses = False
        self.hangs = False
        self.num_tried = 0

    async def call(self, *commands: Command, timeout_s: float = 0.05) -> list[Any] | None:
        self.num_tried += 1
        if self.hangs:
            await asyncio.sleep(timeout_s)
            return None
        if self.refuses:
            return [RedisRefusal(RefusalKind.FULL, "OOM") for _ in commands]
        replies = await super().call(*commands, timeout_s=timeout_s)
        if replies is not None:
            self.commands.extend(commands)
        return replies

    def written(self) -> list[set[str]]:
        """The fields of each HSET."""
        return [
            {str(name, "ascii") for name in command[2::2] if isinstance(name, bytes)}
            for command in self.commands
            if command[0] == "HSET"
        ]


def make_journal(link: FakeLink | None) -> Journal:
    return Journal(link, NAME, lambda: 1000.0)


async def loaded(link: FakeLink) -> list[JournalEntry]:
    """What the next orchestrator finds."""
    entries = await make_journal(link).load()
    assert entries is not None
    return entries


def test_the_next_orchestrator_finds_a_request_with_its_tokens() -> None:
    async def main() -> None:
        link, log = FakeLink(), make_log()
        journal = make_journal(link)
        journal.begin(RECORD, log)
        for token_id in range(150):
            log.append(token_id, None, 1.0)
            journal.touch(RECORD.record_id)
        await asyncio.sleep(SETTLE_S)
        journal.check_invariants()

        (entry,) = await loaded(link)
        assert entry.record == RECORD
        assert entry.log == log

    run_virtually(main())


def test_requests_are_found_in_the_order_in_which_they_came() -> None:
    async def main() -> None:
        link = FakeLink()
        journal = make_journal(link)
        for number in (3, 1, 2):
            journal.begin(make_record(number, accepted_at=float(number)), make_log())
        await asyncio.sleep(SETTLE_S)

        assert [entry.record.request_id for entry in await loaded(link)] == ["r-1", "r-2", "r-3"]

    run_virtually(main())


def test_another_orchestrator_finds_nothing() -> None:
    async def main() -> None:
        link = FakeLink()
        make_journal(link).begin(RECORD, make_log())
        await asyncio.sleep(SETTLE_S)

        assert await Journal(link, b"m" * 16).load() == []

    run_virtually(main())


def test_a_request_is_written_at_once_and_its_tokens_in_batches() -> None:
    async def main() -> None:
        link, log = CountingLink(), make_log()
        journal = make_journal(link)
        journal.begin(RECORD, log)
        await asyncio.sleep(WRITE_EVERY_S / 2)
        assert link.written() == [{"record", "state"}]

        for token_id in range(30):
            log.append(token_id, None, 1.0)
            journal.touch(RECORD.record_id)
            await asyncio.sleep(WRITE_EVERY_S / 10)

        assert len(link.written()) <= 1 + 4
        assert all(fields == {"state", "0"} for fields in link.written()[1:])

    run_virtually(main())


def test_a_segment_that_is_full_is_not_written_again() -> None:
    async def main() -> None:
        link, log = CountingLink(), make_log()
        journal = make_journal(link)
        journal.begin(RECORD, log)
        for num_tokens in (SEGMENT_TOKENS - 1, 1, 1):
            for token_id in range(num_tokens):
                log.append(token_id, None, 1.0)
            journal.touch(RECORD.record_id)
            await asyncio.sleep(2 * WRITE_EVERY_S)

        assert link.written() == [{"record", "state", "0"}, {"state", "0"}, {"state", "1"}]

    run_virtually(main())


def test_nothing_is_written_where_nothing_happens() -> None:
    async def main() -> None:
        link = CountingLink()
        make_journal(link).begin(RECORD, make_log())
        await asyncio.sleep(SETTLE_S)
        num_tried = link.num_tried

        await asyncio.sleep(3600.0)

        assert link.num_tried == num_tried

    run_virtually(main())


def test_a_request_that_is_over_is_kept_for_less_time() -> None:
    async def main() -> None:
        link, log = FakeLink(), make_log([4])
        journal = make_journal(link)
        journal.begin(RECORD, log)
        await asyncio.sleep(SETTLE_S)
        assert link.ttls_ms[KEY] == TTL_S * 1e3

        log.finish = FinishReason.LENGTH
        journal.touch(RECORD.record_id)
        await asyncio.sleep(SETTLE_S)
        assert link.ttls_ms[KEY] == ENDED_TTL_S * 1e3

    run_virtually(main())


def test_a_forgotten_request_leaves_nothing() -> None:
    async def main() -> None:
        link = FakeLink()
        journal = make_journal(link)
        journal.begin(RECORD, make_log([4]))
        await asyncio.sleep(SETTLE_S)
        journal.forget(RECORD.record_id)
        journal.touch(RECORD.record_id)
        await asyncio.sleep(SETTLE_S)
        journal.check_invariants()

        assert (link.hashes, link.sets[request_index_key(NAME)]) == ({}, set())

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


def test_more_requests_than_are_kept_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)

    async def main() -> None:
        link = FakeLink()
        journal = make_journal(link)
        for number in (1, 2, 3):
            journal.begin(make_record(number), make_log())
        journal.forget(make_record(1).record_id)
        journal.begin(make_record(4), make_log())
        await asyncio.sleep(SETTLE_S)
        journal.check_invariants()

        assert {entry.record.request_id for entry in await loaded(link)} == {"r-2", "r-4"}
        assert journal.counters.dropped == 1

    run_virtually(main())


def test_prompts_that_are_too_long_together_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPT_TOKENS", 5)

    async def main() -> None:
        journal = make_journal(FakeLink())
        journal.begin(make_record(1), make_log())
        journal.begin(make_record(2), make_log())
        journal.check_invariants()

        assert (journal.counters.requests, journal.counters.dropped) == (1, 1)

    run_virtually(main())


def test_much_is_written_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WRITE_BYTES", 100)

    async def main() -> None:
        link = CountingLink()
        journal = make_journal(link)
        for number in (1, 2, 3):
            journal.begin(make_record(number), make_log())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(link.written()) == 1
        await asyncio.sleep(SETTLE_S)

        assert (len(link.written()), link.num_tried) == (3, 3)

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


def test_what_an_orchestrator_itself_keeps_it_does_not_find() -> None:
    async def main() -> None:
        link = FakeLink()
        journal = make_journal(link)
        journal.begin(RECORD, make_log())
        await asyncio.sleep(SETTLE_S)

        assert await journal.load() == []

    run_virtually(main())


def test_home_address_and_model_name_an_orchestrator() -> None:
    names = {
        name_of(b"secret", "127.0.0.1:1", "ab"),
        name_of(b"secrets", "127.0.0.1:1", "ab"),
        name_of(b"secret", "127.0.0.1:11", "ab"),
        name_of(b"secret", "127.0.0.1:1", "abc"),
    }

    assert len(names) == 4
