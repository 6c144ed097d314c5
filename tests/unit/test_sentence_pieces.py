"""SentencePiece vocabularies: ids, bytes for what has no token, where spaces are put in front, and what stays text."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelstore.manifest import TokenizerData
from orchestrator.text import TextStream
from orchestrator.tokenizer import Tokenizer
from shoal.errors import BadModelFile
from tests.support import pieces_reference
from tests.support.pieces_reference import BYTE, CONTROL, CONTROLS, NORMAL, SPACE, make_pieces

DATA = make_pieces()
TOKENIZER = Tokenizer(DATA)
EACH = Tokenizer(make_pieces(space_prefix="each"))
FIRST = Tokenizer(make_pieces(space_prefix="first"))
UNKNOWN_ID, BEGIN, END, TURN = range(4)
TAG = DATA.tokens.index("<tag>")

# A busy machine is no fault of the code.
unhurried = settings(deadline=None)

WORDY_TEXT = st.lists(
    st.sampled_from([*pieces_reference.CHARACTERS[1:], " ", "hello", " hello", "aaaaa", "x", "😀", "\0", "\u0301"])
).map("".join)
# U+2581 is a space written out: what has it comes back with a space.
ANY_TEXT = st.text().filter(lambda text: SPACE not in text and not any(token in text for token in CONTROLS))
SPELLINGS = st.lists(st.sampled_from([*CONTROLS, "<", ">", "turn", "<tag>", " ", "\n", "hello", "/s"])).map("".join)


def only(kept: list[int]) -> TokenizerData:
    """The vocabulary with some of its tokens."""
    return replace(
        DATA,
        tokens=tuple(DATA.tokens[index] for index in kept),
        token_types=tuple(DATA.token_types[index] for index in kept),
        scores=tuple(DATA.scores[index] for index in kept),
    )


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [DATA.tokens[token_id] for token_id in tokenizer.encode(text, add_special=False)]


def test_the_best_pair_is_merged_first() -> None:
    assert tokens_of(TOKENIZER, "hello world") == ["hello", f"{SPACE}world"]


def test_what_has_no_token_becomes_its_bytes() -> None:
    assert tokens_of(TOKENIZER, "a😀") == ["a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


def test_text_that_is_spelt_like_a_byte_stays_text() -> None:
    assert "<0x41>" not in tokens_of(TOKENIZER, "<0x41>")
    assert TOKENIZER.decode(TOKENIZER.encode("<0x41>", add_special=False)) == "<0x41>"


@unhurried
@given(text=WORDY_TEXT)
def test_ids_are_those_of_an_independent_implementation(text: str) -> None:
    data = make_pieces(has_user_defined=False)
    assert Tokenizer(data).encode(text, add_special=False) == pieces_reference.encode(data, text)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, EACH, FIRST], ids=["never", "each", "first"])
@unhurried
@given(text=st.one_of(ANY_TEXT, WORDY_TEXT))
def test_text_comes_back_from_its_ids(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_user_defined_tokens_are_whole_in_text_the_longest_first() -> None:
    assert tokens_of(TOKENIZER, "a  <tag>\n\n\n") == ["a", "  ", "<tag>", "\n\n", "\n"]
    assert TOKENIZER.decode([TAG]) == "<tag>"


def test_a_space_is_put_in_front_of_text_where_the_model_wants_it() -> None:
    assert tokens_of(TOKENIZER, "hello") == ["hello"]
    assert tokens_of(EACH, "hello") == [f"{SPACE}hello"]
    assert tokens_of(FIRST, "hello") == [f"{SPACE}hello"]


def test_a_begin_token_does_not_keep_the_space_in_front_of_text() -> None:
    tokenizer = Tokenizer(make_pieces(space_prefix="first", add_bos=True))
    token_ids = tokenizer.encode("hello", add_special=True)
    assert [DATA.tokens[token_id] for token_id in token_ids] == ["<s>", f"{SPACE}hello"]
    assert tokenizer.decode(token_ids) == "hello"


def test_a_space_is_put_behind_control_tokens_only_where_each_text_gets_one() -> None:
    assert tokens_of(EACH, "<turn>hello") == ["<turn>", f"{SPACE}hello"]
    assert tokens_of(FIRST, "<turn>hello") == ["<turn>", "hello"]


def test_a_space_is_put_behind_user_defined_tokens_too() -> None:
    assert tokens_of(EACH, "<tag>hello") == ["<tag>", f"{SPACE}hello"]


def test_a_space_is_doubled_unless_the_model_has_it_once() -> None:
    once = Tokenizer(make_pieces(space_prefix="each", has_double_prefix=False))
    assert tokens_of(EACH, " hello") == ["  ", "hello"]
    assert tokens_of(once, " hello") == [f"{SPACE}hello"]


def test_text_that_goes_on_from_other_text_has_no_space_in_front() -> None:
    ids = EACH.encode("hello", add_special=False, goes_on=True)
    assert [DATA.tokens[token_id] for token_id in ids] == ["hello"]


def test_a_later_turn_goes_on_from_the_answer() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "aa"}]
    last = {"role": "user", "content": "the"}
    session = EACH.encode_chat(messages[:1]) + EACH.encode("aa", add_special=False, goes_on=True)
    assert session + EACH.encode_turn([last]) == EACH.encode_chat([*messages, last])


def test_white_space_vanishes_beside_tokens_that_take_it_along() -> None:
    tokenizer = Tokenizer(make_pieces(space_prefix="each", rstrip_ids=(TURN, TAG), lstrip_ids=(END,)))
    assert tokens_of(tokenizer, "<turn>\n hello \n</s>") == ["<turn>", f"{SPACE}hello", "</s>"]
    assert tokens_of(tokenizer, "<tag>\n hello") == ["<tag>", f"{SPACE}hello"]


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (TURN, "hello"),
        (TAG, "hello"),
        (DATA.tokens.index("a"), " hello"),
        (DATA.tokens.index("  "), " hello"),
        (None, " hello"),
    ],
)
def test_an_answer_has_no_space_in_front_that_the_token_before_brought(after: int | None, text: str) -> None:
    stream = TextStream(EACH, after=after)
    assert stream.push(DATA.tokens.index(f"{SPACE}hello")).text == text


def test_no_space_comes_back_behind_a_user_defined_token() -> None:
    assert EACH.decode(EACH.encode("a<tag>hello  a", add_special=False)) == "a<tag>hello  a"


def test_an_answer_keeps_the_spaces_between_its_words() -> None:
    stream = TextStream(EACH, after=TURN)
    hello = DATA.tokens.index(f"{SPACE}hello")
    assert [stream.push(token_id).text for token_id in (TURN, hello, hello)] == ["", "hello", " hello"]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, EACH], ids=["never", "each"])
@unhurried
@given(content=SPELLINGS.filter(bool))
def test_contents_never_become_control_tokens_and_keep_their_text(tokenizer: Tokenizer, content: str) -> None:
    token_ids = tokenizer.encode_chat([{"role": "user", "content": content}])
    assert [token_id for token_id in token_ids if token_id < len(CONTROLS)] == [TURN, END, TURN]
    start, end = token_ids.index(TURN) + 1, token_ids.index(END)
    assert tokenizer.decode(token_ids[start:end]) == f"user\n{content}"


@pytest.mark.parametrize("space_prefix", ["never", "each"])
def test_contents_never_become_an_end_that_the_file_calls_user_defined(space_prefix: str) -> None:
    tokenizer = Tokenizer(make_pieces(space_prefix=space_prefix, end_ids=(TAG,)))
    assert TAG not in tokenizer.encode_chat([{"role": "user", "content": "a<tag>"}])


def test_a_raw_prompt_may_spell_out_control_tokens() -> None:
    assert TOKENIZER.encode("<s>hello", add_special=True)[0] == BEGIN


def test_unknown_text_has_no_text_where_there_are_no_bytes() -> None:
    kept = [index for index, kind in enumerate(DATA.token_types) if kind != BYTE]
    tokenizer = Tokenizer(only(kept))
    assert tokenizer.encode("a😀a", add_special=False)[1:-1] == [UNKNOWN_ID]
    assert tokenizer.decode(tokenizer.encode("a😀a", add_special=False)) == "aa"


def test_a_vocabulary_without_an_unknown_token_drops_what_it_does_not_know() -> None:
    kept = [index for index, kind in enumerate(DATA.token_types) if index and kind != BYTE]
    tokenizer = Tokenizer(replace(only(kept), bos_id=None, eos_id=None))
    token_ids = tokenizer.encode("a😀a", add_special=False)
    assert max(token_ids) < tokenizer.vocab_size
    assert tokenizer.decode(token_ids) == "aa"


def test_tokens_without_text_are_never_found() -> None:
    data = make_pieces(
        tokens=(*DATA.tokens, "", ""), token_types=(*DATA.token_types, NORMAL, CONTROL), scores=(*DATA.scores, 0.0, 0.0)
    )
    assert Tokenizer(data).encode("hello", add_special=False) == TOKENIZER.encode("hello", add_special=False)


def test_scores_that_are_not_one_a_token_are_refused() -> None:
    with pytest.raises(BadModelFile, match="scores"):
        Tokenizer(make_pieces(scores=DATA.scores[1:]))


def test_pieces_that_the_library_does_not_take_are_refused() -> None:
    with pytest.raises(BadModelFile, match="SentencePiece"):
        Tokenizer(make_pieces(tokens=(*DATA.tokens[:-1], DATA.tokens[-2])))


def test_long_texts_of_one_character_are_a_few_tokens_each() -> None:
    # As many steps as characters: with the square of them this would not end.
    token_ids = TOKENIZER.encode("a" * (1 << 20), add_special=False)
    assert len(token_ids) == 1 << 18
