"""What `shoal plan` prints: a bar of layers and memory for each device, figures, what binds, and other plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.plan import plan
from modelstore.store import ModelStore
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
    with pytest.raises(ConfigError, match="ways to say the same"):
        plan(devices="phone", profiles=tmp_path, home=home)
    with pytest.raises(ConfigError, match=r"no \.toml file"):
        plan(profiles=tmp_path, home=home, model="tiny")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 100_000}, "context = 100000 is more than tiny can have: its context is {most} tokens"),
        ({"prompt": 100_000}, "prompt = 100000 leaves no room for an answer: the context is {most} tokens"),
        ({"context": 32, "prompt": 32}, "prompt = 32 leaves no room for an answer: the context is 32 tokens, so .* 31"),
    ],
)
def test_more_tokens_than_the_model_can_have_are_refused_with_the_numbers(
    home: Path, tmp_path: Path, options: dict[str, int], message: str
) -> None:
    most = ModelStore(home).open("tiny").config.context_tokens
    with pytest.raises(ConfigError, match=message.format(most=most)):
        plan(profiles=write_devices(tmp_path, 1.0), model="tiny", home=home, **options)


@pytest.mark.parametrize(
    ("devices", "question"),
    [
        ("phone,tablte", "did you mean tablet?"),
        ("Phone", "did you mean phone?"),
        ("phone:lateny", "did you mean latency?"),
    ],
)
def test_a_slip_in_the_list_of_devices_is_answered_with_the_name_that_is_close(
    home: Path, devices: str, question: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(question)):
        plan(devices=devices, model="tiny", home=home, streams=4)


def test_a_device_that_is_like_no_other_is_answered_with_those_there_are(home: Path) -> None:
    with pytest.raises(ConfigError, match="shipped are edge-box") as raised:
        plan(devices="zebra", model="tiny", home=home)
    assert "did you mean" not in raised.value.message
