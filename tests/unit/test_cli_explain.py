"""`shoal explain` against a scripted orchestrator: the story as a person reads it, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cli.explain import explain
from shoal.errors import RequestNotFound
from shoal.v1 import admin_pb2, types_pb2
from tests.support.fake_server import FakeServer

STORY = admin_pb2.ExplainResponse(
    request_id="r-1",
    tenant="gold",
    qos_class=types_pb2.QOS_CLASS_BALANCED,
    state="finished",
    prompt_tokens=12,
    completion_tokens=34,
    finish="stop",
    routes=[
        admin_pb2.RouteDecision(
            at_ms=0.1,
            pipeline_id="p1",
            reason="arrived",
            candidates=[
                admin_pb2.RouteCandidate(
                    pipeline_id="p1", score_ms=4200, queue_ms=120, prefill_ms=300, inter_token_ms=60, num_stages=2
                ),
                admin_pb2.RouteCandidate(pipeline_id="p2", ruled_out="kept for class latency", num_stages=1),
            ],
        )
    ],
    events=[
        admin_pb2.RequestEvent(at_ms=120.5, what="admitted", detail="slot 3"),
        admin_pb2.RequestEvent(at_ms=480.0, what="first_token"),
    ],
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        server.orchestrator.explanation = STORY
        yield server


def test_the_story_names_candidates_with_scores_and_what_happened_when(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    explain("r-1", json=False, server=server.address)

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ("request r-1 of tenant gold, class balanced: 12 prompt and 34 answer tokens, ended: stop")
    assert "the lowest wins" in lines[1]
    assert lines[3] == "0.1 ms arrived: pipeline p1"
    assert "p1 2 120 ms 300 ms 60 ms 0 4200 ms chosen" in lines
    assert "p2 1 0 ms 0 ms 0 ms 0 - kept for class latency" in lines
    assert lines[-2:] == ["120.5 ms admitted: slot 3", "480.0 ms first_token"]
    assert server.orchestrator.explained == ["r-1"]


def test_the_story_as_json_is_one_object(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    explain("", json=True, server=server.address)

    story = json.loads(capsys.readouterr().out)
    assert (story["qos_class"], story["routes"][0]["candidates"][1]["ruled_out"]) == (
        "balanced",
        "kept for class latency",
    )


def test_an_unknown_request_is_a_typed_error(server: FakeServer) -> None:
    server.orchestrator.explanation = RequestNotFound("no request 'x' among the last 1000")

    with pytest.raises(RequestNotFound, match="no request 'x'"):
        explain("x", json=False, server=server.address)


def test_no_line_of_a_story_is_longer_than_the_terminal(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    story = admin_pb2.ExplainResponse()
    story.CopyFrom(STORY)
    story.tenant = "t" * 40
    story.routes[0].candidates[1].ruled_out = "its KV holds 4096 tokens and the request needs more than that, " * 3
    story.events.append(admin_pb2.RequestEvent(at_ms=600.0, what="parked", detail="device phone-2 was lost " * 8))
    server.orchestrator.explanation = story

    explain("r-1", json=False, server=server.address)

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 90
    assert "and the request needs more" in " ".join(" ".join(lines).split())
    assert lines[-1].startswith(" " * 14 + "device") or lines[-1].startswith(" " * 14 + "was")
