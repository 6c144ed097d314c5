"""Writes the tokenizer files of Hugging Face folders for the small vocabularies of `vocabulary` and `pieces_reference`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from modelstore.hf_folder import HfFolder
from modelstore.manifest import TokenizerData
from modelstore.tokenizer_hf import read_tokenizer
from tests.support.pieces_reference import CONTROL, SPACE, UNKNOWN, USER_DEFINED, make_pieces
from tests.support.vocabulary import make_tokenizer_data

BYTE_LEVEL_STEP = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS_STEP = {"type": "Digits", "individual_digits": True}
REPLACE_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND_SPACE = {"type": "Prepend", "prepend": SPACE}
DIGITS_SPLIT = {"type": "Split", "pattern": {"Regex": r"\d{1,2}"}, "behavior": "Isolated", "invert": False}
SPACES_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
BEGIN_TEMPLATE: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}

BYTE_LEVEL = make_tokenizer_data()
PIECES = make_pieces()
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
CHATML_SETTINGS = {"bos_token": None, "eos_token": "<|im_end|>"}


def sequence(inner: str, *steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", inner: list(steps)}


def added_tokens(data: TokenizerData) -> list[dict[str, Any]]:
    """Control and user-defined tokens, as tokenizer.json has them."""
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    return [
        {
            "id": token_id,
            "content": token.replace(" ", SPACE) if data.kind == "llama" else token,
            "special": kind != USER_DEFINED,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for token_id, (token, kind) in enumerate(zip(data.tokens, data.token_types, strict=True))
        if kind in kinds
    ]


def byte_level_json(data: TokenizerData, *, merges: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json of smollm's splitting; changes: of its top level and, by "model_NAME", of its model."""
    model = {
        "type": "BPE",
        "vocab": {
            token: token_id for token_id, token in enumerate(data.tokens) if data.token_types[token_id] != USER_DEFINED
        },
        "merges": [merge.split(" ") for merge in data.merges] if merges is None else merges,
        "byte_fallback": False,
    }
    content = {
        "added_tokens": added_tokens(data),
        "normalizer": None,
        "pre_tokenizer": sequence("pretokenizers", DIGITS_STEP, BYTE_LEVEL_STEP),
        "post_processor": None,
        "decoder": BYTE_LEVEL_STEP,
        "model": model,
    }
    return _changed(content, changes)


def pieces_json(data: TokenizerData, *, merges: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json of a SentencePiece vocabulary, with the merges that its scores come to."""
    vocabulary = {token.replace(" ", SPACE): token_id for token_id, token in enumerate(data.tokens)}
    places = sorted(vocabulary, key=lambda token: -data.scores[vocabulary[token]])
    pairs = [
        [token[:cut], token[cut:]]
        for token in places
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    content = {
        "added_tokens": added_tokens(data),
        "normalizer": REPLACE_SPACES,
        "pre_tokenizer": None,
        "post_processor": BEGIN_TEMPLATE,
        "decoder": sequence("decoders", REPLACE_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}),
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": pairs if merges is None else merges,
        },
    }
    return _changed(content, changes)


def pieces_model(data: TokenizerData, **changes: Any) -> bytes:
    """A tokenizer.model; changes: of its trainer_spec and normalizer_spec, by the names of their fields."""
    model = sentencepiece_model_pb2.ModelProto()
    for token, kind, score in zip(data.tokens, data.token_types, data.scores, strict=True):
        model.pieces.add(piece=token.replace(" ", SPACE), type=kind, score=score)
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    for name, value in changes.items():
        spec = model.trainer_spec if hasattr(model.trainer_spec, name) else model.normalizer_spec
        setattr(spec, name, value)
    content: bytes = model.SerializeToString()
    return content


def write_files(folder: Path, files: Mapping[str, Any]) -> HfFolder:
    """Write files by their names: objects as JSON, text and bytes as they are."""
    for name, content in files.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return HfFolder(folder)


def read_files(
    folder: Path, files: Mapping[str, Any], *, config: Mapping[str, Any] | None = None, rows: int
) -> TokenizerData:
    return read_tokenizer(write_files(folder, files), config or {}, rows)


def splits(step: dict[str, Any]) -> dict[str, Any]:
    """A pre-tokenizer of byte-level BPE that cuts with this step first."""
    return sequence("pretokenizers", step, BYTE_LEVEL_STEP)


def read_byte_level(folder: Path, *, rows: int = len(BYTE_LEVEL.tokens), **changes: Any) -> TokenizerData:
    files = {"tokenizer.json": byte_level_json(BYTE_LEVEL, **changes), "tokenizer_config.json": CHATML_SETTINGS}
    return read_files(folder, files, rows=rows)


def read_pieces(folder: Path, *, rows: int = len(PIECES.tokens), **changes: Any) -> TokenizerData:
    files = {"tokenizer.json": pieces_json(PIECES, **changes), "tokenizer_config.json": SETTINGS}
    return read_files(folder, files, rows=rows)


def read_with(folder: Path, settings: dict[str, Any], **files: Any) -> TokenizerData:
    """Pieces with other settings and further files."""
    base = {"tokenizer.json": pieces_json(PIECES), "tokenizer_config.json": {**SETTINGS, **settings}}
    return read_files(folder, {**base, **files}, rows=len(PIECES.tokens))


def _changed(content: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        if name.startswith("model_"):
            content["model"][name.removeprefix("model_")] = value
        else:
            content[name] = value
    return content
