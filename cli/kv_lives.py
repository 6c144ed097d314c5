"""The lives of KV blocks, read from the traces that workers wrote: how long each stayed, and of what use it was.

Reads a line at a time and keeps figures, one entry a block, not events. What a process that was killed left of its last line
is passed over. Prints nothing. Called by `kv_trace`.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from statistics import median

from shoal.errors import ConfigError
from worker.kv.trace import TRACE_SUFFIX, BlockEvent

# How each line of a trace begins, also one that was cut off.
_BEGIN = '{"time"'


@dataclass(frozen=True, slots=True)
class TraceLine:
    """time: seconds since 1970. block: its name, in hex."""

    time: float
    event: BlockEvent
    block: str
    tier: str
    num_bytes: int
    codec: str


@dataclass(slots=True)
class BlockLife:
    """A block in a tier. since: when it came last; None once it is gone, or if that is not known."""

    num_hits: int = 0
    num_bytes: int = 0
    codec: str = ""
    since: float | None = None


@dataclass(slots=True)
class TierLives:
    """What happened in one tier of a device. lives_s: of blocks that came and were evicted."""

    device: str
    tier: str
    events: Counter[BlockEvent] = field(default_factory=Counter)
    blocks: dict[str, BlockLife] = field(default_factory=dict)
    lives_s: list[float] = field(default_factory=list)

    @property
    def median_life_s(self) -> float | None:
        return median(self.lives_s) if self.lives_s else None

    @property
    def hits_per_block(self) -> float | None:
        """None where no block ever came, or the trace tells of none that did."""
        num_came = self.events[BlockEvent.ALLOCATED] + self.events[BlockEvent.PROMOTED] + self.events[BlockEvent.HIT]
        return self.events[BlockEvent.HIT] / len(self.blocks) if num_came else None

    def add(self, line: TraceLine) -> None:
        self.events[line.event] += 1
        if line.event is BlockEvent.STARTED:
            for held in self.blocks.values():
                held.since = None
            return
        block = self.blocks.setdefault(line.block, BlockLife())
        if line.event is not BlockEvent.DROPPED:
            block.num_bytes, block.codec = line.num_bytes, line.codec
        match line.event:
            case BlockEvent.ALLOCATED | BlockEvent.PROMOTED:
                block.since = line.time
            case BlockEvent.HIT:
                block.num_hits += 1
            case BlockEvent.EVICTED | BlockEvent.FORGOTTEN:
                if line.event is BlockEvent.EVICTED and block.since is not None:
                    self.lives_s.append(line.time - block.since)
                block.since = None


@dataclass(frozen=True, slots=True)
class TopBlock:
    """One of those that were of use most often."""

    device: str
    tier: str
    block: str
    life: BlockLife


def trace_files(folder: Path) -> dict[str, Path]:
    """The traces in a folder, by device. Raises ConfigError if there is none."""
    files = {path.stem: path for path in sorted(folder.glob(f"*{TRACE_SUFFIX}")) if path.is_file()}
    if not files:
        raise ConfigError(
            f"{folder} has no traces (*{TRACE_SUFFIX}); `shoal up --kv-trace {folder}` writes them", field="trace"
        )
    return files


def read_trace(path: Path) -> Iterator[TraceLine]:
    """The lines of a trace, without those that were cut off. Raises ConfigError for what cannot be read, or is no trace."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, start=1):
                line = _parse(text)
                if line is not None:
                    yield line
                elif not text.startswith(_BEGIN):
                    raise ConfigError(f"{path}, line {number}: this is no trace of KV blocks", field="trace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="trace") from error


def _parse(text: str) -> TraceLine | None:
    try:
        line = json.loads(text)
        return TraceLine(
            time=float(line["time"]),
            event=BlockEvent(line["event"]),
            block=str(line["block"]),
            tier=str(line["tier"]),
            num_bytes=int(line["bytes"]),
            codec=str(line["codec"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def read_lives(files: dict[str, Path]) -> list[TierLives]:
    """What happened in each tier of each device, in the order of their names."""
    lives: dict[tuple[str, str], TierLives] = {}
    for device, path in files.items():
        for line in read_trace(path):
            key = (device, line.tier)
            lives.setdefault(key, TierLives(*key)).add(line)
    return [lives[key] for key in sorted(lives)]


def merged(files: dict[str, Path]) -> Iterator[tuple[str, TraceLine]]:
    """The events of all devices, by time."""
    return heapq.merge(*starmap(_of_device, files.items()), key=lambda one: one[1].time)


def _of_device(device: str, path: Path) -> Iterator[tuple[str, TraceLine]]:
    return ((device, line) for line in read_trace(path))


def top_blocks(lives: Iterable[TierLives], num_most: int) -> list[TopBlock]:
    """The blocks that were of use most often, of those that were at all."""
    used = (
        TopBlock(tier.device, tier.tier, block, life)
        for tier in lives
        for block, life in tier.blocks.items()
        if life.num_hits
    )
    return heapq.nsmallest(num_most, used, key=lambda one: (-one.life.num_hits, one.device, one.tier, one.block))
