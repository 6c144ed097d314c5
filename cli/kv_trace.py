"""`shoal kv --trace`: the lives of KV blocks as tables, and their events as a file to plot. `kv_lives` reads the traces."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from cli.columns import NOTHING, Column, device_rows, short_count, short_time
from cli.kv_lives import TierLives, TopBlock, merged, read_lives, top_blocks, trace_files
from cli.terminal import console, note, say, write_json
from worker.kv.trace import BlockEvent

if TYPE_CHECKING:
    from rich.table import Table

NUM_TOP = 5
LEGEND = (
    "new: stored; up: fetched from redis; down: stored more coarsely, or written to redis;",
    "lost: evicted; drop: not stored; del: deleted; life: median until evicted; a block: hits",
)
# Enough of a name to tell blocks apart.
NAME_CHARS = 12
CSV_FIELDS = ("time", "device", "tier", "event", "block", "bytes", "codec")


def show_trace(folder: Path, csv_path: Path | None, *, is_json: bool) -> None:
    """Print what the traces in a folder tell, and write their events to csv_path. Raises ConfigError."""
    files = trace_files(folder)
    lives = read_lives(files)
    if csv_path is not None:
        num_events = write_csv(files, csv_path)
        note(f"{num_events} events are in {csv_path}")
    if is_json:
        write_json({"tiers": [_to_jsonable(tier) for tier in lives], "top_blocks": top_blocks(lives, NUM_TOP)})
        return
    if not lives:
        say(f"{len(files)} traces in {folder}: nothing has happened to a block yet")
        return
    say(lives_table(lives))
    for line in LEGEND:
        note(line)
    top = top_blocks(lives, NUM_TOP)
    if top:
        say()
        say("used most often:")
        say(top_table(top))


def write_csv(files: dict[str, Path], path: Path) -> int:
    """Write the events of all devices by time; returns how many there are."""
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_FIELDS)
        for device, line in merged(files):
            writer.writerow((line.time, device, line.tier, line.event.value, line.block, line.num_bytes, line.codec))
            count += 1
    return count


def _event(title: str, event: BlockEvent, rank: int = 0) -> Column[TierLives]:
    return Column(title, lambda lives: short_count(lives.events[event]), rank)


LIFE_COLUMNS: tuple[Column[TierLives], ...] = (
    Column("tier", lambda lives: lives.tier, is_number=False),
    Column("blocks", lambda lives: short_count(len(lives.blocks))),
    _event("new", BlockEvent.ALLOCATED),
    _event("up", BlockEvent.PROMOTED),
    _event("down", BlockEvent.DEMOTED),
    _event("lost", BlockEvent.EVICTED),
    _event("drop", BlockEvent.DROPPED, rank=1),
    _event("del", BlockEvent.FORGOTTEN, rank=2),
    Column("life", lambda lives: NOTHING if lives.median_life_s is None else short_time(lives.median_life_s)),
    _event("hits", BlockEvent.HIT),
    Column("a block", lambda lives: NOTHING if lives.hits_per_block is None else f"{lives.hits_per_block:.1f}"),
)


def lives_table(lives: Sequence[TierLives]) -> Table:
    """One row a device and tier; life: the median from coming to being evicted."""
    devices = [(device, list(tiers)) for device, tiers in groupby(lives, key=lambda tier: tier.device)]
    return device_rows(devices, LIFE_COLUMNS, console().width)


TOP_COLUMNS: tuple[Column[TopBlock], ...] = (
    Column("tier", lambda top: top.tier, is_number=False),
    Column("block", lambda top: top.block[:NAME_CHARS], is_number=False),
    Column("hits", lambda top: short_count(top.life.num_hits)),
    Column("KiB", lambda top: short_count(top.life.num_bytes // 1024)),
    Column("codec", lambda top: top.life.codec, is_number=False),
    Column("now", lambda top: "gone" if top.life.since is None else "there", is_number=False),
)


def top_table(top: Sequence[TopBlock]) -> Table:
    devices = [(device, list(blocks)) for device, blocks in groupby(top, key=lambda one: one.device)]
    return device_rows(devices, TOP_COLUMNS, console().width)


def _to_jsonable(lives: TierLives) -> dict[str, object]:
    return {
        "device": lives.device,
        "tier": lives.tier,
        "num_blocks": len(lives.blocks),
        "events": {event.value: lives.events[event] for event in BlockEvent},
        "median_life_s": lives.median_life_s,
        "hits_per_block": lives.hits_per_block,
    }
