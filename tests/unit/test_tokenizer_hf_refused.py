"""Tokenizer files of Hugging Face folders that are refused: pipelines that cannot be done, and whatever is malformed."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from modelstore.tokenizer_hf import read_tokenizer
from orchestrator.tokenizer import Tokenizer
from shoal.errors import BadModelFile, UnsupportedModel
from tests.support.pieces_reference import SPACE
from tests.support.tokenizer_files import (
    BYTE_LEVEL,
    BYTE_LEVEL_STEP,
    CHATML_SETTINGS,
    DIGITS_SPLIT,
    METASPACE,
    PIECES,
    PREPEND_SPACE,
    REPLACE_SPACES,
    SETTINGS,
    SPACES_SPLIT,
    byte_level_json,
    pieces_json,
    pieces_model,
    read_byte_level,
    read_files,
    read_pieces,
    read_with,
    sequence,
    splits,
    write_files,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "Unigram"}, "model.type Unigram"),
        ({"model_type": "WordPiece"}, "model.type WordPiece"),
        ({"model_dropout": 0.1}, "model.dropout"),
        ({"model_continuing_subword_prefix": "##"}, "model.continuing_subword_prefix"),
        ({"model_end_of_word_suffix": "</w>"}, "model.end_of_word_suffix"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"normalizer": sequence("normalizers", {"type": "NFKC"})}, "normalizer NFKC"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"pre_tokenizer": {**BYTE_LEVEL_STEP, "add_prefix_space": True}}, "add_prefix_space"),
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "add_prefix_space"),
        ({"pre_tokenizer": splits({"type": "Punctuation"})}, "Punctuation"),
        ({"decoder": {"type": "WordPiece"}}, "decoder WordPiece"),
        ({"pre_tokenizer": splits({**DIGITS_SPLIT, "behavior": "Removed"})}, "Split"),
        ({"pre_tokenizer": splits({**DIGITS_SPLIT, "invert": True})}, "Split"),
        ({"pre_tokenizer": splits({"type": "Digits", "individual_digits": False})}, "Digits"),
        ({"pre_tokenizer": splits({**DIGITS_SPLIT, "pattern": {"Regex": "(a"}})}, "pattern"),
        ({"pre_tokenizer": splits({**DIGITS_SPLIT, "pattern": {"Regex": "a{99999999999}"}})}, "pattern"),
        ({"pre_tokenizer": splits({**DIGITS_SPLIT, "pattern": {"Regex": "(" * 2000 + ")" * 2000}})}, "pattern"),
        ({"pre_tokenizer": splits({**DIGITS_SPLIT, "pattern": {"Regex": r"\p{Zorp}"}})}, "Zorp"),
        ({"added_tokens": [{"id": 1, "content": "<|im_start|>", "special": True, "single_word": True}]}, "single_word"),
    ],
)
def test_pipelines_that_cannot_be_done_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_byte_level(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "NFKC"}}, "normalizer NFKC"),
        ({"normalizer": {**REPLACE_SPACES, "content": "_"}}, "normalizer Replace"),
        ({"normalizer": sequence("normalizers", {**PREPEND_SPACE, "prepend": "_"}, REPLACE_SPACES)}, "Prepend"),
        ({"normalizer": None, "pre_tokenizer": {**METASPACE, "split": True}}, "Metaspace"),
        ({"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE}}, "Metaspace"),
        ({"normalizer": None, "pre_tokenizer": {**METASPACE, "replacement": "_"}}, "Metaspace"),
        ({"pre_tokenizer": METASPACE}, "Metaspace"),
        ({"pre_tokenizer": {**SPACES_SPLIT, "pattern": {"String": "a"}}}, "Split"),
        ({"normalizer": None}, "pre_tokenizer"),
        ({"merges": [["l", "l"], ["h", "e"]]}, "not those of a SentencePiece model"),
    ],
)
def test_pieces_that_cannot_be_done_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_pieces(tmp_path, **changes)


def test_merges_of_a_token_before_and_behind_anothers_are_refused(tmp_path: Path) -> None:
    merges = pieces_json(PIECES)["model"]["merges"]
    of_three = [merge for merge in merges if "".join(merge) == "aaa"]
    others = [merge for merge in merges if merge not in of_three]
    with pytest.raises(UnsupportedModel, match="not those of a SentencePiece model"):
        read_pieces(tmp_path, merges=[of_three[0], *others, of_three[1]])


def test_merges_of_an_added_token_may_stand_anywhere(tmp_path: Path) -> None:
    content = pieces_json(PIECES)
    merges = content["model"]["merges"]
    first, second = (merge for merge in merges if "".join(merge) == "aaa")
    added = [*content["added_tokens"], {"id": PIECES.tokens.index("aaa"), "content": "aaa"}]
    others = [merge for merge in merges if merge not in (first, second)]
    data = read_pieces(tmp_path, merges=[first, *others, second], added_tokens=added)
    assert data.token_types[PIECES.tokens.index("aaa")] == 4


def test_a_merge_in_place_of_another_is_refused(tmp_path: Path) -> None:
    *merges, before, _ = pieces_json(PIECES)["model"]["merges"]
    with pytest.raises(UnsupportedModel, match="not those of a SentencePiece model"):
        read_pieces(tmp_path, merges=[*merges, before, before])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"model_vocab": []}, "vocab is missing or no object"),
        ({"model_vocab": {"a": "1"}}, "model.vocab has an id"),
        ({"model_vocab": {"a": 1, "b": 1}}, "gives two tokens one id"),
        ({"model_vocab": {"a": -1}}, "outside"),
        ({"model_merges": "a b"}, "model.merges is no list"),
        ({"model_merges": ["a b c"]}, "no pair"),
        ({"model_merges": [["a", 1]]}, "no pair"),
        ({"model_merges": ["h zz"]}, "h zz"),
        ({"added_tokens": {}}, "added_tokens is no list"),
        ({"added_tokens": ["x"]}, "added token"),
        ({"added_tokens": [{"id": 1, "content": ""}]}, "malformed"),
        ({"added_tokens": [{"id": 1, "content": "<|im_start|>", "special": 1}]}, "malformed"),
        ({"added_tokens": [{"id": -1, "content": "<x>", "lstrip": True}]}, "lstrip_ids is -1"),
        ({"added_tokens": [{"id": -1, "content": "<x>", "rstrip": True}]}, "rstrip_ids is -1"),
        ({"added_tokens": [{"id": 5, "content": "<|im_start|>"}]}, "ids 5 and 1|token 5 is"),
        ({"pre_tokenizer": splits({**DIGITS_SPLIT, "pattern": {"Regex": ""}})}, "pattern of 0 characters"),
        ({"pre_tokenizer": splits({**DIGITS_SPLIT, "pattern": {"Regex": "a" * 4097}})}, "pattern of 4097 characters"),
        ({"normalizer": "NFC"}, "no object"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": "x"}}, "no list of pretokenizers"),
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadModelFile, match=message):
        read_byte_level(tmp_path, **changes)


@pytest.mark.parametrize(
    ("settings", "files", "message"),
    [
        ({"eos_token": "<none>"}, {}, "eos_token is '<none>'"),
        ({"add_bos_token": "yes"}, {}, "add_bos_token"),
        ({"added_tokens_decoder": ["x"]}, {}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, {}, "added token"),
        ({}, {"generation_config.json": {"eos_token_id": "2"}}, "generation_config.json: eos_token_id"),
        ({}, {"generation_config.json": {"eos_token_id": 10**6}}, "generation_config.json: eos_token_id is 1000000"),
        ({}, {"tokenizer.json": "[" * 100_000}, "tokenizer.json is no JSON"),
        ({}, {"tokenizer.json": '{"model": {}, "model": {}}'}, "model is given twice"),
        ({"chat_template": 1}, {}, "chat_template"),
        ({}, {"chat_template.jinja": b"\xff"}, "chat_template.jinja is no UTF-8"),
        ({}, {"chat_template.jinja": "x" * (1 << 21)}, "chat_template.jinja has more than"),
        ({}, {"added_tokens.json": {"<x>": "1"}}, "added_tokens.json"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    tmp_path: Path, settings: dict[str, Any], files: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadModelFile, match=message):
        read_with(tmp_path, settings, **files)


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=r"neither tokenizer\.json nor tokenizer\.model"):
        read_files(tmp_path, {}, rows=1)


def test_a_file_beyond_all_measure_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(BadModelFile, match=r"tokenizer\.json has more than"):
        read_files(tmp_path, {}, rows=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": 1}, "kind UNIGRAM"),
        ({"precompiled_charsmap": b"x"}, "normalizer identity"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"escape_whitespaces": False}, "escape_whitespaces"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_sentencepiece_models_that_cannot_be_done_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_files(tmp_path, {"tokenizer.model": pieces_model(PIECES, **changes)}, rows=len(PIECES.tokens))


@pytest.mark.parametrize("content", [b"", b"\x0a\xff", b"IQ== 0\nIg== 1\n"])
def test_what_is_no_sentencepiece_model_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadModelFile, match=r"tokenizer\.model"):
        read_files(tmp_path, {"tokenizer.model": content}, rows=1)


# The folder holds one file, which each example writes anew.
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 4000), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_sentencepiece_model_is_read_or_refused(tmp_path: Path, place: int, value: int, cut: bool) -> None:
    content = bytearray(pieces_model(PIECES))
    place %= len(content)
    if cut:
        del content[place:]
    content[place : place + 1] = bytes([value])
    folder = write_files(tmp_path, {"tokenizer.model": bytes(content)})
    with suppress(BadModelFile, UnsupportedModel):
        Tokenizer(read_tokenizer(folder, {}, len(PIECES.tokens)))


def places_in(value: Any) -> list[tuple[Any, ...]]:
    """The ways to all values inside a JSON value, without the tokens of its vocabulary."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, ...]] = [()]
    for key, content in inner:
        found += [(key, *place) for place in ([()] if key == "vocab" else places_in(content))]
    return found


FILES = {
    "tokenizer.json": pieces_json(PIECES, pre_tokenizer=sequence("pretokenizers")),
    "other.json": byte_level_json(BYTE_LEVEL, pre_tokenizer=sequence("pretokenizers", DIGITS_SPLIT, BYTE_LEVEL_STEP)),
    "tokenizer_config.json": {
        **SETTINGS,
        "add_bos_token": True,
        "added_tokens_decoder": {"3": {"content": "<turn>", "special": True}},
        "additional_special_tokens": ["<turn>"],
        "chat_template": [{"name": "default", "template": "x"}],
    },
    "generation_config.json": {"eos_token_id": [2, 3]},
    "special_tokens_map.json": {"eos_token": {"content": "</s>"}},
    "added_tokens.json": {"<turn>": 3},
}
PLACES = [(name, *place) for name, content in FILES.items() for place in places_in(content) if place]
JSON_VALUES = st.sampled_from(
    [None, True, -1, 10**30, 0.5, "", "x", "\ud800", "a b", [], [None], {}, {"type": "Sequence"}]
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PLACES), value=JSON_VALUES)
@example(place=("tokenizer_config.json", "chat_template"), value="\ud800")
def test_whatever_stands_at_any_place_is_read_or_refused(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    files = json.loads(json.dumps(FILES))
    inner: Any = files
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    rows = len(PIECES.tokens)
    if place[0] == "other.json":
        files = {"tokenizer.json": files["other.json"], "tokenizer_config.json": CHATML_SETTINGS}
        rows = len(BYTE_LEVEL.tokens)
    with suppress(BadModelFile, UnsupportedModel):
        Tokenizer(read_files(tmp_path, files, rows=rows)).encode("hello 12", add_special=True)
