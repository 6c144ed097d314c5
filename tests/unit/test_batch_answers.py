"""The file of answers, after ends of all kinds: nothing is lost, nothing is there twice."""

from __future__ import annotations

import fcntl
import json
import resource
from pathlib import Path
from typing import IO

import pytest

from batch.answers import AnswerFile
from shoal.errors import ConfigError, StorageFull


def answer(line: int, text: str = "Hi") -> dict[str, object]:
    return {"line": line, "id": f"line-{line}", "text": text, "completion_tokens": 2, "prompt_digest": "d"}


def lines_of(path: Path) -> list[int]:
    return [json.loads(line)["line"] for line in path.read_text(encoding="utf-8").splitlines()]


def written(path: Path, *lines: int) -> None:
    with AnswerFile(path) as file:
        file.append(answer(line) for line in lines)


def test_what_was_appended_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    written(path, 2, 1)

    with AnswerFile(path) as file:
        assert file.kept.keys() == {1, 2}
        assert file.num_repaired == 0


@pytest.mark.parametrize("num_bytes", [1, 10, 70])
def test_a_last_line_that_was_cut_off_is_removed_and_the_next_one_is_whole(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "answers.jsonl"
    written(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[1][:num_bytes])

    with AnswerFile(path) as file:
        assert (set(file.kept), file.num_repaired) == ({1, 2}, num_bytes)
        file.append([answer(3)])

    assert lines_of(path) == [1, 2, 3]


def test_a_line_without_its_end_is_not_an_answer_though_it_could_be_read(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    written(path, 1)
    path.write_bytes(path.read_bytes()[:-1])

    with AnswerFile(path) as file:
        assert not file.kept


def test_sorting_puts_answers_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path) as file:
        file.append(answer(line) for line in (3, 1, 2))
        file.sort()

    assert lines_of(path) == [1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["dear diary\n", "dear diary", '{"prompt": "Fish"}'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(content)

    with pytest.raises(ConfigError, match=r"answers\.jsonl:1"), AnswerFile(path):
        pass

    assert path.read_text() == content


def test_half_a_character_in_what_is_told_of_a_line_is_kept_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path) as file:
        file.append([answer(1, "\ud800")])

    assert json.loads(path.read_bytes())["text"] == "\ud800"


def test_a_line_that_is_there_twice_is_told(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    written(path, 1)
    path.write_bytes(path.read_bytes() * 2)

    with pytest.raises(ConfigError, match="there twice"), AnswerFile(path):
        pass


def test_a_second_batch_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path), pytest.raises(ConfigError, match="another batch writes to it"), AnswerFile(path):
        pass


def test_a_file_that_another_batch_replaces_before_it_is_locked_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.jsonl"
    written(path, 1)
    lock = fcntl.flock

    def replace_and_lock(file: IO[bytes], operation: int) -> None:
        (tmp_path / "sorted").write_bytes(path.read_bytes())
        (tmp_path / "sorted").replace(path)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)
    with pytest.raises(ConfigError, match="another batch writes to it"), AnswerFile(path):
        pass


def failed(line: int) -> dict[str, object]:
    return {"line": line, "id": f"line-{line}", "error": {"reason": "INTERNAL"}, "prompt_digest": "d"}


def test_errors_that_are_dropped_are_no_answers_any_more_and_the_file_is_still_locked(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path) as file:
        file.append([answer(1), failed(2), answer(3), failed(4)])

    with AnswerFile(path) as file:
        assert file.drop_errors() == 2
        assert file.kept.keys() == {1, 3}
        with pytest.raises(ConfigError, match="another batch writes to it"), AnswerFile(path):
            pass
        file.append([answer(2)])
        assert file.drop_errors() == 0

    assert lines_of(path) == [1, 3, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["answers.jsonl"]


def test_a_full_disk_is_told_and_what_was_kept_before_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    written(path, 1, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(StorageFull, match="start the batch again to go on"), AnswerFile(path) as file:
            file.append([answer(3), answer(4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with AnswerFile(path) as file:
        assert (set(file.kept), file.num_repaired > 0) == ({1, 2}, True)
        file.append([answer(3)])
    assert lines_of(path) == [1, 2, 3]


def test_what_is_no_file_is_not_written_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/dev/full: is no regular file"), AnswerFile(Path("/dev/full")):
        pass
