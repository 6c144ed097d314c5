"""Tokenizers as the files of Hugging Face folders state them: the same as GGUF's, what counts where, and what is refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelstore.manifest import Splitting, TokenizerData
from modelstore.tokenizer_hf import read_tokenizer
from orchestrator.tokenizer import Tokenizer
from shoal.errors import BadModelFile, UnsupportedModel
from tests.support.pieces_reference import SPACE, make_pieces
from tests.support.tokenizer_files import (
    BEGIN_TEMPLATE,
    BYTE_LEVEL_STEP,
    PREPEND_SPACE,
    REPLACE_SPACES,
    byte_level_json,
    pieces_json,
    pieces_model,
    read_files,
    sequence,
    write_files,
)
from tests.support.vocabulary import make_tokenizer_data

BYTE_LEVEL = make_tokenizer_data()
PIECES = make_pieces()
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
CHATML_SETTINGS = {"bos_token": None, "eos_token": "<|im_end|>"}
TEXTS = ("hello world", "  hello\n\nworld 12", "aaaaa é! 😀", "<tag>hello <tag>", "")
DIGITS_SPLIT = {"type": "Split", "pattern": {"Regex": r"\d{1,2}"}, "behavior": "Isolated", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}


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


def test_byte_level_bpe_is_read_as_gguf_states_it(tmp_path: Path) -> None:
    data = read_byte_level(tmp_path)
    assert (data.kind, data.pre, data.splitting) == ("gpt2", "smollm", None)
    assert (data.tokens, data.token_types, data.merges) == (
        BYTE_LEVEL.tokens,
        BYTE_LEVEL.token_types,
        BYTE_LEVEL.merges,
    )


def test_merges_may_be_written_as_text(tmp_path: Path) -> None:
    assert read_byte_level(tmp_path, merges=list(BYTE_LEVEL.merges)).merges == BYTE_LEVEL.merges


def test_pieces_are_read_as_gguf_states_them(tmp_path: Path) -> None:
    data = read_pieces(tmp_path)
    assert (data.kind, data.tokens, data.token_types) == ("llama", PIECES.tokens, PIECES.token_types)
    assert (data.bos_id, data.eos_id, data.add_bos, data.add_eos) == (1, 2, True, False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalizer": sequence("normalizers", PREPEND_SPACE, REPLACE_SPACES)},
        {"normalizer": None, "pre_tokenizer": METASPACE},
        {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "always"}},
    ],
    ids=["never", "each", "first", "once"],
)
@pytest.mark.parametrize("has_user_defined", [True, False])
def test_ids_of_pieces_are_those_of_the_library(
    tmp_path: Path, changes: dict[str, Any], has_user_defined: bool
) -> None:
    pieces = make_pieces(has_user_defined=has_user_defined)
    files = {"tokenizer.json": pieces_json(pieces, **changes), "tokenizer_config.json": SETTINGS}
    ours = Tokenizer(read_files(tmp_path, files, rows=len(pieces.tokens)))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (*TEXTS, " hello", "<turn>hello", "<turn> hello"):
        assert ours.encode(text, add_special=True)[1:] == library.encode(text, add_special_tokens=False).ids, text


def test_ids_of_byte_level_bpe_are_those_of_the_library(tmp_path: Path) -> None:
    ours = Tokenizer(
        read_byte_level(
            tmp_path, normalizer={"type": "NFC"}, pre_tokenizer=sequence("pretokenizers", DIGITS_SPLIT, BYTE_LEVEL_STEP)
        )
    )
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (*TEXTS, "1234 e\u0301", "<think>12<|im_end|>"):
        assert ours.encode(text, add_special=False) == library.encode(text, add_special_tokens=False).ids, text


def test_a_splitting_without_a_name_is_kept_by_its_patterns(tmp_path: Path) -> None:
    data = read_byte_level(
        tmp_path, pre_tokenizer=sequence("pretokenizers", DIGITS_SPLIT, {**BYTE_LEVEL_STEP, "use_regex": False})
    )
    assert (data.pre, data.splitting) == ("custom", Splitting((r"\d{1,2}",)))


def test_rows_without_a_token_are_unused(tmp_path: Path) -> None:
    rows = len(BYTE_LEVEL.tokens) + 2
    data = read_byte_level(tmp_path, rows=rows)
    assert data.tokens[-2:] == (f"[PAD{rows - 2}]", f"[PAD{rows - 1}]")
    assert data.token_types[-2:] == (5, 5)


def test_an_added_token_without_a_row_is_left_out(tmp_path: Path) -> None:
    data = read_byte_level(tmp_path, rows=len(BYTE_LEVEL.tokens) - 1)
    assert data.tokens == BYTE_LEVEL.tokens[:-1]


def test_a_token_without_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="outside the 100 rows"):
        read_byte_level(tmp_path, rows=100)


def test_added_tokens_that_look_like_control_tokens_are_such(tmp_path: Path) -> None:
    added = [{"id": 0, "content": "<|endoftext|>", "special": False}]
    assert read_byte_level(tmp_path, added_tokens=added).token_types[0] == 3


def test_tokens_that_the_settings_name_are_control_tokens(tmp_path: Path) -> None:
    data = read_with(tmp_path, {"additional_special_tokens": ["<tag>"]})
    assert data.token_types[PIECES.tokens.index("<tag>")] == 3


def test_white_space_that_added_tokens_take_along_is_read(tmp_path: Path) -> None:
    content = pieces_json(PIECES)
    content["added_tokens"][3] |= {"rstrip": True, "lstrip": True}
    data = read_files(tmp_path, {"tokenizer.json": content, "tokenizer_config.json": SETTINGS}, rows=len(PIECES.tokens))
    assert (data.rstrip_ids, data.lstrip_ids) == ((3,), (3,))


@pytest.mark.parametrize(
    ("settings", "template", "add_bos"),
    [
        ({}, BEGIN_TEMPLATE, True),
        ({}, None, False),
        ({}, {**BEGIN_TEMPLATE, "single": BEGIN_TEMPLATE["single"][1:]}, False),
        ({"add_bos_token": False}, BEGIN_TEMPLATE, False),
        ({"add_bos_token": True}, None, True),
    ],
)
def test_a_begin_token_is_added_as_the_settings_or_else_the_template_say(
    tmp_path: Path, settings: dict[str, Any], template: Any, add_bos: bool
) -> None:
    content = pieces_json(PIECES, post_processor=template)
    assert read_with(tmp_path, settings, **{"tokenizer.json": content}).add_bos is add_bos


def test_all_ends_of_the_generation_settings_count(tmp_path: Path) -> None:
    data = read_with(tmp_path, {}, **{"generation_config.json": {"eos_token_id": [2, 3]}})
    assert data.end_ids == (2, 3)
    assert Tokenizer(data).stop_ids == {2, 3}


def test_one_end_may_be_given_alone_and_by_the_configuration(tmp_path: Path) -> None:
    files = {"tokenizer.json": pieces_json(PIECES)}
    data = read_files(tmp_path, files, config={"eos_token_id": 3, "bos_token_id": 1}, rows=len(PIECES.tokens))
    assert (data.bos_id, data.eos_id, data.end_ids) == (1, 3, (3,))


def test_names_of_tokens_may_stand_in_the_special_tokens_map(tmp_path: Path) -> None:
    files = {"tokenizer.json": pieces_json(PIECES), "special_tokens_map.json": SETTINGS}
    assert read_files(tmp_path, files, rows=len(PIECES.tokens)).eos_id == 2


def test_a_sentencepiece_file_gives_the_same_tokenizer(tmp_path: Path) -> None:
    files = {"tokenizer.model": pieces_model(PIECES, add_dummy_prefix=False), "tokenizer_config.json": SETTINGS}
    data = read_files(tmp_path, files, rows=len(PIECES.tokens))
    assert (data.tokens, data.token_types, data.scores) == (PIECES.tokens, PIECES.token_types, PIECES.scores)
    assert (data.space_prefix, data.add_bos) == ("never", True)


@pytest.mark.parametrize(("legacy", "prefix"), [(None, "each"), (True, "each"), (False, "first")])
def test_a_sentencepiece_file_puts_spaces_in_front_as_its_class_did(
    tmp_path: Path, legacy: bool | None, prefix: str
) -> None:
    files = {"tokenizer.model": pieces_model(PIECES), "tokenizer_config.json": {**SETTINGS, "legacy": legacy}}
    assert read_files(tmp_path, files, rows=len(PIECES.tokens)).space_prefix == prefix or legacy is None


def test_tokens_added_to_a_sentencepiece_file_are_read_where_they_are(tmp_path: Path) -> None:
    count = len(PIECES.tokens)
    files = {
        "tokenizer.model": pieces_model(PIECES),
        "added_tokens.json": {"<one>": count},
        "tokenizer_config.json": {
            **SETTINGS,
            "added_tokens_decoder": {str(count + 1): {"content": "<two>", "special": True}},
        },
    }
    data = read_files(tmp_path, files, rows=count + 2)
    assert (data.tokens[-2:], data.token_types[-2:]) == (("<one>", "<two>"), (4, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "Unigram"}, "model.type Unigram"),
        ({"model_type": "WordPiece"}, "model.type WordPiece"),
        ({"model_dropout": 0.1}, "model.dropout"),
        ({"model_end_of_word_suffix": "</w>"}, "model.end_of_word_suffix"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"normalizer": sequence("normalizers", {"type": "NFKC"})}, "normalizer NFKC"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"pre_tokenizer": {**BYTE_LEVEL_STEP, "add_prefix_space": True}}, "add_prefix_space"),
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "add_prefix_space"),
        ({"pre_tokenizer": sequence("pretokenizers", {"type": "Punctuation"}, BYTE_LEVEL_STEP)}, "Punctuation"),
        ({"decoder": {"type": "WordPiece"}}, "decoder WordPiece"),
        (
            {"pre_tokenizer": sequence("pretokenizers", {**DIGITS_SPLIT, "behavior": "Removed"}, BYTE_LEVEL_STEP)},
            "Split",
        ),
        (
            {"pre_tokenizer": sequence("pretokenizers", {**DIGITS_SPLIT, "pattern": {"Regex": "(a"}}, BYTE_LEVEL_STEP)},
            "pattern",
        ),
        (
            {
                "pre_tokenizer": sequence(
                    "pretokenizers", {**DIGITS_SPLIT, "pattern": {"Regex": r"\p{Zorp}"}}, BYTE_LEVEL_STEP
                )
            },
            "Zorp",
        ),
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
        ({"normalizer": None, "pre_tokenizer": {**METASPACE, "split": True}}, "Metaspace"),
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
        ({"added_tokens": [{"id": 5, "content": "<|im_start|>"}]}, "ids 5 and 1|token 5 is"),
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
