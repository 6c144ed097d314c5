"""Reads the header of a GGUF file: its keys, and where its tensors lie.

Owns the layout of versions 2 and 3, which differ in the byte order they allow only. The file is not trusted: each length is
compared with what is left of the file and with bounds far above any real model before it is used, so that a damaged or
hostile file costs an error and little memory. Knows no key's meaning but the alignment's; `gguf` is its only caller.
Source: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelstore.block_types import SUPPORTED_TYPES, bytes_of_row, values_of_block
from modelstore.mapped_file import TensorPlace, neighbours
from shoal.errors import BadModelFile, UnsupportedModel

Value = str | int | float | bool | list[str] | NDArray[np.generic]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Bounds far above any real model, so that a file of some gigabytes cannot take as much memory as Python objects.
MAX_NAME_BYTES = 256
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 21
MAX_HEADER_BYTES = 256 << 20
# Source: ggml.h, enum ggml_type. Those that are not supported are here to be named in an error.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
# Source: gguf.md, enum gguf_metadata_value_type.
_STRUCT_OF_SCALAR = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Magic, version and two counts.
MIN_FILE_BYTES = 24
_LENGTH = struct.Struct("<Q")
# A key with its shortest value, and the shortest tensor description: what a count must at least take of the file.
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class Header:
    keys: dict[str, Value]
    places: tuple[TensorPlace, ...]


def read_header(mapped: mmap.mmap, file_name: str) -> Header:
    """Read and check a mapped file's header.

    file_name: what errors call the file. Raises BadModelFile for what is damaged and UnsupportedModel for a version or
    type of tensor that cannot be read, naming the key or tensor.
    """
    cursor = _Cursor(mapped, file_name)
    num_tensors, num_keys = _read_counts(cursor)
    keys = _read_keys(cursor, num_keys)
    return Header(keys, _read_places(cursor, num_tensors, _alignment(keys)))


class _Cursor:
    """A reading position in the header that never passes the end of the file."""

    def __init__(self, mapped: mmap.mmap, file_name: str) -> None:
        self._map = mapped
        self._file_name = file_name
        self._num_strings = 0
        self.position = 0
        self.size = len(mapped)

    def fault(self, message: str) -> BadModelFile:
        return BadModelFile(f"{self._file_name}: {message}")

    def take(self, num_bytes: int, what: str) -> bytes:
        self.require(num_bytes, what)
        start = self.position
        self.position += num_bytes
        return self._map[start : self.position]

    def require(self, num_bytes: int, what: str) -> None:
        """Raise BadModelFile unless so many bytes are left."""
        if num_bytes > self.size - self.position:
            raise self.fault(
                f"{what} wants {num_bytes} bytes at byte {self.position}, the file has {self.size}: "
                "it is truncated or damaged, get it again"
            )
        if num_bytes > MAX_HEADER_BYTES - self.position:
            raise self.fault(f"{what} wants {num_bytes} bytes; a header has at most {MAX_HEADER_BYTES}")

    def scalar(self, code: str, what: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]
        return value

    def number(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def name(self, what: str) -> str:
        """A name short and plain enough to be shown."""
        length = self.number("Q", what)
        if length > MAX_NAME_BYTES:
            raise self.fault(f"{what} is {length} bytes long, at most {MAX_NAME_BYTES} are allowed")
        try:
            name = self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not UTF-8") from error
        if not name.isprintable():
            raise self.fault(f"{what} has characters that cannot be shown: {name!r}")
        return name

    def strings(self, count: int, what: str) -> list[str]:
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise self.fault(f"{what} makes {self._num_strings} strings in all, at most {MAX_STRINGS} are allowed")
        found = []
        mapped, limit, length_at = self._map, min(self.size, MAX_HEADER_BYTES), _LENGTH.unpack_from
        position = self.position
        try:
            # A loop of few calls: there are hundreds of thousands of tokens.
            for _ in range(count):
                self.position, start = position, position + _LENGTH.size
                if start > limit:
                    self.require(_LENGTH.size, what)
                position = start + length_at(mapped, start - _LENGTH.size)[0]
                if position > limit:
                    self.position = start
                    self.require(position - start, what)
                found.append(str(mapped[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not UTF-8") from error
        self.position = position
        return found


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of keys."""
    magic = cursor.take(4, "the magic number")
    if magic != MAGIC:
        raise cursor.fault(f"this is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        is_big_endian = struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS
        what = "big-endian" if is_big_endian else f"version {version}"
        raise UnsupportedModel(f"this GGUF file is {what}; little-endian versions 2 and 3 can be read")
    num_tensors, num_keys = cursor.number("Q", "the tensor count"), cursor.number("Q", "the key count")
    for count, most, least_bytes, what in (
        (num_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors"),
        (num_keys, MAX_KEYS, _MIN_KEY_BYTES, "keys"),
    ):
        cursor.require(count * least_bytes, f"a header of {count} {what}")
        if count > most:
            raise cursor.fault(f"a header of {count} {what} is too much, at most {most} are allowed")
    return num_tensors, num_keys


def _read_keys(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    keys: dict[str, Value] = {}
    for index in range(num_keys):
        key = cursor.name(f"the name of key {index}")
        if key in keys:
            raise cursor.fault(f"key {key} is given twice")
        keys[key] = _read_value(cursor, cursor.number("I", f"the type of key {key}"), f"key {key}")
    return keys


def _read_value(cursor: _Cursor, kind: int, what: str) -> Value:
    if kind == _STRING:
        return cursor.strings(1, what)[0]
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind not in _STRUCT_OF_SCALAR:
        raise cursor.fault(f"{what} has the unknown value type {kind}")
    return cursor.scalar(_STRUCT_OF_SCALAR[kind], what)


def _read_array(cursor: _Cursor, what: str) -> Value:
    kind, count = cursor.number("I", what), cursor.number("Q", what)
    if kind == _STRING:
        cursor.require(_LENGTH.size * count, f"{what}, an array of {count} strings,")
        return cursor.strings(count, what)
    if kind not in _STRUCT_OF_SCALAR:
        # Arrays of arrays among them: no model has any.
        raise cursor.fault(f"{what} is an array of value type {kind}, which is not supported")
    dtype = np.dtype("<" + _STRUCT_OF_SCALAR[kind])
    data = cursor.take(count * dtype.itemsize, f"{what}, an array of {count} values,")
    values: NDArray[np.generic] = np.frombuffer(data, dtype)
    return values


def _alignment(keys: dict[str, Value]) -> int:
    alignment = keys.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise BadModelFile(f"key general.alignment is {alignment}; it must be a power of two from 8 to 2^20")
    return alignment


def _read_places(cursor: _Cursor, num_tensors: int, alignment: int) -> tuple[TensorPlace, ...]:
    """Read where the tensors lie; offsets in the result count from the start of the file."""
    relative: dict[str, TensorPlace] = {}
    for index in range(num_tensors):
        place = _read_place(cursor, index, alignment)
        if place.name in relative:
            raise cursor.fault(f"tensor {place.name} is given twice")
        relative[place.name] = place
    data_start = -(-cursor.position // alignment) * alignment
    places = tuple(
        TensorPlace(place.name, place.type, place.shape, data_start + place.offset, place.num_bytes)
        for place in relative.values()
    )
    _require_inside(cursor, places)
    return places


def _read_place(cursor: _Cursor, index: int, alignment: int) -> TensorPlace:
    name = cursor.name(f"the name of tensor {index}")
    what = f"tensor {name}"
    num_dims = cursor.number("I", what)
    if not 1 <= num_dims <= 4:
        raise cursor.fault(f"{what} has {num_dims} dimensions; 1 to 4 are possible")
    shape = tuple(cursor.number("Q", what) for _ in range(num_dims))[::-1]
    type_id, offset = cursor.number("I", what), cursor.number("Q", what)
    type_name = TYPE_NAMES.get(type_id, f"number {type_id}")
    if type_name not in SUPPORTED_TYPES:
        raise UnsupportedModel(f"{what} is of type {type_name}; supported are {', '.join(SUPPORTED_TYPES)}")
    if offset % alignment:
        raise cursor.fault(f"{what} starts at {offset}, which is not a multiple of {alignment}")
    if num_dims > 2:
        raise UnsupportedModel(f"{what} has {num_dims} dimensions; a decoder has vectors and matrices only")
    block = values_of_block(type_name)
    if 0 in shape or shape[-1] % block:
        raise cursor.fault(f"{what} has shape {shape}; rows of {type_name} must be a multiple of {block}")
    num_rows = shape[0] if num_dims == 2 else 1
    return TensorPlace(name, type_name, shape, offset, num_rows * bytes_of_row(type_name, shape[-1]))


def _require_inside(cursor: _Cursor, places: tuple[TensorPlace, ...]) -> None:
    """Raise BadModelFile unless the tensors lie within the file and apart from each other."""
    for before, place in neighbours(places):
        end = place.offset + place.num_bytes
        if end > cursor.size:
            raise cursor.fault(
                f"tensor {place.name} ends at byte {end}, the file has {cursor.size}: "
                "it is truncated or damaged, get it again"
            )
        if before is not None and before.offset + before.num_bytes > place.offset:
            raise cursor.fault(f"tensors {before.name} and {place.name} overlap")
