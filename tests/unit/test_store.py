"""The model store: what an import writes, that it may be interrupted anywhere, that damage is found and repaired."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelstore import packing
from modelstore.gguf import GgufFile
from modelstore.manifest import ArrayEntry, BlobEntry, Linear
from modelstore.quantize import pack_embedding, pack_linear, to_float32, unpermute_rotary
from modelstore.requantize import uniform
from modelstore.store import ModelStore, Progress
from shoal.errors import BadModelFile, CorruptBlob, InvalidRequest, ModelNotFound, StorageFull
from tests.support.tiny_gguf import write_tiny_gguf

IMPORT_SCRIPT = """
import sys
from pathlib import Path
from modelstore.store import ModelStore

def progress(done, total, label):
    print(label, flush=True)
    if label == sys.argv[3]:
        sys.stdin.readline()

print(ModelStore(Path(sys.argv[2])).import_model(Path(sys.argv[1]), "tiny", progress=progress).digest)
"""
PEAK_MEMORY_SCRIPT = """
import sys
from pathlib import Path
from modelstore.store import ModelStore

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

before = peak_kib()
manifest = ModelStore(Path(sys.argv[2])).import_model(Path(sys.argv[1]), "tiny")
print((peak_kib() - before) * 1024, max(blob.num_bytes for blob in manifest.blobs))
"""


class InterruptedImport(Exception):
    """What a test's progress callback raises."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every weight come in several chunks of rows."""
    monkeypatch.setattr(packing, "CHUNK_BYTES", 1)


def read_array(store: ModelStore, blob: BlobEntry, entry: ArrayEntry) -> np.ndarray:
    content = store.blob_path(blob.digest).read_bytes()[entry.offset : entry.offset + entry.num_bytes]
    return np.frombuffer(content, entry.dtype).reshape(entry.shape)


def read_linear(store: ModelStore, blob: BlobEntry, linear: Linear) -> dict[str, np.ndarray]:
    return {name: read_array(store, blob, entry) for name, entry in linear.arrays.items()}


def interrupt_at(wanted: str) -> Progress:
    def progress(done_bytes: int, total_bytes: int, label: str) -> None:
        if label == wanted:
            raise InterruptedImport

    return progress


def blob_inodes(store: ModelStore) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (store.root / "blobs").iterdir()}


def start_import(path: Path, root: Path, pause_at: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, "-c", IMPORT_SCRIPT, str(path), str(root), pause_at),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def lines_until(process: subprocess.Popen[str], wanted: str) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.strip()
        if line.strip() == wanted:
            return


def finish(process: subprocess.Popen[str]) -> str:
    """Let a paused import go on; return the last line it prints."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    return list(process.stdout)[-1].strip()


def test_an_imported_model_is_listed_and_opened_as_it_was_returned(store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny", source="made here", license="MIT")
    assert store.open("tiny") == manifest
    assert list(store.list()) == [manifest]
    assert (manifest.name, manifest.source, manifest.license) == ("tiny", "made here", "MIT")
    assert manifest.digest == manifest.compute_digest()


def test_source_and_licence_are_the_files_own_by_default(store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny")
    assert (manifest.source, manifest.license, manifest.quantization) == ("tiny.gguf", "apache-2.0", "Q4_1")


def test_an_import_leaves_only_blobs_and_manifest_and_empty_locks(store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny")
    files = {path for path in store.root.rglob("*") if path.is_file() and path.stat().st_size}
    blobs = {store.blob_path(blob.digest) for blob in manifest.blobs}
    assert files == blobs | {store.root / "models" / "tiny" / "manifest.json"}


def test_arrays_are_aligned_and_apart(store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny")
    for blob in manifest.blobs:
        packed = [entry for linear in blob.linears.values() for entry in linear.arrays.values()]
        entries = sorted([*blob.arrays.values(), *packed], key=lambda entry: entry.offset)
        assert all(entry.offset % 4096 == 0 for entry in entries)
        ends = [entry.offset + entry.num_bytes for entry in entries]
        assert all(end <= entry.offset for end, entry in zip(ends, entries[1:], strict=False))
        assert ends[-1] == blob.num_bytes == store.blob_path(blob.digest).stat().st_size


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("precision", ["int8", "int4", "int4-asym", "float32"])
@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q6_K"])
def test_a_layer_packed_in_chunks_equals_its_weights_packed_whole(
    store: ModelStore, tmp_path: Path, weight_type: str, precision: str
) -> None:
    hidden = 256 if weight_type.endswith("_K") else 64
    path = write_tiny_gguf(tmp_path / "a.gguf", num_layers=1, hidden=hidden, ffn=256, weight_type=weight_type)
    blob = store.import_model(path, "tiny", precisions=uniform(precision)).layers[0]
    tensors = {name.split(".")[2]: t for name, t in GgufFile(path).tensors.items() if name.startswith("blk.0.")}
    query, key = (
        unpermute_rotary(tensors[name], num_heads, hidden // 4) for name, num_heads in (("attn_q", 4), ("attn_k", 2))
    )
    parts = {
        "attn_qkv": [query, key, tensors["attn_v"]],
        "attn_out": [tensors["attn_output"]],
        "ffn_gate_up": [tensors["ffn_gate"], tensors["ffn_up"]],
        "ffn_down": [tensors["ffn_down"]],
    }
    assert set(blob.linears) == set(parts)
    for name, linear in blob.linears.items():
        whole = pack_linear(parts[name], precision=precision)
        assert (linear.kind, linear.n, linear.k, linear.block) == (whole.kind, whole.n, whole.k, whole.block)
        for array_name, values in read_linear(store, blob, linear).items():
            np.testing.assert_array_equal(values, whole.arrays[array_name])
    for norm in ("attn_norm", "ffn_norm"):
        np.testing.assert_array_equal(read_array(store, blob, blob.arrays[norm]), to_float32(tensors[norm]))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("embedding_type", "precision"), [("Q8_0", "int8"), ("F16", "int8"), ("F32", "float32")])
def test_embedding_and_untied_head_packed_in_chunks_equal_those_packed_whole(
    store: ModelStore, tmp_path: Path, embedding_type: str, precision: str
) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", is_tied=False, embedding_type=embedding_type, weight_type="F32")
    manifest = store.import_model(path, "tiny", precisions=uniform(precision))
    tensors = GgufFile(path).tensors
    embedding = pack_embedding(tensors["token_embd.weight"], precision=precision)
    head = pack_linear([tensors["output.weight"]], precision=precision)
    for blob, name, whole in (
        (manifest.embedding, "token_embd", embedding),
        (manifest.head, "output", head),
    ):
        assert blob.linears[name].kind == whole.kind
        for array_name, values in read_linear(store, blob, blob.linears[name]).items():
            np.testing.assert_array_equal(values, whole.arrays[array_name])


def test_a_tied_head_has_only_its_norm(store: ModelStore, tiny: Path) -> None:
    head = store.import_model(tiny, "tiny").head
    assert (set(head.arrays), head.linears) == ({"output_norm"}, {})


def test_parts_of_different_types_are_stored_one_by_one(store: ModelStore, tmp_path: Path) -> None:
    types = {"blk.0.attn_v.weight": "Q8_0", "blk.0.ffn_up.weight": "F16"}
    layer = store.import_model(write_tiny_gguf(tmp_path / "a.gguf", tensor_types=types), "tiny").layers[0]
    assert {name: linear.kind for name, linear in layer.linears.items()} == {
        "attn_q": "int4_cz",
        "attn_k": "int4_cz",
        "attn_v": "int8",
        "attn_out": "int4_cz",
        "ffn_gate": "int4_cz",
        "ffn_up": "int8",
        "ffn_down": "int4_cz",
    }


@pytest.mark.usefixtures("small_chunks")
def test_rotary_tables_hold_cos_and_sin_of_every_position(store: ModelStore, tmp_path: Path) -> None:
    rope = store.import_model(write_tiny_gguf(tmp_path / "a.gguf", context=100, rope_base=500.0), "tiny").rope
    angles = np.arange(100)[:, None] / 500.0 ** (np.arange(8) / 8)
    np.testing.assert_allclose(read_array(store, rope, rope.arrays["cos"]), np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(read_array(store, rope, rope.arrays["sin"]), np.sin(angles), atol=1e-6)


def test_progress_rises_to_all_bytes_and_tells_the_loss_of_rounding(store: ModelStore, tmp_path: Path) -> None:
    reports: list[tuple[int, int, str]] = []
    path = write_tiny_gguf(tmp_path / "a.gguf", weight_type="F16")
    store.import_model(path, "tiny", progress=lambda *report: reports.append(report))
    done = [report[0] for report in reports]
    assert done == sorted(done)
    assert done[-1] == reports[-1][1] > 0
    assert reports[-1][2].startswith("done, rounding changed the weights by 0.")


def test_exact_packings_report_no_loss(store: ModelStore, tiny: Path) -> None:
    labels: list[str] = []
    store.import_model(tiny, "tiny", progress=lambda done, total, label: labels.append(label))
    assert labels[-1] == "done"


def test_an_interrupted_import_shows_nothing_and_goes_on_to_the_same_manifest(
    store: ModelStore, tiny: Path, tmp_path: Path
) -> None:
    undisturbed = ModelStore(tmp_path / "other").import_model(tiny, "tiny")
    with pytest.raises(InterruptedImport):
        store.import_model(tiny, "tiny", progress=interrupt_at("layer 3 of 3"))
    assert store.list() == []
    finished = blob_inodes(store)
    assert len(finished) == 4
    assert store.import_model(tiny, "tiny") == undisturbed
    assert finished.items() <= blob_inodes(store).items(), "finished blobs were packed again"
    store.verify("tiny")


def test_an_import_interrupted_within_a_blob_leaves_no_half_written_file(
    store: ModelStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise InterruptedImport

    monkeypatch.setattr(packing, "unpermute_rotary", fail)
    with pytest.raises(InterruptedImport):
        store.import_model(tiny, "tiny")
    assert len(blob_inodes(store)) == 2
    assert {path.suffix for path in (store.root / "partial").iterdir()} == {".lock", ".json"}


def test_a_killed_import_shows_nothing_and_goes_on_to_the_same_manifest(
    store: ModelStore, tiny: Path, tmp_path: Path
) -> None:
    undisturbed = ModelStore(tmp_path / "other").import_model(tiny, "tiny")
    with start_import(tiny, store.root, pause_at="layer 2 of 3") as process:
        assert list(lines_until(process, "layer 2 of 3"))[-1] == "layer 2 of 3"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert store.list() == []
    finished = blob_inodes(store)
    assert store.import_model(tiny, "tiny") == undisturbed
    assert finished.items() <= blob_inodes(store).items(), "finished blobs were packed again"


def test_two_processes_that_import_one_model_at_once_both_end_well(store: ModelStore, tiny: Path) -> None:
    with start_import(tiny, store.root, "layer 1 of 3") as first:
        assert list(lines_until(first, "layer 1 of 3"))
        with start_import(tiny, store.root, "never") as second:
            assert list(lines_until(second, "waiting for another import of tiny"))[-1].startswith("waiting")
            outputs = [finish(first), finish(second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert outputs == [store.verify("tiny").digest] * 2


def test_an_import_does_not_go_on_with_another_files_blobs(store: ModelStore, tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    undisturbed = ModelStore(tmp_path / "other").import_model(other, "tiny")
    with pytest.raises(InterruptedImport):
        store.import_model(tiny, "tiny", progress=interrupt_at("head"))
    assert store.import_model(other, "tiny") == undisturbed


def test_unreadable_notes_of_an_interrupted_import_are_ignored(store: ModelStore, tiny: Path) -> None:
    with pytest.raises(InterruptedImport):
        store.import_model(tiny, "tiny", progress=interrupt_at("head"))
    (store.root / "partial" / "tiny.json").write_text("[1")
    store.import_model(tiny, "tiny")
    store.verify("tiny")


def test_an_import_goes_on_only_with_sound_blobs(store: ModelStore, tiny: Path) -> None:
    with pytest.raises(InterruptedImport):
        store.import_model(tiny, "tiny", progress=interrupt_at("head"))
    for path in (store.root / "blobs").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    store.import_model(tiny, "tiny")
    store.verify("tiny")


def test_a_damaged_file_leaves_the_stored_model_as_it_was(store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny")
    tiny.write_bytes(tiny.read_bytes()[:-5000])
    with pytest.raises(BadModelFile):
        store.import_model(tiny, "tiny")
    assert store.verify("tiny") == manifest


def test_importing_another_file_under_a_name_replaces_the_model(store: ModelStore, tiny: Path, tmp_path: Path) -> None:
    first = store.import_model(tiny, "tiny")
    second = store.import_model(write_tiny_gguf(tmp_path / "b.gguf", seed=1), "tiny")
    assert second.digest != first.digest
    assert list(store.list()) == [second]


def test_name_and_source_do_not_change_the_digest(store: ModelStore, tiny: Path) -> None:
    assert store.import_model(tiny, "a", source="x").digest == store.import_model(tiny, "b", license="y").digest


@pytest.mark.parametrize(("damage", "state"), [("flip", "damaged"), ("cut", "damaged"), ("remove", "missing")])
def test_a_damaged_blob_is_named_and_repaired_by_another_import(
    store: ModelStore, tiny: Path, damage: str, state: str
) -> None:
    manifest = store.import_model(tiny, "tiny")
    digest = manifest.layers[1].digest
    path = store.blob_path(digest)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(CorruptBlob, match=rf"blob {digest} \(layer 2 of tiny\) is {state}.* import or pull tiny again"):
        store.verify("tiny")
    assert store.import_model(tiny, "tiny") == manifest
    store.verify("tiny")


def test_a_missing_blob_is_seen_without_reading_any(store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny")
    assert store.has_blobs(manifest)
    store.blob_path(manifest.head.digest).unlink()
    assert not store.has_blobs(manifest)


def test_an_unknown_model_is_answered_with_those_there_are(store: ModelStore, tiny: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model tiny .* stored are: none yet"):
        store.open("tiny")
    store.import_model(tiny, "first")
    store.import_model(tiny, "second")
    with pytest.raises(ModelNotFound, match=r"no model \.\./x .* stored are: first, second"):
        store.open("../x")


@pytest.mark.parametrize("text", ["", "[]", "7", '{"manifest_version": 1}', '{"manifest_version": 99}'])
def test_a_manifest_that_is_none_is_refused_with_what_to_do(store: ModelStore, tiny: Path, text: str) -> None:
    store.import_model(tiny, "tiny")
    (store.root / "models" / "tiny" / "manifest.json").write_text(text)
    with pytest.raises(CorruptBlob, match=r"cannot be read .* import or pull tiny again"):
        store.open("tiny")


def test_a_manifest_that_was_changed_is_refused(store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")
    path = store.root / "models" / "tiny" / "manifest.json"
    path.write_text(path.read_text().replace('"num_heads": 4', '"num_heads": 2'))
    with pytest.raises(CorruptBlob, match="has been changed"):
        store.open("tiny")


def test_a_blob_can_only_be_asked_for_by_a_digest(store: ModelStore) -> None:
    with pytest.raises(CorruptBlob, match="is not the digest"):
        store.blob_path("../models/tiny/manifest.json")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 101])
def test_a_name_that_is_no_file_name_is_refused(store: ModelStore, tiny: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name:"):
        store.import_model(tiny, name)
    assert not store.root.exists()


def test_a_disk_with_too_little_room_is_refused_with_the_numbers(
    store: ModelStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tiny)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageFull, match=r"needs [\d,]+ bytes and its disk has 1,000 left"):
        store.import_model(tiny, "tiny")


def test_a_disk_that_fills_up_is_explained_and_the_import_goes_on_later(store: ModelStore, tiny: Path) -> None:
    def fill_up(done_bytes: int, total_bytes: int, label: str) -> None:
        if label == "head":
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFull, match="is full: free some space, then start again to go on"):
        store.import_model(tiny, "tiny", progress=fill_up)
    assert store.list() == []
    finished = blob_inodes(store)
    store.import_model(tiny, "tiny")
    assert finished.items() <= blob_inodes(store).items()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_import_needs_less_memory_than_its_largest_blob(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", num_layers=2, hidden=1024, num_heads=16, ffn=64, vocab=32000)
    script = (sys.executable, "-c", PEAK_MEMORY_SCRIPT, str(path), str(tmp_path / "store"))
    peak, largest_blob = map(int, subprocess.run(script, check=True, capture_output=True, text=True).stdout.split())
    assert largest_blob > 30 << 20
    assert peak < largest_blob


def test_the_packing_version_keeps_old_blobs_from_being_used(
    store: ModelStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer = packing.Packer(GgufFile(tiny), uniform("int8"))
    plan = packer.plans()[2]
    key = packer.key(plan)
    assert packer.key(replace(plan, label="other")) == key
    monkeypatch.setattr(packing, "PACKING_VERSION", packing.PACKING_VERSION + 1)
    assert packer.key(plan) != key
