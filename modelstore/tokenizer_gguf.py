"""What the keys of a GGUF file say of its tokenizer.

Decides what a key that is not there means. Source: llama.cpp's vocabulary loader, which files are written for. Pure: gets
keys already read by `gguf`, which is its only caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelstore.architectures.fields import Fields
from modelstore.manifest import TokenizerData
from modelstore.pre_tokenizers import BEGIN_TOKEN_FAMILIES
from modelstore.tokenizer_rules import (
    CONTROL,
    SENTENCE_PIECES,
    UNKNOWN,
    USER_DEFINED,
    require_kind,
    require_sound,
)
from shoal.errors import BadModelFile

PREFIX = "tokenizer.ggml."
_KEY_OF_FIELD = {
    "token_types": "token_type",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "end_ids": "eot_token_id or eom_token_id",
}
# Phi-3's tokenizer takes white space behind these as its own text; its GGUF files do not say which it takes along.
_PHI3_KEEPERS = ("<unk>", "<s>", "<|endoftext|>")


def read_tokenizer(keys: Mapping[str, Any], vocab_size: int) -> TokenizerData:
    """Build the tokenizer data; raises UnsupportedModel for what is not supported by name, BadModelFile for a bad key."""
    fields = Fields(keys, prefix=PREFIX)
    kind = fields.get("model", str)
    require_kind(kind)
    tokens = fields.get("tokens", list)
    token_types = _numbers(keys, "token_type", "iu") if "token_type" in fields else [1] * len(tokens)
    for key, count in (("tokens", len(tokens)), ("token_type", len(token_types))):
        if count != vocab_size:
            raise BadModelFile(f"{fields.label(key)} has {count} entries, token_embd.weight has {vocab_size} rows")
    is_sentence_pieces = kind == SENTENCE_PIECES
    pre = fields.find("pre", str, "default")
    ends = ("eot_token_id", "eom_token_id")
    data = TokenizerData(
        kind=kind,
        pre=pre,
        tokens=tuple(tokens),
        token_types=tuple(token_types),
        merges=() if is_sentence_pieces else tuple(fields.get("merges", list)),
        bos_id=_token_id(fields, "bos_token_id", vocab_size),
        eos_id=_token_id(fields, "eos_token_id", vocab_size),
        add_bos=fields.find("add_bos_token", bool, is_sentence_pieces or pre in BEGIN_TOKEN_FAMILIES),
        chat_template=Fields(keys).find("tokenizer.chat_template", str, "") or None,
        add_eos=fields.find("add_eos_token", bool, False),
        scores=tuple(_numbers(keys, "scores", "f")) if is_sentence_pieces else (),
        end_ids=tuple(token_id for end in ends if (token_id := _token_id(fields, end, vocab_size)) is not None),
        space_prefix="each" if is_sentence_pieces and fields.find("add_space_prefix", bool, True) else "never",
        rstrip_ids=_phi3_strippers(tokens, token_types) if is_sentence_pieces and _is_phi3(keys) else (),
    )
    require_sound(data, _label)
    return data


def _label(field: str) -> str:
    return (
        "key tokenizer.chat_template" if field == "chat_template" else f"key {PREFIX}{_KEY_OF_FIELD.get(field, field)}"
    )


def _numbers(keys: Mapping[str, Any], name: str, dtype_kinds: str) -> list[Any]:
    values = keys.get(PREFIX + name)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in dtype_kinds:
        what = "numbers" if dtype_kinds == "f" else "integers"
        raise BadModelFile(f"key {PREFIX}{name} is not an array of {what}")
    numbers: list[Any] = values.tolist()
    return numbers


def _token_id(fields: Fields, name: str, vocab_size: int) -> int | None:
    if name not in fields:
        return None
    value = fields.get(name, int)
    if not 0 <= value < vocab_size:
        raise BadModelFile(f"{fields.label(name)} is {value}, outside the vocabulary of {vocab_size}")
    return value


def _is_phi3(keys: Mapping[str, Any]) -> bool:
    name = str(keys.get("general.name", "")).lower()
    return keys.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _phi3_strippers(tokens: Sequence[str], token_types: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, token_types, strict=True))
        if token not in _PHI3_KEEPERS and (kind in (UNKNOWN, CONTROL, USER_DEFINED) or token == "</s>")
    )
