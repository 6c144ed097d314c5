"""Tokenizers as the keys of GGUF files state them: what absent keys mean, and bad ones by their names."""

from typing import Any

import numpy as np
import pytest

from modelstore.manifest import TokenizerData
from modelstore.tokenizer_gguf import read_tokenizer
from modelstore.tokenizer_rules import MAX_TOKEN_BYTES
from shoal.errors import BadModelFile, UnsupportedModel
from tests.support.pieces_reference import make_pieces
from tests.support.vocabulary import make_tokenizer_data

BYTE_LEVEL, PIECES = make_tokenizer_data(), make_pieces()


def keys_of(data: TokenizerData, **changes: Any) -> dict[str, Any]:
    """The keys of a file without those that may be absent; changes by name, "-" in place of a value takes it away."""
    keys: dict[str, Any] = {
        "model": data.kind,
        "tokens": list(data.tokens),
        "token_type": np.array(data.token_types, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    keys |= {"scores": np.array(data.scores, np.float32)} if data.kind == "llama" else {"merges": list(data.merges)}
    keys |= {"pre": data.pre} if data.kind == "gpt2" else {}
    stated = {key: value for key, value in (keys | changes).items() if not isinstance(value, str) or value != "-"}
    return {f"tokenizer.ggml.{key}": value for key, value in stated.items()}


def read(data: TokenizerData, **changes: Any) -> TokenizerData:
    return read_tokenizer(keys_of(data, **changes), len(data.tokens))


def test_pieces_have_a_begin_token_and_spaces_in_front_unless_the_file_says_otherwise() -> None:
    assert (read(PIECES).add_bos, read(PIECES).space_prefix) == (True, "each")
    stated = read(PIECES, add_bos_token=False, add_space_prefix=False)
    assert (stated.add_bos, stated.space_prefix) == (False, "never")


@pytest.mark.parametrize(
    ("pre", "add_bos"), [("smollm", False), ("llama-bpe", True), ("tekken", True), ("qwen2", False)]
)
def test_byte_level_families_have_a_begin_token_as_they_were_trained(pre: str, add_bos: bool) -> None:
    assert read(BYTE_LEVEL, pre=pre).add_bos is add_bos
    assert read(BYTE_LEVEL, pre=pre, add_bos_token=not add_bos).add_bos is not add_bos


def test_pieces_are_read_whole() -> None:
    assert (read(PIECES).tokens, read(PIECES).token_types) == (PIECES.tokens, PIECES.token_types)
    assert read(PIECES).scores == PIECES.scores
    assert read(PIECES).merges == ()


def test_further_ends_are_read() -> None:
    assert read(PIECES, eot_token_id=3, eom_token_id=0).end_ids == (3, 0)
    assert read(PIECES).end_ids == ()


def test_an_end_token_behind_prompts_is_read() -> None:
    assert read(PIECES, add_eos_token=True).add_eos is True


def test_phi3_takes_white_space_along_with_its_turns() -> None:
    phi3 = {**keys_of(PIECES), "general.architecture": "phi3"}
    taking = {PIECES.tokens.index(token) for token in ("<turn>", "</s>", "<tag>")}
    assert taking <= set(read_tokenizer(phi3, len(PIECES.tokens)).rstrip_ids)
    assert not {0, 1} & set(read_tokenizer(phi3, len(PIECES.tokens)).rstrip_ids)
    assert read(PIECES).rstrip_ids == ()


@pytest.mark.parametrize("name", ["Phi-3 Mini", "my-phi3"])
def test_phi3_is_known_by_its_name_too(name: str) -> None:
    keys = {**keys_of(PIECES), "general.architecture": "llama", "general.name": name}
    assert PIECES.tokens.index("<turn>") in read_tokenizer(keys, len(PIECES.tokens)).rstrip_ids


def test_phi3_takes_white_space_along_with_an_end_that_the_file_calls_normal() -> None:
    end = PIECES.tokens.index("</s>")
    types = np.array([1 if index == end else kind for index, kind in enumerate(PIECES.token_types)], np.int32)
    phi3 = {**keys_of(PIECES, token_type=types), "general.architecture": "phi3"}
    assert end in read_tokenizer(phi3, len(PIECES.tokens)).rstrip_ids


def test_byte_level_tokens_of_the_phi3_architecture_take_no_white_space_along() -> None:
    phi4 = {**keys_of(BYTE_LEVEL), "general.architecture": "phi3"}
    assert read_tokenizer(phi4, len(BYTE_LEVEL.tokens)).rstrip_ids == ()


def test_tokens_without_types_are_normal() -> None:
    data = read(BYTE_LEVEL, token_type="-")
    assert set(data.token_types) == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "bert is not supported"),
        ({"pre": "bloom"}, "'bloom' is not supported.*qwen2"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(BYTE_LEVEL, **changes)


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        (BYTE_LEVEL, {"merges": "-"}, "tokenizer.ggml.merges is missing"),
        (BYTE_LEVEL, {"merges": ["h zz"]}, "tokenizer.ggml.merges: 'h zz'"),
        (BYTE_LEVEL, {"tokens": list(BYTE_LEVEL.tokens[1:])}, "tokenizer.ggml.tokens has"),
        (BYTE_LEVEL, {"token_type": np.ones(3, np.int32)}, "tokenizer.ggml.token_type has 3"),
        (BYTE_LEVEL, {"token_type": np.full(len(BYTE_LEVEL.tokens), 7, np.int32)}, "token_type: there are others"),
        (BYTE_LEVEL, {"token_type": ["a"]}, "token_type is not an array of integers"),
        (BYTE_LEVEL, {"bos_token_id": len(BYTE_LEVEL.tokens)}, "bos_token_id is"),
        (BYTE_LEVEL, {"eot_token_id": 2**32 - 1}, "eot_token_id is 4294967295"),
        (BYTE_LEVEL, {"tokens": [*BYTE_LEVEL.tokens[:-1], BYTE_LEVEL.tokens[-2]]}, "is there twice, as"),
        (BYTE_LEVEL, {"tokens": [*BYTE_LEVEL.tokens[:-1], "a" * (MAX_TOKEN_BYTES + 1)]}, "has 4097 bytes"),
        (BYTE_LEVEL, {"tokens": [*BYTE_LEVEL.tokens[:-1], "\ud800"]}, "is no text"),
        (PIECES, {"scores": "-"}, "tokenizer.ggml.scores is not an array of numbers"),
        (PIECES, {"scores": np.zeros(3, np.float32)}, "scores: 3 for"),
        (PIECES, {"scores": np.full(len(PIECES.tokens), np.nan, np.float32)}, "scores: one of them is no finite"),
        (PIECES, {"tokens": [token.replace("<0x41>", "<0x41") for token in PIECES.tokens]}, "tokens of bytes"),
        (PIECES, {"add_bos_token": 1}, "add_bos_token should be a bool"),
    ],
)
def test_bad_keys_are_named(data: TokenizerData, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadModelFile, match=message):
        read(data, **changes)


def test_a_template_beyond_all_measure_is_refused() -> None:
    keys = {**keys_of(BYTE_LEVEL), "tokenizer.chat_template": "x" * (1 << 20) + "y"}
    with pytest.raises(BadModelFile, match="chat_template has more than"):
        read_tokenizer(keys, len(BYTE_LEVEL.tokens))


def test_several_tokens_may_be_without_text() -> None:
    assert read(PIECES, tokens=["", "", *PIECES.tokens[2:]]).tokens[:2] == ("", "")


def test_user_defined_spaces_and_the_piece_for_them_are_one_token() -> None:
    tokens = [*PIECES.tokens[:-1], "\u2581\u2581"]
    with pytest.raises(BadModelFile, match="is there twice"):
        read(PIECES, tokens=tokens)
