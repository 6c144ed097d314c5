"""The folder of stored models: imports them blob by blob, opens, lists, verifies and removes them.

Owns the layout root/models/<name>/manifest.json, root/blobs/<digest> and root/partial/ (what an import has under way).
A blob appears whole or not at all, a manifest after all its blobs, and a blob goes after the last manifest that names it.
Knows nothing of file formats, networks or graphs; the command line, `pull` and the orchestrator call it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from modelstore.blob_writer import BlobWriter
from modelstore.file_lock import exclusive_lock, shared_lock, sync_folder
from modelstore.formats import open_model
from modelstore.in_use import blobs_in_use, marked
from modelstore.manifest import BlobEntry, Manifest, from_json, parse_blob, to_fields, to_json
from modelstore.packing import BlobPlan, Packer, require_packable_tensors
from modelstore.requantize import Precisions
from modelstore.source import SourceModel
from shoal.errors import CorruptBlob, InvalidRequest, ModelNotFound, StorageFull

Progress = Callable[[int, int, str], None]
# Of an open model, with a folder to work in, which need not exist.
Choose = Callable[[SourceModel, Path], Precisions]

# Packed weights are larger than most files: of SmolLM2 in Q4_1 1.18 times, of Gemma 3 270M in Q4_K_M 1.43 times. What
# is asked for before a file is there; an import knows better.
GROWTH = 1.5
DEFAULT = Precisions()
# Characters of a licence or source.
MAX_TEXT = 300
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def ignore_progress(done_bytes: int, total_bytes: int, label: str) -> None:
    """The progress callback of those who do not want to know."""


class ModelStore:
    """Models under one root folder, which is made when something is first imported."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def import_model(
        self,
        origin: Path | SourceModel,
        name: str,
        *,
        source: str = "",
        license: str = "",  # noqa: A002
        accepted_terms: str = "",
        chat_template: str = "",
        progress: Progress = ignore_progress,
        precisions: Precisions | Choose = DEFAULT,
    ) -> Manifest:
        """Pack a model into blobs and store it under a name, in place of a model that had it.

        origin: a file or folder that `formats` can open, or a model already open, which stays so. source, license: as the
        manifest will state them; by default the file's name and what the file says. chat_template: in place of the model's
        own. progress: called with bytes of the
        model done, bytes in all, and a label. precisions: what F32, F16 and BF16 weights become,
        or who chooses it. An import that was interrupted goes on where it was; damaged blobs are replaced. Raises
        BadModelFile, UnsupportedModel, StorageFull, InvalidRequest.
        """
        require_name(name)
        opened = open_model(origin) if isinstance(origin, Path) else nullcontext(origin)
        with opened as model:
            require_packable_tensors(model)
            with full_disk_explained(self.root), self._importing(name, progress):
                if not isinstance(precisions, Precisions):
                    precisions = precisions(model, self._partial_path(name, "auto"))
                packer = Packer(model, precisions)
                blobs = self._pack(packer, name, progress)
                manifest = Manifest(
                    name=name,
                    source=_printable(source or model.path.name),
                    license=_printable(license or model.license),
                    config=model.config,
                    quantization=packer.quantization,
                    tokenizer=replace(model.tokenizer, chat_template=chat_template or model.tokenizer.chat_template),
                    embedding=blobs[0],
                    rope=blobs[1],
                    layers=tuple(blobs[2:-1]),
                    head=blobs[-1],
                    accepted_terms=accepted_terms,
                )
                manifest = replace(manifest, digest=manifest.compute_digest())
                self._publish(manifest)
        return manifest

    def open(self, name: str) -> Manifest:
        """Read a model's manifest; raises ModelNotFound listing what there is, CorruptBlob if it is damaged."""
        self._require_known(name, self.names())
        path = self._manifest_path(name)
        try:
            manifest = from_json(path.read_text(encoding="utf-8"))
            is_intact = manifest.digest == manifest.compute_digest() and manifest.name == name
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise CorruptBlob(f"{path} cannot be read ({error}): import or pull {name} again") from error
        if not is_intact:
            raise CorruptBlob(f"{path} has been changed since it was written: import or pull {name} again")
        return manifest

    @contextmanager
    def serving(self, name: str) -> Iterator[Manifest]:
        """Open a model whose blobs stay until the end of the block, whatever is removed or imported meanwhile."""
        # Before the folder is written to.
        self._require_known(name, self.names())
        with ExitStack() as stack:
            # Between opening and marking nobody may remove it.
            with shared_lock(self._blobs_lock, lambda: None):
                manifest = self.open(name)
                stack.enter_context(marked(self.root, manifest))
            yield manifest

    def list(self) -> Sequence[Manifest]:
        """All models by name; raises CorruptBlob if a manifest is damaged."""
        return [self.open(name) for name in self.names()]

    def names(self) -> tuple[str, ...]:
        """The names of the stored models, whether sound or not."""
        return tuple(sorted(path.parent.name for path in self.root.glob("models/*/manifest.json")))

    def unfinished(self) -> tuple[str, ...]:
        """The names of imports that were interrupted, or are under way: they have blobs, but no model yet."""
        return tuple(sorted({path.stem for path in self.root.glob("partial/*.json")} - {*self.names()}))

    def blob_path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise CorruptBlob(f"{digest!r} is not the digest of a blob: import or pull the model again")
        return self.root / "blobs" / digest

    def has_blobs(self, manifest: Manifest) -> bool:
        """Whether all blobs are there with the right sizes: a quick look that reads none of them."""
        return all(self._has_blob(blob) for blob in manifest.blobs)

    def verify(self, name: str, progress: Progress = ignore_progress) -> Manifest:
        """Read all blobs of a model; raises CorruptBlob naming the first that is missing or damaged."""
        manifest = self.open(name)
        done, total = 0, manifest.weight_bytes
        for label, blob in _labelled_blobs(manifest):
            if not self._is_sound(blob):
                state = "damaged" if self.blob_path(blob.digest).exists() else "missing"
                raise CorruptBlob(
                    f"blob {blob.digest} ({label} of {name}) is {state} in {self.root}: import or pull {name} again"
                )
            done += blob.num_bytes
            progress(done, total, label)
        return manifest

    def remove(self, name: str, progress: Progress = ignore_progress) -> int:
        """Delete a model, sound or not, and all blobs that no other model or unfinished import names; return their bytes.

        Also what an import that did not finish has of it. Waits for imports that are under way. Raises ModelNotFound, and
        InvalidRequest for a model that is being served.
        """
        self._require_known(name, (*self.names(), *self.unfinished()))
        with exclusive_lock(self._blobs_lock, lambda: progress(0, 0, "waiting for an import to end")):
            served = blobs_in_use(self.root)
            if name in self.names():
                self._require_unserved(name, served)
                shutil.rmtree(self._manifest_path(name).parent)
            for kind in ("json", "text", "blob"):
                self._partial_path(name, kind).unlink(missing_ok=True)
            named = self._named_blobs().union(*served.values())
            unused = [path for path in self.root.glob("blobs/*") if path.name not in named]
            freed = sum(path.stat().st_size for path in unused)
            for path in unused:
                path.unlink()
        return freed

    def _require_known(self, name: str, known: Sequence[str]) -> None:
        if name not in known:
            stored = ", ".join(self.names()) or "none yet"
            raise ModelNotFound(f"there is no model {name} in {self.root}; stored are: {stored}", field="model")

    def _require_unserved(self, name: str, served: Collection[str]) -> None:
        try:
            is_served = self.open(name).digest in served
        except CorruptBlob:
            return
        if is_served:
            raise InvalidRequest("model", f"{name} is being served from {self.root}: stop its fleet first")

    def _named_blobs(self) -> set[str]:
        """All digests in manifests and notes, also in those that this program cannot read otherwise."""
        paths = (*self.root.glob("models/*/manifest.json"), *self.root.glob("partial/*.json"))
        return {digest for path in paths for digest in _DIGEST.findall(path.read_text(errors="replace"))}

    @contextmanager
    def _importing(self, name: str, progress: Progress) -> Iterator[None]:
        """Hold the name against other imports, and the blobs against their removal."""
        lock = exclusive_lock(
            self._partial_path(name, "lock"), lambda: progress(0, 0, f"waiting for another import of {name}")
        )
        with lock, shared_lock(self._blobs_lock, lambda: progress(0, 0, "waiting for a model to be removed")):
            yield

    @property
    def _blobs_lock(self) -> Path:
        return self.root / "partial" / ".blobs.lock"

    def _pack(self, packer: Packer, name: str, progress: Progress) -> Sequence[BlobEntry]:
        """Make the blobs that are not there yet, noting each, so that an interrupted import can go on."""
        plans = packer.plans()
        notes = self._read_notes(name)
        done, total = 0, sum(plan.source_bytes for plan in plans)
        if not notes:
            require_free_space(self.root, sum(plan.num_bytes for plan in plans))
        blobs = []
        for plan in plans:
            progress(done, total, plan.label)
            key = packer.key(plan)
            if key not in notes or not self._is_sound(notes[key]):
                notes[key] = self._write_blob(plan, name)
                self._write_text(name, self._notes_path(name), json.dumps(notes, default=to_fields))
            blobs.append(notes[key])
            done += plan.source_bytes
        loss = packer.rounding_error
        progress(done, total, f"done, rounding changed the weights by {loss:.2%}" if loss else "done")
        return blobs

    def _write_blob(self, plan: BlobPlan, name: str) -> BlobEntry:
        partial = self._partial_path(name, "blob")
        try:
            with partial.open("w+b") as file:
                writer = BlobWriter(file)
                plan.write(writer)
                blob = writer.finish()
            target = self.blob_path(blob.digest)
            target.parent.mkdir(exist_ok=True)
            partial.replace(target)
            sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)
        return blob

    def _publish(self, manifest: Manifest) -> None:
        path = self._manifest_path(manifest.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write_text(manifest.name, path, to_json(manifest))
        self._notes_path(manifest.name).unlink(missing_ok=True)

    def _write_text(self, name: str, path: Path, text: str) -> None:
        """Write a file of the import of a name, in one step as others see it."""
        partial = self._partial_path(name, "text")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)

    def _read_notes(self, name: str) -> dict[str, BlobEntry]:
        """What an interrupted import has finished, by key; unreadable notes only cost packing it again."""
        try:
            fields = json.loads(self._notes_path(name).read_text(encoding="utf-8"))
            return {key: parse_blob(blob) for key, blob in fields.items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _has_blob(self, blob: BlobEntry) -> bool:
        path = self.blob_path(blob.digest)
        return path.exists() and path.stat().st_size == blob.num_bytes

    def _is_sound(self, blob: BlobEntry) -> bool:
        if not self._has_blob(blob):
            return False
        with self.blob_path(blob.digest).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == blob.digest

    def _manifest_path(self, name: str) -> Path:
        return self.root / "models" / name / "manifest.json"

    def _notes_path(self, name: str) -> Path:
        return self._partial_path(name, "json")

    def _partial_path(self, name: str, kind: str) -> Path:
        return self.root / "partial" / f"{name}.{kind}"


def require_free_space(folder: Path, num_bytes: int) -> None:
    """Raise StorageFull, with the numbers, unless the disk of a folder has so many bytes left."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise StorageFull(
            f"{folder} needs {num_bytes:,} bytes and its disk has {free:,} left: "
            f"free {num_bytes - free:,} bytes or choose another folder"
        )


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """Turn the system's error for a full disk into StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFull(f"the disk of {folder} is full: free some space, then start again to go on") from error


def _printable(text: str) -> str:
    """A text of a file as far as it can be shown: no controls that would command a terminal, and no page of it."""
    return "".join(character for character in text if character.isprintable())[:MAX_TEXT]


def require_name(name: str) -> None:
    """Raise InvalidRequest for a name that no model can be stored under."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "name", f"{name!r} must be 1 to 100 of a-z, A-Z, 0-9, '.', '_', '-', and start with no sign"
        )


def _labelled_blobs(manifest: Manifest) -> Iterator[tuple[str, BlobEntry]]:
    yield "embedding", manifest.embedding
    yield "rotary tables", manifest.rope
    for index, blob in enumerate(manifest.layers):
        yield f"layer {index + 1}", blob
    yield "head", manifest.head
