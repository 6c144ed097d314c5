"""A device that stands by has the weights of what it would take over before anybody is lost; real workers, real blobs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from orchestrator import prefetching
from tests.support.fleet import make_device, start_fleet
from tests.support.shards import TinyModel
from tests.support.streams import SLOW, start_stream


@pytest.fixture(autouse=True)
def no_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "CALM_S", 0.0)


async def test_a_device_that_takes_over_has_nothing_left_to_fetch(
    fleet_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start_fleet(fleet_model.store.root, tmp_path, [SLOW] * 2, split="2,2") as fleet:
        fleet.add_worker("w2", make_device(speed=0.01))
        before = await fleet.client.generate("hello", max_tokens=60, ignore_eos=True)
        status = await fleet.until(
            lambda status: any(0 < one.prefetch_bytes == one.prefetched_bytes for one in status.devices)
        )
        reader = await start_stream(fleet, max_tokens=60)
        caplog.clear()
        await fleet.workers["w1"].vanish()
        after = await reader.result()

    (standby,) = (one for one in status.devices if one.layers is None)
    model_bytes = sum(blob.num_bytes for blob in fleet_model.manifest.blobs)
    assert standby.worker_id == "w2"
    assert standby.prefetch_bytes == model_bytes
    assert after.text == before.text
    # What is loaded anew is loaded from what is there.
    assert [one.message for one in caplog.records if "blobs_ready" in one.message] == [
        "blobs_ready pipeline=p1 fetched_bytes=0"
    ]
