"""Writes the life of each KV block to a file, one JSON object a line, to plot what a cache does.

Knows nothing of tiers or policies: `cache` says what happened. A file that cannot be written ends the trace, never the
cache. Called by the compute thread only.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from shoal.kv import BlockHash

logger = logging.getLogger(__name__)

# Of the names of trace files.
TRACE_SUFFIX = ".jsonl"


class BlockEvent(StrEnum):
    """What may happen to a block in a tier, or (STARTED) that it begins empty in a new process.

    ALLOCATED: computed and stored. HIT: a slot was filled with it. PROMOTED: fetched from the tier below. DEMOTED: stored
    more coarsely, or given to the tier below. EVICTED: lost for lack of room. DROPPED: not stored. FORGOTTEN: deleted.
    """

    ALLOCATED = "allocated"
    HIT = "hit"
    PROMOTED = "promoted"
    DEMOTED = "demoted"
    EVICTED = "evicted"
    DROPPED = "dropped"
    FORGOTTEN = "forgotten"
    STARTED = "started"


class BlockTrace:
    """A trace file, or none; times are seconds since 1970, which files of several devices share."""

    __slots__ = ("_clock", "_file", "_path")

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file: TextIO | None = None
        if path is None:
            return
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            logger.warning("kv_trace_ended file=%s error=%s", path, error)

    def begin(self, tier: str) -> None:
        """Tell that a tier is empty: whatever is told of it before was of a process that has ended."""
        self.record(BlockEvent.STARTED, BlockHash(b""), tier, 0, "")

    def record(self, event: BlockEvent, block_hash: BlockHash, tier: str, num_bytes: int, codec: str) -> None:
        """Add a line; does nothing without a file, or once it has failed."""
        if self._file is None:
            return
        line = {
            "time": round(self._clock(), 6),
            "event": event.value,
            "block": block_hash.hex(),
            "tier": tier,
            "bytes": num_bytes,
            "codec": codec,
        }
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            logger.warning("kv_trace_ended file=%s error=%s", self._path, error)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            logger.warning("kv_trace_ended file=%s error=%s", self._path, error)
