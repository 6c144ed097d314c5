"""Safetensors files: what is read of a sound one, and that a damaged or hostile one costs an error and little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from modelstore.mapped_file import TensorPlace, release
from modelstore.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile
from shoal.errors import BadModelFile

BYTES_OF_TYPE = {"F32": 4, "BF16": 2, "I8": 1}
READ_SCRIPT = """
import sys
from pathlib import Path
from modelstore.safetensors_file import SafetensorsFile
from shoal.errors import BadModelFile

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

before = peak_kib()
try:
    SafetensorsFile(Path(sys.argv[1]))
except BadModelFile as error:
    print((peak_kib() - before) * 1024, error.message)
"""


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write(path: Path, header: object, num_bytes: int = 8, length: int | None = None) -> Path:
    """A file with this header, or these bytes as one, that says to be so long, and so many bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def content_of(file: SafetensorsFile, place: TensorPlace) -> np.ndarray:
    return file.content[place.offset : place.offset + place.num_bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_tensors_are_read_as_the_formats_own_library_wrote_them(path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
    }
    save_file(arrays, path, metadata={"format": "pt"})

    file = SafetensorsFile(path)

    assert {name: (place.type, place.shape) for name, place in file.places.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (4,)),
    }
    for name, array in arrays.items():
        assert content_of(file, file.places[name]).tobytes() == array.tobytes()


def test_bytes_are_views_on_the_file_and_outlive_the_release_of_its_memory(path: Path) -> None:
    save_file({"a": np.arange(10_000, dtype=np.float32)}, path)
    file = SafetensorsFile(path)
    raw = content_of(file, file.places["a"])

    release({path: file.mapped})

    assert not raw.flags.owndata
    np.testing.assert_array_equal(raw.view(np.float32), np.arange(10_000))


@pytest.mark.parametrize(
    ("header", "num_bytes", "message"),
    [
        ({"a": entry(), "b": entry(offsets=(8, 16))}, 12, r"tensor b ends at byte \d+ .* truncated"),
        ({"a": entry()}, 9, "the last 1 bytes of model.safetensors belong to no tensor"),
        ({"a": entry(offsets=(4, 12))}, 12, "4 bytes before tensor a of model.safetensors belong to none"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "tensors a and b of model.safetensors overlap"),
        ({"a": entry(), "b": entry()}, 8, "tensors a and b of model.safetensors overlap"),
        ({"a": entry(shape=(3,))}, 8, r"tensor a .* has shape \(3,\) of F32, 12 bytes, in 8 bytes"),
        ({"a": entry(shape=(2**62, 2**62))}, 8, r"tensor a .* has shape \(4611686018427387904, "),
        ({"a": entry(shape=(-2,))}, 8, r"tensor a .* has the shape \[-2\]"),
        ({"a": entry(shape=(True, 2))}, 8, r"tensor a .* has the shape \[True, 2\]"),
        ({"a": entry(shape=(1,) * 9)}, 8, "tensor a .* at most 8 counts"),
        ({"a": entry(offsets=(8, 0))}, 8, "tensor a .* a start and an end"),
        ({"a": entry(offsets=(0, 8, 8))}, 8, "tensor a .* a start and an end"),
        ({"a": entry(offsets=(0, 8.0))}, 8, "tensor a .* a start and an end"),
        ({"a": entry(dtype="Q4_0")}, 8, "tensor a .* is of the unknown type 'Q4_0'"),
        ({"a": entry(dtype=["F32"])}, 8, "tensor a .* is of the unknown type"),
        ({"a": {"dtype": "F32"}}, 8, "tensor a .* other than dtype, shape and data_offsets"),
        ({"a": 7}, 8, "tensor a .* other than dtype, shape and data_offsets"),
        ([entry()], 8, "the header of model.safetensors is no JSON object"),
        (b'{"a": 1, "a": 2}', 0, "key a is given twice in the header of model.safetensors"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', 0, "key dtype is given twice"),
        (b'{"a": NaN}', 0, "has NaN where a number should be"),
        (b'{"a": [1' + b"0" * 400 + b"]}", 0, "has 10000.* where a number should be"),
        (b'{"a \\ud800": 1}', 0, "the header of model.safetensors holds half a character"),
        (b'{"a": ["\\uDC00\\uD800"]}', 0, "holds half a character"),
        (b"[" * 100_000, 0, "is no JSON"),
        (b"\xff\xfe", 0, "is no JSON"),
        (b"", 0, "is no JSON"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_naming_the_tensor(
    path: Path, header: object, num_bytes: int, message: str
) -> None:
    with pytest.raises(BadModelFile, match=message):
        SafetensorsFile(write(path, header, num_bytes))


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100])
def test_a_header_longer_than_the_file_is_refused_before_anything_is_read(path: Path, length: int) -> None:
    with pytest.raises(BadModelFile, match=f"the header wants {length} bytes, the file has"):
        SafetensorsFile(write(path, {"a": entry()}, length=length))


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_header_is_refused(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    with pytest.raises(BadModelFile, match=f"{size} bytes, too few"):
        SafetensorsFile(path)


def test_a_pointer_of_a_repository_cloned_without_its_large_files_is_told(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BadModelFile, match="it is a pointer of Git LFS, get it again"):
        SafetensorsFile(path)


def test_a_long_header_is_refused_unread(path: Path) -> None:
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 1000)
    with pytest.raises(BadModelFile, match=f"at most {MAX_HEADER_BYTES} are read"):
        SafetensorsFile(path)


@pytest.mark.parametrize("filling", [b"[],", b'{"a":0},', b'"",'])
def test_the_worst_header_of_allowed_size_takes_a_bounded_amount_of_memory(path: Path, filling: bytes) -> None:
    count = (MAX_HEADER_BYTES - 20) // len(filling)
    write(path, b'{"a": [' + filling * count + b"0]}", 0)

    printed = subprocess.run((sys.executable, "-c", READ_SCRIPT, str(path)), capture_output=True, text=True, check=True)

    peak, _, message = printed.stdout.partition(" ")
    assert "tensor a of model.safetensors is described by other" in message
    assert int(peak) < 64 * MAX_HEADER_BYTES


tensor_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BYTES_OF_TYPE, "F4", "Q4_0"]),
        "shape": st.lists(st.integers(-1, 5), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3),
    }
)


@st.composite
def sound_headers(draw: st.DrawFn) -> dict[str, Any]:
    end, header = 0, {}
    for name in draw(st.lists(st.text(max_size=5), unique=True, max_size=4)):
        dtype, shape = draw(st.sampled_from([*BYTES_OF_TYPE])), draw(st.lists(st.integers(0, 5), max_size=3))
        start, end = end, end + prod(shape) * BYTES_OF_TYPE[dtype]
        header[name] = entry(dtype, shape, (start, end))
    return header


def read_ours(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        file = SafetensorsFile(path)
    except BadModelFile:
        return None
    return {name: (place.type, place.shape, content_of(file, place).tobytes()) for name, place in file.places.items()}


def read_theirs(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        tensors = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return None
    return {name: (str(tensor["dtype"]), tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in tensors}


fuzzing = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzing
@given(header=st.dictionaries(st.text(max_size=3), tensor_entries, max_size=3), num_bytes=st.integers(0, 60))
def test_whatever_a_header_says_is_taken_as_the_formats_own_library_takes_it(
    path: Path, header: dict[str, Any], num_bytes: int
) -> None:
    write(path, header, num_bytes)
    assert read_ours(path) == read_theirs(path)


@fuzzing
@given(header=sound_headers())
def test_every_sound_header_is_read(path: Path, header: dict[str, Any]) -> None:
    write(path, header, max((fields["data_offsets"][1] for fields in header.values()), default=0))
    ours = read_ours(path)
    assert ours is not None
    assert ours == read_theirs(path)


@fuzzing
@given(header=sound_headers(), position=st.integers(0, 1 << 16), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_byte_changed_or_the_end_cut_off_is_an_error_or_another_model_never_a_crash(
    path: Path, header: dict[str, Any], position: int, value: int, cut: int
) -> None:
    write(path, header, max((fields["data_offsets"][1] for fields in header.values()), default=0))
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content[: len(content) - cut])
    ours = read_ours(path)
    assert ours is None or ours == read_theirs(path)


@fuzzing
@given(content=st.binary(max_size=200))
def test_any_bytes_are_an_error_or_what_the_library_reads(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    ours = read_ours(path)
    assert ours is None or ours == read_theirs(path)
