"""What a tokenizer.json says, the file of the Hugging Face library `tokenizers`.

Decides which of its pipelines can be done: byte-level BPE, and SentencePiece's BPE written as merges, whose scores are
found again. Any part that asks for something else is refused by name. Pure: gets parsed JSON from `tokenizer_hf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from modelstore.manifest import Splitting
from modelstore.pre_tokenizers import DIGIT_PATTERN, GPT2_PATTERN, name_of
from modelstore.tokenizer_parts import AddedToken, TokenizerParts, parse_added
from modelstore.tokenizer_rules import BYTE, BYTE_LEVEL, BYTE_TOKEN, SENTENCE_PIECES, SPACE_MARK, UNKNOWN
from shoal.errors import BadModelFile, UnsupportedModel

NAME = "tokenizer.json"
MAX_PATTERN_CHARACTERS = 4096


def read_parts(content: Mapping[str, Any]) -> TokenizerParts:
    """Raise BadModelFile for what is malformed, UnsupportedModel for a pipeline that cannot be done."""
    model = _mapping(content, "model")
    _require_bpe(model)
    vocabulary = _vocabulary(model)
    merges = _merges(model)
    added = _added(content)
    if model.get("byte_fallback") is True:
        parts = _sentence_pieces(content, vocabulary, _scores(vocabulary, merges, {token.content for token in added}))
    else:
        parts = _byte_level(content, vocabulary, merges)
    parts.added = added
    parts.adds_bos, parts.adds_eos = _template(content.get("post_processor"))
    return parts


def _require_bpe(model: Mapping[str, Any]) -> None:
    # Files of before the field say nothing; only BPE has merges.
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise _unsupported(f"model.type {kind}")
    if model.get("dropout"):
        raise _unsupported("model.dropout")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _unsupported(f"model.{name}")


def _vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = _mapping(model, "vocab")
    ids = list(vocabulary.values())
    if not all(type(token_id) is int for token_id in ids):
        raise BadModelFile(f"{NAME}: model.vocab has an id that is no whole number")
    if len(set(ids)) != len(ids):
        raise BadModelFile(f"{NAME}: model.vocab gives two tokens one id")
    return dict(vocabulary)


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Written as "l r" in older files, as [l, r] in newer ones."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise BadModelFile(f"{NAME}: model.merges is no list")
    pairs = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise BadModelFile(f"{NAME}: model.merges has {str(merge)[:100]!r}, which is no pair of tokens")
        pairs.append((pair[0], pair[1]))
    return pairs


def _added(content: Mapping[str, Any]) -> list[AddedToken]:
    added = content.get("added_tokens", [])
    if not isinstance(added, list):
        raise BadModelFile(f"{NAME}: added_tokens is no list")
    return [parse_added(token, token.get("id") if isinstance(token, Mapping) else None, NAME) for token in added]


def _byte_level(
    content: Mapping[str, Any], vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]
) -> TokenizerParts:
    _require_types(content, "decoder", ("ByteLevel",))
    model = content["model"]
    splitting = Splitting(
        _patterns(content.get("pre_tokenizer")), model.get("ignore_merges") is True, _is_nfc(content.get("normalizer"))
    )
    name = name_of(splitting)
    return TokenizerParts(
        kind=BYTE_LEVEL,
        tokens={token_id: token for token, token_id in vocabulary.items()},
        merges=tuple(f"{left} {right}" for left, right in merges),
        pre=name or "custom",
        splitting=None if name else splitting,
    )


def _is_nfc(normalizer: Any) -> bool:
    steps = _steps(normalizer, "normalizers")
    for step in steps:
        if step.get("type") != "NFC":
            raise _unsupported(f"normalizer {step.get('type')}")
    return bool(steps)


def _patterns(pre_tokenizer: Any) -> tuple[str, ...]:
    """The patterns of splits that end in bytes as characters."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel":
        raise _unsupported(f"pre_tokenizer {[step.get('type') for step in steps]}")
    *splits, byte_level = steps
    # Without the field the library puts a space in front.
    if byte_level.get("add_prefix_space", True) is not False:
        raise _unsupported("pre_tokenizer ByteLevel with add_prefix_space")
    patterns = [_pattern(step) for step in splits]
    return (*patterns, GPT2_PATTERN) if byte_level.get("use_regex", True) is True else tuple(patterns)


def _pattern(step: Mapping[str, Any]) -> str:
    kind = step.get("type")
    if kind == "Digits" and step.get("individual_digits") is True:
        return DIGIT_PATTERN
    spec = step.get("pattern")
    pattern = spec.get("Regex") if isinstance(spec, Mapping) else None
    is_plain = step.get("behavior") == "Isolated" and step.get("invert", False) is False
    if kind != "Split" or not isinstance(pattern, str) or not is_plain:
        raise _unsupported(f"pre_tokenizer {kind} as it is set up there")
    if not pattern or len(pattern) > MAX_PATTERN_CHARACTERS:
        raise BadModelFile(f"{NAME}: pre_tokenizer has a pattern of {len(pattern)} characters")
    return pattern


def _sentence_pieces(
    content: Mapping[str, Any], vocabulary: dict[str, int], scores: dict[int, float]
) -> TokenizerParts:
    _require_types(content, "decoder", ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"))
    space_prefix, has_double_prefix = _space_prefix(content)
    types = {token_id: BYTE for token, token_id in vocabulary.items() if BYTE_TOKEN.fullmatch(token)}
    unknown = content["model"].get("unk_token")
    if isinstance(unknown, str) and unknown in vocabulary:
        types[vocabulary[unknown]] = UNKNOWN
    return TokenizerParts(
        kind=SENTENCE_PIECES,
        tokens={token_id: token for token, token_id in vocabulary.items()},
        types=types,
        scores=scores,
        space_prefix=space_prefix,
        has_double_prefix=has_double_prefix,
    )


def _scores(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], added: Set[str]) -> dict[int, float]:
    """The scores by which SentencePiece merges just as these merges do, by id.

    It merges whatever two neighbours make a token, the best token first. So the merges must be all pairs that make a
    token, and those of a token must follow each other, but for tokens that text is searched for anyway. Raises
    UnsupportedModel if they are others.
    """
    ranks: dict[str, int] = {}
    before = ""
    is_sorted = True
    for rank, (left, right) in enumerate(merges):
        token = left + right
        if left not in vocabulary or right not in vocabulary or token not in vocabulary:
            raise BadModelFile(f"{NAME}: model.merges makes {token[:100]!r} of what are not tokens; get the file again")
        is_sorted &= token == before or token not in ranks or token in added
        ranks.setdefault(token, rank)
        before = token
    if not is_sorted or len(set(merges)) != len(merges) or len(merges) != sum(map(_pair_count(vocabulary), vocabulary)):
        raise _unsupported("model.merges, which are not those of a SentencePiece model,")
    return {token_id: float(-ranks.get(token, -1) - 1) for token, token_id in vocabulary.items()}


def _pair_count(vocabulary: Mapping[str, int]) -> Callable[[str], int]:
    """How many pairs of tokens make a token."""
    return lambda token: sum(token[:cut] in vocabulary and token[cut:] in vocabulary for cut in range(1, len(token)))


def _space_prefix(content: Mapping[str, Any]) -> tuple[str, bool]:
    """Where a space is put in front of text, and whether of text that begins with one, too."""
    steps = _steps(content.get("normalizer"), "normalizers")
    prefix = "never"
    for step in steps:
        if step.get("type") == "Prepend" and step.get("prepend") == SPACE_MARK:
            prefix = "each"
        elif step.get("type") != "Replace" or not _replaces_spaces(step):
            raise _unsupported(f"normalizer {step.get('type')}")
    cuts = _steps(content.get("pre_tokenizer"), "pretokenizers")
    if len(cuts) == 1 and cuts[0].get("type") == "Metaspace" and not steps:
        return _metaspace_prefix(cuts[0]), False
    # Spaces are gone by then, so a cut at spaces does nothing.
    is_idle = not cuts or (
        len(cuts) == 1 and cuts[0].get("type") == "Split" and cuts[0].get("pattern") == {"String": " "}
    )
    if not is_idle or not any(step.get("type") == "Replace" for step in steps):
        raise _unsupported(f"pre_tokenizer {[step.get('type') for step in cuts]}")
    return prefix, True


def _replaces_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": " "} and step.get("content") == SPACE_MARK


def _metaspace_prefix(step: Mapping[str, Any]) -> str:
    # Files of before the scheme have a flag.
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) is True else "never")
    names = {"always": "each", "first": "first", "never": "never"}
    if step.get("split", True) is not False or step.get("replacement") != SPACE_MARK or scheme not in names:
        raise _unsupported("pre_tokenizer Metaspace as it is set up there")
    return names[scheme]


def _template(post_processor: Any) -> tuple[bool | None, bool | None]:
    """Whether a text gets a token in front and one behind; None where nothing is said."""
    for step in _steps(post_processor, "processors"):
        if step.get("type") == "TemplateProcessing":
            single = step.get("single")
            if not isinstance(single, list) or not single or not all(isinstance(piece, Mapping) for piece in single):
                raise BadModelFile(f"{NAME}: post_processor has no list of objects as single")
            return "SpecialToken" in single[0], "SpecialToken" in single[-1]
    return None, None


def _steps(part: Any, inner: str) -> list[Mapping[str, Any]]:
    """A step of a pipeline, or those of a sequence, as a list."""
    if part is None:
        return []
    if not isinstance(part, Mapping):
        raise BadModelFile(f"{NAME}: a step is {str(part)[:100]!r}, no object")
    if part.get("type") != "Sequence":
        return [part]
    steps = part.get(inner)
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise BadModelFile(f"{NAME}: a sequence has no list of {inner}")
    return steps


def _require_types(content: Mapping[str, Any], name: str, known: tuple[str, ...]) -> None:
    for step in _steps(content.get(name), f"{name}s"):
        if step.get("type") not in known:
            raise _unsupported(f"{name} {step.get('type')}")


def _mapping(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name)
    if not isinstance(value, Mapping):
        raise BadModelFile(f"{NAME}: {name} is missing or no object: get the file again")
    return value


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{NAME}: {what} is not supported; supported are byte-level BPE and SentencePiece's BPE")
