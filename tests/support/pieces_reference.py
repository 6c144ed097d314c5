"""A small SentencePiece vocabulary, and SentencePiece's BPE written again, slowly and without a library.

Source: Sennrich et al. 2016, arXiv:1508.07909, with the rule of SentencePiece that of all neighbours the pair that makes the
best token is merged first, the leftmost of several.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from modelstore.manifest import TokenizerData

SPACE = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED, BYTE, NORMAL = 2, 3, 4, 6, 1
CONTROLS = ("<unk>", "<s>", "</s>", "<turn>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
USER_DEFINED_TOKENS = ("<tag>", "  ", "\n\n")
# The best first; all are merged of pairs that come later, down to characters.
MERGED = (
    f"{SPACE}t", "he", "ll", "hell", "hello", f"{SPACE}hello", f"{SPACE}the", f"{SPACE}w", "or", f"{SPACE}wor", "ld",
    f"{SPACE}world", "aa", "aaa", "aaaa", f"{SPACE}{SPACE}{SPACE}", "é!",
)  # fmt: skip
CHARACTERS = (SPACE, *"thelowrda!é中\n")
TEMPLATE = (
    "{% for message in messages %}{{ '<turn>' + message['role'] + '\n' + message['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)


def make_pieces(*, has_user_defined: bool = True, **changes: Any) -> TokenizerData:
    """Ids in order: control tokens, bytes by value, user-defined tokens, merged pieces, characters."""
    user_defined = USER_DEFINED_TOKENS if has_user_defined else ()
    normal = (*MERGED, *CHARACTERS)
    kinds = (UNKNOWN, CONTROL, CONTROL, CONTROL, *(BYTE,) * 256, *(USER_DEFINED,) * len(user_defined))
    num_special = len(kinds)
    data = TokenizerData(
        kind="llama",
        pre="default",
        tokens=(*CONTROLS, *BYTES, *user_defined, *normal),
        token_types=(*kinds, *(NORMAL,) * len(normal)),
        merges=(),
        bos_id=1,
        eos_id=2,
        add_bos=False,
        chat_template=TEMPLATE,
        scores=(*(0.0,) * num_special, *(-float(place) for place in range(len(normal)))),
        space_prefix="never",
    )
    return replace(data, **changes)


def encode(data: TokenizerData, text: str) -> list[int]:
    """The ids of text in which no token is spelt out."""
    normal = {
        token: (score, token_id)
        for token_id, (token, kind, score) in enumerate(zip(data.tokens, data.token_types, data.scores, strict=True))
        if kind == NORMAL
    }
    parts = list(text.replace(" ", SPACE))
    while True:
        made = [(-normal[left + right][0], place) for place, (left, right) in _pairs(parts) if left + right in normal]
        if not made:
            break
        _, place = min(made)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [token_id for part in parts for token_id in ([normal[part][1]] if part in normal else _bytes(data, part))]


def _pairs(parts: Sequence[str]) -> list[tuple[int, tuple[str, str]]]:
    return list(enumerate(itertools.pairwise(parts)))


def _bytes(data: TokenizerData, part: str) -> list[int]:
    return [data.tokens.index(f"<0x{byte:02X}>") for byte in part.encode()]
