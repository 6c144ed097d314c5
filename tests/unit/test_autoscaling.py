"""The autoscaler looks, has one change made at a time, and tells of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import autoscaling
from launch.autoscaling import LOOK_S, Autoscaler
from launch.desk import Desk, Wanted
from launch.scaling import SETTLE_S, UP_S, Bounds
from tests.support.commands import until

UNDOING = """
import time
from pathlib import Path
try:
    Path({begun!r}).touch()
    time.sleep(60)
except KeyboardInterrupt:
    Path({undone!r}).touch()
"""


UNWILLING = """
import signal, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path({begun!r}).touch()
time.sleep(60)
"""


class Office:
    """An autoscaler with a clock, a queue and a command of the test's own."""

    def __init__(self, home: Path, program: str) -> None:
        self.now = 0.0
        self.num_waiting = 0
        self.num_looks = 0
        self.asked: list[str] = []
        self._program = program
        self.desk = Desk(home, 50_070)
        self.desk.tell(Wanted(("phone", "tablet")))
        self.scaler = Autoscaler(
            "127.0.0.1:50070",
            home,
            self.desk,
            Bounds("tablet", 1, 3),
            status=self._status,
            command=self._command,
            clock=lambda: self.now,
        )

    def _status(self, _: str) -> Any:
        self.num_looks += 1
        return SimpleNamespace(num_waiting=self.num_waiting, num_running=2)

    def _command(self, count: str) -> list[str]:
        self.asked.append(count)
        return [sys.executable, "-c", self._program]

    def fill(self) -> list[str]:
        """Let the queue be full for long enough; what is told then."""
        self.num_waiting = 9
        self.now += SETTLE_S
        assert self.scaler.step() == []
        self.now += max(UP_S, LOOK_S)
        return self.scaler.step()


@pytest.fixture
def make_office(tmp_path: Path) -> Iterator[Any]:
    offices: list[Office] = []

    def make(program: str) -> Office:
        offices.append(Office(tmp_path, program))
        return offices[-1]

    yield make
    for office in offices:
        office.scaler.stop()


def test_a_full_queue_has_another_device_come_and_that_is_told(make_office: Any) -> None:
    office = make_office("")

    told = office.fill()

    assert office.asked == ["tablet=2"]
    assert told == ["9 requests wait, 2 are computed: tablet=2 in place of 1"]


def test_the_fleet_is_looked_at_now_and_then_only(make_office: Any) -> None:
    office = make_office("")

    for _ in range(3):
        office.scaler.step()

    assert office.num_looks == 1


def test_nothing_more_is_asked_for_while_a_change_is_under_way(make_office: Any) -> None:
    office = make_office("import time; time.sleep(60)")
    office.fill()
    office.now += 1000.0

    assert office.scaler.step() == []
    assert office.asked == ["tablet=2"]


def test_a_change_that_failed_is_told_with_its_error(make_office: Any) -> None:
    office = make_office("import sys; sys.exit('error: no room')")
    office.fill()

    assert until(office.scaler.step) == ["error: no room"]


def test_a_change_that_is_under_way_at_the_end_may_undo_what_it_has_begun(make_office: Any, tmp_path: Path) -> None:
    begun, undone = tmp_path / "begun", tmp_path / "undone"
    office = make_office(UNDOING.format(begun=str(begun), undone=str(undone)))
    office.fill()
    until(begun.exists)

    office.scaler.stop()

    assert undone.exists()


def test_a_change_that_does_not_end_is_not_waited_for(
    make_office: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "STOP_S", 0.01)
    begun = tmp_path / "begun"
    office = make_office(UNWILLING.format(begun=str(begun)))
    office.fill()
    until(begun.exists)
    process = office.scaler._changing

    office.scaler.stop()

    assert process.returncode == -signal.SIGKILL
