"""Where a report goes: a file at once, a pipe or a link as it is, and a path that cannot be written not at all."""

from __future__ import annotations

import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from loadtest.report import Report, check_writable, make_report, write_report
from loadtest.runner import Ending, Outcome
from shoal.errors import ConfigError
from tests.support.load_runs import make_record, make_result


def make() -> Report:
    outcome = Outcome(make_result(make_record(0)), Ending.COMPLETE)
    return make_report(outcome, created_at=datetime(2025, 1, 2, tzinfo=UTC), shoal_version="1.2.3")


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # The report fits a pipe: nobody has to read meanwhile.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_report(pipe, make())
        text = os.read(reader, 65536)
    finally:
        os.close(reader)

    assert json.loads(text)["format"] == "shoal-load-report"
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")

    write_report(tmp_path / "link.json", make())

    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["format"] == "shoal-load-report"


def test_a_report_that_cannot_be_written_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fill_up)

    with pytest.raises(OSError, match="No space left"):
        write_report(tmp_path / "report.json", make())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["folder", "x" * 300, "none/report.json"])
def test_a_path_that_cannot_be_written_is_refused_beforehand(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()

    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(tmp_path / name)


def test_looking_whether_a_report_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")

    check_writable(tmp_path / "old.json")
    check_writable(tmp_path / "new.json")

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "old")]
