"""Damaged and hostile GGUF files: a clear error that names key or tensor, little memory, and nothing left behind."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from modelstore import gguf_header
from modelstore.gguf import GgufFile
from modelstore.store import ModelStore
from shoal.errors import BadModelFile, ShoalError, UnsupportedModel
from tests.support.bad_gguf import BAD_FILES, SOUND, UNSUPPORTED_FILES, import_content, key
from tests.support.raw_gguf import ARRAY, STRING, array, sound, string


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def test_the_file_that_the_others_are_made_of_is_sound(tmp_path: Path) -> None:
    import_content(SOUND, tmp_path)


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_with_what_is_wrong_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    make_content, message = BAD_FILES[name]
    with pytest.raises(BadModelFile, match=message):
        import_content(make_content(), tmp_path)


@pytest.mark.parametrize("name", UNSUPPORTED_FILES)
def test_an_unsupported_file_is_refused_with_what_is_asked_for_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    make_content, message = UNSUPPORTED_FILES[name]
    with pytest.raises(UnsupportedModel, match=message):
        import_content(make_content(), tmp_path)


@pytest.mark.parametrize("name", BAD_FILES)
def test_refusing_a_bad_file_takes_little_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(BAD_FILES[name][0]())
    tracemalloc.start()
    try:
        # The last cases are found by reading weights, which opening a file does not.
        with GgufFile(path):
            pass
    except ShoalError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


def test_the_strings_that_are_allowed_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", 20_000)
    path = tmp_path / "model.gguf"
    path.write_bytes(key(ARRAY, array(STRING, [string("ab") * 19_900], 19_900)).content())
    tracemalloc.start()
    GgufFile(path).close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * 20_000


def test_the_bytes_of_a_header_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 4096)
    path = tmp_path / "model.gguf"
    path.write_bytes(key(STRING, string("x" * 5000)).content())
    with pytest.raises(BadModelFile, match=r"key test\.key wants 5000 bytes; a header has at most 4096"):
        GgufFile(path)


def test_a_file_cut_at_the_end_of_any_field_of_its_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for end in sound().boundaries():
        path.write_bytes(SOUND[:end])
        with pytest.raises(BadModelFile):
            GgufFile(path)


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    header_bytes = sound().boundaries()[-1]
    for end in (*range(header_bytes), *range(header_bytes, len(SOUND), 997), len(SOUND) - 1):
        path.write_bytes(SOUND[:end])
        with pytest.raises(BadModelFile):
            GgufFile(path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    with pytest.raises(BadModelFile, match=r"model\.gguf is a directory, not a GGUF file"):
        GgufFile(folder)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path, store: ModelStore) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(BadModelFile, match="no regular file"):
        GgufFile(pipe)
    with pytest.raises(BadModelFile):
        store.import_model(pipe, "model")
    assert not store.root.exists()


def test_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="no regular file"):
        GgufFile(Path("/dev/zero"))


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(link)
    with pytest.raises(BadModelFile, match="cannot be read"):
        GgufFile(link)


def test_a_name_with_a_zero_byte_is_refused() -> None:
    with pytest.raises(BadModelFile, match="cannot be read"):
        GgufFile(Path("model\0.gguf"))
