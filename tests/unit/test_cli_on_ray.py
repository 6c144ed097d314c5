"""Which options belong to which kind of fleet."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from cli.on_ray import Elsewhere, On, RayChoice, choice_of, devices_of
from launch import changes
from launch.desk import Desk
from launch.local import LocalFleet
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError
from tests.unit.conftest import Run

if TYPE_CHECKING:
    from launch.ray_fleet import RayDevices


def test_a_fleet_of_this_machine_has_nothing_of_ray() -> None:
    assert choice_of(On.LOCAL, "auto", None, "", None) is None


def test_what_is_said_of_ray_is_kept() -> None:
    choice = choice_of(On.RAY, "head:6379", Path("nodes.toml"), "tablet=1..2", None)

    assert choice == RayChoice("head:6379", Path("nodes.toml"), "tablet=1..2")


@pytest.mark.parametrize(
    ("on", "address", "ray_map", "autoscale", "kv_trace", "said"),
    [
        (On.LOCAL, "head:6379", None, "", None, "--address is for"),
        (On.LOCAL, "auto", Path("nodes.toml"), "", None, "--ray-map is for"),
        (On.LOCAL, "auto", None, "tablet=1..2", None, "--autoscale is for"),
        (On.RAY, "auto", None, "", Path("traces"), "--kv-trace is for"),
    ],
)
def test_an_option_of_the_other_kind_is_refused_and_not_ignored(
    on: On, address: str, ray_map: Path | None, autoscale: str, kv_trace: Path | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        choice_of(on, address, ray_map, autoscale, kv_trace)


@pytest.mark.parametrize(
    ("name", "choice", "said"),
    [
        ("phnoe", RayChoice("auto", None), "no device profile 'phnoe'"),
        ("phone", RayChoice("auto", Path("none.toml")), "none.toml: cannot be read"),
        ("phone", RayChoice("auto", None, "phone=many"), r"NAME=LEAST\.\.MOST"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_fetched_or_started(
    tmp_path: Path, name: str, choice: RayChoice, said: str
) -> None:
    fleet = LocalFleet(OrchestratorConfig(home=tmp_path), [], num_elsewhere=1)

    with pytest.raises(ConfigError, match=said):
        devices_of(choice, fleet, [name])

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ["ray-dispatcher"],
        ["batch", "prompts.jsonl", "--out", "answers.jsonl", "--ray", "2"],
        ["load", "server", "--requests", "1", "--rate", "1", "--ray", "2"],
    ],
)
def test_without_ray_whoever_needs_it_says_how_to_install_it(
    run: Run, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    for name in ("dispatcher", "work"):
        monkeypatch.setitem(sys.modules, f"launch.ray_cluster.{name}", None)

    ended = run(*command)

    assert ended.code == 1
    assert "pip install 'shoal[ray]'" in ended.err


def test_whom_a_change_that_was_cut_short_has_left_cordoned_is_let_in_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = LocalFleet(OrchestratorConfig(home=tmp_path), [], num_elsewhere=1)
    desk = Desk(tmp_path, fleet.config.port)
    left = {(fleet.address, desk): ["phone-1"]}
    monkeypatch.setattr(changes, "let_in_after_others", lambda *whose: left.get(whose, []))
    devices = cast("RayDevices", SimpleNamespace(hear=list, worker_ids=["phone-1"]))

    Elsewhere(fleet, devices, desk, None).step()

    assert "phone-1 was left cordoned" in capsys.readouterr().err
