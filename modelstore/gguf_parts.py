"""Finds the files of a GGUF model, which may be split as `NAME-00001-of-00003.gguf`, and so on.

Decides which files belong to one model, given any of them: all must be there, lie in one folder, and say the same of
themselves. Knows nothing of what is in them beyond the keys `split.*`; `gguf` is its only caller.
Source: llama.cpp, llama_split_path and gguf-split.cpp.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from modelstore.architectures.fields import Fields
from modelstore.gguf_header import Header
from shoal.errors import BadModelFile

MAX_PARTS = 512
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def find_parts(path: Path) -> tuple[Path, ...]:
    """All files of the model of which this is one, in order; raises BadModelFile naming one that cannot be taken."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_PARTS:
        raise BadModelFile(
            f"{path.name} says that it is part {number} of {count}; of 1 to {MAX_PARTS} parts are possible"
        )
    parts = tuple(path.with_name(f"{match['stem']}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1))
    folders = {os.path.realpath(path.parent), os.path.dirname(os.path.realpath(path))}
    for part in parts:
        if not part.exists():
            raise BadModelFile(f"{part.name} is missing in {path.parent}: get all {count} parts into one folder")
        # A cache may keep all files elsewhere; a single one from elsewhere is none of this model.
        if os.path.dirname(os.path.realpath(part)) not in folders:
            raise BadModelFile(f"{part.name} is a link that leads out of {path.parent}: put the file itself there")
    return parts


def require_agreement(paths: Sequence[Path], headers: Sequence[Header]) -> None:
    """Raise BadModelFile unless these files are all parts of one model, in order."""
    names = set[str]()
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        _require_place(path, header, index, len(paths))
        if index:
            _require_same_keys(path, header, paths[0], headers[0])
        for place in header.places:
            if place.name in names:
                raise BadModelFile(f"tensor {place.name} is given twice: {path.name} has it too")
            names.add(place.name)
    said = Fields(headers[0].keys).find("split.tensors.count", int, len(names))
    if said != len(names):
        raise BadModelFile(
            f"key split.tensors.count is {said}, but there are {len(names)} tensors: get the files again"
        )


def _require_place(path: Path, header: Header, index: int, count: int) -> None:
    """Raise BadModelFile unless the file says that it is the part that its name says it is."""
    fields = Fields(header.keys, where=f"{path.name}: key")
    said = fields.find("split.count", int, 0)
    if count == 1 and said not in (0, 1):
        raise BadModelFile(f"{path.name}: key split.count is {said}: parts are found by names as X-00001-of-00003.gguf")
    if count > 1 and said != count:
        raise BadModelFile(f"{path.name}: key split.count is {said}, by the name there are {count} parts")
    number = fields.find("split.no", int, 0)
    if number != index:
        raise BadModelFile(f"{path.name}: key split.no is {number}, by the name it is part {index}, counted from 0")


def _require_same_keys(path: Path, header: Header, first_path: Path, first: Header) -> None:
    """Raise BadModelFile for a plain value that two parts have differently; of arrays the first part's are used."""
    for key, value in header.keys.items():
        other = first.keys.get(key)
        if key != "split.no" and isinstance(value, (str, int, float)) and other is not None:
            is_plain = isinstance(other, (str, int, float))
            if not is_plain or value != other:
                raise BadModelFile(f"{path.name} and {first_path.name} have another {key}: they are not of one model")
