"""Tokenizers as the files of Hugging Face folders state them: the same as GGUF's, and what counts where."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from modelstore.manifest import Splitting
from orchestrator.tokenizer import Tokenizer
from shoal.errors import BadModelFile, UnsupportedModel
from tests.support.pieces_reference import SPACE, make_pieces
from tests.support.tokenizer_files import (
    BEGIN_TEMPLATE,
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
)

TEXTS = ("hello world", "  hello\n\nworld 12", "aaaaa é! 😀", "<tag>hello <tag>", "")


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


def test_a_model_without_a_type_is_bpe_if_it_has_merges(tmp_path: Path) -> None:
    content = byte_level_json(BYTE_LEVEL)
    del content["model"]["type"]
    files = {"tokenizer.json": content, "tokenizer_config.json": CHATML_SETTINGS}
    assert read_files(tmp_path, files, rows=len(BYTE_LEVEL.tokens)).merges == BYTE_LEVEL.merges
    del content["model"]["merges"]
    with pytest.raises(UnsupportedModel, match=r"model\.type None"):
        read_files(tmp_path, files, rows=len(BYTE_LEVEL.tokens))


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
        {"pre_tokenizer": SPACES_SPLIT},
    ],
    ids=["never", "each", "first", "once", "cut"],
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


@pytest.mark.parametrize(("flag", "prefix"), [({}, "each"), ({"add_prefix_space": False}, "never")])
def test_older_files_say_with_a_flag_whether_a_space_is_put_in_front(
    tmp_path: Path, flag: dict[str, bool], prefix: str
) -> None:
    step = {"type": "Metaspace", "replacement": SPACE, "split": False, **flag}
    assert read_pieces(tmp_path, normalizer=None, pre_tokenizer=step).space_prefix == prefix


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


def test_whole_words_of_the_vocabulary_are_taken_where_the_model_ignores_merges(tmp_path: Path) -> None:
    splitting = read_byte_level(tmp_path, model_ignore_merges=True).splitting
    assert splitting is not None
    assert splitting.whole_words


def test_bytes_are_cut_as_gpt2_does_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    step = {"type": "ByteLevel", "add_prefix_space": False}
    assert read_byte_level(tmp_path, pre_tokenizer=step).pre == "gpt-2"


def test_rows_without_a_token_are_unused(tmp_path: Path) -> None:
    rows = len(BYTE_LEVEL.tokens) + 2
    data = read_byte_level(tmp_path, rows=rows)
    assert data.tokens[-2:] == (f"[PAD{rows - 2}]", f"[PAD{rows - 1}]")
    assert data.token_types[-2:] == (5, 5)


def test_an_added_token_without_a_row_is_left_out(tmp_path: Path) -> None:
    rows = len(BYTE_LEVEL.tokens) - 1
    added = [{"id": rows, "content": BYTE_LEVEL.tokens[-1], "lstrip": True, "rstrip": True}]
    data = read_byte_level(tmp_path, rows=rows, added_tokens=added)
    assert (data.tokens, data.lstrip_ids, data.rstrip_ids) == (BYTE_LEVEL.tokens[:-1], (), ())


def test_a_token_without_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="outside the 100 rows"):
        read_byte_level(tmp_path, rows=100)


def test_added_tokens_that_look_like_control_tokens_are_such(tmp_path: Path) -> None:
    added = [{"id": 0, "content": "<|endoftext|>", "special": False}]
    assert read_byte_level(tmp_path, added_tokens=added).token_types[0] == 3


@pytest.mark.parametrize("name", ["<pad>", "<mask>", "<｜begin｜>", "<unused7>"])
def test_names_that_are_control_tokens_elsewhere_are_such(tmp_path: Path, name: str) -> None:
    rows = len(BYTE_LEVEL.tokens)
    added = [{"id": rows, "content": name}, {"id": rows + 1, "content": "<other>"}]
    assert read_byte_level(tmp_path, rows=rows + 2, added_tokens=added).token_types[rows:] == (3, 4)


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


@pytest.mark.parametrize(
    ("settings", "add_eos"), [({}, True), ({"add_eos_token": False}, False), ({"add_eos_token": None}, True)]
)
def test_an_end_token_is_added_as_the_settings_or_else_the_template_say(
    tmp_path: Path, settings: dict[str, Any], add_eos: bool
) -> None:
    template = {**BEGIN_TEMPLATE, "single": [*BEGIN_TEMPLATE["single"], {"SpecialToken": {"id": "</s>"}}]}
    content = pieces_json(PIECES, post_processor=template)
    assert read_with(tmp_path, settings, **{"tokenizer.json": content}).add_eos is add_eos


def test_all_ends_of_the_generation_settings_count(tmp_path: Path) -> None:
    data = read_with(tmp_path, {}, **{"generation_config.json": {"eos_token_id": [2, 3]}})
    assert data.end_ids == (2, 3)
    assert Tokenizer(data).stop_ids == {2, 3}


def test_the_end_of_the_configuration_counts_beside_that_of_the_generation_settings(tmp_path: Path) -> None:
    files = {"tokenizer.json": pieces_json(PIECES), "generation_config.json": {"eos_token_id": 2}}
    assert read_files(tmp_path, files, config={"eos_token_id": 3}, rows=len(PIECES.tokens)).end_ids == (2, 3)


def test_one_end_may_be_given_alone_and_by_the_configuration(tmp_path: Path) -> None:
    files = {"tokenizer.json": pieces_json(PIECES)}
    data = read_files(tmp_path, files, config={"eos_token_id": 3, "bos_token_id": 1}, rows=len(PIECES.tokens))
    assert (data.bos_id, data.eos_id, data.end_ids) == (1, 3, (3,))


def test_names_of_tokens_may_stand_in_the_special_tokens_map(tmp_path: Path) -> None:
    files = {"tokenizer.json": pieces_json(PIECES), "special_tokens_map.json": SETTINGS}
    assert read_files(tmp_path, files, rows=len(PIECES.tokens)).eos_id == 2


def test_names_in_the_settings_come_before_those_in_the_special_tokens_map(tmp_path: Path) -> None:
    assert read_with(tmp_path, {}, **{"special_tokens_map.json": {"eos_token": "<turn>"}}).eos_id == 2


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
        # What the settings say of a token counts before that.
        "added_tokens.json": {"<one>": count, "<two>": count + 1},
        "tokenizer_config.json": {
            **SETTINGS,
            "added_tokens_decoder": {str(count + 1): {"content": "<two>", "special": True}},
        },
    }
    data = read_files(tmp_path, files, rows=count + 2)
    assert (data.tokens[-2:], data.token_types[-2:]) == (("<one>", "<two>"), (4, 3))
