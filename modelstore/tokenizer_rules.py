"""What holds of every tokenizer that is taken in, whatever file it came from, and what the kinds of tokens are.

Decides what is refused as damaged before it is stored, naming the key or file it is from. Called by the readers of
tokenizers; knows none of their formats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from modelstore.manifest import TokenizerData
from modelstore.pre_tokenizers import PRE_TOKENIZERS
from shoal.errors import BadModelFile, UnsupportedModel

BYTE_LEVEL, SENTENCE_PIECES = "gpt2", "llama"
KINDS = (BYTE_LEVEL, SENTENCE_PIECES)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_KNOWN_TYPES = frozenset(range(BYTE + 1))
# SentencePiece writes a space so.
SPACE_MARK = "\u2581"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

# Far more than any token of a model has; longer ones would make the length checks of prompts worthless.
MAX_TOKEN_BYTES = 4096
MAX_TEMPLATE_BYTES = 1 << 20

_CHARACTER_CLASS = re.compile(r"\\[pP]\{\^?(\w+)\}")
_KNOWN_CLASSES = (
    "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf Co Cn "
    "Han Hiragana Katakana Hangul Latin Greek Cyrillic Arabic Hebrew Thai Devanagari"
)

Label = Callable[[str], str]


def require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UnsupportedModel(
            f"tokenizer {kind} is not supported; supported are gpt2 (byte-level BPE) and llama (SentencePiece)"
        )


def require_sound(data: TokenizerData, label: Label) -> None:
    """Raise BadModelFile for what makes no sense, UnsupportedModel for what cannot be done; label: what to call a field."""
    require_kind(data.kind)
    if len(data.token_types) != len(data.tokens):
        raise BadModelFile(f"{label('token_types')}: {len(data.token_types)} for {len(data.tokens)} tokens")
    if not set(data.token_types) <= _KNOWN_TYPES:
        raise BadModelFile(f"{label('token_types')}: there are others than 0 to {BYTE}")
    _require_ids(data, label)
    _require_texts(data, label)
    if data.kind == BYTE_LEVEL:
        require_splitting(data)
        for _ in parsed_merges(data.merges, plain_tokens(data), label("merges")):
            pass
    else:
        _require_scores(data, label)
    if len((data.chat_template or "").encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise BadModelFile(f"{label('chat_template')} has more than {MAX_TEMPLATE_BYTES} bytes")


def require_splitting(data: TokenizerData) -> None:
    """Raise UnsupportedModel for a splitting that is not known, or whose patterns have what is not known to be right."""
    if data.splitting is None and data.pre not in PRE_TOKENIZERS:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModel(f"pre-tokenizer {data.pre!r} is not supported; supported are {supported}")
    for pattern in data.splitting.patterns if data.splitting else ():
        # Python's expressions are Oniguruma's but for classes of characters.
        names = set(_CHARACTER_CLASS.findall(pattern))
        try:
            re.compile(_CHARACTER_CLASS.sub(r"\\w", pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise UnsupportedModel(f"pre-tokenizer pattern {pattern[:100]!r} is not supported: {error}") from error
        if unknown := sorted(names - set(_KNOWN_CLASSES.split())):
            raise UnsupportedModel(f"pre-tokenizer pattern {pattern[:100]!r} is not supported: it has {unknown[0]}")


def control_ids(data: TokenizerData) -> dict[str, int]:
    """The tokens that text has to be searched for, by what they are spelt like. Unknown ones are such, as in llama.cpp."""
    ends = {data.bos_id, data.eos_id, *data.end_ids}
    return {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(data.tokens, data.token_types, strict=True))
        if token and (kind in (UNKNOWN, CONTROL) or token_id in ends)
    }


def plain_tokens(data: TokenizerData) -> dict[str, int]:
    """The tokens that are not control tokens: what text becomes that was not searched for those."""
    special = control_ids(data)
    return {token: token_id for token_id, token in enumerate(data.tokens) if token not in special}


def parsed_merges(merges: Iterable[str], vocabulary: Mapping[str, int], where: str) -> Iterator[tuple[str, str]]:
    """The two sides of each merge; raises BadModelFile for one that is not made of tokens."""
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise BadModelFile(f"{where}: {merge[:100]!r} merges what are not tokens; get the file again")
        yield left, right


def _require_ids(data: TokenizerData, label: Label) -> None:
    named = [("bos_id", data.bos_id), ("eos_id", data.eos_id)]
    for field in ("end_ids", "lstrip_ids", "rstrip_ids"):
        named += [(field, token_id) for token_id in getattr(data, field)]
    for field, token_id in named:
        if token_id is not None and not 0 <= token_id < len(data.tokens):
            raise BadModelFile(f"{label(field)} is {token_id}, but there are {len(data.tokens)} tokens")


def _require_texts(data: TokenizerData, label: Label) -> None:
    first_ids: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(data.tokens, data.token_types, strict=True)):
        try:
            num_bytes = len(token.encode())
        except UnicodeEncodeError as error:
            raise BadModelFile(f"{label('tokens')}: token {token_id} ({token[:40]!a}) is no text") from error
        if num_bytes > MAX_TOKEN_BYTES:
            raise BadModelFile(
                f"{label('tokens')}: token {token_id} has {num_bytes} bytes, at most {MAX_TOKEN_BYTES} are read"
            )
        if data.kind == SENTENCE_PIECES and kind == USER_DEFINED:
            token = token.replace(" ", SPACE_MARK)
        first = first_ids.setdefault(token, token_id)
        if first != token_id and token:
            raise BadModelFile(f"{label('tokens')}: token {token[:40]!r} is there twice, as {first} and as {token_id}")


def _require_scores(data: TokenizerData, label: Label) -> None:
    if len(data.scores) != len(data.tokens):
        raise BadModelFile(f"{label('scores')}: {len(data.scores)} for {len(data.tokens)} tokens")
    if not all(map(math.isfinite, data.scores)):
        raise BadModelFile(f"{label('scores')}: one of them is no finite number")
    spelt = zip(data.tokens, data.token_types, strict=True)
    byte_tokens = {token for token, kind in spelt if kind == BYTE}
    if byte_tokens and byte_tokens != {f"<0x{byte:02X}>" for byte in range(256)}:
        raise BadModelFile(f"{label('token_types')}: the tokens of bytes are not <0x00> to <0xFF>, each once")
