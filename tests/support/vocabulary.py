"""A small byte-level vocabulary, as a model file would state it: every byte, some merges, ChatML's control tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelstore.manifest import TokenizerData
from tests.support.bpe_reference import BYTE_CHARACTERS

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED_TOKENS = ("<think>",)
MERGES = (
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "l d",
    "Ġwor ld",
    "Ġ Ġ",
    "1 2",
    "Ċ Ċ",
    "u s",
    "e r",
    "Ã ©",
)
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


def make_tokenizer_data(**changes: Any) -> TokenizerData:
    """Ids in order: control tokens, bytes by value, results of the merges, user-defined tokens."""
    merged = tuple(merge.replace(" ", "") for merge in MERGES)
    normal = (*BYTE_CHARACTERS, *merged)
    data = TokenizerData(
        kind="gpt2",
        pre="smollm",
        tokens=(*CONTROL_TOKENS, *normal, *USER_DEFINED_TOKENS),
        token_types=(CONTROL,) * len(CONTROL_TOKENS)
        + (NORMAL,) * len(normal)
        + (USER_DEFINED,) * len(USER_DEFINED_TOKENS),
        merges=MERGES,
        bos_id=1,
        eos_id=2,
        add_bos=False,
        chat_template=CHATML,
    )
    return replace(data, **changes)


def byte_id(byte: int) -> int:
    """The id of the token of one byte."""
    return len(CONTROL_TOKENS) + byte
