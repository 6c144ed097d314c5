"""Marks of the models that running processes serve, so that nobody removes what they may still have to hand out.

A mark is a file root/served/<model digest>, with the digests of its blobs, locked by all who serve the model; the system
frees it however they end, and one that nobody locks says nothing. The store makes and reads them.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelstore.manifest import Manifest


@contextmanager
def marked(root: Path, manifest: Manifest) -> Iterator[None]:
    """Have a model in use until the end of the block; not while somebody removes a model."""
    path = _folder(root) / manifest.digest
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        file.truncate(0)
        file.write("\n".join(blob.digest for blob in manifest.blobs))
        file.flush()
        yield


def blobs_in_use(root: Path) -> dict[str, frozenset[str]]:
    """The blobs of each model that is served, by the model's digest; forgets marks that nobody holds."""
    blobs = {}
    for path in sorted(_folder(root).glob("*")):
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                blobs[path.name] = frozenset(file.read().split())
            else:
                path.unlink()
    return blobs


def _folder(root: Path) -> Path:
    return root / "served"
