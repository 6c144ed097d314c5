"""Who is gone, and why: as long as somebody may ask."""

from __future__ import annotations

from orchestrator.departures import KEPT_S, MAX_KEPT, Departures
from orchestrator.worker_session import LEFT
from shoal.types import WorkerId

PHONE, TABLET = WorkerId("phone"), WorkerId("tablet")


def test_the_latest_that_went_is_the_first_with_its_reason() -> None:
    departures = Departures()
    departures.gone(PHONE, "no heartbeat for 5 s", 100.0)
    departures.gone(TABLET, LEFT, 130.0)
    assert [(one.worker_id, one.why, one.at, one.is_orderly) for one in departures.recent(131.0)] == [
        (TABLET, LEFT, 130.0, True),
        (PHONE, "no heartbeat for 5 s", 100.0, False),
    ]


def test_who_comes_back_is_not_gone() -> None:
    departures = Departures()
    departures.gone(PHONE, "its connection ended", 100.0)
    departures.back(PHONE)
    departures.back(TABLET)
    assert departures.recent(101.0) == ()


def test_who_goes_again_is_gone_since_then() -> None:
    departures = Departures()
    departures.gone(PHONE, "its connection ended", 100.0)
    departures.gone(TABLET, "its connection ended", 101.0)
    departures.gone(PHONE, "no heartbeat for 5 s", 102.0)
    assert [(one.worker_id, one.at) for one in departures.recent(103.0)] == [(PHONE, 102.0), (TABLET, 101.0)]


def test_nobody_is_told_of_after_ten_minutes() -> None:
    departures = Departures()
    departures.gone(PHONE, "its connection ended", 100.0)
    assert len(departures.recent(100.0 + KEPT_S - 0.1)) == 1
    assert departures.recent(100.0 + KEPT_S) == ()


def test_of_too_many_those_that_went_first_are_forgotten() -> None:
    departures = Departures()
    for index in range(MAX_KEPT + 1):
        departures.gone(WorkerId(f"w{index}"), "its connection ended", float(index))
    recent = departures.recent(float(MAX_KEPT))
    assert len(recent) == MAX_KEPT
    assert recent[0].worker_id == f"w{MAX_KEPT}"
    assert recent[-1].worker_id == "w1"
