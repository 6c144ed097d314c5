"""Models split over several files: any of them stands for all, and files that do not belong together are refused."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest

from modelstore.gguf import GgufFile
from modelstore.store import ModelStore
from shoal.errors import BadModelFile
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A tiny model in three files, as the format's own package writes them."""
    folder = tmp_path / "split"
    folder.mkdir()
    write_tiny_gguf(folder / "tiny.gguf", num_layers=2, max_tensors_a_file=7)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return parts


def overwrite(path: Path, key: str, code: str, value: int) -> None:
    """Change the number that a key has."""
    content = bytearray(path.read_bytes())
    at = content.index(key.encode()) + len(key) + 4
    content[at : at + struct.calcsize(code)] = struct.pack("<" + code, value)
    path.write_bytes(content)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_part_stands_for_the_whole_model(parts: list[Path], number: int, tmp_path: Path) -> None:
    whole = GgufFile(write_tiny_gguf(tmp_path / "whole.gguf", num_layers=2))
    split = GgufFile(parts[number])
    assert split.config == whole.config
    assert split.tokenizer == whole.tokenizer
    assert set(split.tensors) == set(whole.tensors)
    for name, tensor in split.tensors.items():
        assert tensor.raw.tobytes() == whole.tensors[name].raw.tobytes()


def test_a_split_model_is_imported_as_the_whole_one_is(parts: list[Path], tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    whole = store.import_model(write_tiny_gguf(tmp_path / "whole.gguf", num_layers=2), "whole")
    assert store.import_model(parts[1], "split").digest == whole.digest


def test_a_relative_path_finds_its_parts(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(parts[0].parent)
    assert GgufFile(Path(parts[2].name)).config.num_layers == 2


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Path], number: int) -> None:
    parts[number].unlink()
    with pytest.raises(BadModelFile, match=rf"tiny-0000{number + 1}-of-00003\.gguf is missing .* get all 3 parts"):
        GgufFile(parts[number - 1])


def test_a_damaged_part_is_named(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-2000])
    with pytest.raises(BadModelFile, match=r"tiny-00002-of-00003\.gguf: tensor .* ends at byte"):
        GgufFile(parts[0])


def test_a_part_that_is_no_file_is_refused(parts: list[Path]) -> None:
    parts[1].unlink()
    os.mkfifo(parts[1])
    with pytest.raises(BadModelFile, match=r"tiny-00002-of-00003\.gguf is no regular file"):
        GgufFile(parts[0])


def test_parts_in_another_order_than_their_names_say_are_refused(parts: list[Path]) -> None:
    spare = parts[0].with_name("spare")
    parts[1].rename(spare)
    parts[2].rename(parts[1])
    spare.rename(parts[2])
    with pytest.raises(BadModelFile, match=r"tiny-00002-of-00003\.gguf: key split\.no is 2, by the name it is part 1"):
        GgufFile(parts[0])


def test_one_part_given_as_all_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[0], parts[1])
    with pytest.raises(BadModelFile, match=r"split\.no is 0, by the name it is part 1"):
        GgufFile(parts[0])


def test_parts_that_count_themselves_differently_are_refused(parts: list[Path]) -> None:
    overwrite(parts[2], "split.count", "H", 4)
    with pytest.raises(BadModelFile, match=r"tiny-00003-of-00003\.gguf: key split\.count is 4, .* there are 3 parts"):
        GgufFile(parts[0])


def test_parts_that_count_the_tensors_differently_are_refused(parts: list[Path]) -> None:
    overwrite(parts[1], "split.tensors.count", "i", 5)
    with pytest.raises(BadModelFile, match=r"have another split\.tensors\.count: they are not of one model"):
        GgufFile(parts[0])


def test_a_total_of_tensors_that_is_not_there_is_refused(parts: list[Path]) -> None:
    for part in parts:
        overwrite(part, "split.tensors.count", "i", 99)
    with pytest.raises(BadModelFile, match=r"split\.tensors\.count is 99, but there are \d+ tensors"):
        GgufFile(parts[0])


def test_a_tensor_in_two_parts_is_refused(parts: list[Path]) -> None:
    names = [name for name in GgufFile(parts[0]).tensors if name.startswith("blk.0.attn_")]
    content = [part.read_bytes() for part in parts]
    first = next(name for name in names if name.encode() in content[0])
    twin = first.replace("blk.0.", "blk.1.").encode()
    at = next(index for index in (1, 2) if twin in content[index])
    parts[at].write_bytes(content[at].replace(twin, first.encode()))
    with pytest.raises(BadModelFile, match=rf"tensor {first} is given twice: {parts[at].name} has it too"):
        GgufFile(parts[0])


def test_a_whole_file_under_the_name_of_a_part_is_refused(parts: list[Path]) -> None:
    write_tiny_gguf(parts[1], num_layers=2)
    with pytest.raises(BadModelFile, match=r"split\.count is 0, by the name there are 3 parts"):
        GgufFile(parts[0])


def test_a_part_under_a_name_of_its_own_is_refused_with_how_parts_are_found(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(BadModelFile, match=r"model\.gguf: key split\.count is 3: .* X-00001-of-00003\.gguf"):
        GgufFile(renamed)


def test_the_only_part_of_one_is_a_whole_model(tmp_path: Path) -> None:
    assert GgufFile(write_tiny_gguf(tmp_path / "tiny-00001-of-00001.gguf")).config.num_layers == 3


@pytest.mark.parametrize("name", ["a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-00001-of-99999.gguf"])
def test_numbers_that_no_part_can_have_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadModelFile, match=r"says that it is part \d+ of \d+"):
        GgufFile(write_tiny_gguf(tmp_path / name))


def test_a_part_that_is_a_link_out_of_the_folder_is_refused(parts: list[Path], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    parts[1].rename(outside)
    parts[1].symlink_to(outside)
    with pytest.raises(BadModelFile, match=r"tiny-00002-of-00003\.gguf is a link that leads out of"):
        GgufFile(parts[0])


def test_a_part_that_is_a_link_to_nothing_or_to_itself_is_missing(parts: list[Path]) -> None:
    for target in (parts[1], parts[1].with_name("nowhere")):
        parts[1].unlink()
        parts[1].symlink_to(target)
        with pytest.raises(BadModelFile, match=r"tiny-00002-of-00003\.gguf is missing"):
            GgufFile(parts[0])


def test_a_folder_of_links_into_one_cache_is_read(parts: list[Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for part in parts:
        stored = part.rename(part.with_name(f"stored-{part.name[5:10]}"))
        (snapshot / part.name).symlink_to(stored)
    assert GgufFile(snapshot / parts[1].name).config.num_layers == 2
