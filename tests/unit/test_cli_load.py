"""`shoal load` against scripted servers: what it asks, prints and writes, its exit codes, and how it is stopped."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from cli.load_run import _command, _describe
from loadtest import report as reports
from loadtest.runner import Progress
from shoal.errors import ConfigError, LaunchFailed, Overloaded
from shoal.v1 import types_pb2
from tests.support.commands import start_shoal
from tests.support.fake_server import ENDLESS, HELLO, FakeServer
from tests.support.openai_server import HELLO as HELLO_OPENAI
from tests.support.openai_server import OpenAiServer, Plain, event
from tests.support.openai_server import error as openai_error
from tests.unit.conftest import Run

WAIT_S = 20.0


@pytest.fixture
def run(run: Run) -> Run:
    """Run `shoal load` with these words."""
    return partial(run, "load")


def rows(out: str) -> dict[str, list[str]]:
    """The figures of the table that is printed last, by the words before the first digit."""
    found: dict[str, list[str]] = {}
    for line in out.splitlines():
        name, *cells = [cell.strip() for cell in line.split("  ") if cell.strip()] or [""]
        found[name] = cells
    return found


def test_one_stream_is_asked_and_its_figures_printed(run: Run, server: FakeServer) -> None:
    outcome = run("single-stream", "--requests", "3", "--server", server.address)

    assert outcome.code == 0
    assert len(server.orchestrator.requests) == 3
    table = rows(outcome.out)
    assert (table["requests"], table["failed"], table["met its SLO"]) == (["3"], ["0"], ["100 %"])
    assert {"TTFT p50", "TTFT p99", "TPOT p99", "gap p99", "e2e p99", "tokens/s"} <= table.keys()
    assert outcome.out.startswith(f"tiny at {server.address} (Shoal)\nsingle-stream: workload chat ")


def test_requests_are_what_the_workload_says(run: Run, server: FakeServer) -> None:
    run("offline", "--workload", "mixed", "--requests", "8", "--model", "tiny", "--server", server.address)

    asked = server.orchestrator.requests
    assert {request.qos_class for request in asked} == {
        types_pb2.QOS_CLASS_LATENCY,
        types_pb2.QOS_CLASS_BALANCED,
        types_pb2.QOS_CLASS_THROUGHPUT,
    }
    assert all(request.ignore_eos and request.max_tokens > 0 and request.model == "tiny" for request in asked)
    assert {request.tenant for request in asked} == {"app", "batch"}


def test_the_same_seed_asks_the_same_things_and_another_others(run: Run, server: FakeServer) -> None:
    for seed in ("1", "1", "2"):
        run("single-stream", "--requests", "2", "--seed", seed, "--server", server.address)

    first, again, other = (server.orchestrator.requests[at : at + 2] for at in (0, 2, 4))
    assert first == again
    assert first != other


def test_any_server_with_openai_s_interface_can_be_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_OPENAI_KEY", "secret")
    with OpenAiServer() as server:
        outcome = run("server", "--rate", "100", "--requests", "4", "--openai", server.base_url)

    assert (outcome.code, len(server.requests)) == (0, 4)
    assert server.requests[0].headers["authorization"] == "Bearer secret"
    assert outcome.out.startswith(f"tiny at {server.base_url} (OpenAI)\n")


def test_prompts_may_be_continued_as_they_are(run: Run, server: FakeServer) -> None:
    run("single-stream", "--requests", "1", "--raw", "--server", server.address)

    assert server.orchestrator.requests[0].WhichOneof("input") == "prompt"


def test_nobody_listening_is_one_line_and_exit_code_1(run: Run) -> None:
    outcome = run("single-stream", "--server", "127.0.0.1:1")

    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: nobody answers at 127.0.0.1:1")
    assert outcome.err.count("\n") == 1


def test_a_server_that_refuses_everything_is_exit_code_1_with_its_reasons(run: Run) -> None:
    with FakeServer((Overloaded("the queue is full"),)) as server:
        outcome = run("single-stream", "--requests", "2", "--server", server.address)

    assert outcome.code == 1
    assert "! No request ended well." in outcome.out
    assert rows(outcome.out)["OVERLOADED"] == ["2", "the queue is full"]


@pytest.mark.parametrize("model", [[], ["--model", "tiny"]])
def test_a_path_that_no_request_found_is_exit_code_1(run: Run, model: list[str]) -> None:
    with OpenAiServer(Plain(404, b"")) as server:
        outcome = run("server", "--rate", "100", "--requests", "3", *model, "--openai", server.base_url)

    assert outcome.code == 1
    assert "there is no such path" in outcome.out


@pytest.mark.parametrize(
    ("models", "told"),
    [(Plain(404, b""), "there is no such path"), (openai_error(404, message="no model"), "says 404: no model")],
)
def test_a_foreign_server_s_models_are_not_looked_for_among_ours(run: Run, models: Plain, told: str) -> None:
    with OpenAiServer(models=models) as server:
        outcome = run("single-stream", "--openai", server.base_url)

    assert outcome.code == 1
    assert told in outcome.err
    assert "shoal models list" not in outcome.err


def test_garbage_of_a_server_is_an_error_of_its_request_alone(run: Run) -> None:
    with OpenAiServer((event(b"[" * 100_000),), HELLO_OPENAI) as server:
        outcome = run("single-stream", "--requests", "2", "--openai", server.base_url)

    assert outcome.code == 0
    assert rows(outcome.out)["PROTOCOL_MISMATCH"][0] == "1"


def test_a_class_without_an_slo_shows_no_share_that_met_it(run: Run, server: FakeServer) -> None:
    outcome = run("offline", "--workload", "batch", "--requests", "2", "--server", server.address)

    assert rows(outcome.out)["met its SLO"] == ["-"]
    assert "SLO: throughput none" in outcome.out


def test_the_progress_says_over_what_its_figures_are() -> None:
    told = _describe(Progress(9.0, 8, 2, 3, 1, 40, 12.5, 0.25))

    assert told == "9 s: 4 of 8 ended (1 failed), 2 under way, 12.5 tokens/s (last 2 s), TTFT p50 250 ms"


def test_a_run_of_which_a_part_went_well_is_exit_code_0(run: Run) -> None:
    with FakeServer((Overloaded("the queue is full"),), HELLO) as server:
        outcome = run("single-stream", "--requests", "2", "--server", server.address)

    assert outcome.code == 0
    assert rows(outcome.out)["failed"] == ["1"]


def test_reports_are_written_where_they_are_asked_for(run: Run, server: FakeServer, tmp_path: Path) -> None:
    written = tmp_path / "report.json", tmp_path / "report.html"
    outcome = run(
        "single-stream", "--requests", "2", "--json", str(written[0]), "--html", str(written[1]), "--records",
        "--server", server.address,
    )  # fmt: skip

    fields = json.loads(written[0].read_text())
    assert fields["command"].startswith("shoal load single-stream --requests 2 --json ")
    assert [record["completion_tokens"] for record in fields["records"]] == [2, 2]
    assert "<svg" in written[1].read_text()
    assert [line for line in outcome.err.splitlines() if line.startswith("wrote ")] == [
        f"wrote {path}" for path in written
    ]


def test_the_json_on_stdout_is_all_there_is(run: Run, server: FakeServer) -> None:
    outcome = run("single-stream", "--requests", "2", "--json", "-", "--server", server.address)

    assert json.loads(outcome.out)["statistics"]["overall"]["num_ok"] == 2
    assert outcome.out.count("\n") == 1


def test_a_report_that_could_not_be_written_is_found_out_before_anything_is_asked(
    run: Run, server: FakeServer, tmp_path: Path
) -> None:
    outcome = run("single-stream", "--json", str(tmp_path / "none" / "x.json"), "--server", server.address)

    assert (outcome.code, server.orchestrator.requests) == (1, [])
    assert outcome.err.startswith("error: ")
    assert "there is no folder" in outcome.err


@pytest.mark.parametrize(("option", "code"), [("--json", 2), ("--html", 2)])
def test_a_folder_is_no_place_for_a_report(
    run: Run, server: FakeServer, tmp_path: Path, option: str, code: int
) -> None:
    outcome = run("single-stream", option, str(tmp_path), "--server", server.address)

    assert (outcome.code, server.orchestrator.requests) == (code, [])


def test_a_path_that_cannot_be_made_is_found_out_before_anything_is_asked(
    run: Run, server: FakeServer, tmp_path: Path
) -> None:
    outcome = run("single-stream", "--json", str(tmp_path / ("x" * 254)), "--server", server.address)

    assert (outcome.code, server.orchestrator.requests) == (1, [])
    assert "cannot be written: File name too long" in outcome.err


def test_a_report_that_cannot_be_written_after_all_does_not_cost_the_figures(
    run: Run, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(path: Path, _: object) -> None:
        raise ConfigError(f"{path}: no space left")

    monkeypatch.setattr(Path, "replace", fill_up)
    path = tmp_path / "x.json"
    outcome = run("single-stream", "--requests", "1", "--json", str(path), "--server", server.address)

    assert outcome.code == 1
    assert rows(outcome.out)["requests"] == ["1"]
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_json_is_written_and_a_line_says_how_to_get_the_page(
    run: Run, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "find_spec", lambda _: None)
    json_path, html_path = tmp_path / "report.json", tmp_path / "report.html"
    args = ("single-stream", "--requests", "1", "--server", server.address, "--html", str(html_path))

    both, only_html = run(*args, "--json", str(json_path)), run(*args)

    assert (both.code, only_html.code) == (0, 1)
    assert json_path.exists()
    assert not html_path.exists()
    assert f"no {html_path}: a page has pictures" in both.err
    assert "pip install 'shoal[load]'" in both.err
    assert only_html.err.splitlines()[-1].startswith("error: ")
    assert len(server.orchestrator.requests) == 1


def test_no_password_gets_into_a_report(run: Run, tmp_path: Path) -> None:
    with OpenAiServer() as server:
        url = server.base_url.replace("http://", "http://me:hush@")
        run("single-stream", "--requests", "1", "--openai", url, "--json", str(tmp_path / "x.json"))

    text = (tmp_path / "x.json").read_text()
    assert server.base_url in text
    assert "hush" not in text


@pytest.mark.parametrize(
    "url", ["http://me:hu@sh@host/v1", "http://host/v1?key=hush", "--openai=http://me:hush@host/v1"]
)
def test_no_secret_of_a_url_is_in_the_command(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal", "load", url, "a b"])

    assert re.fullmatch(r"shoal load (--openai=)?http://host/v1 'a b'", _command())


def test_objectives_of_the_command_line_take_the_place_of_the_workload_s(run: Run, server: FakeServer) -> None:
    args = ("single-stream", "--requests", "1", "--json", "-", "--server", server.address)
    given, none = (json.loads(run(*args, *more).out) for more in (["--ttft-ms", "0.001"], ["--ttft-ms", "0"]))

    assert given["statistics"]["slos"]["latency"] == {"ttft_s": 1e-6, "tpot_s": 0.03, "e2e_s": None}
    assert given["statistics"]["overall"]["num_good"] == 0
    assert none["statistics"]["slos"]["throughput"] == {"ttft_s": None, "tpot_s": None, "e2e_s": None}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["server", "--workload", "none"], "there is no workload 'none'"),
        (["server", "--rate", "0"], "rate_per_s = 0.0 is not allowed"),
        (["server"], "give a rate"),
        (["server", "--rate", "1", "--requests", "2", "--duration", "3"], "one of the two"),
        (["server", "--rate", "1", "--duration", "9", "--timeout", "2"], "timeout = 2 is not allowed"),
        (["server", "--ramp", "--workload", "batch"], "give --ttft-ms or --tpot-ms"),
        (["server", "--ramp", "--good-share", "0"], "good_share = 0.0 is not allowed"),
        (["trace", "none"], "there is no trace 'none'"),
        (["single-stream", "--openai", "localhost:8000"], "no address of a server"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(run: Run, server: FakeServer, args: list[str], told: str) -> None:
    outcome = run(*args, "--server", server.address)

    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: ")
    assert told in outcome.err
    assert (outcome.err.count("\n"), server.orchestrator.requests) == (1, [])


@pytest.mark.parametrize("args", [["server", "--requests", "0"], ["fly"], ["single-stream", "--seed", "-1"]])
def test_wrong_usage_is_exit_code_2(run: Run, args: list[str]) -> None:
    assert run(*args).code == 2


def test_a_ramp_prints_every_rate_and_the_highest_that_holds(run: Run, server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "ramp.json"
    outcome = run(
        "server", "--ramp", "--rate", "200", "--requests", "3", "--probes", "2", "--ttft-ms", "60000", "--tpot-ms", "60000",
        "--json", str(path), "--server", server.address,
    )  # fmt: skip

    assert outcome.code == 0
    assert "highest rate that holds: 400 requests/s (no limit met); this rests on 3 requests" in outcome.out
    assert "SLO: balanced TTFT 60.0 s, TPOT 60.0 s" in outcome.out
    assert "! The ramp's result rests on 3 requests" in outcome.out
    assert rows(outcome.out)["400"][:2] == ["100 %", "yes"]
    assert "200 requests/s: holds, 100 % good" in outcome.err
    assert [probe["rate_per_s"] for probe in json.loads(path.read_text())["ramp"]["probes"]] == [200.0, 400.0]


def test_a_ramp_in_which_no_rate_holds_is_exit_code_1(run: Run) -> None:
    with FakeServer((Overloaded("full"),)) as server:
        outcome = run(
            "server", "--ramp", "--rate", "200", "--requests", "3", "--probes", "2", "--server", server.address
        )

    assert outcome.code == 1
    assert "highest rate that holds: 0.00 requests/s (no rate holds)" in outcome.out


def test_a_ramp_that_comes_to_a_rate_without_a_plan_reports_what_it_found(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "ramp.json"
    with FakeServer((Overloaded("full"),)) as server:
        outcome = run(
            "server", "--ramp", "--rate", "64", "--duration", "0.1", "--json", str(path), "--server", server.address
        )

    assert outcome.code == 1
    assert "(no further rate can be planned: at " in outcome.out
    assert "! No rate held its objectives" in outcome.out
    assert json.loads(path.read_text())["ramp"]["end"] == "no further rate can be planned"


def test_a_run_whose_time_is_up_reports_what_there_is(run: Run) -> None:
    with FakeServer(HELLO, ENDLESS) as server:
        outcome = run("single-stream", "--requests", "9", "--timeout", "0.3", "--server", server.address)

    assert outcome.code == 0
    assert "! This is a part of what was planned: 1 of 9 requests ended before its time was up." in outcome.out
    assert rows(outcome.out)["RUN_TIMEOUT"][0] == "1"


def test_ctrl_c_ends_a_run_with_a_report_of_what_there_is(tmp_path: Path) -> None:
    with FakeServer(HELLO, ENDLESS) as server:
        args = ("load", "single-stream", "--requests", "9", "--json", str(tmp_path / "x.json"))
        with start_shoal(*args, "--server", server.address, home=tmp_path) as command:
            assert server.orchestrator.is_hanging.wait(WAIT_S)
            command.process.send_signal(signal.SIGINT)
            out = command.read_rest()

            assert command.wait() == 0
            assert "Traceback" not in command.err
        assert server.orchestrator.is_released.wait(WAIT_S)

    assert "1 of 9 requests ended before it was interrupted" in out
    assert json.loads((tmp_path / "x.json").read_text())["ending"] == "interrupted"


def test_at_a_terminal_the_progress_is_shown_and_the_figures_fit_80_columns(tmp_path: Path) -> None:
    with FakeServer(HELLO, HELLO, ENDLESS) as server:
        args = ("load", "offline", "--workload", "mixed", "--requests", "6", "--concurrency", "1")
        with start_shoal(*args, "--server", server.address, home=tmp_path, columns=80) as command:
            command.read_until("2 of 6 ended, 1 under way")
            command.press("\x03")
            out = command.read_rest()

            assert command.wait() == 0
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out).splitlines()
    table = lines[next(index for index, line in enumerate(lines) if line.startswith(" requests ")) :]
    assert any(line.startswith(" gap p99") for line in table)
    assert max(len(line.rstrip()) for line in table) <= 80


def test_a_trace_is_made_and_replayed(run: Run, server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    made = run("make-trace", str(path), "--conversations", "4", "--seed", "3")
    outcome = run("trace", str(path), "--speed-up", "10000", "--server", server.address)

    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert made.out.startswith(f"{path}: {len(lines)} requests over ")
    assert (outcome.code, len(server.orchestrator.requests)) == (0, len(lines))


def test_a_trace_comes_with_the_command(run: Run, server: FakeServer) -> None:
    outcome = run("trace", "--requests", "3", "--speed-up", "10000", "--qos", "latency", "--server", server.address)

    assert (outcome.code, len(server.orchestrator.requests)) == (0, 3)


def test_a_trace_of_mooncake_s_is_shrunk(run: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "mooncake.jsonl", tmp_path / "small.jsonl"
    entry: dict[str, Any] = {"timestamp": 1000, "input_length": 6400, "output_length": 640, "hash_ids": list(range(13))}
    source.write_text(json.dumps(entry) + "\n" + json.dumps(entry | {"timestamp": 3000}) + "\n")

    outcome = run("convert-mooncake", str(source), str(out), "--scale", "64", "--floor", "4", "--speed-up", "2")

    entries = [json.loads(line) for line in out.read_text().splitlines() if not line.startswith("#")]
    assert outcome.out == f"{out}: 2 requests over 1 s, blocks of 8 tokens\n"
    assert [(entry["timestamp"], entry["input_length"], entry["output_length"]) for entry in entries] == [
        (0, 100, 10),
        (1000, 100, 10),
    ]


def test_a_mooncake_trace_that_is_none_names_its_line(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "mooncake.jsonl"
    source.write_text("no json\n")

    outcome = run("convert-mooncake", str(source), str(tmp_path / "out.jsonl"))

    assert outcome.code == 1
    assert outcome.err.startswith("error: mooncake.jsonl:1: not valid JSON")


def test_a_mooncake_trace_that_is_no_text_is_told_in_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")

    assert "is not UTF-8" in run("convert-mooncake", str(tmp_path / "x"), str(tmp_path / "y")).err


# From several harnesses


class HandsHere:
    """Harnesses of this process, of which some are lost with what they saw."""

    lost: frozenset[int] = frozenset()

    def __init__(self, address: str, do: Callable[..., Awaitable[Any]], parts: Sequence[Any]) -> None:
        self._do = do
        self._parts = parts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    async def work(self, lead_s: float, stopping: asyncio.Event, show: Callable[..., None]) -> list[Any]:
        seen = [await self._do(part, time.time(), lambda _: None, stopping) for part in self._parts]
        return [LaunchFailed("gone") if at in self.lost else outcome for at, outcome in enumerate(seen)]


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> type[HandsHere]:
    pytest.importorskip("ray", reason="needs shoal[ray]")
    monkeypatch.setattr("launch.ray_cluster.work.Hands", HandsHere)
    monkeypatch.setattr(HandsHere, "lost", frozenset())
    return HandsHere


ON_RAY = ("server", "--ray", "2", "--requests", "4", "--rate", "100", "--json", "-", "--records")


@pytest.mark.parametrize(("lost", "ending", "count"), [((), "complete", 4), ((1,), "lost", 2)])
def test_of_a_run_from_several_harnesses_is_reported_what_those_saw_who_are_left(
    run: Run, server: FakeServer, hands: type[HandsHere], lost: Sequence[int], ending: str, count: int
) -> None:
    hands.lost = frozenset(lost)
    outcome = run(*ON_RAY, "--server", server.address)

    report = json.loads(outcome.out)
    assert (outcome.code, report["ending"], len(report["records"])) == (0, ending, count)
    assert outcome.err.count("a harness is lost, with what it saw: gone") == len(lost)


def test_a_run_that_is_lost_with_all_its_harnesses_is_an_error(
    run: Run, server: FakeServer, hands: type[HandsHere]
) -> None:
    hands.lost = frozenset((0, 1))
    outcome = run(*ON_RAY, "--server", server.address)

    assert (outcome.code, outcome.out) == (1, "")
    assert "error: gone" in outcome.err
