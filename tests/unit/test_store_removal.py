"""Removing stored models: what goes, what stays for others, and that nobody loses what is about to be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from shoal.errors import CorruptBlob, InvalidRequest, ModelNotFound
from tests.support.tiny_gguf import write_tiny_gguf

IMPORT_SCRIPT = """
import sys
from pathlib import Path
from modelstore.store import ModelStore

def progress(done, total, label):
    print(label, flush=True)
    if label == "head":
        sys.stdin.readline()

ModelStore(Path(sys.argv[2])).import_model(Path(sys.argv[1]), "other", progress=progress)
"""


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def blobs_of(store: ModelStore) -> set[str]:
    return {path.name for path in store.root.glob("blobs/*")}


def test_a_removed_model_is_gone_with_its_blobs(store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny")
    assert store.remove("tiny") == manifest.weight_bytes
    assert store.names() == ()
    assert blobs_of(store) == set()


def test_blobs_that_another_model_has_too_stay(store: ModelStore, tiny: Path, tmp_path: Path) -> None:
    first = store.import_model(tiny, "first")
    # The same weights but for the embedding: layers, rotary tables and head are shared.
    other = write_tiny_gguf(tmp_path / "other.gguf", embedding_type="F16")
    second = store.import_model(other, "second")
    assert store.remove("first") == first.embedding.num_bytes
    assert store.verify("second") == second


def test_a_model_of_the_same_blobs_keeps_them_all(store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "first")
    second = store.import_model(tiny, "second")
    assert store.remove("first") == 0
    assert store.verify("second") == second


def test_blobs_of_a_model_that_was_replaced_go_with_the_next_removal(
    store: ModelStore, tiny: Path, tmp_path: Path
) -> None:
    store.import_model(tiny, "tiny")
    store.import_model(write_tiny_gguf(tmp_path / "b.gguf", seed=1), "tiny")
    store.remove("tiny")
    assert blobs_of(store) == set()


def test_a_damaged_model_can_be_removed(store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")
    (store.root / "models/tiny/manifest.json").write_text("{}")
    store.remove("tiny")
    assert store.names() == ()


def test_blobs_of_a_model_that_this_program_cannot_read_stay(store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "newer")
    store.import_model(tiny, "tiny")
    path = store.root / "models/newer/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"manifest_version": 999}))
    with pytest.raises(CorruptBlob, match="999"):
        store.open("newer")
    store.remove("tiny")
    assert blobs_of(store) == {blob.digest for blob in manifest.blobs}


def test_what_an_interrupted_import_has_finished_stays(store: ModelStore, tiny: Path, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def progress(done_bytes: int, total_bytes: int, label: str) -> None:
        if label == "head":
            raise Interrupted

    store.import_model(write_tiny_gguf(tmp_path / "b.gguf", seed=1), "tiny")
    with pytest.raises(Interrupted):
        store.import_model(tiny, "other", progress=progress)
    finished = {path.name: path.stat().st_ino for path in store.root.glob("blobs/*")}
    store.remove("tiny")
    manifest = store.import_model(tiny, "other")
    kept = {blob.digest for blob in manifest.blobs[:-1]}
    assert {name: (store.root / "blobs" / name).stat().st_ino for name in kept} == {
        name: finished[name] for name in kept
    }


def test_a_removal_waits_for_an_import_that_is_under_way(store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")
    command = (sys.executable, "-c", IMPORT_SCRIPT, str(tiny), str(store.root))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as importing:
        assert importing.stdin is not None
        assert importing.stdout is not None
        assert any(line.strip() == "head" for line in importing.stdout)
        labels: list[str] = []

        def progress(done_bytes: int, total_bytes: int, label: str) -> None:
            labels.append(label)
            assert importing.stdin is not None
            importing.stdin.close()

        store.remove("tiny", progress)
    assert labels == ["waiting for an import to end"]
    store.verify("other")


def test_a_model_that_is_not_there_cannot_be_removed(store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")
    with pytest.raises(ModelNotFound, match=r"there is no model other in .*; stored are: tiny"):
        store.remove("other")


@pytest.mark.parametrize("name", ["..", "", ".", "../store", "tiny/../tiny"])
def test_a_name_that_is_a_path_is_no_model(store: ModelStore, tiny: Path, name: str) -> None:
    store.import_model(tiny, "tiny")
    with pytest.raises(ModelNotFound):
        store.remove(name)
    assert store.names() == ("tiny",)


def test_what_a_file_says_of_itself_cannot_command_a_terminal(store: ModelStore, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "\x1b[2Ja.gguf", license_name="mit\x1b]0;x\x07\n" + "y" * 1000)
    manifest = store.import_model(path, "tiny")
    assert manifest.source == "[2Ja.gguf"
    assert manifest.license == "mit]0;x" + "y" * 293


def test_what_an_interrupted_import_has_left_can_be_removed(store: ModelStore, tiny: Path) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", IMPORT_SCRIPT, str(tiny), str(store.root)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert any(line == b"head\n" for line in process.stdout)
        process.kill()
    assert store.names() == ()
    assert store.unfinished() == ("other",)
    left = sum(path.stat().st_size for path in store.root.glob("blobs/*"))
    assert left

    assert store.remove("other") == left
    assert store.unfinished() == ()
    assert {path.name for path in store.root.glob("*/*")} == {".blobs.lock", "other.lock"}


@pytest.mark.parametrize("name", ["../tiny", "../models/tiny/manifest", "", "nobody"])
def test_only_what_is_in_the_store_is_removed(store: ModelStore, tiny: Path, name: str) -> None:
    store.import_model(tiny, "tiny")
    (store.root / "tiny.json").write_text("{}")
    with pytest.raises(ModelNotFound):
        store.remove(name)
    assert (store.root / "tiny.json").exists()
    store.verify("tiny")


def test_a_model_that_is_served_is_not_removed_until_that_ends(store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")
    with store.serving("tiny"), store.serving("tiny") as manifest:
        with pytest.raises(InvalidRequest, match=r"tiny is being served from .*: stop its fleet first"):
            store.remove("tiny")
        assert store.has_blobs(manifest)
    store.remove("tiny")
    assert [*store.root.glob("blobs/*")] == [*store.root.glob("served/*")] == []


def test_a_model_that_two_serve_stays_when_one_ends(store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")
    with store.serving("tiny"):
        with store.serving("tiny"):
            pass
        with pytest.raises(InvalidRequest, match="is being served"):
            store.remove("tiny")


def test_a_model_that_is_not_there_cannot_be_served_and_nothing_is_made_for_it(store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match="stored are: none yet"), store.serving("tiny"):
        pass
    assert not store.root.exists()


def test_what_a_served_model_was_replaced_by_leaves_it_its_blobs(store: ModelStore, tmp_path: Path) -> None:
    first, second = (write_tiny_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    store.import_model(first, "tiny")
    store.import_model(first, "other")
    with store.serving("tiny") as served:
        newer = store.import_model(second, "tiny")
        with pytest.raises(InvalidRequest, match="other is being served"):
            store.remove("other")
        store.remove("tiny")
        assert store.has_blobs(served)
        assert not store.has_blobs(newer)


def test_blobs_that_only_a_served_model_has_stay_while_anybody_serves_it(store: ModelStore, tmp_path: Path) -> None:
    first, second = (write_tiny_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    store.import_model(first, "tiny")
    with store.serving("tiny") as served:
        with store.serving("tiny"):
            pass
        store.import_model(second, "tiny")
        store.remove("tiny")
        assert blobs_of(store) == {blob.digest for blob in served.blobs}


def test_a_mark_that_was_torn_is_written_anew(store: ModelStore, tmp_path: Path) -> None:
    first, second = (write_tiny_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    torn = store.root / "served" / store.import_model(first, "tiny").digest
    torn.parent.mkdir()
    torn.write_text("0123")
    with store.serving("tiny") as served:
        store.import_model(second, "tiny")
        store.remove("tiny")
        assert store.has_blobs(served)


def test_a_removal_waits_for_who_has_opened_a_model_but_not_marked_it(store: ModelStore, tiny: Path) -> None:
    class Waits(Exception):
        pass

    def progress(done_bytes: int, total_bytes: int, label: str) -> None:
        raise Waits

    class Store(ModelStore):
        def open(self, name: str) -> Manifest:
            with pytest.raises(Waits):
                store.remove(name, progress)
            return super().open(name)

    store.import_model(tiny, "tiny")
    with Store(store.root).serving("tiny") as manifest:
        assert store.has_blobs(manifest)


def test_a_process_that_served_and_was_killed_keeps_nothing(store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")
    program = (
        "import sys, pathlib; from modelstore.store import ModelStore\n"
        "with ModelStore(pathlib.Path(sys.argv[1])).serving('tiny'): print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen((sys.executable, "-c", program, str(store.root)), stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(InvalidRequest):
            store.remove("tiny")
        process.kill()
    assert store.remove("tiny")
