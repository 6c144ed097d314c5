"""The grid of a sweep: what may be said of it, and which cells it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from simulation.grid import Axis, Cell, cells_of, read_axes


def test_an_axis_is_a_name_and_its_values() -> None:
    assert read_axes(["streams=1,8,64", "objective=latency,throughput", "rate=0.5, 2"]) == (
        Axis("streams", (1, 8, 64)),
        Axis("objective", ("latency", "throughput")),
        Axis("rate", (0.5, 2.0)),
    )


def test_a_file_has_axes_too(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('fleet = [10, 50]\nobjective = ["latency"]\n')

    assert read_axes([str(path), "streams=4"]) == (
        Axis("fleet", (10, 50)),
        Axis("objective", ("latency",)),
        Axis("streams", (4,)),
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("streams", "must be NAME=VALUE,VALUE"),
        ("streams=", "must be NAME=VALUE,VALUE"),
        ("streems=1", "cannot be swept .did you mean streams"),
        ("streams=0", "streams = '0' is not allowed; it must be a number from 1 to 100000"),
        ("streams=1,,2", "streams = '' is not allowed"),
        ("streams=1.5", "streams = '1.5' is not allowed"),
        ("rate=nan", "rate = 'nan' is not allowed"),
        ("rate=1e999", "rate = '1e999' is not allowed"),
        ("objective=fast", "it must be one of latency, throughput, mixed"),
        ("devices=10", "for a number of devices sweep fleet"),
        ("streams=1,1", "streams has a value twice"),
        ("nowhere.toml", "nowhere.toml: cannot be read"),
    ],
)
def test_what_cannot_be_swept_is_refused_with_what_can(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_axes([word])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streams = 1", "streams must be a list of values"),
        ("streams = []", "streams must be a list of values"),
        ("streams = [true]", "streams = True is not allowed"),
        ("streams = [1.5]", "streams = 1.5 is not allowed"),
        ("streams = [[1]]", r"streams = \[1\] is not allowed"),
        ("streams", "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=f"{path}: {message}"):
        read_axes([str(path)])


def test_a_name_is_swept_once() -> None:
    with pytest.raises(ConfigError, match="sweep has streams twice"):
        read_axes(["streams=1", "streams=2"])


def test_cells_are_all_combinations_with_each_seed() -> None:
    base = Cell(objective="latency", seed=7)

    cells = cells_of(base, read_axes(["fleet=5,10", "streams=1,2"]), num_seeds=2)

    assert [(cell.fleet, cell.streams, cell.seed) for cell in cells] == [
        (fleet, streams, seed) for fleet in (5, 10) for streams in (1, 2) for seed in (7, 8)
    ]
    assert {cell.objective for cell in cells} == {"latency"}


def test_what_only_a_run_has_is_not_swept_over_plans() -> None:
    with pytest.raises(ConfigError, match="rate: of a simulation; add --simulate"):
        cells_of(Cell(), read_axes(["rate=1,2"]), num_seeds=1)

    assert len(cells_of(Cell(is_played=True), read_axes(["rate=1,2"]), num_seeds=1)) == 2


def test_devices_are_said_in_one_way() -> None:
    with pytest.raises(ConfigError, match="sweep one of them"):
        cells_of(Cell(), read_axes(["fleet=1,2", "devices=phone,tablet"]), num_seeds=1)


def test_a_grid_that_nobody_could_wait_for_is_refused() -> None:
    streams = ",".join(map(str, range(1, 200)))

    with pytest.raises(ConfigError, match="the sweep has 19900 cells"):
        cells_of(Cell(), read_axes([f"streams={streams}"]), num_seeds=100)


def test_streams_and_replicas_are_what_is_usual_for_the_devices_if_nobody_says() -> None:
    assert (Cell(fleet=10).num_streams, Cell(fleet=10).num_replicas) == (40, 0)
    assert (Cell().num_streams, Cell().num_replicas) == (16, 1)
    assert (Cell(fleet=10, streams=3, replicas=1).num_streams, Cell(replicas=0).num_replicas) == (3, 0)
