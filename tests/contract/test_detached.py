"""Workers that outlive their keepers, with real processes in the place of workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch import detached
from launch.backoff import FIRST_S
from launch.detached import Keeper, WorkerOrder
from tests.support.commands import until

# Says by its log what its standard input does, and ends when it is told to.
LASTING = "import sys, time; print('up', flush=True); sys.stdin.read(); print('alone', flush=True); time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
ENDING = "print('no such model')"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Place:
    """Keepers of one worker, one after the other, and what they leave."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.clock = Clock()
        self.pids: set[int] = set()

    def keeper(self, program: str = LASTING, **order: str) -> Keeper:
        made = WorkerOrder(worker_id="phone-1", join="127.0.0.1:50070", profile="phone", home=str(self.home), **order)  # type: ignore[arg-type]
        return Keeper(made, (sys.executable, "-c", program), self.clock)

    def tend(self, keeper: Keeper, *, may_start: bool = True) -> detached.Tended:
        tended = keeper.tend(may_start=may_start)
        self.pids |= {tended.pid} - {0}
        return tended


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for pid in place.pids:
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_worker_is_started_once_and_is_nobody_s_child(place: Place) -> None:
    keeper = place.keeper()

    started, again = place.tend(keeper), place.tend(keeper)

    assert (started.news, again.news) == ("runs", "")
    assert again.pid == started.pid
    assert psutil.Process(started.pid) not in psutil.Process().children(recursive=True)


def test_a_worker_learns_that_its_keeper_is_gone_and_goes_on(place: Place) -> None:
    keeper = place.keeper()
    pid = place.tend(keeper).pid
    log = keeper.log_path
    until(log.read_text, lambda said: "up" in said)

    keeper.forsake()

    until(log.read_text, lambda said: "alone" in said)
    assert not has_ended(pid)


def test_the_next_keeper_takes_over_what_still_runs(place: Place) -> None:
    pid = place.tend(place.keeper()).pid

    taken = place.tend(place.keeper())

    assert (taken.pid, taken.news) == (pid, "goes on under a new keeper")


def test_a_worker_that_may_run_elsewhere_is_taken_over_but_not_started(place: Place) -> None:
    waiting = place.tend(place.keeper(), may_start=False)
    pid = place.tend(place.keeper()).pid
    taken = place.tend(place.keeper(), may_start=False)

    assert (waiting.pid, waiting.news) == (0, "")
    assert taken.pid == pid


def test_a_note_of_a_process_that_is_another_one_by_now_is_not_believed(place: Place) -> None:
    first = place.keeper()
    pid = place.tend(first).pid
    note = first.note_path
    note.write_text(note.read_text().replace('"created": ', '"created": 1'))

    assert place.tend(place.keeper()).pid != pid


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 7}', '{"pid": "seven", "created": 1.0}'])
def test_a_note_that_is_none_is_not_believed(place: Place, text: str) -> None:
    keeper = place.keeper()
    keeper.note_path.parent.mkdir(parents=True)
    keeper.note_path.write_text(text)

    assert place.tend(keeper).news == "runs"


def test_a_worker_that_ends_is_started_again_after_a_while_and_its_last_words_are_told(place: Place) -> None:
    keeper = place.keeper(ENDING)
    pid = place.tend(keeper).pid
    until(lambda: has_ended(pid))

    ended, early = place.tend(keeper), place.tend(keeper)
    place.clock.now += FIRST_S
    again = place.tend(keeper)

    assert (ended.pid, early.pid) == (0, 0)
    assert "no such model" in ended.news
    assert again.pid not in (0, pid)


def test_what_a_killed_worker_happened_to_say_before_is_no_reason(place: Place) -> None:
    keeper = place.keeper(DEAF)
    pid = place.tend(keeper).pid
    with keeper.log_path.open("a") as log:
        log.write("2026-12-01 03:36:27,260 INFO worker.agent peer_linked pipeline=p1\n")
    psutil.Process(pid).kill()
    until(lambda: has_ended(pid))

    assert place.tend(keeper).news.endswith(f"started again in {FIRST_S:g} s (log: {keeper.log_path})")


def test_stopping_ends_the_worker_and_it_is_started_no_more(place: Place) -> None:
    keeper = place.keeper()
    pid = place.tend(keeper).pid

    keeper.stop()

    assert has_ended(pid)
    assert not keeper.note_path.exists()
    assert place.tend(keeper).pid == 0
    assert place.tend(place.keeper(), may_start=False).pid == 0


def test_a_worker_that_does_not_end_when_it_is_told_to_is_killed(place: Place) -> None:
    keeper = place.keeper(DEAF)
    pid = place.tend(keeper).pid
    until(keeper.log_path.read_text, lambda said: "up" in said)

    keeper.stop(timeout_s=0.0)

    until(lambda: has_ended(pid))


def test_a_profile_that_was_sent_is_a_file_where_the_worker_runs(place: Place) -> None:
    keeper = place.keeper("import sys; print(open(sys.argv[1].split('=')[1]).read())", profile_text="name = 'mine'")
    pid = place.tend(keeper).pid
    until(lambda: has_ended(pid))

    assert "name = 'mine'" in keeper.log_path.read_text()
