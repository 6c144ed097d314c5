"""The tokenizer of a model in Hugging Face's layout, of the several files that have a part of it.

Decides which file counts: tokenizer.json before tokenizer.model, and before both, for what is put around a text and what
ends an answer, tokenizer_config.json and generation_config.json. Makes of it what GGUF files have. `huggingface` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelstore import sentencepiece_file, tokenizer_json
from modelstore.hf_folder import HfFolder
from modelstore.hf_template import read_template
from modelstore.manifest import TokenizerData
from modelstore.tokenizer_parts import AddedToken, TokenizerParts, parse_added
from modelstore.tokenizer_rules import (
    CONTROL,
    NORMAL,
    SENTENCE_PIECES,
    SPACE_MARK,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    require_sound,
)
from shoal.errors import BadModelFile, UnsupportedModel

TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
ADDED_TOKENS, SPECIAL_TOKENS = "added_tokens.json", "special_tokens_map.json"
# Gemma 3's has 33 MB.
MAX_TOKENIZER_BYTES = 64 << 20
MAX_SETTINGS_BYTES = 8 << 20
_FILE_OF_FIELD = {
    "end_ids": f"{GENERATION_CONFIG}: eos_token_id",
    "bos_id": f"{TOKENIZER_CONFIG}: bos_token",
    "eos_id": f"{TOKENIZER_CONFIG}: eos_token",
    "chat_template": "chat_template",
}


def read_tokenizer(folder: HfFolder, config: Mapping[str, Any], vocab_size: int) -> TokenizerData:
    """Build the tokenizer data of a model with that many rows in its embedding.

    config: of config.json. Raises BadModelFile for what is missing or malformed, UnsupportedModel for what cannot be done.
    """
    settings = folder.read_json(TOKENIZER_CONFIG, MAX_SETTINGS_BYTES) or {}
    names = {**(folder.read_json(SPECIAL_TOKENS, MAX_SETTINGS_BYTES) or {}), **settings}
    parts, source = _read_parts(folder, settings)
    _add_tokens(parts, _more_added(folder, settings, parts), _special_names(names))
    tokens, types = _lay_out(parts, vocab_size, source)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ends = _end_ids(folder, config)
    eos_id = _named_id(names, "eos_token", ids)
    is_sentence_pieces = parts.kind == SENTENCE_PIECES
    adds_bos, adds_eos = (
        _flag(settings, "add_bos_token", parts.adds_bos),
        _flag(settings, "add_eos_token", parts.adds_eos),
    )
    data = TokenizerData(
        kind=parts.kind,
        pre=parts.pre,
        tokens=tokens,
        token_types=types,
        merges=parts.merges,
        bos_id=_named_id(names, "bos_token", ids) if names else _config_id(config, "bos_token_id"),
        eos_id=eos_id if eos_id is not None else next(iter(ends), None),
        add_bos=bool(adds_bos),
        chat_template=read_template(folder, settings),
        add_eos=bool(adds_eos),
        scores=tuple(parts.scores.get(token_id, 0.0) for token_id in range(vocab_size)) if is_sentence_pieces else (),
        splitting=parts.splitting,
        end_ids=ends,
        space_prefix=parts.space_prefix,
        has_double_prefix=parts.has_double_prefix,
        lstrip_ids=tuple(token.id for token in parts.added if token.strips_left and token.id < vocab_size),
        rstrip_ids=tuple(token.id for token in parts.added if token.strips_right and token.id < vocab_size),
    )
    require_sound(data, lambda field: _FILE_OF_FIELD.get(field, f"{source}: {field}"))
    return data


def _read_parts(folder: HfFolder, settings: Mapping[str, Any]) -> tuple[TokenizerParts, str]:
    content = folder.read_json(tokenizer_json.NAME, MAX_TOKENIZER_BYTES)
    if content is not None:
        return tokenizer_json.read_parts(content), tokenizer_json.NAME
    pieces = folder.read(sentencepiece_file.NAME, sentencepiece_file.MAX_BYTES)
    if pieces is None:
        raise BadModelFile(
            f"{folder.path} has neither {tokenizer_json.NAME} nor {sentencepiece_file.NAME}: get the tokenizer's files, too"
        )
    parts = sentencepiece_file.read_parts(pieces)
    # Source: transformers' LlamaTokenizer and GemmaTokenizer, which put the begin token in front unless told not to.
    parts.adds_bos = True
    if parts.space_prefix == "each" and settings.get("legacy", True) is False:
        parts.space_prefix = "first"
    return parts, sentencepiece_file.NAME


def _more_added(folder: HfFolder, settings: Mapping[str, Any], parts: TokenizerParts) -> list[AddedToken]:
    """Added tokens that the tokenizer's own file does not have."""
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        raise BadModelFile(f"{TOKENIZER_CONFIG}: added_tokens_decoder is no object")
    found = {}
    for key, fields in decoder.items():
        token = parse_added(fields, int(key) if key.isascii() and key.isdigit() else None, TOKENIZER_CONFIG)
        found[token.id] = token
    for content, token_id in (folder.read_json(ADDED_TOKENS, MAX_SETTINGS_BYTES) or {}).items():
        token = parse_added({"content": content}, token_id, ADDED_TOKENS)
        found.setdefault(token.id, token)
    known = {token.id for token in parts.added}
    return [token for token in found.values() if token.id not in known]


def _special_names(names: Mapping[str, Any]) -> set[str]:
    """The tokens that the settings give a meaning to, as the end of a text."""
    found = {_spelling(value) for name, value in names.items() if name.endswith("_token")}
    listed = names.get("additional_special_tokens")
    found |= {_spelling(value) for value in listed} if isinstance(listed, list) else set()
    return {spelling for spelling in found if spelling}


def _spelling(value: Any) -> str | None:
    """Of a token that is given by its text, or with its flags."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _add_tokens(parts: TokenizerParts, more: Iterable[AddedToken], special: set[str]) -> None:
    """Put the added tokens among the tokens, each with its type."""
    parts.added += more
    ids = {token: token_id for token_id, token in parts.tokens.items()}
    for token in parts.added:
        if ids.get(token.content, token.id) != token.id:
            known = ids[token.content]
            raise BadModelFile(
                f"added token {token.content[:40]!r} has the ids {token.id} and {known}: get the files again"
            )
        kind = CONTROL if token.content in special else token.kind
        if parts.types.get(token.id) != UNKNOWN:
            parts.types[token.id] = kind
        is_literal = parts.kind == SENTENCE_PIECES and kind == USER_DEFINED
        if parts.tokens.get(token.id, token.content) not in (token.content, token.content.replace(SPACE_MARK, " ")):
            raise BadModelFile(
                f"token {token.id} is {parts.tokens[token.id][:40]!r} and {token.content[:40]!r}: get the files again"
            )
        parts.tokens[token.id] = token.content.replace(SPACE_MARK, " ") if is_literal else token.content


def _lay_out(parts: TokenizerParts, vocab_size: int, source: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tokens and types by id, one for each row of the embedding; rows without a token get an unused one.

    An added token without a row stands for what this model does not take, as an image.
    """
    added = {token.id for token in parts.added}
    beyond = [token_id for token_id in parts.tokens if not 0 <= token_id < vocab_size and token_id not in added]
    if beyond:
        raise BadModelFile(f"{source}: token {beyond[0]} is outside the {vocab_size} rows of token_embd.weight")
    tokens = tuple(parts.tokens.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size))
    types = tuple(
        parts.types.get(token_id, NORMAL) if token_id in parts.tokens else UNUSED for token_id in range(vocab_size)
    )
    return tokens, types


def _named_id(names: Mapping[str, Any], name: str, ids: Mapping[str, int]) -> int | None:
    spelling = _spelling(names.get(name))
    if spelling is None:
        return None
    if spelling not in ids:
        raise BadModelFile(f"{TOKENIZER_CONFIG}: {name} is {spelling[:40]!r}, which is no token")
    return ids[spelling]


def _flag(settings: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadModelFile(f"{TOKENIZER_CONFIG}: {name} is neither true nor false")
    return default if value is None else value


def _end_ids(folder: HfFolder, config: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends an answer, as the settings of generation have it, and the configuration behind those."""
    generation = folder.read_json(GENERATION_CONFIG) or {}
    ends: dict[int, None] = {}
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token_id) is not int:
                raise BadModelFile(f"{GENERATION_CONFIG}: eos_token_id has {str(token_id)[:40]!r}, no whole number")
            ends[token_id] = None
    return tuple(ends)


def _config_id(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and type(value) is not int:
        raise UnsupportedModel(f"config.json: {name} is {str(value)[:40]!r}; supported is one whole number")
    return value
