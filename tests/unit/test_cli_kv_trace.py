"""What `shoal kv --trace` makes of workers' traces: lives of blocks by device and tier, and all events for plots."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import cli.kv_trace
from cli.kv_lives import BlockLife, read_lives, top_blocks, trace_files
from cli.kv_trace import lives_table, top_table
from shoal.kv import BlockHash
from tests.unit.conftest import Run
from worker.kv.trace import BlockEvent, BlockTrace

A, B, C = (BlockHash(bytes([number]) * 32) for number in (1, 2, 3))
ALLOCATED, HIT, EVICTED = BlockEvent.ALLOCATED, BlockEvent.HIT, BlockEvent.EVICTED


def write(path: Path, *events: tuple[float, BlockEvent, BlockHash, str]) -> None:
    """As a worker does."""
    times = [at for at, *_ in events]
    trace = BlockTrace(path, clock=lambda: times.pop(0))
    for _, event, block, tier in events:
        trace.record(event, block, tier, 2048, "f32")
    trace.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path / "phone-1.jsonl",
        (10.0, ALLOCATED, A, "host"),
        (10.5, BlockEvent.DEMOTED, A, "redis"),
        (11.0, ALLOCATED, B, "host"),
        (12.0, HIT, A, "host"),
        (13.0, HIT, A, "host"),
        (14.0, HIT, B, "host"),
        (15.0, EVICTED, A, "host"),
        (31.0, EVICTED, B, "host"),
        (32.0, BlockEvent.PROMOTED, A, "host"),
        (33.0, BlockEvent.DROPPED, C, "host"),
    )
    write(tmp_path / "tablet-1.jsonl", (10.2, ALLOCATED, C, "host"), (10.3, BlockEvent.FORGOTTEN, C, "host"))
    (tmp_path / "notes.txt").write_text("no trace")
    return tmp_path


def rows_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_each_device_and_tier_has_a_row(run: Run, folder: Path) -> None:
    rows = rows_of(run("kv", "--trace", str(folder)).out)

    assert "device tier blocks new up down lost drop del life hits a block" in rows
    assert "phone-1 host 3 2 1 0 2 1 0 12s 3 1.0" in rows
    assert "redis 1 0 0 1 0 0 0 - 0 -" in rows
    assert "tablet-1 host 1 1 0 0 0 0 1 - 0 0.0" in rows


def test_the_blocks_of_most_use_come_first(run: Run, folder: Path) -> None:
    rows = rows_of(run("kv", "--trace", str(folder)).out)

    at = rows.index("used most often:")
    assert rows[at + 3] == "phone-1 host 010101010101 2 2 f32 there"
    assert rows[at + 4] == "host 020202020202 1 2 f32 gone"


def test_as_json_there_are_all_figures(run: Run, folder: Path) -> None:
    printed = json.loads(run("kv", "--trace", str(folder), "--json").out)

    host = printed["tiers"][0]
    assert (host["device"], host["tier"], host["num_blocks"], host["median_life_s"]) == ("phone-1", "host", 3, 12.5)
    assert host["events"]["hit"] == 3
    assert printed["top_blocks"][0]["block"] == A.hex()


def test_all_events_are_written_by_time_to_be_plotted(run: Run, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    outcome = run("kv", "--trace", str(folder), "--csv", str(path))

    with path.open(newline="") as file:
        first, *rest = csv.DictReader(file)
    assert first == {
        "time": "10.0",
        "device": "phone-1",
        "tier": "host",
        "event": "allocated",
        "block": A.hex(),
        "bytes": "2048",
        "codec": "f32",
    }
    times = [float(row["time"]) for row in rest]
    assert (len(times), times) == (11, sorted(times))
    assert outcome.err.startswith(f"12 events are in {path}\n")


def test_what_a_killed_worker_left_of_a_line_is_passed_over(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "phone-1.jsonl"
    write(path, (1.0, ALLOCATED, A, "host"))
    whole = path.read_text()
    for cut in range(10, len(whole) - 1):
        path.write_text(whole + whole[:cut])
        assert [lives.events[ALLOCATED] for lives in read_lives(trace_files(tmp_path))] == [1], cut

    path.write_text(whole[:40])
    assert "nothing has happened to a block yet" in run("kv", "--trace", str(tmp_path)).out


@pytest.mark.parametrize("content", [b"hello\n", b"\x00\xff" * 100, b"{}\n", b"[1]\n", b'{"event": "hit"}\n', b"7\n"])
def test_a_file_that_is_no_trace_is_one_clear_line(run: Run, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.jsonl").write_bytes(content)

    outcome = run("kv", "--trace", str(tmp_path))

    assert outcome.code == 1
    assert outcome.err == f"error: {tmp_path}/other.jsonl, line 1: this is no trace of KV blocks\n"


def test_a_folder_without_traces_says_how_to_get_some(run: Run, tmp_path: Path) -> None:
    outcome = run("kv", "--trace", str(tmp_path / "none"))

    assert outcome.code == 1
    assert f"`shoal up --kv-trace {tmp_path}/none` writes them" in outcome.err


def test_a_csv_of_no_trace_is_wrong_usage(run: Run, tmp_path: Path) -> None:
    assert run("kv", "--csv", str(tmp_path / "events.csv")).code == 2


def test_a_block_that_a_lost_process_had_begins_a_new_life(tmp_path: Path) -> None:
    write(tmp_path / "w.jsonl", (1.0, ALLOCATED, A, "host"), (100.0, ALLOCATED, A, "host"), (103.0, EVICTED, A, "host"))

    (lives,) = read_lives(trace_files(tmp_path))

    assert lives.lives_s == [3.0]


def test_a_new_process_begins_with_none_of_the_blocks_of_the_one_before(tmp_path: Path) -> None:
    write(tmp_path / "w.jsonl", (1.0, ALLOCATED, A, "host"))
    trace = BlockTrace(tmp_path / "w.jsonl")
    trace.begin("host")
    trace.record(ALLOCATED, B, "host", 2048, "f32")
    trace.close()

    (lives,) = read_lives(trace_files(tmp_path))

    assert {name: life.since is not None for name, life in lives.blocks.items()} == {A.hex(): False, B.hex(): True}


def test_what_was_not_stored_leaves_a_block_as_it_was(tmp_path: Path) -> None:
    times = [1.0, 2.0]
    trace = BlockTrace(tmp_path / "w.jsonl", clock=lambda: times.pop(0))
    trace.record(ALLOCATED, A, "host", 2048, "f32")
    trace.record(BlockEvent.DROPPED, A, "host", 512, "int8")
    trace.close()

    (lives,) = read_lives(trace_files(tmp_path))

    assert lives.blocks[A.hex()] == BlockLife(num_bytes=2048, codec="f32", since=1.0)


@pytest.mark.parametrize(("device", "left_out"), [("tablet-1", []), ("laptop-kitchen", ["del"])])
def test_the_tables_fit_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, left_out: list[str]
) -> None:
    from rich.console import Console

    console = Console(width=80, color_system=None)
    monkeypatch.setattr(cli.kv_trace, "console", lambda: console)
    many: list[Any] = [(float(at), HIT, A, "host") for at in range(12_000)]
    write(tmp_path / f"{device}.jsonl", (0.0, ALLOCATED, A, "host"), *many, (9e6, EVICTED, A, "host"))
    lives = read_lives(trace_files(tmp_path))

    with console.capture() as captured:
        console.print(lives_table(lives))
        console.print(top_table(top_blocks(lives, 5)))

    text = captured.get()
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert [title for title in ("del", "drop") if title not in text] == left_out
