"""`shoal plan --sweep`: cells planned or played, shown, kept, gone on with, and drawn."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from cli import sweep
from cli.plan import plan
from cli.sweep_report import axis_of_x
from launch import pool
from shoal.errors import ConfigError, LaunchFailed
from simulation import sweep as sweep_cells
from simulation.grid import Axis
from simulation.sweep import Task, work
from tests.support.shards import make_tiny_model

IN_PROCESSES = pool.each


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sweep"), num_layers=6).store.root


@pytest.fixture
def watch(tmp_path: Path) -> Path:
    """A device that holds nothing."""
    path = tmp_path / "watch.toml"
    path.write_text('name = "watch"\nkind = "phone"\nmemory_mib = 16\nhost_kv_mib = 0\nemulated = true\n')
    return path


def in_this_process(_: Any, tasks: list[Task], num_at_once: int) -> Iterator[tuple[int, Any]]:
    return ((index, work(task)) for index, task in enumerate(tasks))


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "each", in_this_process)


def run(home: Path, *words: str, **options: Any) -> int:
    """Sweep; returns the exit code."""
    with pytest.raises(typer.Exit) as ended:
        plan(sweep=list(words), model="tiny", home=home, **options)
    return ended.value.exit_code


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_cell_is_what_the_plan_alone_would_be(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "streams=1,8", devices="phone,tablet", json=True) == 0
    cells = told(capsys)["cells"]

    assert [cell["cell"]["streams"] for cell in cells] == [1, 8]
    for cell in cells:
        plan(devices="phone,tablet", streams=cell["cell"]["streams"], model="tiny", home=home, json=True)
        alone = told(capsys)
        assert cell["figures"]["tokens_per_s"] == alone["outcome"]["tokens_per_s"]


def test_each_cell_is_what_the_run_alone_would_be(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"simulate": True, "fleet": 6, "seconds": 1.0, "json": True}
    assert run(home, "streams=2,6", **options, seeds=2, seed=4) == 0
    cells = told(capsys)["cells"]

    assert [(cell["cell"]["streams"], cell["cell"]["seed"]) for cell in cells] == [(2, 4), (2, 5), (6, 4), (6, 5)]
    for cell in cells:
        settings = cell["cell"]
        plan(streams=settings["streams"], seed=settings["seed"], model="tiny", home=home, **options)
        alone = told(capsys)
        assert cell["figures"]["tokens_per_s"] == alone["tokens_per_s"]
        assert cell["figures"]["ttft_p95_s"] == (alone["ttft"] and alone["ttft"]["p95_s"])


@pytest.mark.parametrize(("axis", "name"), [("rate=1,4", "rate"), ("churn=0,3600", "churn")])
def test_what_a_run_is_asked_for_is_asked_of_its_cells(
    home: Path, capsys: pytest.CaptureFixture[str], axis: str, name: str
) -> None:
    options: dict[str, Any] = {"simulate": True, "fleet": 6, "seconds": 3.0, "json": True}
    run(home, axis, **options)
    cells = told(capsys)["cells"]

    for cell in cells:
        plan(model="tiny", home=home, **{name: cell["cell"][name]}, **options)
        assert cell["figures"]["tokens_per_s"] == told(capsys)["tokens_per_s"]
    assert len({cell["figures"]["tokens_per_s"] for cell in cells}) == len(cells)


def test_a_run_of_no_length_takes_as_long_as_its_plan_and_its_churn_ask_for(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_cells, "some_seconds", lambda predictions, churn: len(predictions) + churn)

    run(home, "churn=0,2", simulate=True, fleet=6, replicas=1, json=True)

    assert [cell["figures"]["duration_s"] for cell in told(capsys)["cells"]] == [1.0, 3.0]


def test_processes_find_the_same_as_this_one(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"simulate": True, "fleet": 6, "seconds": 1.0, "json": True, "seeds": 2}
    run(home, "streams=2,6", **options)
    here = told(capsys)
    monkeypatch.setattr(pool, "each", IN_PROCESSES)
    run(home, "streams=2,6", **options, jobs=2)

    assert told(capsys) == here


def test_a_person_sees_means_of_seeds_and_by_how_much_they_differ(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(home, "streams=2,6", "objective=latency,throughput", fleet=8, seeds=3)

    said = capsys.readouterr().out
    assert "12 of 12 cells" in said
    assert said.count("throughput") == 2
    assert "±" in said


def test_nothing_of_a_figure_is_lost_in_a_terminal_of_a_hundred_columns(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        run(home, "streams=2,6", "rate=0,2", simulate=True, seconds=2.0, fleet=8, seeds=2)
        return capsys.readouterr().out

    wide, narrow = said(200), said(100)

    assert max(map(len, wide.splitlines())) > 100 >= max(map(len, narrow.splitlines()))
    assert "…" not in narrow
    spreads = re.findall(r"±[\d.]+", wide)
    assert spreads
    assert sorted(spreads) == sorted(re.findall(r"±[\d.]+", narrow))


def test_a_cell_that_fails_is_a_line_and_not_the_end(
    home: Path, watch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(home, f"devices={watch},{watch}+phone", json=True)

    said = capsys.readouterr()
    cells = json.loads(said.out)["cells"]
    assert (code, len(cells)) == (1, 2)
    assert cells[0]["error"]["reason"] == "PLACEMENT_IMPOSSIBLE"
    assert f"devices={watch}, seed=1: " in said.err


def test_a_person_sees_of_how_many_runs_a_cell_has_no_figures(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def each(_: Any, tasks: list[Task], num_at_once: int) -> Iterator[tuple[int, Any]]:
        return ((index, LaunchFailed("it ended") if index else work(task)) for index, task in enumerate(tasks))

    monkeypatch.setattr(pool, "each", each)
    assert run(home, "streams=1", devices="phone", seeds=3) == 1

    assert "2 of 3 failed" in capsys.readouterr().out


def test_what_is_kept_is_not_done_again_and_a_larger_grid_goes_on_with_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, done = tmp_path / "cells.jsonl", []

    def each(_: Any, tasks: list[Task], num_at_once: int) -> Iterator[tuple[int, Any]]:
        for index, task in enumerate(tasks):
            done.append(task.cell.streams)
            yield index, work(task)

    monkeypatch.setattr(pool, "each", each)
    run(home, "streams=1,8", devices="phone", out=out)
    with out.open("a") as file:
        file.write('{"subject": "cut o')
    capsys.readouterr()
    run(home, "streams=1,8,9", devices="phone", out=out, json=True)
    said = capsys.readouterr()

    assert done == [1, 8, 9]
    assert "2 of 3 cells are there already" in said.err
    assert [cell["cell"]["streams"] for cell in json.loads(said.out)["cells"]] == [1, 8, 9]
    assert [line["cell"]["streams"] for line in lines_of(out)] == [1, 8, 9]

    run(home, "streams=1,8", devices="tablet", out=out)
    assert done == [1, 8, 9, 1, 8], "other devices are other cells"


def test_a_cell_whose_process_died_is_told_and_tried_again_next_time(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cells.jsonl"

    def each(_: Any, tasks: list[Task], num_at_once: int) -> Iterator[tuple[int, Any]]:
        yield 0, LaunchFailed("the process that did it ended with -9")

    monkeypatch.setattr(pool, "each", each)
    assert run(home, "streams=1", devices="phone", out=out) == 1
    assert "streams=1, seed=1: the process that did it ended with -9" in capsys.readouterr().err

    monkeypatch.setattr(pool, "each", in_this_process)
    assert run(home, "streams=1", devices="phone", out=out) == 0


def test_an_interrupted_sweep_shows_what_it_has(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def each(_: Any, tasks: list[Task], num_at_once: int) -> Iterator[tuple[int, Any]]:
        yield 1, work(tasks[1])
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "each", each)
    out = tmp_path / "cells.jsonl"
    code = run(home, "streams=1,8,9", devices="phone", out=out)

    said = capsys.readouterr()
    assert code == sweep.INTERRUPTED
    assert "1 of 3 cells" in said.out
    assert f"the same command goes on with {out}" in said.err
    assert [line["cell"]["streams"] for line in lines_of(out)] == [8]


@pytest.mark.parametrize("text", ["my notes\nof the day", "my notes"])
def test_another_file_is_not_written_to(home: Path, tmp_path: Path, text: str) -> None:
    other = tmp_path / "notes.txt"
    other.write_text(text)

    with pytest.raises(ConfigError, match=r"notes.txt:1: is no cell of a sweep"):
        plan(sweep=["streams=1"], devices="phone", out=other, model="tiny", home=home)
    assert other.read_text() == text


def test_cells_of_another_model_are_other_cells(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cells.jsonl"
    other = make_tiny_model(tmp_path / "other", num_layers=6, seed=9).store.root
    run(home, "streams=1", devices="phone", out=out)

    run(other, "streams=1", devices="phone", out=out)

    assert "are there already" not in capsys.readouterr().err


def test_two_sweeps_do_not_write_to_one_file(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cells.jsonl"

    def each(_: Any, tasks: list[Task], num_at_once: int) -> Iterator[tuple[int, Any]]:
        with pytest.raises(ConfigError, match="another sweep writes to it"):
            plan(sweep=["streams=1"], devices="phone", out=out, model="tiny", home=home)
        yield 0, work(tasks[0])

    monkeypatch.setattr(pool, "each", each)
    assert run(home, "streams=1", devices="phone", out=out) == 0

    assert len(lines_of(out)) == 1


def test_a_table_for_other_programs_has_a_line_for_each_cell(home: Path, watch: Path, tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    run(home, f"devices={watch},phone", csv=path)

    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["devices"] for row in rows] == [str(watch), "phone"]
    assert "lacks" in rows[0]["error"]
    assert float(rows[1]["tokens_per_s"]) > 0


def test_a_picture_has_a_line_for_each_combination_of_the_other_values(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "sweep.svg"
    run(home, "streams=1,4,16", "objective=latency,throughput", devices="phone,tablet", plot=path)

    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "objective=latency" in text
    assert "objective=throughput" in text


def test_a_picture_is_drawn_over_the_numbers_with_most_values() -> None:
    few, most, words = Axis("streams", (1, 8)), Axis("rate", (0.5, 1.0, 2.0)), Axis("objective", ("a", "b", "c", "d"))

    assert axis_of_x([few, most, words]) is most


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["streams=1"], {"plot": Path("x.svg")}, "a plot needs a sweep over numbers"),
        (["streams=1,2"], {"plot": Path("/nowhere/x.svg")}, "in a folder that there is"),
        (["streams=1"], {"out": Path("/nowhere/x.jsonl")}, "there is no folder /nowhere"),
        (["context=900000"], {}, "is more than tiny can have"),
        (["fleet=5"], {}, "ways to say the same"),
        ([], {"seeds": 3}, "add --sweep"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    home: Path, words: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(sweep=words, devices="phone", model="tiny", home=home, **options)
