"""What is written of requests, and when: over a fake Redis, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import journal as module
from orchestrator.journal import ENDED_TTL_S, TTL_S, WRITE_EVERY_S, Journal, name_of
from orchestrator.record import SEGMENT_TOKENS
from shoal.redis_link import request_index_key
from shoal.types import FinishReason
from tests.support.fake_link import FakeLink
from tests.support.journals import KEY, NAME, RECORD, SETTLE_S, CountingLink, loaded, make_journal
from tests.support.requests_kept import make_log, make_record
from tests.support.virtual_time import run_virtually


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


def test_a_request_whose_client_has_left_is_kept_for_less_time() -> None:
    async def main() -> None:
        link = FakeLink()
        make_journal(link).begin(RECORD, make_log([4], is_left=True))
        await asyncio.sleep(SETTLE_S)

        assert link.ttls_ms[KEY] == ENDED_TTL_S * 1e3

    run_virtually(main())


def test_an_answer_that_grows_is_kept_for_longer() -> None:
    async def main() -> None:
        link, log = FakeLink(), make_log(range(SEGMENT_TOKENS))
        journal = make_journal(link)
        journal.begin(RECORD, log)
        await asyncio.sleep(SETTLE_S)
        link.ttls_ms.clear()
        log.append(9, None, 1.0)
        journal.touch(RECORD.record_id)
        await asyncio.sleep(SETTLE_S)

        assert link.ttls_ms[KEY] == TTL_S * 1e3

    run_virtually(main())


def test_the_list_of_requests_lasts_as_long_as_any_of_them_whatever_becomes_of_others() -> None:
    async def main() -> None:
        link = FakeLink()
        journal = make_journal(link)
        journal.begin(RECORD, make_log([4]))
        journal.begin(make_record(2), make_log([4], finish=FinishReason.LENGTH))
        await asyncio.sleep(SETTLE_S)

        assert link.ttls_ms[request_index_key(NAME)] == TTL_S * 1e3

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


def test_a_forgotten_request_is_deleted_once() -> None:
    async def main() -> None:
        link = CountingLink()
        journal = make_journal(link)
        journal.begin(RECORD, make_log([4]))
        journal.forget(RECORD.record_id)
        await asyncio.sleep(SETTLE_S)

        assert [command[0] for command in link.commands] == ["DEL", "SREM"]

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
