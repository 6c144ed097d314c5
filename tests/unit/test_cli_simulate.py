"""`shoal plan --simulate`: what it prints, as JSON and as a picture, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cli.plan import plan
from loadtest.plots import Curve, Curves, draw_curves
from shoal.errors import ConfigError
from tests.support.shards import make_tiny_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("simulate"), num_layers=6).store.root


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_synthetic_fleet_is_planned_at_sites_and_played(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(simulate=True, fleet=30, streams=20, seconds=0.5, model="tiny", home=home, json=True)
    results = told(capsys)
    assert (results["model"], results["num_devices"], results["num_sites"]) == ("tiny", 30, 2)
    assert results["num_streams"] == 20
    assert results["tokens_per_s"] > 0
    assert results["ends"]["lost"] == 0


def test_devices_that_are_named_are_one_site(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(simulate=True, devices="phone,laptop", rate=4.0, seconds=2.0, model="tiny", home=home, json=True)
    results = told(capsys)
    assert (results["num_devices"], results["num_sites"], results["num_pipelines"]) == (2, 1, 1)
    assert (results["rate_per_s"], results["num_streams"]) == (4.0, 0)


def test_a_seed_gives_the_same_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for seed in (1, 1, 2):
        plan(simulate=True, devices="sbc", streams=2, seconds=1.0, seed=seed, model="tiny", home=home, json=True)
        runs.append({**told(capsys), "seed": 0})
    assert runs[0] == runs[1] != runs[2]


def test_a_person_is_told_what_was_asked_what_came_of_it_and_what_binds(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(simulate=True, devices="phone,phone", churn=60.0, seconds=60.0, streams=2, model="tiny", home=home)
    said = capsys.readouterr()
    for words in ("2 streams that ask again", "balanced", "tokens/s of answers", "left:", "0 lost", "bound by"):
        assert words in said.out
    assert "the same seed (1)" in said.err


def test_a_picture_is_drawn_where_it_is_wanted(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    plan(simulate=True, devices="laptop", streams=2, seconds=2.0, plot=path, model="tiny", home=home, json=True)
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert "Tokens a second, 1 devices" in path.read_text()


@pytest.mark.parametrize("asked", [{"fleet": 5}, {"rate": 1.0}, {"seconds": 5.0}, {"churn": 1.0}])
def test_what_only_a_simulation_has_is_refused_without_one(home: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="add --simulate"):
        plan(devices="phone", model="tiny", home=home, **asked)


def test_a_fleet_is_said_in_one_way(home: Path) -> None:
    with pytest.raises(ConfigError, match="ways to say the same"):
        plan(simulate=True, fleet=5, devices="phone", model="tiny", home=home)


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(home: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "run.png", tmp_path / "nowhere" / "run.svg"):
        with pytest.raises(ConfigError, match=r"must be an \.svg file"):
            plan(simulate=True, devices="phone", plot=path, model="tiny", home=home)


def test_curves_are_a_file_of_their_own_that_any_viewer_shows() -> None:
    panel = Curves("T", "x", [Curve("a", [(1, 1), (10, 2)]), Curve("b", [(1, 3)])], is_log_x=True, marks=[5.0])
    svg = draw_curves("name", [panel, panel])
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "var(" not in svg
    assert "#0102" not in svg
