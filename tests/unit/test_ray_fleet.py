"""What whoever starts a fleet on Ray is told, and what it tells: without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.desk import Desk, Wanted
from launch.ray_fleet import Placed, RayDevices, reach_of
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError


def make_devices(home: Path, *devices: str, host: str = "127.0.0.1") -> RayDevices:
    return RayDevices(OrchestratorConfig(home=home, port=50_070, host=host), devices)


def test_workers_are_numbered_as_those_of_a_local_fleet(tmp_path: Path) -> None:
    assert make_devices(tmp_path, "phone", "tablet:latency", "phone").worker_ids == ["phone-1", "tablet-1", "phone-2"]


def test_a_fleet_of_no_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one device"):
        make_devices(tmp_path)


@pytest.mark.parametrize(
    ("host", "reach"),
    [("127.0.0.1", ""), ("localhost", ""), ("0.0.0.0", "all"), ("10.0.0.1", "10.0.0.1:50070"), ("lab", "lab:50070")],
)
def test_other_machines_are_told_the_outer_address_where_there_is_one(host: str, reach: str) -> None:
    assert reach_of(OrchestratorConfig(port=50_070, host=host)) == reach


def test_news_of_a_device_are_told_with_where_it_is(tmp_path: Path) -> None:
    devices = make_devices(tmp_path, "phone")

    told = devices.take({"worker_id": "phone-1", "pid": 7, "node": "10.0.0.2/abc", "news": "runs"})

    assert told == "phone-1 runs (node 10.0.0.2/abc, process 7)"
    assert devices.placed == {"phone-1": Placed(7, "10.0.0.2/abc")}


def test_an_order_can_be_sent_as_json_with_the_text_of_a_file_in_it(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('name = "own"\nkind = "phone"\nmemory_mib = 500\nemulated = true\n')

    message = json.loads(json.dumps(make_devices(tmp_path, f"{path}:latency", "phone").message(is_first=True)))
    own, phone = (device["order"] for device in message["devices"])

    assert (own["worker_id"], own["profile"], own["mode"]) == ("own-1", "", "latency")
    assert own["profile_text"] == path.read_text()
    assert (phone["profile"], phone["profile_text"]) == ("phone", "")
    assert phone["join"] == "127.0.0.1:50070"


@pytest.mark.parametrize(("host", "join"), [("0.0.0.0", "127.0.0.1:50070"), ("::", "[::1]:50070")])
def test_devices_of_this_machine_reach_an_orchestrator_that_listens_on_all_addresses(
    tmp_path: Path, host: str, join: str
) -> None:
    message = json.loads(json.dumps(make_devices(tmp_path, "phone", host=host).message(is_first=True)))
    (device,) = message["devices"]

    assert device["order"]["join"] == join


def test_what_is_wanted_at_the_desk_is_taken_up_and_told_there(tmp_path: Path) -> None:
    devices = make_devices(tmp_path, "phone")
    desk = Desk(tmp_path, 50_070)
    desk.ask(Wanted(("phone", "phone"), {"phone-1": 2}))

    assert devices.hear() == ["wanted are phone-1, phone-2"]

    message = json.loads(json.dumps(devices.message(is_first=False)))
    assert [device["generation"] for device in message["devices"]] == [2, 0]
    assert desk.look() == Wanted(("phone", "phone"), {"phone-1": 2})


def test_devices_that_are_to_run_anew_are_the_same_ones(tmp_path: Path) -> None:
    devices = make_devices(tmp_path, "phone")
    Desk(tmp_path, 50_070).ask(Wanted(("phone",), {"phone-1": 1}))

    assert devices.hear() == []


def test_devices_that_cannot_be_are_told_and_those_there_are_stay(tmp_path: Path) -> None:
    devices = make_devices(tmp_path, "phone")
    Desk(tmp_path, 50_070).ask(Wanted(("phnoe",)))

    (told,) = devices.hear()

    assert told.startswith("devices stay as they are: there is no device profile 'phnoe'")
    assert devices.worker_ids == ["phone-1"]


def test_that_ray_is_back_is_told_only_where_it_was_lost(tmp_path: Path) -> None:
    devices = make_devices(tmp_path, "phone")
    assert devices.take({"connected": "head:6379"}) == ""

    devices.is_lost = True

    assert devices.take({"connected": "head:6379"}) == "Ray is back at head:6379"
    assert not devices.is_lost
