"""The engine and what stages keep of prompts: the frames it sends and acts on, and which lane a request goes to."""

from __future__ import annotations

import pytest

from orchestrator.answer import Answer
from orchestrator.core.forecast import UNKNOWN_BLOCK_S, UNKNOWN_FETCH_S
from orchestrator.core.routing import RouteRequest
from orchestrator.core.sequence import RestoredPrefix
from shoal.kv import BlockHash
from shoal.types import FinishReason, KVReuse, QosClass, SequenceId
from shoal.v1 import flow_pb2
from tests.support.builders import know_times, make_sequence, with_blocks
from tests.support.lanes import LOST, P1, P2, Harness, Stages, expected_answer, token_ids, told, where

NUM_PROMPT = 200
BLOCKS = with_blocks(make_sequence(num_prompt=NUM_PROMPT)).block_hashes


def submit(
    harness: Harness, sequence_id: int = 1, request_id: str = "", *, num_stored: int = 0, **fields: object
) -> Answer:
    """Ask for an answer of four tokens to the prompt whose blocks have names."""
    sequence = with_blocks(make_sequence(sequence_id, num_prompt=NUM_PROMPT, max_tokens=4), num_stored)
    for name, value in fields.items():
        setattr(sequence, name, value)
    return harness.engine.submit(sequence, request_id)


def restores(stages: Stages) -> list[flow_pb2.Restore]:
    return [frame.restore for frame in stages.sent if frame.HasField("restore")]


def computed(harness: Harness) -> Harness:
    """A harness whose first pipeline has answered the prompt once, and nobody is there any more."""
    answer = submit(harness, 99)
    harness.p1.compute_all()
    assert token_ids(answer) == expected_answer(NUM_PROMPT, 4)
    assert harness.engine.is_idle
    harness.p1.sent.clear()
    return harness


def test_a_prompt_that_comes_again_is_restored_and_its_answer_is_the_same() -> None:
    harness = computed(Harness())
    answer = submit(harness, 1, "again")
    assert harness.p1.bodies() == ["restore"]

    harness.p1.compute_all()

    assert token_ids(answer) == expected_answer(NUM_PROMPT, 4)
    assert answer.sequence.restored == RestoredPrefix(3, codec="f32")
    assert [(row.position, row.num_tokens) for row in harness.p1.steps()[0].rows] == [(192, 8)]
    assert ("restored", "192 of 192 tokens") in told(harness, "again")


def test_a_restore_says_what_is_wanted_and_how_long_fetching_may_take() -> None:
    harness = computed(Harness())
    submit(harness, num_stored=3, kv_reuse=KVReuse.EXACT)

    (restore,) = restores(harness.p1)

    assert (list(restore.block_hashes), restore.slot, restore.is_exact_only) == (list(BLOCKS), 0, True)
    assert restore.fetch_timeout_ms == pytest.approx(1e3 * (UNKNOWN_FETCH_S + 3 * UNKNOWN_BLOCK_S))
    assert restore.restored == flow_pb2.RestoredBlocks(num_blocks=3, is_exact=True)


def test_the_row_that_starts_a_run_names_its_blocks_and_says_whether_they_will_be_exact() -> None:
    harness = computed(Harness())
    submit(harness)
    (restore,) = restores(harness.p1)
    blocks = flow_pb2.RestoredBlocks(num_blocks=2, num_from_redis=1, codec="int8")

    harness.p1.feed(flow_pb2.Restored(sequence_id=restore.sequence_id, restored=blocks))

    (row,) = harness.p1.steps()[0].rows
    assert (row.position, list(row.start.block_hashes), row.start.is_kv_exact) == (128, list(BLOCKS), False)


def test_a_run_that_restores_nothing_is_exact() -> None:
    harness = Harness()
    submit(harness)

    (row,) = harness.p1.steps()[0].rows
    assert (row.position, row.start.is_kv_exact) == (0, True)


def test_stages_that_are_to_keep_nothing_are_told_no_names() -> None:
    harness, unkept = Harness(), Harness(keeps_blocks=False)
    submit(harness, kv_reuse=KVReuse.NONE)
    submit(unkept)

    for stages in (harness.p1, unkept.p1):
        start = stages.steps()[0].rows[0].start
        assert (list(start.block_hashes), start.is_kv_exact) == ([], True)


def test_a_slot_is_cancelled_before_it_is_filled_for_another_and_filled_before_its_rows() -> None:
    harness = computed(Harness(num_slots=1))
    submit(harness, 1)
    harness.p1.compute(1)
    submit(harness, 2)
    harness.engine.abort(SequenceId(1))

    assert harness.p1.bodies() == ["restore", "step", "cancel", "restore"]
    harness.p1.compute_all()
    assert harness.p1.bodies()[:5] == ["restore", "step", "cancel", "restore", "step"]


def test_a_restored_frame_of_a_run_that_is_over_changes_nothing() -> None:
    harness = computed(Harness())
    submit(harness, 1)
    (restore,) = restores(harness.p1)
    harness.engine.abort(SequenceId(1), FinishReason.CANCELLED)

    harness.p1.feed(flow_pb2.Restored(sequence_id=restore.sequence_id))

    assert harness.engine.is_idle
    harness.p1.lane.scheduler.check_invariants()


def test_who_awaits_blocks_when_its_pipeline_is_lost_goes_on_elsewhere() -> None:
    harness = computed(Harness())
    answer = submit(harness, 1)
    p2 = harness.add(P2)

    harness.engine.pipeline_down(P1, LOST)
    p2.compute_all()

    assert where(answer) == P2
    assert token_ids(answer) == expected_answer(NUM_PROMPT, 4)
    assert answer.sequence.restored is None


def test_stages_fetch_what_only_redis_holds_while_a_request_waits() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1)
    submit(harness, 2, num_stored=2)

    (prefetch,) = [frame.prefetch for frame in harness.p1.sent if frame.HasField("prefetch")]

    assert list(prefetch.block_hashes) == list(BLOCKS[:2])
    assert prefetch.timeout_ms == pytest.approx(1e3 * (UNKNOWN_FETCH_S + 2 * UNKNOWN_BLOCK_S))


def test_the_lane_that_knows_the_prompt_gets_it_and_the_story_shows_why() -> None:
    harness = Harness()
    harness.add(P2)
    first = submit(harness, 1, qos=QosClass.THROUGHPUT)
    assert where(first) == P1
    harness.p1.compute_all()
    # The other one is as fast, and comes first among equals once p1 has anything to do.
    harness.submit(2)

    answer = submit(harness, 3, "mine")

    assert where(answer) == P1
    candidates = harness.engine.stories.find("mine").to_proto().routes[0].candidates
    assert [(one.pipeline_id, one.cached_tokens) for one in candidates] == [(P1, 192), (P2, 0)]
    assert candidates[0].prefill_ms < candidates[1].prefill_ms / 4


def test_what_blocks_save_is_what_their_tokens_would_take() -> None:
    harness = Harness()
    scheduler = harness.p1.lane.scheduler
    know_times(scheduler)
    blocks = with_blocks(make_sequence(num_prompt=200)).restorable_blocks
    request = RouteRequest(QosClass.BALANCED, num_prompt=200, max_tokens=16, block_hashes=blocks, num_stored=2)

    seen = harness.p1.lane.view(request, 0.0)

    whole = scheduler.predict(200, QosClass.BALANCED, 0.0)
    assert seen.saved_s == whole.prefill_s - seen.prediction.prefill_s > 0


def test_what_redis_holds_counts_for_every_lane_that_keeps_blocks() -> None:
    harness = Harness()
    harness.add(P2, keeps_blocks=False)
    submit(harness, 1, "mine", num_stored=2)

    candidates = harness.engine.stories.find("mine").to_proto().routes[0].candidates

    assert {one.pipeline_id: one.cached_tokens for one in candidates} == {P1: 128, P2: 0}


def test_a_device_that_computes_a_prompt_faster_than_another_its_rest_gets_it() -> None:
    harness = computed(Harness())
    know_times(harness.p1.lane.scheduler, base_s=2.0, token_s=0.5)
    p2 = harness.add(P2)
    know_times(p2.lane.scheduler, base_s=0.02, token_s=0.005)

    assert where(submit(harness)) == P2


def test_the_engine_knows_of_as_many_blocks_as_the_pipeline_with_most_of_them() -> None:
    harness = Harness()
    assert harness.engine.known_blocks(BLOCKS) == 0
    computed(harness).add(P2).lane.scheduler.restores.index.learn(BLOCKS[:1])

    assert harness.engine.known_blocks(BLOCKS) == 3
    assert harness.engine.known_blocks((BlockHash(b"x" * 32), *BLOCKS)) == 0
    harness.engine.pipeline_down(P1, LOST)
    assert harness.engine.known_blocks(BLOCKS) == 1
    assert Harness().engine.known_blocks(()) == 0


def test_blocks_are_pinned_in_all_pipelines() -> None:
    harness = Harness()
    p2 = harness.add(P2)

    harness.engine.keep_blocks(BLOCKS, 30.0)

    for stages in (harness.p1, p2):
        assert [frame.keep_blocks for frame in stages.sent] == [flow_pb2.KeepBlocks(block_hashes=BLOCKS, ttl_s=30.0)]


def test_blocks_that_are_forgotten_are_deleted_in_all_pipelines_and_not_asked_for_again() -> None:
    harness = computed(Harness())
    p2 = harness.add(P2)

    harness.engine.forget_blocks(BLOCKS[1:])

    for stages in (harness.p1, p2):
        assert [list(frame.forget_blocks.block_hashes) for frame in stages.sent] == [list(BLOCKS[1:])]
    assert harness.engine.known_blocks(BLOCKS) == 1
    submit(harness)
    assert [list(one.block_hashes) for one in restores(harness.p1)] == [list(BLOCKS[:1])]


@pytest.mark.parametrize("max_blocks", [0, 1, 2])
def test_stages_that_have_less_than_is_believed_compute_the_rest(max_blocks: int) -> None:
    harness = computed(Harness())
    harness.p1.model.max_blocks = max_blocks
    answer = submit(harness)

    harness.p1.compute_all()

    assert token_ids(answer) == expected_answer(NUM_PROMPT, 4)
    assert answer.sequence.num_restored == 64 * max_blocks
    assert harness.engine.known_blocks(BLOCKS) == 3, "what was computed is known again"
