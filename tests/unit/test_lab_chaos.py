"""What the lab's faults are told by: the orchestrator's log, and when tokens came."""

from __future__ import annotations

import time

from tests.chaos.losses import Stream
from tests.lab.chaos import lost_and_served, noticed_after

LOG = """
2026-11-30 20:00:00,000 INFO orchestrator.bringup serving pipeline=p1 epoch=1
2026-11-30 20:00:10,500 WARNING orchestrator.control pipeline_lost pipeline=p1 worker=box
2026-11-30 20:00:10,750 INFO orchestrator.bringup serving pipeline=p1 epoch=2
2026-11-30 20:00:10,900 WARNING orchestrator.control pipeline_lost pipeline=p1 worker=laptop
a line without a time
2026-11-30 20:00:11,500 INFO orchestrator.bringup serving pipeline=p1 epoch=3
2026-11-30 20:00:30,000 INFO orchestrator.bringup serving pipeline=p1 epoch=4
"""
BEGIN = 1796068800.0


def test_of_several_losses_the_first_counts_and_what_serves_after_the_last() -> None:
    assert lost_and_served(LOG, BEGIN + 5.0) == (BEGIN + 10.5, BEGIN + 11.5)


def test_what_was_lost_before_is_not_told() -> None:
    assert lost_and_served(LOG, BEGIN + 20.0) == (None, None)


def test_a_loss_is_noticed_after_the_last_token_that_any_stream_had_before_it() -> None:
    now = time.perf_counter()
    streams = [Stream("", {}, token_at=[now - 9.0, now - 3.0]), Stream("", {}, token_at=[now - 4.0, now - 1.0])]

    assert round(noticed_after(streams, time.time() - 2.0), 1) == 1.0
