"""Which lines of a file of prompts can be asked, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batch import prompts
from batch.prompts import Prompt, Refusal, read_prompts
from shoal.errors import ConfigError


def read(folder: Path, *lines: str) -> list[Prompt | Refusal]:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return list(read_prompts(path))


def read_one(folder: Path, **content: object) -> Prompt | Refusal:
    (line,) = read(folder, json.dumps(content))
    return line


def test_a_line_has_an_id_a_text_and_options(tmp_path: Path) -> None:
    line = read_one(tmp_path, id="a", prompt="Hi", max_tokens=3, stop=["."])

    assert isinstance(line, Prompt)
    assert (line.line, line.id, line.text, line.messages) == (1, "a", "Hi", None)
    assert line.options == {"max_tokens": 3, "stop": ["."]}


def test_a_chat_is_asked_as_one(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    line = read_one(tmp_path, messages=messages)

    assert isinstance(line, Prompt)
    assert (line.text, line.messages) == (None, messages)


def test_a_line_without_an_id_is_named_by_its_number_blank_lines_counted(tmp_path: Path) -> None:
    lines = read(tmp_path, "", '{"prompt": "Hi"}', '{"id": 7, "prompt": "Hi"}')

    assert [(line.line, line.id) for line in lines] == [(2, "line-2"), (3, "7")]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("Hi", "line"),
        ('["Hi"]', "line"),
        ('{"id": "a"}', "prompt"),
        ('{"prompt": 3}', "prompt"),
        ('{"prompt": "Hi", "messages": []}', "prompt"),
        ('{"messages": "Hi"}', "messages"),
        ('{"messages": [{"role": "user"}]}', "messages"),
        ('{"prompt": "Hi", "max_tokens": "3"}', "max_tokens"),
        ('{"prompt": "Hi", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "Hi", "stop": [3]}', "stop"),
        ('{"prompt": "Hi", "session_id": "s"}', "session_id"),
        ('{"id": "", "prompt": "Hi"}', "id"),
        ('{"id": "\\ud800", "prompt": "Hi"}', "id"),
        ('{"id": true, "prompt": "Hi"}', "id"),
    ],
)
def test_a_bad_line_is_refused_by_the_field_at_fault_and_the_next_one_is_read(
    tmp_path: Path, line: str, field: str
) -> None:
    refused, following = read(tmp_path, line, '{"prompt": "Hi"}')

    assert isinstance(refused, Refusal)
    assert (refused.error.reason, refused.error.field) == ("INVALID_REQUEST", field)
    assert isinstance(following, Prompt)


def test_an_id_that_comes_again_is_refused_the_second_time(tmp_path: Path) -> None:
    first, second = read(tmp_path, '{"id": "a", "prompt": "Hi"}', '{"id": "a", "prompt": "Ho"}')

    assert isinstance(first, Prompt)
    assert isinstance(second, Refusal)
    assert second.error.field == "id"


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')

    (line,) = read_prompts(path)

    assert isinstance(line, Refusal)


def test_a_line_is_the_same_prompt_when_another_one_comes_behind_it(tmp_path: Path) -> None:
    (last,) = read(tmp_path, '{"prompt": "Hi"}')
    first, _ = read(tmp_path, '{"prompt": "Hi"}', '{"prompt": "Ho"}')

    assert first.digest == last.digest


def test_a_line_far_longer_than_a_prompt_is_told_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 20)

    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: longer than 20 bytes"):
        read(tmp_path, '{"prompt": "Hi"}', json.dumps({"prompt": "Hi" * 20}))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        list(read_prompts(tmp_path / "none.jsonl"))
