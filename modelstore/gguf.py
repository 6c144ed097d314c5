"""Reads GGUF files: a llama model's header, tokenizer and tensors, checked before anything is believed.

Owns the file format; `gguf_llama` says what a file must contain. The file is not trusted: each length is compared with
what is left of the file before it is used, so that a damaged or hostile file costs an error and no memory. Tensors are
views on the mapped file. Knows nothing of packing or storing; the store calls it.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from modelstore.gguf_llama import read_config, read_tokenizer, require_llama, require_shapes
from modelstore.manifest import ModelConfig, TokenizerData
from shoal.errors import BadModelFile, UnsupportedModel

Scalar = str | int | float | bool
Value = Scalar | list[str] | NDArray[np.generic]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_NAME_BYTES = 4096
# Values a block and bytes a block, of the types that can be packed.
BLOCK_OF_TYPE = {"F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)}
# Source: ggml.h, enum ggml_type. Those that are not in BLOCK_OF_TYPE are here to be named in an error.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
# Source: gguf.md, enum gguf_metadata_value_type.
_STRUCT_OF_SCALAR = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# A key with its shortest value, and the shortest tensor description: what a count must at least take of the file.
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True, eq=False)
class SourceTensor:
    """A tensor as a file holds it. raw: uint8 [N, bytes of a row]; a vector is one row. shape: (N, K) or (N,)."""

    name: str
    type: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile:
    """A validated, mapped GGUF file of architecture llama.

    Raises BadModelFile for what is damaged and UnsupportedModel for what is sound but cannot be served, naming the key
    or tensor. The arrays handed out are valid for as long as somebody holds them, close() or not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        cursor = _Cursor(self._map, path)
        num_tensors, num_keys = _read_counts(cursor)
        keys = _read_keys(cursor, num_keys)
        require_llama(keys)
        places = _read_places(cursor, num_tensors, _alignment(keys))
        self.config: ModelConfig = read_config(keys, {place.name: place.shape for place in places})
        require_shapes(self.config, {place.name: place.shape for place in places})
        self.tokenizer: TokenizerData = read_tokenizer(keys, self.config.vocab_size)
        license_name = keys.get("general.license")
        self.license = license_name if isinstance(license_name, str) else ""
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.tensors = {place.name: self._view(place) for place in places}

    @property
    def quantization(self) -> str:
        """The type most of the weight bytes have."""
        weights = Counter[str]()
        for tensor in self.tensors.values():
            if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
                weights[tensor.type] += tensor.raw.nbytes
        return weights.most_common(1)[0][0]

    def release(self) -> None:
        """Let the system take back the memory of all that has been read so far; it can be read again."""
        # Of the whole mapping, since reading a page also maps its neighbours, which may lie in a tensor already done with.
        if sys.platform != "win32":
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Forget the tensors; the mapping ends when nobody holds an array of it."""
        self.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _view(self, place: _TensorPlace) -> SourceTensor:
        rows = place.shape[0] if len(place.shape) == 2 else 1
        raw = self._bytes[place.offset : place.offset + place.num_bytes].reshape(rows, -1)  # [N, bytes of a row]
        return SourceTensor(place.name, place.type, place.shape, raw)


class _Cursor:
    """A reading position in the header that never passes the end of the file."""

    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self._map = mapped
        self._path = path
        self.position = 0
        self.size = len(mapped)

    def take(self, num_bytes: int, what: str) -> bytes:
        self.require(num_bytes, what)
        start = self.position
        self.position += num_bytes
        return self._map[start : self.position]

    def require(self, num_bytes: int, what: str) -> None:
        """Raise BadModelFile unless so many bytes are left."""
        if num_bytes > self.size - self.position:
            raise BadModelFile(
                f"{self._path.name}: {what} wants {num_bytes} bytes at byte {self.position}, the file has {self.size}: "
                "it is truncated or damaged, get it again"
            )

    def number(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def string(self, what: str, max_bytes: int | None = None) -> str:
        length = self.number("Q", what)
        if max_bytes is not None and length > max_bytes:
            raise BadModelFile(f"{self._path.name}: {what} is {length} bytes long, at most {max_bytes} are allowed")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{self._path.name}: {what} is not UTF-8") from error

    def scalar(self, code: str, what: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]
        return value


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise BadModelFile(f"{path} has {size} bytes, too few for a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror}") from error


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of keys."""
    magic = cursor.take(4, "the magic number")
    if magic != MAGIC:
        raise BadModelFile(f"this is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        is_big_endian = struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS
        what = "big-endian" if is_big_endian else f"version {version}"
        raise UnsupportedModel(f"this GGUF file is {what}; little-endian versions 2 and 3 can be read")
    num_tensors, num_keys = cursor.number("Q", "the tensor count"), cursor.number("Q", "the key count")
    cursor.require(num_tensors * _MIN_TENSOR_BYTES, f"a header of {num_tensors} tensors")
    cursor.require(num_keys * _MIN_KEY_BYTES, f"a header of {num_keys} keys")
    return num_tensors, num_keys


def _read_keys(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    keys: dict[str, Value] = {}
    for index in range(num_keys):
        key = cursor.string(f"the name of key {index}", MAX_NAME_BYTES)
        if key in keys:
            raise BadModelFile(f"key {key} is given twice")
        keys[key] = _read_value(cursor, cursor.number("I", f"the type of key {key}"), f"key {key}")
    return keys


def _read_value(cursor: _Cursor, kind: int, what: str) -> Value:
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind not in _STRUCT_OF_SCALAR:
        raise BadModelFile(f"{what} has the unknown value type {kind}")
    return cursor.scalar(_STRUCT_OF_SCALAR[kind], what)


def _read_array(cursor: _Cursor, what: str) -> Value:
    kind, count = cursor.number("I", what), cursor.number("Q", what)
    if kind == _STRING:
        cursor.require(8 * count, f"{what}, an array of {count} strings,")
        return [cursor.string(what) for _ in range(count)]
    if kind not in _STRUCT_OF_SCALAR:
        raise BadModelFile(f"{what} is an array of value type {kind}, which is not supported")
    dtype = np.dtype("<" + _STRUCT_OF_SCALAR[kind])
    data = cursor.take(count * dtype.itemsize, f"{what}, an array of {count} values,")
    values: NDArray[np.generic] = np.frombuffer(data, dtype)
    return values


def _alignment(keys: dict[str, Value]) -> int:
    alignment = keys.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise BadModelFile(f"key general.alignment is {alignment}; it must be a power of two from 8 to 2^20")
    return alignment


def _read_places(cursor: _Cursor, num_tensors: int, alignment: int) -> list[_TensorPlace]:
    """Read where the tensors lie; offsets in the result count from the start of the file."""
    relative = [_read_place(cursor, index, alignment) for index in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    places = [
        _TensorPlace(place.name, place.type, place.shape, data_start + place.offset, place.num_bytes)
        for place in relative
    ]
    for name, count in Counter(place.name for place in places).items():
        if count > 1:
            raise BadModelFile(f"tensor {name} is given twice")
    _require_inside(places, cursor.size)
    return places


def _read_place(cursor: _Cursor, index: int, alignment: int) -> _TensorPlace:
    name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {name}"
    num_dims = cursor.number("I", what)
    if not 1 <= num_dims <= 4:
        raise BadModelFile(f"{what} has {num_dims} dimensions; 1 to 4 are possible")
    shape = tuple(cursor.number("Q", what) for _ in range(num_dims))[::-1]
    type_id, offset = cursor.number("I", what), cursor.number("Q", what)
    type_name = TYPE_NAMES.get(type_id, f"number {type_id}")
    if type_name not in BLOCK_OF_TYPE:
        raise UnsupportedModel(f"{what} is of type {type_name}; supported are {', '.join(BLOCK_OF_TYPE)}")
    block, block_bytes = BLOCK_OF_TYPE[type_name]
    if offset % alignment:
        raise BadModelFile(f"{what} starts at {offset}, which is not a multiple of {alignment}")
    if num_dims > 2:
        raise UnsupportedModel(f"{what} has {num_dims} dimensions; a plain llama decoder has vectors and matrices only")
    if 0 in shape or shape[-1] % block:
        raise BadModelFile(f"{what} has shape {shape}; rows of {type_name} must be a multiple of {block}")
    num_values = shape[0] * (shape[1] if num_dims == 2 else 1)
    return _TensorPlace(name, type_name, shape, offset, num_values // block * block_bytes)


def _require_inside(places: list[_TensorPlace], file_size: int) -> None:
    """Raise BadModelFile unless the tensors lie within the file and apart from each other."""
    for before, place in _neighbours(places):
        end = place.offset + place.num_bytes
        if end > file_size:
            raise BadModelFile(
                f"tensor {place.name} ends at byte {end}, the file has {file_size}: "
                "it is truncated or damaged, get it again"
            )
        if before is not None and before.offset + before.num_bytes > place.offset:
            raise BadModelFile(f"tensors {before.name} and {place.name} overlap")


def _neighbours(places: list[_TensorPlace]) -> Iterator[tuple[_TensorPlace | None, _TensorPlace]]:
    ordered = sorted(places, key=lambda place: place.offset)
    return zip([None, *ordered], ordered, strict=False)
