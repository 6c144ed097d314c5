"""Reads safetensors files: which tensors there are, and their bytes as views on the mapped file.

Owns the file format and nothing else: names are handed out as they stand in the file, and types are not judged. The file
is not trusted: what its header says is compared with the file before it is believed, so that a damaged or hostile one
costs an error and little memory. Called by `huggingface`.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelstore.mapped_file import TensorPlace, map_file, neighbours
from modelstore.strict_json import parse_object
from shoal.errors import BadModelFile

# Ten times what models of a thousand layers take. The format allows 100 MB, which would cost a GB as Python objects.
MAX_HEADER_BYTES = 8 << 20
MAX_DIMENSIONS = 8
METADATA = "__metadata__"
# Source: the format's own reader, safetensors/src/tensor.rs, enum Dtype. Those of less than a byte are counted in bits.
BITS_OF_TYPE = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_LENGTH_BYTES = 8


class SafetensorsFile:
    """A mapped safetensors file whose header agrees with it. Raises BadModelFile naming the tensor at fault.

    Views on the content are valid for as long as somebody holds them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapped = map_file(path, _LENGTH_BYTES, "a safetensors file")
        self.places: Mapping[str, TensorPlace] = {place.name: place for place in _read_places(self.mapped, path.name)}
        self.content: NDArray[np.uint8] = np.frombuffer(self.mapped, np.uint8)


def _read_places(mapped: mmap.mmap, file_name: str) -> list[TensorPlace]:
    """Read the header; raises BadModelFile unless its tensors fill the rest of the file, without gaps or overlap."""
    length, room = int.from_bytes(mapped[:_LENGTH_BYTES], "little"), len(mapped) - _LENGTH_BYTES
    if length > room:
        # What people get who clone a repository without its large files.
        is_pointer = mapped[:_LENGTH_BYTES] == b"version "
        problem = "it is a pointer of Git LFS" if is_pointer else "it is truncated or no safetensors file"
        raise BadModelFile(
            f"{file_name}: the header wants {length} bytes, the file has {room}: {problem}, get it again"
        )
    if length > MAX_HEADER_BYTES:
        raise BadModelFile(f"{file_name}: the header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
    data_start = _LENGTH_BYTES + length
    header = parse_object(mapped[_LENGTH_BYTES:data_start], f"the header of {file_name}")
    places = [
        _read_place(f"tensor {name} of {file_name}", name, entry, data_start)
        for name, entry in header.items()
        if name != METADATA
    ]
    _require_filled(places, data_start, len(mapped), file_name)
    return places


def _read_place(what: str, name: str, entry: object, data_start: int) -> TensorPlace:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadModelFile(f"{what} is described by other than dtype, shape and data_offsets: get the file again")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in BITS_OF_TYPE:
        raise BadModelFile(f"{what} is of the unknown type {kind!r}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise BadModelFile(f"{what} has the shape {str(shape)[:100]}; it must be at most {MAX_DIMENSIONS} counts")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadModelFile(f"{what} has data_offsets {str(offsets)[:100]}; they must be a start and an end")
    start, end = offsets
    num_bits = prod(shape) * BITS_OF_TYPE[kind]
    if num_bits != 8 * (end - start):
        raise BadModelFile(f"{what} has shape {tuple(shape)} of {kind}, {num_bits // 8} bytes, in {end - start} bytes")
    return TensorPlace(name, kind, tuple(shape), data_start + start, end - start)


def _are_counts(value: object) -> bool:
    """Whether this is a list of whole numbers that a file's size or a tensor's side can be."""
    if not isinstance(value, list):
        return False
    return all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _require_filled(places: list[TensorPlace], data_start: int, file_size: int, file_name: str) -> None:
    end = data_start
    for before, place in neighbours(places):
        if place.offset + place.num_bytes > file_size:
            raise BadModelFile(
                f"tensor {place.name} ends at byte {place.offset + place.num_bytes} of {file_name}, which has {file_size}: "
                "it is truncated, get it again"
            )
        if before is not None and place.offset < end:
            raise BadModelFile(f"tensors {before.name} and {place.name} of {file_name} overlap")
        if place.offset > end:
            raise BadModelFile(f"{place.offset - end} bytes before tensor {place.name} of {file_name} belong to none")
        end = place.offset + place.num_bytes
    if end != file_size:
        raise BadModelFile(f"the last {file_size - end} bytes of {file_name} belong to no tensor: get the file again")
