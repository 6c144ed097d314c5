"""A fleet that is measured before it is placed: real workers and a real orchestrator on loopback, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.measuring import Measuring
from shoal.types import LinkProfile
from tests.support.fleet import make_device, start_fleet
from tests.support.shards import TinyModel


def kept_times(home: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in (home / "times").glob("*.json")]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Measuring]:
    """Every Measuring that an orchestrator of the test makes."""
    made: list[Measuring] = []
    original = Measuring.__init__

    def remember(self: Measuring, *arguments: object, **options: object) -> None:
        original(self, *arguments, **options)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Measuring, "__init__", remember)
    return made


@pytest.mark.parametrize("use_sockets", [True, False])
async def test_a_fleet_is_placed_when_its_devices_and_the_links_between_all_of_them_are_measured(
    fleet_model: TinyModel, tmp_path: Path, seen: list[Measuring], use_sockets: bool
) -> None:
    devices = [make_device(is_emulated=True, speed=speed, link=LinkProfile(2.0, 40.0)) for speed in (1.0, 0.5)]
    options: dict[str, Any] = {"use_sockets": use_sockets, "is_measured": True, "split": "2,2"}
    async with start_fleet(fleet_model.store.root, tmp_path, devices, **options):
        figures = seen[0].figures()

    w0, w1 = sorted(figures.devices, key=lambda one: one.worker_id)
    assert not w0.is_declared
    assert not w1.is_declared
    assert w1.times.layer_at(4) == pytest.approx(2 * w0.times.layer_at(4))
    ends = (None, w0.worker_id, w1.worker_id)
    links = [figures.links[one, other] for one in ends for other in ends if one != other]
    assert all(link.delay_s >= 0.002 for link in links)
    # Of 5 MB/s, which a busy machine may blur.
    assert all(link.bytes_per_s <= 7.5e6 for link in links)


async def test_devices_of_one_machine_are_measured_once_and_never_again(fleet_model: TinyModel, tmp_path: Path) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path, [make_device()] * 2, is_measured=True, split="2,2"):
        first = kept_times(tmp_path)
    async with start_fleet(fleet_model.store.root, tmp_path, [make_device()] * 2, is_measured=True, split="2,2"):
        again = kept_times(tmp_path)

    assert len(first) == 1
    assert again == first


async def test_a_fleet_that_cannot_keep_its_times_serves_all_the_same(fleet_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "times").write_text("in the way", encoding="utf-8")
    async with start_fleet(fleet_model.store.root, tmp_path, [make_device()], is_measured=True) as fleet:
        status = await fleet.client.status()
    assert status.ready


async def test_an_orchestrator_that_comes_back_knows_the_links_of_devices_that_hold_layers(
    fleet_model: TinyModel, tmp_path: Path, seen: list[Measuring]
) -> None:
    devices = [make_device(is_emulated=True, link=LinkProfile(2.0, 40.0))] * 2
    async with start_fleet(fleet_model.store.root, tmp_path, devices, is_measured=True, split="2,2") as fleet:
        before = seen[0].figures()
        await fleet.restart_orchestrator()
        await fleet.serving(2)
        after = seen[1].figures()

    assert len(before.links) == 6
    assert after.links == before.links
