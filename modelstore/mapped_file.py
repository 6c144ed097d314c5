"""A model file in memory: mapped rather than read, and where in it a tensor lies.

Owns what readers of all formats do alike; knows none of them. Called by `safetensors_file` and those of GGUF files.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BadModelFile


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies, from the start of the file. shape: (rows, columns) or (values,)."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def view(self, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The tensor's bytes as a view on those of the file: [N, bytes of a row]; a vector is one row."""
        rows = self.shape[0] if len(self.shape) == 2 else 1
        return content[self.offset : self.offset + self.num_bytes].reshape(rows, -1)


def map_file(path: Path, min_bytes: int, what: str) -> mmap.mmap:
    """Map a regular file of some bytes; raises BadModelFile for anything else. what: as in "a GGUF file"."""
    try:
        kind = path.stat().st_mode
        # Before it is opened: a pipe would make us wait for a writer.
        if not stat.S_ISREG(kind):
            raise BadModelFile(f"{path} is {'a directory' if stat.S_ISDIR(kind) else 'no regular file'}, not {what}")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < min_bytes:
                raise BadModelFile(f"{path} has {size} bytes, too few for {what}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        # ValueError: a name with a zero byte.
        reason = os.strerror(error.errno or errno.EIO) if isinstance(error, OSError) else str(error)
        raise BadModelFile(f"{path} cannot be read: {reason}") from error


def release(maps: Mapping[Path, mmap.mmap]) -> None:
    """Let the system take back the memory of all that has been read so far; it can be read again.

    Raises BadModelFile for a file that has become shorter: reading on would end the process, with SIGBUS.
    """
    # Of whole mappings, since reading a page also maps its neighbours, which may lie in a tensor already done with.
    for path, mapped in maps.items():
        if mapped.size() < len(mapped):
            raise BadModelFile(
                f"{path.name} has become shorter while it was read, from {len(mapped)} to {mapped.size()} bytes: "
                "start again when nothing writes to it"
            )
        if sys.platform != "win32":
            mapped.madvise(mmap.MADV_DONTNEED)


def neighbours(places: Iterable[TensorPlace]) -> Iterator[tuple[TensorPlace | None, TensorPlace]]:
    """Each tensor with the one that lies before it, in the order of the file."""
    ordered = sorted(places, key=lambda place: (place.offset, place.num_bytes))
    return zip([None, *ordered], ordered, strict=False)
