"""Says how much of a mapping is resident, as the kernel counts it (Linux only)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")

_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_RSS = re.compile(r"Rss:\s+(\d+) kB")


def resident_bytes_at(address: int) -> int:
    """The resident bytes of the mapping that an address lies in."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := _HEADER.match(line):
            is_inside = int(header[1], 16) <= address < int(header[2], 16)
        elif is_inside and (rss := _RSS.match(line)):
            return int(rss[1]) * 1024
    raise ValueError(f"no mapping at {address:#x}")
