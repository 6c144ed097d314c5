"""The story of a request: what is told while it runs, what is kept after its end, and how many are kept."""

from __future__ import annotations

import pytest

from orchestrator.core.routing import Candidate, Decision
from orchestrator.core.sequence import Sequence
from orchestrator.explain import MAX_DECISIONS, MAX_STORIES, Stories, Story
from shoal.errors import RequestNotFound
from shoal.types import PipelineId
from shoal.v1 import types_pb2
from tests.support.builders import make_sequence

P1, P2 = PipelineId("p1"), PipelineId("p2")


def make_candidate(pipeline_id: PipelineId = P1, ruled_out: str = "") -> Candidate:
    return Candidate(
        pipeline_id=pipeline_id,
        ruled_out=ruled_out,
        score_s=3.5,
        queue_s=0.25,
        prefill_s=0.5,
        inter_token_s=0.0625,
        cached_tokens=7,
        num_stages=2,
    )


def make_decision(reason: str = "arrived", ruled_out: str = "") -> Decision:
    return Decision((make_candidate(P1, ruled_out), make_candidate(P2, "kept for class latency")), reason)


def open_story(sequence: Sequence | None = None, request_id: str = "r1") -> Story:
    return Stories().open(request_id, sequence or make_sequence())


def test_a_running_request_is_told_as_it_stands_now() -> None:
    sequence = make_sequence(num_prompt=5)
    story = open_story(sequence)
    sequence.output_token_ids += [1, 2, 3]

    told = story.to_proto()

    assert (told.request_id, told.tenant, told.qos_class) == ("r1", "default", types_pb2.QOS_CLASS_BALANCED)
    assert (told.state, told.prompt_tokens, told.completion_tokens, told.finish) == ("waiting", 5, 3, "")


def test_a_decision_is_told_with_every_candidate_in_milliseconds_since_the_request_came() -> None:
    story = open_story(make_sequence(arrived_at=10.0))
    story.decide(make_decision(), 10.5)

    (route,) = story.to_proto().routes

    assert (route.at_ms, route.pipeline_id, route.reason) == (500.0, "p1", "arrived")
    first, second = route.candidates
    assert (first.pipeline_id, first.ruled_out, first.score_ms) == ("p1", "", 3500.0)
    assert (first.queue_ms, first.prefill_ms, first.inter_token_ms) == (250.0, 500.0, 62.5)
    assert (first.cached_tokens, first.num_stages) == (7, 2)
    assert (second.pipeline_id, second.ruled_out) == ("p2", "kept for class latency")


def test_a_decision_for_nobody_names_no_pipeline() -> None:
    story = open_story()
    story.decide(make_decision(ruled_out="holds too little"), 0.0)

    assert story.to_proto().routes[0].pipeline_id == ""


def test_events_are_told_in_milliseconds_since_the_request_came() -> None:
    sequence = make_sequence(arrived_at=10.0)
    sequence.note(10.25, "admitted", "run 1 in slot 0")

    (event,) = open_story(sequence).to_proto().events

    assert (event.at_ms, event.what, event.detail) == (250.0, "admitted", "run 1 in slot 0")


def test_an_ended_request_is_told_as_it_was_at_its_end() -> None:
    sequence = make_sequence()
    story = open_story(sequence)
    story.decide(make_decision(), 0.0)
    sequence.output_token_ids.append(1)

    story.end("length")
    sequence.output_token_ids.append(2)
    told = story.to_proto()

    assert (told.state, told.finish, told.completion_tokens, len(told.routes)) == ("finished", "length", 1, 1)


def test_the_first_end_of_a_request_is_the_one_that_counts() -> None:
    story = open_story()
    story.end("WORKER_LOST")

    story.end("cancelled")

    assert story.to_proto().finish == "WORKER_LOST"


def test_an_ended_story_does_not_keep_its_prompt() -> None:
    story = open_story(make_sequence(num_prompt=500))

    story.end("stop")

    assert story._sequence is None
    assert story.to_proto().ByteSize() < 500


def test_the_decisions_of_a_request_are_bounded() -> None:
    story = open_story()
    for number in range(2 * MAX_DECISIONS):
        story.decide(make_decision(reason=f"reason {number}"), 0.0)

    routes = story.to_proto().routes

    assert (len(routes), routes[0].reason) == (MAX_DECISIONS, "reason 0")


def test_a_story_is_found_by_the_id_of_its_request() -> None:
    stories = Stories()
    first, second = stories.open("r1", make_sequence(1)), stories.open("r2", make_sequence(2))

    assert stories.find("r1") is first
    assert stories.find("r2") is second


def test_without_an_id_the_newest_is_found() -> None:
    stories = Stories()
    stories.open("r1", make_sequence(1))
    newest = stories.open("r2", make_sequence(2))

    assert stories.find("") is newest


def test_a_newer_request_with_the_same_id_replaces_the_older() -> None:
    stories = Stories()
    stories.open("r1", make_sequence(1))
    stories.open("r2", make_sequence(2))
    again = stories.open("r1", make_sequence(3))

    assert stories.find("r1") is again
    assert stories.find("") is again


def test_only_the_newest_stories_are_kept() -> None:
    stories = Stories()
    for number in range(MAX_STORIES + 1):
        stories.open(f"r{number}", make_sequence(number))

    assert stories.find("r1").request_id == "r1"
    with pytest.raises(RequestNotFound):
        stories.find("r0")


def test_a_running_request_is_not_forgotten_for_those_that_are_over() -> None:
    stories = Stories()
    stories.open("running", make_sequence(0))
    for number in range(1, MAX_STORIES + 10):
        stories.open(f"r{number}", make_sequence(number)).end("stop")

    assert stories.find("running").to_proto().finish == ""
    with pytest.raises(RequestNotFound):
        stories.find("r1")


def test_a_request_without_an_id_pushes_nobody_out() -> None:
    stories = Stories()
    stories.open("r1", make_sequence(1))
    for number in range(MAX_STORIES):
        stories.open("", make_sequence(number))

    assert stories.find("").request_id == "r1"


@pytest.mark.parametrize(
    ("request_id", "message"), [("r9", "request 'r9' is not among the last 1000"), ("", "there is no request among")]
)
def test_a_request_nobody_knows_is_a_clear_error(request_id: str, message: str) -> None:
    with pytest.raises(RequestNotFound) as raised:
        Stories().find(request_id)

    assert message in raised.value.message
    assert raised.value.field == "request_id"
