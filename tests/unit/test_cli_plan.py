"""What `shoal plan` prints: a bar of layers and memory for each device, figures, what binds, and other plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.plan import plan
from shoal.errors import ConfigError, PlacementImpossible
from tests.support.shards import make_tiny_model

PHONE = """
name = "{name}"
kind = "phone"
memory_mib = {memory_mib}
host_kv_mib = 0
speed = {speed}
emulated = true
"""
WIDTH = 100


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plan"), num_layers=6).store.root


def write_devices(folder: Path, *speeds: float, memory_mib: int = 256) -> Path:
    for index, speed in enumerate(speeds):
        name = f"phone{index}"
        (folder / f"{name}.toml").write_text(PHONE.format(name=name, memory_mib=memory_mib, speed=speed))
    return folder


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_each_stage_has_a_bar_of_layers_and_of_memory(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(profiles=write_devices(tmp_path, 1.0), model="tiny", home=home, objective="latency")
    lines = lines_of(capsys)
    (stage,) = [line for line in lines if line.startswith("phone0-1*  ")]
    assert "██████  [0, 6)" in stage
    assert " of 256 MiB" in stage
    assert any(line.startswith("bound by ") for line in lines)
    assert max(len(line) for line in lines) <= WIDTH


def test_devices_on_standby_and_other_plans_are_shown(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(profiles=write_devices(tmp_path, 1.0, 0.5), model="tiny", home=home, objective="latency")
    lines = lines_of(capsys)
    assert any(line.startswith("on standby: phone1-1") for line in lines)
    assert any(line.startswith("1 device (this plan)") for line in lines)
    assert any(line.startswith("2 devices ") for line in lines)


def test_json_has_the_same_plan(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(profiles=write_devices(tmp_path, 1.0, 0.5), model="tiny", home=home, objective="latency", json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["standby"]) == ("tiny", ["phone1-1"])
    assert told["pipelines"][0]["stages"][0]["layers"] == [0, 6]


def test_shipped_devices_are_named_as_a_fleet_would_name_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(devices="phone,phone,tablet:latency", model="tiny", home=home, json=True)
    told = json.loads(capsys.readouterr().out)
    named = {stage["worker_id"] for one in told["pipelines"] for stage in one["stages"]} | set(told["standby"])
    assert named == {"phone-1", "phone-2", "tablet-1"}
    assert told["pipelines"][-1]["mode"] == "latency"


def test_an_impossible_plan_says_what_is_missing(home: Path, tmp_path: Path) -> None:
    devices = write_devices(tmp_path, 1.0, memory_mib=100)
    with pytest.raises(PlacementImpossible, match=r"lacks \d+ .*What helps: another worker with \d+ MiB"):
        plan(profiles=devices, model="tiny", home=home)


def test_devices_are_said_in_one_way(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two ways"):
        plan(devices="phone", profiles=tmp_path, home=home)
    with pytest.raises(ConfigError, match=r"no \.toml file"):
        plan(profiles=tmp_path, home=home, model="tiny")
