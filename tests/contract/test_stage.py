"""Stages of a real tiny model, chained by hand: any cut gives the same, bursts, cancelling, stale frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from shoal.errors import InternalError
from shoal.types import SamplingParams
from shoal.v1 import flow_pb2
from tests.support.shards import TinyModel, make_tiny_model, make_tokens
from tests.support.stages import EPOCH, StageChain, make_cancel, make_row, make_start, make_step

NUM_LAYERS = 3
PROMPT = make_tokens(7, 280, seed=1)
OTHER_PROMPT = make_tokens(5, 280, seed=2)
ALL_CUTS = [(), (1,), (2,), (1, 2)]

Open = Callable[..., StageChain]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("stage"), num_layers=NUM_LAYERS)


@pytest.fixture
def open_stages(model: TinyModel) -> Iterator[Open]:
    opened: list[StageChain] = []

    def open_with(cuts: Sequence[int] = ()) -> StageChain:
        opened.append(StageChain(model, cuts))
        return opened[-1]

    yield open_with
    for chain in opened:
        chain.close()


def prefill(sequence_id: int, prompt: Sequence[int], *, slot: int = 0, step: int = 1, **start: Any) -> flow_pb2.Frame:
    row = make_row(sequence_id, num_tokens=len(prompt), slot=slot, start=make_start(**start))
    return make_step(step, [row], prompt)


def generate(chain: StageChain, prompt: Sequence[int], count: int, **start: Any) -> list[flow_pb2.SampledToken]:
    """One step a token, as without bursts."""
    chain.send(prefill(1, prompt, **start))
    for step in range(2, count + 1):
        newest = chain.tokens_of(1)[-1]
        chain.send(make_step(step, [make_row(1, position=newest.position)], [newest.token_id]))
    return chain.tokens_of(1)


@pytest.mark.parametrize("cuts", ALL_CUTS[1:])
@pytest.mark.parametrize("sampling", [SamplingParams(num_logprobs=5), SamplingParams(temperature=1.0, seed=5)])
def test_tokens_and_logprobs_do_not_depend_on_the_cut(
    open_stages: Open, cuts: Sequence[int], sampling: SamplingParams
) -> None:
    whole = generate(open_stages(), PROMPT, 12, sampling=sampling)

    assert len(whole) == 12
    assert generate(open_stages(cuts), PROMPT, 12, sampling=sampling) == whole


def test_activations_do_not_depend_on_the_cut_before_them(open_stages: Open) -> None:
    thirds, halves = open_stages((1, 2)), open_stages((2,))
    for chain in (thirds, halves):
        generate(chain, PROMPT, 4)

    into_last = [frame.step.activations for frame in thirds.passed if frame.to_stage == 2]

    assert into_last == [frame.step.activations for frame in halves.passed]
    assert len(set(into_last)) == 4


def test_tokens_are_numbered_by_their_position_in_the_sequence(open_stages: Open) -> None:
    tokens = generate(open_stages((1,)), PROMPT, 3)

    assert [token.position for token in tokens] == [7, 8, 9]


def test_a_prompt_in_chunks_is_sampled_once_at_its_end(open_stages: Open) -> None:
    whole, chunked = open_stages((1,)), open_stages((1,))
    whole.send(prefill(1, PROMPT))

    chunked.send(make_step(1, [make_row(1, num_tokens=4, sample=False)], PROMPT[:4]))
    chunked.send(make_step(2, [make_row(1, num_tokens=3, position=4)], PROMPT[4:]))

    assert [len(frame.step_result.tokens) for frame in chunked.results] == [0, 1]
    assert chunked.tokens_of(1) == whole.tokens_of(1)


def test_only_rows_that_are_asked_for_are_sampled(open_stages: Open) -> None:
    chain = open_stages((1,))
    rows = [make_row(1, num_tokens=7, slot=0, sample=False), make_row(2, num_tokens=5, slot=1)]

    chain.send(make_step(1, rows, [*PROMPT, *OTHER_PROMPT]))

    (result,) = chain.take_results()
    assert [token.sequence_id for token in result.tokens] == [2]


@pytest.mark.parametrize("cuts", ALL_CUTS)
def test_a_burst_gives_the_tokens_of_single_steps(open_stages: Open, cuts: Sequence[int]) -> None:
    expected = generate(open_stages(), PROMPT, 9)
    chain = open_stages(cuts)
    chain.send(prefill(1, PROMPT))
    first = chain.tokens_of(1)[0]

    chain.send(make_step(2, [make_row(1, position=7)], [first.token_id], burst_steps=7))

    assert chain.tokens_of(1) == expected


def test_a_burst_counts_down_to_nought_in_one_step_number(open_stages: Open) -> None:
    chain = open_stages((1,))
    chain.send(prefill(1, PROMPT))
    first = chain.tokens_of(1)[0]
    chain.take_results()

    chain.send(make_step(2, [make_row(1, position=7)], [first.token_id], burst_steps=3))

    results = chain.take_results()
    assert [(result.step, result.burst_steps) for result in results] == [(2, 3), (2, 2), (2, 1), (2, 0)]


def test_a_burst_ends_for_a_sequence_at_its_stop_token_and_goes_on_for_others(open_stages: Open) -> None:
    alone = generate(open_stages(), OTHER_PROMPT, 9)
    ids = [token.token_id for token in alone]
    stop_at = next(index for index in range(2, 9) if ids[index] not in ids[:index])
    chain = open_stages((1,))
    chain.send(prefill(1, PROMPT, slot=0))
    chain.send(prefill(2, OTHER_PROMPT, slot=1, step=2, stop_ids=[ids[stop_at]]))
    rows = [make_row(1, position=7, slot=0), make_row(2, position=5, slot=1)]
    newest = [chain.tokens_of(1)[0].token_id, chain.tokens_of(2)[0].token_id]

    chain.send(make_step(3, rows, newest, burst_steps=10))

    assert [token.token_id for token in chain.tokens_of(2)] == ids[: stop_at + 1]
    assert len(chain.tokens_of(1)) == 12
    assert chain.results[-1].step_result.burst_steps == 0


def test_a_burst_ends_when_all_its_sequences_have_stopped(open_stages: Open) -> None:
    tokens = generate(open_stages(), PROMPT, 2)
    chain = open_stages((1,))
    chain.send(prefill(1, PROMPT, stop_ids=[tokens[1].token_id]))
    chain.take_results()

    chain.send(make_step(2, [make_row(1, position=7)], [tokens[0].token_id], burst_steps=9))

    (result,) = chain.take_results()
    assert (result.burst_steps, len(result.tokens)) == (0, 1)


@pytest.mark.parametrize("cuts", ALL_CUTS)
def test_a_cancel_frees_the_slot_at_every_stage(open_stages: Open, cuts: Sequence[int]) -> None:
    chain = open_stages(cuts)
    chain.send(prefill(1, PROMPT))
    assert all(chain.kv_bytes())

    chain.send(make_cancel((1, 0)))

    assert not any(chain.kv_bytes())


def test_a_cancel_of_an_earlier_holder_of_a_slot_leaves_the_new_one_alone(open_stages: Open) -> None:
    chain = open_stages((1,))
    chain.send(prefill(1, PROMPT), make_cancel((1, 0)), prefill(2, OTHER_PROMPT, step=2))

    chain.send(make_cancel((1, 0)))
    chain.send(make_step(3, [make_row(2, position=5)], [chain.tokens_of(2)[0].token_id]))

    assert len(chain.tokens_of(2)) == 2


def test_a_reused_slot_starts_afresh(open_stages: Open) -> None:
    expected = generate(open_stages(), PROMPT, 4)
    chain = open_stages((1,))
    chain.send(prefill(9, OTHER_PROMPT), make_cancel((9, 0)))

    assert generate(chain, PROMPT, 4) == expected


def test_rows_of_a_cancelled_sequence_are_dropped_and_the_others_go_on(open_stages: Open) -> None:
    expected = generate(open_stages(), OTHER_PROMPT, 2)
    chain = open_stages((1,))
    chain.send(prefill(1, PROMPT, slot=0), prefill(2, OTHER_PROMPT, slot=1, step=2))
    rows = [make_row(1, position=7, slot=0), make_row(2, position=5, slot=1)]
    newest = [chain.tokens_of(1)[0].token_id, chain.tokens_of(2)[0].token_id]

    chain.send(make_cancel((1, 0)), make_step(3, rows, newest))

    assert chain.results[-1].step_result.step == 3
    assert len(chain.tokens_of(1)) == 1
    assert [token.token_id for token in chain.tokens_of(2)] == [token.token_id for token in expected]
    assert [token.logprobs for token in chain.tokens_of(2)] == [token.logprobs for token in expected]


def test_a_row_of_an_earlier_holder_of_a_slot_is_dropped(open_stages: Open) -> None:
    chain = open_stages((1,))
    chain.send(prefill(1, PROMPT), make_cancel((1, 0)), prefill(2, OTHER_PROMPT, step=2))
    chain.take_results()

    chain.send(make_step(3, [make_row(1, position=5)], [5]))

    (result,) = chain.take_results()
    assert (result.step, list(result.tokens)) == (3, [])


@pytest.mark.parametrize("cuts", ALL_CUTS)
def test_a_step_whose_sequences_are_all_cancelled_still_returns_its_credit(
    open_stages: Open, cuts: Sequence[int]
) -> None:
    chain = open_stages(cuts)
    chain.send(prefill(1, PROMPT))
    chain.take_results()

    chain.send(make_cancel((1, 0)), make_step(2, [make_row(1, position=7)], [5], burst_steps=4))

    (result,) = chain.take_results()
    assert (result.step, result.burst_steps, list(result.tokens)) == (2, 0, [])


def test_a_cancel_that_meets_a_burst_ends_it_at_the_first_stage(open_stages: Open) -> None:
    chain = open_stages((1,))
    chain.send(prefill(1, PROMPT))
    first = chain.tokens_of(1)[0]
    chain.take_results()
    chain.waiting.append(make_step(2, [make_row(1, position=7)], [first.token_id], burst_steps=9))
    chain.pass_one()
    chain.pass_one()
    assert [frame.to_stage for frame in chain.waiting] == [0]

    chain.waiting.appendleft(make_cancel((1, 0)))
    chain.send()

    results = chain.take_results()
    assert [(len(result.tokens), result.burst_steps) for result in results] == [(1, 9), (0, 0)]
    assert not any(chain.kv_bytes())


def test_frames_of_another_epoch_are_dropped(open_stages: Open) -> None:
    chain = open_stages((1,))
    for stale in (prefill(1, PROMPT), make_cancel((1, 0))):
        stale.epoch = EPOCH - 1
        chain.send(stale)

    assert chain.passed == []
    assert chain.results == []


def test_frames_of_another_pipeline_are_dropped(open_stages: Open) -> None:
    chain, foreign = open_stages(), prefill(1, PROMPT)
    foreign.pipeline_id = "p2"

    chain.send(foreign)

    assert chain.results == []


def test_a_step_with_too_few_tokens_is_refused(open_stages: Open) -> None:
    with pytest.raises(InternalError, match="6 tokens for rows of 7"):
        open_stages().send(make_step(1, [make_row(1, num_tokens=7)], PROMPT[:6]))


def test_a_frame_that_no_stage_understands_is_refused(open_stages: Open) -> None:
    frame = flow_pb2.Frame(pipeline_id="p1", epoch=EPOCH, to_stage=0, link_hello=flow_pb2.LinkHello())

    with pytest.raises(InternalError, match="link_hello"):
        open_stages().send(frame)


def test_a_lost_step_is_told_with_its_number_stage_and_reason(open_stages: Open) -> None:
    chain = open_stages((1,))

    chain.stages[1].report_failure(5, InternalError("it broke"))

    assert chain.results[0].step_failed == flow_pb2.StepFailed(step=5, stage=1, reason="INTERNAL", message="it broke")
    assert (chain.results[0].to_stage, chain.results[0].epoch) == (-1, EPOCH)


@pytest.mark.parametrize("cuts", ALL_CUTS)
def test_every_stage_stamps_a_step_twice_between_the_ends(open_stages: Open, cuts: Sequence[int]) -> None:
    chain = open_stages(cuts)
    step = prefill(1, PROMPT)
    step.step.stamps_ns.append(1)

    chain.send(step)

    (result,) = chain.take_results()
    assert len(result.stamps_ns) == 1 + 2 * (len(cuts) + 1)
    assert sorted(result.stamps_ns) == list(result.stamps_ns)


def test_a_solo_step_goes_through_all_stages_alone(open_stages: Open) -> None:
    whole, halves = open_stages(), open_stages((2,))
    for chain in (whole, halves):
        chain.send(prefill(1, PROMPT))
        newest = chain.tokens_of(1)[0].token_id
        chain.send(make_step(2, [make_row(1, position=7)], [newest], burst_steps=3, solo=True))

    assert whole.tokens_of(1) == halves.tokens_of(1)
    assert len(whole.tokens_of(1)) == 5
    assert all(frame.step.solo for frame in halves.passed[1:])
