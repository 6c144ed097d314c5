"""Parts of some work in processes: all results come, one that dies takes its own part alone, and none outlives the wait."""

from __future__ import annotations

import os
import signal
import struct
import sys
from pathlib import Path

import psutil

from launch import pool
from shoal.errors import LaunchFailed
from tests.support.commands import until


def squared(number: int) -> int:
    return number * number


def squared_or_killed(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return squared(number)


def squared_though_interrupted(number: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return squared(number)


def killed_in_mid_word(number: int) -> int:
    sending = sys._getframe(1).f_locals["sending"]
    os.write(sending.fileno(), struct.pack("!i", 100) + b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def id_then_asleep(part: tuple[Path, int]) -> int:
    folder, number = part
    if number == 0:
        return 0
    (folder / "writing").write_text(str(os.getpid()))
    (folder / "writing").rename(folder / "pid")
    signal.pause()
    return number


def test_all_parts_are_done_and_named_by_their_places() -> None:
    results = dict(pool.each(squared, [5, 6, 7, 8, 9], num_at_once=2))

    assert results == {0: 25, 1: 36, 2: 49, 3: 64, 4: 81}


def test_nothing_to_do_is_done_at_once() -> None:
    assert list(pool.each(squared, [], num_at_once=2)) == []


def test_a_process_that_is_killed_fails_its_own_part_and_no_other() -> None:
    results = dict(pool.each(squared_or_killed, [1, 2, 3, 4], num_at_once=2))

    failed = results.pop(2)
    assert isinstance(failed, LaunchFailed)
    assert "ended with -9" in failed.message
    assert results == {0: 1, 1: 4, 3: 16}


def test_ctrl_c_that_its_terminal_sends_to_all_processes_ends_none_of_them_by_itself() -> None:
    assert list(pool.each(squared_though_interrupted, [3], num_at_once=1)) == [(0, 9)]


def test_a_process_that_is_killed_while_it_sends_its_result_fails_its_part() -> None:
    [(place, failed)] = pool.each(killed_in_mid_word, [1], num_at_once=1)

    assert place == 0
    assert isinstance(failed, LaunchFailed)


def test_whoever_is_under_way_ends_with_the_wait(tmp_path: Path) -> None:
    doing = pool.each(id_then_asleep, [(tmp_path, 1), (tmp_path, 0)], num_at_once=2)
    assert next(doing) == (1, 0)
    path = until(lambda: tmp_path / "pid", Path.exists)
    process = psutil.Process(int(path.read_text()))

    doing.close()

    until(process.is_running, lambda is_running: not is_running)
