"""A tokenizer as its files have it, before it is known how many rows the embedding has.

Plain data with the few rules all files share: what an added token is, and which of them are control tokens. Filled by
`tokenizer_json` and `sentencepiece_file`, made a TokenizerData by `tokenizer_hf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelstore.manifest import Splitting
from modelstore.tokenizer_rules import CONTROL, USER_DEFINED
from shoal.errors import BadModelFile, UnsupportedModel

# Source: llama.cpp's converter; some files do not call these special.
_CONTROL_NAMES = frozenset({"<pad>", "<mask>", "<2mass>", "[@BOS@]"})
_CONTROL_EDGES = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that text is searched for before it is cut. strips: which white space beside it vanishes."""

    id: int
    content: str
    is_special: bool
    strips_left: bool = False
    strips_right: bool = False

    @property
    def kind(self) -> int:
        looks_special = self.content in _CONTROL_NAMES or any(
            self.content.startswith(start) and self.content.endswith(end) for start, end in _CONTROL_EDGES
        )
        return CONTROL if self.is_special or looks_special else USER_DEFINED


@dataclass(slots=True)
class TokenizerParts:
    """What one file says. tokens, types, scores by id; a type that is not there is normal.

    adds_bos, adds_eos: what is put around a text, as far as the file says so.
    """

    kind: str
    tokens: dict[int, str]
    types: dict[int, int] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    merges: tuple[str, ...] = ()
    pre: str = "default"
    splitting: Splitting | None = None
    space_prefix: str = "never"
    has_double_prefix: bool = True
    added: list[AddedToken] = field(default_factory=list)
    adds_bos: bool | None = None
    adds_eos: bool | None = None


def parse_added(fields: Any, token_id: Any, where: str) -> AddedToken:
    """Read an added token; raises BadModelFile, or UnsupportedModel for one that only whole words become."""
    if not isinstance(fields, Mapping) or type(token_id) is not int or not isinstance(fields.get("content"), str):
        raise BadModelFile(f"{where}: an added token has no whole number as id, or no text: get the file again")
    content = fields["content"]
    flags = {name: fields.get(name, False) for name in ("special", "lstrip", "rstrip", "single_word")}
    if not content or not all(isinstance(flag, bool) for flag in flags.values()):
        raise BadModelFile(f"{where}: added token {token_id} ({content[:40]!r}) is malformed: get the file again")
    if flags["single_word"]:
        raise UnsupportedModel(f"{where}: added token {content[:40]!r} has single_word, which is not supported")
    return AddedToken(token_id, content, flags["special"], flags["lstrip"], flags["rstrip"])
