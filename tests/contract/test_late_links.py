"""A link that becomes slow while a pipeline serves: the plan is looked at at once, and replaced as any other."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from orchestrator import placing
from orchestrator.core.hops import NUM_HOPS, Hop
from orchestrator.placing import REVIEW_S
from orchestrator.shards import footprint
from shoal.types import PipelineId, WorkerId
from tests.support.builders import make_sequence
from tests.support.desk import Desk, make_desk
from tests.support.shards import TinyModel

P1 = PipelineId("p1")
W0, W1 = WorkerId("w0"), WorkerId("w1")
USUAL_S = 0.001
KV_TOKENS = 256


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "AGAIN_S", 0.0)


def make_serving_desk(model: TinyModel) -> Desk:
    """w0 and w1 serve, for nobody can hold all layers; w2 stands by and is slower; all has been looked at."""
    desk = make_desk(model, expect_workers=3, max_sequences=1)
    half_bytes = max(footprint(model.manifest).need_bytes(start, start + 2, KV_TOKENS) for start in (0, 2))
    for name, speed in (("w0", 1.0), ("w1", 1.0), ("w2", 0.8)):
        desk.join(name, speed=speed, memory_bytes=half_bytes)
    desk.bring_up("w0", "w1")
    now = time.monotonic()
    desk.control.tick(now)
    step(desk, USUAL_S, now)
    assert desk.serving() == {"p1": ["w0", "w1"]}
    assert not desk.control._wants_placement
    return desk


def step(desk: Desk, hop_s: float, now: float) -> None:
    """Let steps come back whose messages from w0 to w1 took so long."""
    lane = desk.engine.lane(P1)
    assert lane is not None
    lane.pipeline._hops.extend([Hop(W0, W1, hop_s)] * NUM_HOPS)
    desk.control.tick(now)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_link_that_becomes_slow_has_its_stages_moved_without_waiting_for_the_next_review(
    fleet_model: TinyModel,
) -> None:
    desk = make_serving_desk(fleet_model)
    before_the_review = time.monotonic() + REVIEW_S / 2

    step(desk, USUAL_S, before_the_review)
    kept = dict(desk.hub.routes)
    step(desk, USUAL_S + 0.5, before_the_review)
    await turns()

    assert kept == {P1: ("w0", "w1")}
    assert any(command.HasField("load_shard") for command in desk.commands("w2"))


async def test_a_slow_link_waits_as_long_after_a_change_as_all_else_does_while_somebody_is_served(
    fleet_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    desk = make_serving_desk(fleet_model)
    desk.engine.submit(make_sequence(7))

    step(desk, USUAL_S + 0.5, time.monotonic())
    await turns()

    assert desk.hub.routes == {P1: ("w0", "w1")}
    assert not any(command.HasField("load_shard") for command in desk.commands("w2"))
    assert "why='the last change is too recent'" in caplog.text
    assert desk.control._wants_placement
