"""The chat templates that go by name, written out as their families document them, and which template a model has."""

from pathlib import Path
from typing import Any

import pytest

from modelstore.chat_templates import CHAT_TEMPLATES
from modelstore.hf_folder import HfFolder
from modelstore.hf_template import read_template, user_template
from orchestrator.chat import ChatTemplate
from shoal.errors import BadModelFile, InvalidRequest
from tests.support.tokenizer_files import write_files

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = [{"role": "user", "content": " Hi "}]
SECOND = [*FIRST, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]

WRITTEN = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral": "<s>[INST] Be brief.\n\nHi [/INST] Hello.</s>[INST] Bye [/INST]",
    "llama2": ("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST]"),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\n Hi <|end|>\n<|assistant|>\nHello.<|end|>\n<|user|>\nBye<|end|>\n"
        "<|assistant|>\n"
    ),
}
TAKING_TURNS = ["gemma", "llama2", "mistral"]


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def test_every_named_template_is_written_out_here() -> None:
    assert set(WRITTEN) == set(CHAT_TEMPLATES)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_conversation_is_written_as_the_family_documents_it(name: str) -> None:
    assert template(CHAT_TEMPLATES[name]).render([SYSTEM, *SECOND]) == WRITTEN[name]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_without_a_system_message_nothing_stands_in_its_place(name: str) -> None:
    written = template(CHAT_TEMPLATES[name]).render(FIRST)
    assert "system" not in written.lower()
    assert "SYS" not in written
    assert written.count("Hi") == 1


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_later_turn_is_what_the_conversation_has_behind_the_answer(name: str) -> None:
    chat = template(CHAT_TEMPLATES[name])
    assert chat.render(FIRST) + "Hello." + chat.render_turn(SECOND[2:]) in (
        chat.render(SECOND),
        chat.render(SECOND).replace("[/INST] Hello", "[/INST]Hello"),
    )


@pytest.mark.parametrize("name", TAKING_TURNS)
def test_two_turns_of_the_user_in_a_row_are_refused_where_the_format_has_none(name: str) -> None:
    with pytest.raises(InvalidRequest, match="take turns"):
        template(CHAT_TEMPLATES[name]).render([*FIRST, *FIRST])


def test_marks_for_training_are_no_text() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert template(source).render(FIRST) == " Hi "


def test_json_may_be_written_as_the_template_asks() -> None:
    source = "{{ {'b': 1, 'a': 'é'} | tojson(indent=None, separators=(',', ':'), sort_keys=True) }}"
    assert template(source).render(FIRST) == '{"a":"é","b":1}'


@pytest.mark.parametrize(
    ("files", "settings", "expected"),
    [
        ({}, {}, None),
        ({}, {"chat_template": "a"}, "a"),
        ({}, {"chat_template": ""}, None),
        ({"chat_template.jinja": "file"}, {"chat_template": "a"}, "file"),
        ({"chat_template.json": {"chat_template": "json"}}, {}, "json"),
        ({}, {"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}, "d"),
        ({}, {"chat_template": [{"name": "rag", "template": "r"}]}, "r"),
        ({}, {"chat_template": [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}]}, None),
    ],
)
def test_of_several_templates_one_counts(
    tmp_path: Path, files: dict[str, Any], settings: dict[str, Any], expected: str | None
) -> None:
    assert read_template(write_files(tmp_path, files), settings) == expected


@pytest.mark.parametrize("stated", [[{"name": "default", "template": 1}], {"default": "x"}, 7])
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, stated: Any) -> None:
    with pytest.raises(BadModelFile, match="chat_template"):
        read_template(HfFolder(tmp_path), {"chat_template": stated})


def test_a_user_may_name_a_template_or_bring_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}")
    assert user_template(str(file)) == "{{ messages }}"
    assert user_template("chatml") == CHAT_TEMPLATES["chatml"]


def test_a_template_that_is_neither_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidRequest, match="neither a file nor one of chatml, gemma"):
        user_template("vicuna")


def test_a_template_file_beyond_all_measure_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "huge.jinja"
    file.write_text("x" * ((1 << 20) + 1))
    with pytest.raises(BadModelFile, match=r"huge\.jinja has more than"):
        user_template(str(file))
