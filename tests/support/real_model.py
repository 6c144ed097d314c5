"""Gets real models once, into a folder that all test runs share, with the GGUF files they were made of.

SHOAL_TEST_HOME names the folder; without it, one in the user's cache is taken. The default model is pulled where a test
wants it. Gemma has terms to accept, and is larger: it is pulled if SHOAL_TEST_GEMMA is set, and used if it is there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import cache
from pathlib import Path

import platformdirs
import pytest

from modelstore.catalog import CATALOG
from modelstore.file_lock import exclusive_lock
from modelstore.manifest import Manifest
from modelstore.pull import pull
from modelstore.store import ModelStore, ignore_progress
from modelstore.wheel_parts import assemble

REAL_MODEL = "smollm2-135m"
GEMMA = "gemma3-270m"


def real_store() -> ModelStore:
    """The shared store; the model is not in it before real_manifest() was called once."""
    return ModelStore(Path(os.environ.get("SHOAL_TEST_HOME") or platformdirs.user_cache_path("shoal-tests")))


@cache
def real_manifest(name: str = REAL_MODEL) -> Manifest:
    """The manifest of the default model or another of the catalogue, pulled if it is not there yet."""
    store = real_store()
    if name not in store.names() and _kept_gguf(name).exists():
        # Pulling goes on where an earlier try was: with the file already there.
        downloads = store.root / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        shutil.copy(_kept_gguf(name), downloads / f"{CATALOG[name].sha256}.gguf")
    return pull(store, name, accept_license=True)


@cache
def real_gguf(name: str = REAL_MODEL) -> Path:
    """The file that a model is made of; a pull keeps none."""
    path = _kept_gguf(name)
    with exclusive_lock(path.with_suffix(".lock"), lambda: None):
        if not path.exists():
            part = path.with_suffix(".part")
            assemble(CATALOG[name].parts, part, ignore_progress)
            digest = hashlib.sha256(part.read_bytes()).hexdigest()
            assert digest == CATALOG[name].sha256, f"the wheels of {name} hold another file than the catalogue says"
            part.replace(path)
    return path


def require_gemma() -> None:
    """Skip the test that calls it where Gemma is not and may not be pulled."""
    if not os.environ.get("SHOAL_TEST_GEMMA") and not _kept_gguf(GEMMA).exists():
        pytest.skip(f"{GEMMA} is not in {real_store().root}: set SHOAL_TEST_GEMMA=1 if you accept its terms")


def _kept_gguf(name: str) -> Path:
    return real_store().root / "test-files" / f"{name}.gguf"
