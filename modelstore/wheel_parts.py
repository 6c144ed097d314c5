"""Brings the pieces of a model file out of wheels, one wheel after the other, and puts them together.

Decides the road of each wheel (installed, downloaded in pieces, or fetched by pip) and what is believed: a piece is what
the catalogue says, byte for byte, or it is not taken. No wheel is unpacked but for that piece, none is imported. What is
under way lies in one folder. Called by `pull`.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
import zlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO

from modelstore.catalog import WheelPart
from modelstore.download import Downloader, sha256_of
from modelstore.pip_index import certificates, download_wheel, find_wheel
from modelstore.store import Progress
from shoal.errors import PullFailed

COPY_BYTES = 1 << 20

# What zipfile raises for archives that are damaged, encrypted, or packed in ways it does not know.
_BAD_ARCHIVE = (zipfile.BadZipFile, KeyError, RuntimeError, zlib.error, EOFError, ValueError)


def find_installed(part: WheelPart) -> Path | None:
    """The file in an installed package, found without importing the package, whose dependencies may be missing."""
    try:
        path = Path(str(distribution(part.package).locate_file(part.file)))
    except PackageNotFoundError:
        return None
    is_wanted = path.is_file() and path.stat().st_size == part.num_bytes and sha256_of(path) == part.sha256
    return path if is_wanted else None


def assemble(parts: tuple[WheelPart, ...], target: Path, progress: Progress) -> None:
    """Write the pieces into a file one after the other; one that is there is gone on with after its last whole piece.

    Raises PullFailed and leaves the pieces that were right.
    """
    start = kept_bytes(parts, target)
    with target.open("r+b" if target.exists() else "wb") as file:
        file.truncate(start)
        file.seek(start)
        position = 0
        for index, part in enumerate(parts):
            if position >= start:
                suffix = f" ({index + 1} of {len(parts)})" if len(parts) > 1 else ""
                _append(part, file, target, suffix, progress)
            position += part.num_bytes


def kept_bytes(parts: tuple[WheelPart, ...], target: Path) -> int:
    """How much of a file that was begun is whole pieces."""
    size, kept = target.stat().st_size if target.exists() else 0, 0
    for part in parts:
        if kept + part.num_bytes > size:
            break
        kept += part.num_bytes
    return kept


def _append(part: WheelPart, file: IO[bytes], target: Path, suffix: str, progress: Progress) -> None:
    start = file.tell()
    installed = find_installed(part)
    wheel = None if installed else _fetch_wheel(part, target.parent, suffix, progress)
    try:
        progress(0, part.num_bytes, f"unpacking{suffix}")
        if installed:
            with installed.open("rb") as source:
                _copy(source, part, installed, file)
        elif wheel:
            _unpack(wheel, part, file)
    except BaseException:
        file.truncate(start)
        raise
    finally:
        if wheel:
            wheel.unlink(missing_ok=True)
        shutil.rmtree(_pip_folder(part, target.parent), ignore_errors=True)


def _fetch_wheel(part: WheelPart, downloads: Path, suffix: str, progress: Progress) -> Path:
    progress(0, part.num_bytes, f"looking for {part.requirement}{suffix}")
    link = find_wheel(part.requirement)
    failure = ""
    if link is not None:
        label = f"downloading {link.file_name}{suffix}"
        try:
            downloader = Downloader(certificates() if link.url.startswith("https:") else None)
            return downloader.fetch(link, downloads, lambda done, total: progress(done, total, label))
        except PullFailed as error:
            failure = f" (before: {error.message})"
    progress(0, part.num_bytes, f"pip downloads {part.requirement}{suffix}")
    folder = _pip_folder(part, downloads)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return download_wheel(part.requirement, folder)
    except PullFailed as error:
        folder.rmdir()
        raise PullFailed(error.message + failure) from error


def _pip_folder(part: WheelPart, downloads: Path) -> Path:
    return downloads / f"{part.package}-pip"


def _unpack(wheel: Path, part: WheelPart, file: IO[bytes]) -> None:
    """Append the one file that is wanted; whatever names and sizes the archive has otherwise are not used."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.file) as source:
            _copy(source, part, wheel, file)
    except _BAD_ARCHIVE as error:
        raise PullFailed(f"{wheel.name} is no wheel with {part.file} in it ({error}): try another index") from error


def _copy(source: IO[bytes], part: WheelPart, origin: Path, file: IO[bytes]) -> None:
    digest, left = hashlib.sha256(), part.num_bytes
    # One byte more than there should be: whatever the archive says, no more than that is unpacked.
    while chunk := source.read(min(COPY_BYTES, left + 1)):
        left -= len(chunk)
        if left < 0:
            break
        digest.update(chunk)
        file.write(chunk)
    if left or digest.hexdigest() != part.sha256:
        raise PullFailed(f"{part.file} in {origin.name} is not the file of the catalogue: try another package index")
