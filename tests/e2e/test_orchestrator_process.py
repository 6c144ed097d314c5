"""The orchestrator's process: how it ends, what a second one on its port says, and who goes on when it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.local import LocalFleet
from shoal import Client
from shoal.errors import NotReady, ShoalError
from shoal.types import FinishReason
from tests.e2e.conftest import StartFleet
from tests.support.commands import WAIT_S, run_shoal, start_shoal, until

pytestmark = pytest.mark.e2e

PROMPT = "A very long story. Once upon a time"
# Ending takes this much longer than draining at most.
STOP_S = 5.0


def refusal(client: Client) -> ShoalError | None:
    """How a new request is refused; None if it is not."""
    try:
        client.generate("Hi", max_tokens=1)
    except ShoalError as error:
        return error
    return None


def test_an_orchestrator_told_to_end_finishes_its_answers_and_takes_no_more(start_fleet: StartFleet) -> None:
    fleet = start_fleet("phone", "tablet", drain_s=30.0)
    orchestrator = fleet.children[0].process
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        with client.stream(PROMPT, max_tokens=60, ignore_eos=True) as stream:
            deltas = iter(stream)
            next(deltas)
            orchestrator.terminate()
            refused = until(lambda: refusal(client))
            assert orchestrator.poll() is None
            for _ in deltas:
                pass

        assert isinstance(refused, NotReady)
        assert "shutting down" in refused.message
        assert (stream.result.finish_reason, stream.result.completion_tokens) == (FinishReason.LENGTH, 60)
    assert orchestrator.wait(STOP_S) == 0


def test_an_answer_that_outlasts_the_drain_ends_with_an_error(start_fleet: StartFleet) -> None:
    fleet = start_fleet("tablet", drain_s=0.5)
    orchestrator = fleet.children[0].process
    with (
        Client(fleet.address, timeout_s=WAIT_S, resume_s=0.0) as client,
        client.stream(PROMPT, max_tokens=4000, ignore_eos=True, deadline_s=3600.0) as stream,
    ):
        deltas = iter(stream)
        next(deltas)
        orchestrator.terminate()
        with pytest.raises(NotReady, match="shut down"):
            for _ in deltas:
                pass
    assert orchestrator.wait(fleet.config.drain_s + STOP_S) == 0


def test_a_second_orchestrator_on_a_port_says_that_it_is_taken(fleet: LocalFleet, home: Path) -> None:
    outcome = run_shoal("orchestrator", "--port", str(fleet.config.port), home=home)

    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert f"cannot listen on {fleet.address}" in outcome.err
    assert "choose another" in outcome.err


def test_workers_of_a_killed_orchestrator_serve_the_next_one_on_its_port(start_fleet: StartFleet, home: Path) -> None:
    fleet = start_fleet("phone", "tablet")
    port = str(fleet.config.port)
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        expected = client.generate(PROMPT, max_tokens=12).token_ids
        fleet.children[0].process.kill()
        fleet.children[0].process.wait()

        with start_shoal("orchestrator", "--port", port, "--expect-workers", "2", home=home):
            fleet_is_up = until(lambda: refusal(client) is None)
            answer = client.generate(PROMPT, max_tokens=12)

    assert fleet_is_up
    assert answer.token_ids == expected
    assert [stage.worker_id for stage in answer.pipeline] == fleet.worker_ids
    assert [child.name for child in fleet.ended()] == ["orchestrator"]
