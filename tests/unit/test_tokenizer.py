"""Ids of texts, what may become a control token, and what tokens add to a text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelstore.manifest import Splitting
from orchestrator.tokenizer import Tokenizer
from shoal.errors import BadModelFile, InvalidRequest, UnsupportedModel
from tests.support import bpe_reference
from tests.support.vocabulary import (
    CONTROL_TOKENS,
    MERGES,
    NORMAL,
    USER_DEFINED_TOKENS,
    byte_id,
    make_tokenizer_data,
)

DATA = make_tokenizer_data()
TOKENIZER = Tokenizer(DATA)
END_OF_TEXT, START, END = 0, 1, 2
THINK = len(DATA.tokens) - 1

# A busy machine is no fault of the code.
unhurried = settings(deadline=None)

# Characters this Python's Unicode tables do not know may be letters in the library's.
KNOWN_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn"))).filter(
    lambda text: not any(token in text for token in (*CONTROL_TOKENS, *USER_DEFINED_TOKENS))
)
WORDY_TEXT = st.lists(
    st.sampled_from(
        [*"helowrd12 \t\n'", "\r\n", "'ll", "hello", " world", "é", "中", "١", "½", "😀", "\u0301", "\u3000"]
    )
).map("".join)


def ids_of(*tokens: str) -> list[int]:
    return [DATA.tokens.index(token) for token in tokens]


def test_words_take_the_merges_of_the_vocabulary() -> None:
    assert TOKENIZER.encode("hello world", add_special=False) == ids_of("hello", "Ġworld")


def test_smollm_cuts_digits_one_by_one() -> None:
    assert TOKENIZER.encode("12", add_special=False) == ids_of("1", "2")


@pytest.mark.parametrize("pre", ["gpt-2", "default"])
def test_plain_gpt2_merges_digits(pre: str) -> None:
    assert Tokenizer(make_tokenizer_data(pre=pre)).encode("12", add_special=False) == ids_of("12")


def test_llama_bpe_takes_a_whole_word_of_the_vocabulary_without_merges() -> None:
    data = make_tokenizer_data(pre="llama-bpe", merges=())
    assert Tokenizer(data).encode("hello world", add_special=False) == ids_of("hello", "Ġworld")


def test_dbrx_takes_no_word_without_merges() -> None:
    assert Tokenizer(make_tokenizer_data(pre="dbrx", merges=())).encode("he", add_special=False) == ids_of("h", "e")


def test_llama_bpe_cuts_numbers_in_threes_and_keeps_newlines_with_punctuation() -> None:
    tokens = (*DATA.tokens, "123", "4", "!Ċ")
    data = make_tokenizer_data(pre="llama-bpe", tokens=tokens, token_types=(*DATA.token_types, *(NORMAL,) * 3))
    encoded = Tokenizer(data).encode("1234!\n", add_special=False)
    assert [tokens[token_id] for token_id in encoded] == ["123", "4", "!Ċ"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
@unhurried
@given(text=st.one_of(KNOWN_TEXT, WORDY_TEXT))
def test_ids_are_those_of_an_independent_implementation(pre: str, text: str) -> None:
    data = make_tokenizer_data(pre=pre)
    assert Tokenizer(data).encode(text, add_special=False) == bpe_reference.encode(data, text)


@unhurried
@given(text=st.text())
def test_text_comes_back_from_its_ids(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special=False)) == text


def test_a_raw_prompt_may_spell_out_control_tokens() -> None:
    assert TOKENIZER.encode("<|im_start|>hello<|im_end|>", add_special=False) == [START, *ids_of("hello"), END]


def test_the_longer_of_two_control_tokens_that_begin_alike_is_taken() -> None:
    tokens = (*DATA.tokens, "<|im_start|>!")
    tokenizer = Tokenizer(make_tokenizer_data(tokens=tokens, token_types=(*DATA.token_types, 3)))
    assert tokenizer.encode("<|im_start|>!", add_special=False) == [len(DATA.tokens)]


def test_user_defined_tokens_are_whole_in_text_and_have_text() -> None:
    assert TOKENIZER.encode("hello<think>", add_special=False) == [*ids_of("hello"), THINK]
    assert TOKENIZER.decode([THINK]) == USER_DEFINED_TOKENS[0]


def test_the_begin_token_is_put_in_front_only_where_model_and_caller_want_it() -> None:
    wanting = Tokenizer(make_tokenizer_data(add_bos=True))
    assert wanting.encode("hello", add_special=True) == [START, *ids_of("hello")]
    assert wanting.encode("hello", add_special=False) == ids_of("hello")
    assert TOKENIZER.encode("hello", add_special=True) == ids_of("hello")


def test_the_begin_token_is_not_doubled_in_a_pasted_prompt() -> None:
    wanting = Tokenizer(make_tokenizer_data(add_bos=True))
    assert wanting.encode("<|im_start|>hello", add_special=True) == [START, *ids_of("hello")]


def test_control_tokens_have_no_text() -> None:
    assert TOKENIZER.decode([START, *ids_of("hello"), END, END_OF_TEXT]) == "hello"


def test_ids_beyond_the_tokens_have_no_text() -> None:
    assert TOKENIZER.decode([TOKENIZER.vocab_size, 10**6]) == ""


def test_unused_tokens_have_no_text() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(tokens=(*DATA.tokens, "[PAD1]"), token_types=(*DATA.token_types, 5)))
    assert tokenizer.decode([len(DATA.tokens)]) == ""


def test_a_normal_token_outside_the_byte_alphabet_stands_for_itself() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(tokens=(*DATA.tokens, "a b"), token_types=(*DATA.token_types, NORMAL)))
    assert tokenizer.decode([len(DATA.tokens)]) == "a b"


def test_bytes_that_are_no_utf8_become_replacement_characters() -> None:
    assert TOKENIZER.decode([byte_id(0xF0), byte_id(0x9F), byte_id(ord("a")), byte_id(0xFF)]) == "\ufffda\ufffd"


def test_an_answer_ends_at_the_end_token_and_at_known_end_of_turn_tokens() -> None:
    assert TOKENIZER.stop_ids == {END_OF_TEXT, END}


def test_an_end_of_turn_name_that_is_no_control_token_ends_nothing() -> None:
    assert Tokenizer(make_tokenizer_data(token_types=(NORMAL, *DATA.token_types[1:]))).stop_ids == {END}


def test_the_end_token_ends_and_has_no_text_even_where_the_file_calls_it_normal() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(token_types=(NORMAL, NORMAL, NORMAL, *DATA.token_types[3:])))
    assert tokenizer.stop_ids == {END}
    assert tokenizer.decode([END]) == ""


def test_an_answer_ends_at_further_ends_that_the_file_names() -> None:
    assert Tokenizer(make_tokenizer_data(end_ids=(THINK,))).stop_ids == {END_OF_TEXT, END, THINK}


def test_a_further_end_has_no_text() -> None:
    assert Tokenizer(make_tokenizer_data(end_ids=(THINK,))).decode([THINK]) == ""


def test_the_end_token_is_put_behind_only_where_model_and_caller_want_it() -> None:
    wanting = Tokenizer(make_tokenizer_data(add_eos=True))
    assert wanting.encode("hello", add_special=True) == [*ids_of("hello"), END]
    assert wanting.encode("hello<|im_end|>", add_special=True) == [*ids_of("hello"), END]
    assert wanting.encode("hello", add_special=False) == ids_of("hello")


def test_qwen2_composes_characters_first() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(pre="qwen2"))
    assert tokenizer.encode("e\u0301", add_special=False) == ids_of("Ã©")


@pytest.mark.parametrize(("pre", "num_bytes"), [("qwen2", 48), ("smollm", 16)])
def test_a_token_has_as_many_bytes_of_text_as_composing_may_take_away(pre: str, num_bytes: int) -> None:
    longer = tuple("K" * length for length in (2, 4, 8, 16))
    data = make_tokenizer_data(
        pre=pre,
        tokens=(*DATA.tokens, *longer),
        token_types=(*DATA.token_types, *(NORMAL,) * len(longer)),
        merges=tuple(f"{half} {half}" for half in ("K", *longer[:-1])),
    )
    tokenizer = Tokenizer(data)
    # The sign of the unit kelvin is a K, once it is composed.
    text = "\u212a" * 16 if pre == "qwen2" else "K" * 16
    assert tokenizer.encode(text, add_special=False) == [len(data.tokens) - 1]
    assert tokenizer.max_token_bytes == len(text.encode()) == num_bytes


def test_deepseeks_qwen_leaves_characters_as_they_are() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(pre="deepseek-r1-qwen"))
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_special=False)) == "e\u0301"


def test_qwen2_cuts_digits_one_by_one() -> None:
    assert Tokenizer(make_tokenizer_data(pre="qwen2")).encode("12", add_special=False) == ids_of("1", "2")


def test_tekken_begins_a_word_where_capitals_follow_small_letters() -> None:
    tokens = (*DATA.tokens, "aB")
    types = (*DATA.token_types, NORMAL)
    data = make_tokenizer_data(pre="tekken", tokens=tokens, token_types=types, merges=("a B",))
    encoded = Tokenizer(data).encode("aB", add_special=False)
    assert [tokens[token_id] for token_id in encoded] == ["a", "B"]


def test_tekken_keeps_newlines_and_slashes_with_punctuation() -> None:
    data = make_tokenizer_data(pre="tekken", tokens=(*DATA.tokens, "!Ċ/"), token_types=(*DATA.token_types, NORMAL))
    assert Tokenizer(data).encode("!\n/", add_special=False) == [len(DATA.tokens)]


def test_gpt_4o_keeps_what_an_apostrophe_adds_with_its_word() -> None:
    longer = ("'ll", "he'll")
    tokens, types = (*DATA.tokens, *longer), (*DATA.token_types, NORMAL, NORMAL)
    data = make_tokenizer_data(pre="gpt-4o", tokens=tokens, token_types=types, merges=(*MERGES, "' ll", "he 'll"))
    assert Tokenizer(data).encode("he'll", add_special=False) == [tokens.index("he'll")]


def test_a_splitting_without_a_name_cuts_by_its_patterns() -> None:
    data = make_tokenizer_data(pre="custom", splitting=Splitting((r"[^o]+|o",)))
    encoded = Tokenizer(data).encode("hello", add_special=False)
    assert [DATA.tokens[token_id] for token_id in encoded] == ["hell", "o"]


def test_a_token_that_takes_white_space_along_leaves_none() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(lstrip_ids=(START,), rstrip_ids=(END,)))
    spelled = tokenizer.encode("hello \n<|im_start|> hello <|im_end|> \nhello", add_special=False)
    assert spelled == [*ids_of("hello"), START, *ids_of("Ġ", "hello", "Ġ"), END, *ids_of("hello")]


def test_a_user_defined_token_that_takes_white_space_along_leaves_none() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(lstrip_ids=(THINK,), rstrip_ids=(THINK,)))
    spelled = tokenizer.encode("hello \n<think> \nhello", add_special=False)
    assert spelled == [*ids_of("hello"), THINK, *ids_of("hello")]


def test_a_user_defined_token_is_found_in_text_as_it_is_written() -> None:
    data = make_tokenizer_data(pre="qwen2", tokens=(*DATA.tokens[:-1], "<K>"))
    assert Tokenizer(data).encode("<K>", add_special=False) == [THINK]
    assert THINK not in Tokenizer(data).encode("<\u212a>", add_special=False)


def test_contents_never_become_an_end_that_the_file_calls_user_defined() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(end_ids=(THINK,)))
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "a<think>"}])
    assert tokenizer.decode(token_ids) == "user\na<think>\nassistant\n"


def test_an_unknown_kind_of_tokenizer_is_named_with_what_is_supported() -> None:
    with pytest.raises(UnsupportedModel, match=r"bert is not supported.*gpt2.*llama"):
        Tokenizer(make_tokenizer_data(kind="bert"))


def test_an_unknown_pre_tokenizer_is_named_with_what_is_supported() -> None:
    with pytest.raises(UnsupportedModel, match=r"'bloom' is not supported.*smollm"):
        Tokenizer(make_tokenizer_data(pre="bloom"))


@pytest.mark.parametrize("merge", ["h zz", "h x", "hello", "<|im_start|> h"])
def test_merges_that_are_not_of_the_tokens_are_refused(merge: str) -> None:
    with pytest.raises(BadModelFile, match="merges"):
        Tokenizer(make_tokenizer_data(merges=(*MERGES, merge)))


def test_a_token_without_a_type_is_refused() -> None:
    with pytest.raises(BadModelFile, match="token types"):
        Tokenizer(make_tokenizer_data(token_types=DATA.token_types[:-1]))


@pytest.mark.parametrize("change", [{"bos_id": len(DATA.tokens)}, {"eos_id": -1}, {"end_ids": (len(DATA.tokens),)}])
def test_a_begin_or_end_token_that_is_none_of_the_tokens_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadModelFile, match="begin or end token"):
        Tokenizer(make_tokenizer_data(**change))


def test_a_model_without_control_tokens_has_none_to_parse() -> None:
    count = len(CONTROL_TOKENS)
    data = make_tokenizer_data(
        tokens=DATA.tokens[count:], token_types=DATA.token_types[count:], bos_id=None, eos_id=None
    )
    tokenizer = Tokenizer(data)
    assert tokenizer.decode(tokenizer.encode("<|im_end|>", add_special=True)) == "<|im_end|>"
    assert tokenizer.stop_ids == frozenset()


def test_a_text_that_a_models_pattern_finds_no_end_in_is_the_requests_error() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(splitting=Splitting(("(a+)+$",))))
    assert tokenizer.encode("hello", add_special=False) == ids_of("hello")
    with pytest.raises(InvalidRequest, match="tokenizer gave up on this text"):
        tokenizer.encode("a" * 60 + "!", add_special=False)
