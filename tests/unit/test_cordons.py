"""The names of cordoned devices over a restart of the orchestrator."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from orchestrator.cordons import CordonFile
from shoal.types import WorkerId

A, B = WorkerId("phone 1"), WorkerId("tablet")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cordoned-1.json"


def test_what_was_written_last_is_read_by_the_next_one(path: Path) -> None:
    CordonFile(path).write([B, A])
    assert CordonFile(path).read() == {A, B}

    CordonFile(path).write([B])
    assert CordonFile(path).read() == {B}

    CordonFile(path).write([])
    assert CordonFile(path).read() == frozenset()


def test_without_a_file_nobody_is_cordoned_and_nobody_is_warned(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert CordonFile(path).read() == frozenset()
    assert caplog.records == []


@pytest.mark.parametrize("content", [b"", b'["phone 1"', b'{"phone 1": true}', b"[1]", b"\xff\xfe"])
def test_a_file_that_is_not_sound_counts_for_nothing_and_that_is_said(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)

    assert CordonFile(path).read() == frozenset()
    assert "cordons_not_read" in caplog.text


def test_nothing_is_left_beside_the_file(path: Path) -> None:
    CordonFile(path).write([A])

    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_said_and_no_error(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path.mkdir()

    CordonFile(path).write([A])

    assert "a restart would forget them" in caplog.text
