"""`shoal load` against a running fleet: small runs of each scenario, and what their reports hold."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from launch.local import LocalFleet
from loadtest.traces import Trace, TraceEntry, write_trace
from modelstore.manifest import Manifest
from shoal import Client
from tests.support.commands import run_shoal, start_shoal, until

pytestmark = pytest.mark.e2e


# Answers of few tokens, of every class: how long they are is not what is looked at.
BRIEF = """
name = "brief"
description = "Answers of a few tokens"
""" + "".join(
    f"""
[[stream]]
name = "{qos}"
qos = "{qos}"
prompt_tokens = {{ distribution = "uniform", min = 32, max = 96 }}
output_tokens = {{ distribution = "uniform", min = 4, max = 8 }}
"""
    for qos in ("latency", "balanced", "throughput")
)


@pytest.fixture
def brief(home: Path) -> str:
    """The path of a workload that is soon answered."""
    path = home / "brief.toml"
    path.write_text(BRIEF, encoding="utf-8")
    return str(path)


def load(fleet: LocalFleet, home: Path, *args: str) -> tuple[str, dict[str, Any]]:
    """Run to the end; what was printed, and the JSON with all records."""
    path = home / "load.json"
    outcome = run_shoal("load", *args, "--json", str(path), "--records", "--server", fleet.address, home=home)
    assert outcome.code == 0, outcome.err
    fields = json.loads(path.read_text())
    assert isinstance(fields, dict)
    return outcome.out, fields


def test_a_mixed_load_is_answered_in_full_and_reported(
    fleet: LocalFleet, home: Path, real_model: Manifest, brief: str
) -> None:
    page = home / "load.html"
    out, fields = load(
        fleet, home, "offline", "--workload", brief, "--requests", "4", "--concurrency", "4", "--html", str(page)
    )

    records, statistics = fields["records"], fields["statistics"]
    assert (fields["ending"], statistics["overall"]["num_ok"], statistics["overall"]["errors"]) == ("complete", 4, {})
    # As long as planned, whatever the model would rather say.
    assert all(record["completion_tokens"] == len(record["token_at_s"]) == record["max_tokens"] for record in records)
    assert {record["class"] for record in records} == {"latency", "balanced", "throughput"}
    assert sum(fields["served_by"].values()) == 4
    assert fields["target"].startswith(f"{real_model.name} at {fleet.address}")
    assert "throughput" in out
    assert page.read_text().count("<svg") == 3


def test_times_of_a_run_follow_each_other(fleet: LocalFleet, home: Path, brief: str) -> None:
    _, fields = load(fleet, home, "server", "--workload", brief, "--rate", "4", "--requests", "6")

    for record in fields["records"]:
        times = [record["due_s"], record["sent_at_s"], *record["token_at_s"], record["ended_at_s"]]
        assert times == sorted(times)
    assert fields["statistics"]["overall"]["ttft"]["count"] == 6


def test_prompts_are_as_long_as_planned_where_no_chat_is_put_around_them(
    fleet: LocalFleet, home: Path, brief: str
) -> None:
    _, fields = load(fleet, home, "single-stream", "--workload", brief, "--requests", "2", "--raw")

    # Made of words that are a token each to this model; the second one has other lengths.
    assert [32 <= record["prompt_tokens"] <= 96 for record in fields["records"]] == [True, True]
    assert fields["records"][0]["prompt_tokens"] != fields["records"][1]["prompt_tokens"]


def test_a_trace_is_replayed(fleet: LocalFleet, home: Path) -> None:
    path = home / "turns.jsonl"
    first = TraceEntry(0.0, 20, 4, (0, 1), conversation="c0")
    entries = (first, TraceEntry(500.0, 24, 6, (0, 2)), TraceEntry(2000.0, 40, 4, (0, 1, 3), conversation="c0", turn=1))
    write_trace(path, Trace(entries, block_tokens=16))

    _, fields = load(fleet, home, "trace", str(path), "--speed-up", "20")

    assert fields["statistics"]["overall"]["num_ok"] == 3
    assert fields["plan"]["num_requests"] == 3


def test_ctrl_c_ends_all_calls_and_leaves_a_report(fleet: LocalFleet, home: Path, client: Client) -> None:
    path = home / "load.json"
    args = ("offline", "--workload", "batch", "--requests", "64", "--json", str(path), "--server", fleet.address)
    with start_shoal("load", *args, home=home) as command:
        until(client.status, lambda status: status.num_running > 0)
        command.process.send_signal(signal.SIGINT)
        command.wait()
        out = command.read_rest()

        assert "Traceback" not in command.err
    assert "requests ended before it was interrupted" in out
    assert json.loads(path.read_text())["ending"] == "interrupted"
    until(client.status, lambda status: status.num_running == 0 and status.num_waiting == 0)
