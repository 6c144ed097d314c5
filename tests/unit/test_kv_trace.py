"""The trace of blocks' lives: lines that can be read back, and a file that fails harms nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.kv import BlockHash
from worker.kv.trace import BlockEvent, BlockTrace

NAME = BlockHash(bytes(range(32)))


def test_each_event_is_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = BlockTrace(path, clock=lambda: 12.5)
    trace.record(BlockEvent.ALLOCATED, NAME, "host", 1000, "f32")
    trace.record(BlockEvent.EVICTED, NAME, "host", 1000, "f32")
    trace.close()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "time": 12.5,
        "event": "allocated",
        "block": NAME.hex(),
        "tier": "host",
        "bytes": 1000,
        "codec": "f32",
    }
    assert [line["event"] for line in lines] == ["allocated", "evicted"]


def test_a_trace_goes_on_where_an_earlier_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        trace = BlockTrace(path)
        trace.record(BlockEvent.HIT, NAME, "host", 1, "f32")
        trace.close()

    assert len(path.read_text().splitlines()) == 2


def test_a_file_that_cannot_be_opened_is_told_once_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = BlockTrace(tmp_path / "no such folder" / "trace.jsonl")
    trace.record(BlockEvent.HIT, NAME, "host", 1, "f32")
    trace.close()
    assert [record.message.split()[0] for record in caplog.records] == ["kv_trace_ended"]


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    trace = BlockTrace(Path("/dev/full"))
    for _ in range(3):
        trace.record(BlockEvent.HIT, NAME, "host", 1, "f32")
    trace.close()
    assert {record.message.split()[0] for record in caplog.records} == {"kv_trace_ended"}


def test_without_a_file_nothing_is_written() -> None:
    trace = BlockTrace(None)
    trace.record(BlockEvent.HIT, NAME, "host", 1, "f32")
    trace.close()
