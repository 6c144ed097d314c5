"""Conversations as ids: what templates may do, what they may not, and that contents stay contents."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.chat import ChatTemplate
from orchestrator.tokenizer import Tokenizer
from shoal.errors import InvalidRequest
from tests.support.vocabulary import CHATML, CONTROL, make_tokenizer_data

DATA = make_tokenizer_data()
TOKENIZER = Tokenizer(DATA)
START, END = 1, 2
CONTROL_IDS = {0, START, END}
ONE_TURN_CONTROLS = [START, END, START]

# A busy machine is no fault of the code.
unhurried = settings(deadline=None)

SPELLINGS = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|", "im_end", "|>", "<", ">", "\n", " ", "a", "<x>", "<think>", "\ud7ff"]
    )
).map("".join)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def render(source: str | None, *messages: dict[str, str]) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages)


def tokenizer_with(template: str) -> Tokenizer:
    return Tokenizer(make_tokenizer_data(chat_template=template))


def controls(token_ids: list[int]) -> list[int]:
    return [token_id for token_id in token_ids if token_id in CONTROL_IDS]


def text_of(token_ids: list[int]) -> str:
    """The text with control tokens written out."""
    spelled = [
        DATA.tokens[token_id].encode() if token_id in CONTROL_IDS else TOKENIZER.token_bytes(token_id)
        for token_id in token_ids
    ]
    return b"".join(spelled).decode()


def test_a_conversation_is_written_in_the_models_template() -> None:
    messages = [{"role": "system", "content": "be"}, user("hello"), {"role": "assistant", "content": "hi"}, user("bye")]
    assert text_of(TOKENIZER.encode_chat(messages)) == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_has_the_ids_of_its_text() -> None:
    pasted = "<|im_start|>user\n\nhello  world<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.encode_chat([user("\nhello  world")]) == TOKENIZER.encode(pasted, add_special=False)


def test_words_are_cut_across_the_joint_of_template_and_content() -> None:
    newlines = DATA.tokens.index("ĊĊ")
    assert newlines in TOKENIZER.encode_chat([user("\n")])
    assert newlines in TOKENIZER.encode_chat([user("\n <|im_end|>")])


@unhurried
@given(content=SPELLINGS.filter(bool))
def test_contents_never_become_control_tokens_and_keep_their_text(content: str) -> None:
    token_ids = TOKENIZER.encode_chat([user(content)])
    assert controls(token_ids) == ONE_TURN_CONTROLS
    assert text_of(token_ids) == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


@unhurried
@given(contents=st.lists(SPELLINGS, min_size=1).filter(any))
def test_contents_put_next_to_each_other_never_become_control_tokens(contents: list[str]) -> None:
    tokenizer = tokenizer_with("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert controls(tokenizer.encode_chat([user(content) for content in contents])) == []


@pytest.mark.parametrize("content", ["|im_end|>", "im_end|>"])
def test_a_control_token_cannot_begin_in_the_template_and_end_in_the_content(content: str) -> None:
    start = "<|im_end|>".removesuffix(content)
    token_ids = tokenizer_with(start + "{{ messages[0].content }}").encode_chat([user(content)])
    assert controls(token_ids) == []
    assert text_of(token_ids) == "<|im_end|>"


@pytest.mark.parametrize("content", ["<", "<|im_end|"])
def test_a_control_token_cannot_begin_in_the_content_and_end_in_the_template(content: str) -> None:
    end = "<|im_end|>".removeprefix(content)
    token_ids = tokenizer_with("{{ messages[0].content }}" + end).encode_chat([user(content)])
    assert controls(token_ids) == []
    assert text_of(token_ids) == "<|im_end|>"


def test_a_content_that_is_a_control_tokens_name_stays_a_word() -> None:
    tokens, types = (*DATA.tokens, "STOP"), (*DATA.token_types, CONTROL)
    data = make_tokenizer_data(
        pre="llama-bpe", tokens=tokens, token_types=types, chat_template="{{ messages[0].content }}"
    )
    token_ids = Tokenizer(data).encode_chat([user("STOP")])
    assert [tokens[token_id] for token_id in token_ids] == ["S", "T", "O", "P"]


def test_a_template_that_cuts_contents_cannot_make_a_control_token_of_them() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content | replace('~', '') }}")
    assert text_of(tokenizer.encode_chat([user("<|im_~end|>")])) == "<|im_end|>"
    assert controls(tokenizer.encode_chat([user("<|im_~end|>")])) == []


def test_a_template_may_trim_contents_even_where_they_spell_control_tokens() -> None:
    tokenizer = tokenizer_with("<|im_start|>{{ messages[0].content | trim }}<|im_end|>")
    token_ids = tokenizer.encode_chat([user("  <|im_end|> x  ")])
    assert text_of(token_ids) == "<|im_start|><|im_end|> x<|im_end|>"
    assert controls(token_ids) == [START, END]


def test_a_template_sees_its_own_tags_in_contents() -> None:
    tokenizer = tokenizer_with("<|im_start|>{{ messages[0].content.split('</think>')[-1] }}<|im_end|>")
    token_ids = tokenizer.encode_chat([user("<think>long</think>short")])
    assert text_of(token_ids) == "<|im_start|>short<|im_end|>"


def test_a_begin_token_is_the_templates_to_write() -> None:
    tokenizer = Tokenizer(make_tokenizer_data(add_bos=True, chat_template="{{ bos_token }}{{ messages[0].content }}"))
    assert controls(tokenizer.encode_chat([user("hello")])) == [START]


def test_a_template_knows_the_begin_and_end_tokens() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", user("x")) == "<s>x</s>"


def test_newlines_after_blocks_and_space_before_them_are_no_text() -> None:
    source = "{% for message in messages %}\n  {% if true %}\n{{ message.content }}{% endif %}\n{% endfor %}\nend"
    assert render(source, user("a"), user("b")) == "abend"


def test_a_template_may_leave_a_loop() -> None:
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", user("a"), user("b")) == "a"


def test_a_template_may_write_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", render("{{ strftime_now('%Y-%m-%d') }}", user("x")))


def test_json_in_a_template_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0].content | tojson }}", user("<é'>")) == '"<é\'>"'


def test_tools_and_documents_are_none_and_not_undefined() -> None:
    assert render("{{ tools is none and documents is none }}", user("x")) == "True"


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.messages: .*roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", user("x"))
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing() }}",
        "{{ missing.attribute }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_broken_or_harmful_template_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.messages: the model's chat template refused"):
        render(source, user("x"))


def test_a_model_without_a_template_points_to_prompt() -> None:
    with pytest.raises(InvalidRequest, match="no chat template; send plain text in prompt"):
        Tokenizer(make_tokenizer_data(chat_template=None)).encode_chat([user("x")])


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        render(CHATML)


@pytest.mark.parametrize("role", ["tool", "", "User", "<|im_end|>"])
def test_a_role_no_template_knows_is_refused_and_named(role: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"message 1 has the role {role!r}; it must be one of system,")):
        render(CHATML, user("x"), {"role": role, "content": "y"})


def test_one_empty_message_is_allowed_but_not_only_empty_ones() -> None:
    assert render(CHATML, {"role": "system", "content": ""}, user("x")).startswith("<|im_start|>system\n<|im_end|>")
    with pytest.raises(InvalidRequest, match="empty"):
        render(CHATML, {"role": "system", "content": ""}, user(""))


def test_a_turn_is_what_the_template_writes_after_an_answer() -> None:
    answer = {"role": "assistant", "content": "hi"}
    whole = TOKENIZER.encode_chat([user("hello"), answer, user("bye")])
    before = TOKENIZER.encode_chat([user("hello")]) + TOKENIZER.encode("hi", add_special=False)

    assert before + TOKENIZER.encode_turn([user("bye")]) == whole


@pytest.mark.parametrize("content", ["shoalmark", "shoalmarkx and shoalmark", "<|im_end|>shoalmark"])
def test_a_content_that_spells_the_mark_stays_a_content(content: str) -> None:
    token_ids = TOKENIZER.encode_turn([user(content)])

    assert text_of(token_ids) == f"<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert controls(token_ids) == [END, *ONE_TURN_CONTROLS]


@unhurried
@given(content=SPELLINGS.filter(bool))
def test_contents_of_a_turn_never_become_control_tokens_and_keep_their_text(content: str) -> None:
    token_ids = TOKENIZER.encode_turn([user(content)])
    assert controls(token_ids) == [END, *ONE_TURN_CONTROLS]
    assert text_of(token_ids) == f"<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
    ids=["changed", "left out", "twice"],
)
def test_a_template_that_does_not_keep_answers_cannot_go_on(template: str) -> None:
    with pytest.raises(InvalidRequest, match="does not keep answers as they are"):
        tokenizer_with(template).encode_turn([user("x")])


def test_a_template_that_trims_answers_keeps_them() -> None:
    token_ids = tokenizer_with(
        "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}"
    ).encode_turn([user(" x ")])
    assert text_of(token_ids) == "<|im_end|><|im_start|>x<|im_end|>"


def test_a_system_message_is_no_part_of_a_later_turn() -> None:
    with pytest.raises(InvalidRequest, match="comes with the first turn"):
        TOKENIZER.encode_turn([{"role": "system", "content": "be"}, user("x")])


def test_a_beginning_of_a_chat_need_not_open_an_answer() -> None:
    system = {"role": "system", "content": "be"}
    beginning = TOKENIZER.encode_chat([system], opens_answer=False)

    assert text_of(beginning) == "<|im_start|>system\nbe<|im_end|>\n"
    assert TOKENIZER.encode_chat([system, user("x")])[: len(beginning)] == beginning
