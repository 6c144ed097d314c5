"""Parses JSON that others wrote: one object, no key twice, no number out of the range of what follows, no half characters.

Knows nothing of what the objects mean. Called by the readers of Hugging Face files.
"""

from __future__ import annotations

import json
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from shoal.errors import BadModelFile

# More than a 64-bit number has: tokenizers state 10^30 for "no limit". What a number is used for bounds it further.
MAX_DIGITS = 40
# May be half of a pair, or alone, which no text can be: Python takes both.
_HALF_A_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Parse an object; raises BadModelFile saying what is wrong with `what` and, of keys given twice, which."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise BadModelFile(f"key {twice} is given twice in {what}")
        return fields

    def refuse(number: str) -> float:
        raise BadModelFile(f"{what} has {number[:100]} where a number should be")

    def bounded(digits: str) -> int:
        return int(digits) if len(digits) <= MAX_DIGITS else int(refuse(digits))

    try:
        content = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse, parse_int=bounded)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadModelFile(f"{what} is no JSON ({str(error)[:100]}): get the file again") from error
    if not isinstance(content, dict):
        raise BadModelFile(f"{what} is no JSON object: get the file again")
    if _HALF_A_CHARACTER.search(text) and not _is_text(content):
        raise BadModelFile(f"{what} holds half a character (a lone surrogate): get the file again")
    return content


def _is_text(content: dict[str, Any]) -> bool:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a whole file; raises BadModelFile for one that cannot be read, is no file, or is longer than max_bytes."""
    try:
        # Opening a pipe would wait for somebody who writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadModelFile(f"{path} is no file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise BadModelFile(f"{path.name} has more than {max_bytes} bytes: it is not what models come with")
    return content
