"""What a request that comes may expect of its prompt, against what comes of it in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.scheduler import Scheduler
from shoal.types import QosClass
from tests.support.builders import know_times, make_decoding, make_limits, make_sequence
from tests.support.simulated_pipeline import SimulatedPipeline, StageSpeed

PASS_S, TOKEN_S = 0.01, 0.005


def test_what_is_predicted_does_not_depend_on_what_is_in_flight() -> None:
    running = [make_sequence(key, max_tokens=400, inter_token_s=0.1) for key in (1, 2)]
    scheduler = make_decoding(make_limits(num_stages=2, kv_tokens=8192, context_tokens=2048), *running)
    know_times(scheduler, base_s=PASS_S, token_s=TOKEN_S)
    scheduler.submit(make_sequence(3, num_prompt=600), 1.0)
    before = scheduler.predict(500, QosClass.BALANCED, 1.0)
    num_queued = 600
    while (batch := scheduler.schedule(1.0)) is not None:
        num_queued -= batch.num_tokens - batch.num_decode_rows
    after = scheduler.predict(500, QosClass.BALANCED, 1.0)
    assert num_queued < 600
    assert after.prefill_s == before.prefill_s
    # The rest of the prompt before it is all that has changed.
    assert after.queue_s == pytest.approx(before.queue_s * num_queued / 600)


def test_a_pass_of_a_prompt_takes_less_while_others_of_its_round_are_under_way() -> None:
    running = make_sequence(1, max_tokens=400, inter_token_s=0.1)
    scheduler = make_decoding(make_limits(num_stages=2, kv_tokens=8192, context_tokens=2048), running)
    know_times(scheduler, base_s=PASS_S, token_s=TOKEN_S)
    moment = scheduler._moment(0.0)
    chunk = replace(moment, busy_s=moment.busy_s + 0.05, has_chunk_in_flight=True)

    with_chunk, without = (scheduler._prompts.room(0, 0, one) for one in (chunk, moment))

    assert 0 < with_chunk < without


@pytest.mark.parametrize(("num_stages", "num_streams"), [(1, 4), (1, 8), (2, 4), (2, 8), (3, 4), (3, 8)])
@pytest.mark.parametrize("inter_token_s", [0.1, 0.02])
@pytest.mark.parametrize("attention_tokens", [float("inf"), 3000.0])
def test_a_prompt_takes_about_as_long_as_predicted(
    num_stages: int, num_streams: int, inter_token_s: float, attention_tokens: float
) -> None:
    """Within a factor of two: how batches meet at stages is not predicted."""
    limits = replace(
        make_limits(num_stages=num_stages, num_slots=16, kv_tokens=64 * 1024, context_tokens=4096, max_batch=8),
        attention_tokens=attention_tokens,
    )
    speed = StageSpeed(PASS_S / num_stages, TOKEN_S / num_stages)
    pipeline = SimulatedPipeline(Scheduler(limits), [speed] * num_stages)
    know_times(pipeline.scheduler, base_s=speed.base_s, token_s=speed.token_s)
    for key in range(1, num_streams + 1):
        stream = make_sequence(key, num_prompt=32, max_tokens=2000, inter_token_s=inter_token_s, stop_ids=frozenset())
        pipeline.submit(stream, 0.0)
    pipeline.run(5.0)
    prompt = make_sequence(99, num_prompt=600, max_tokens=4, stop_ids=frozenset())
    predicted_s = pipeline.scheduler.predict(600, prompt.qos, 5.0).first_token_s
    pipeline.submit(prompt, 5.0)
    for second in range(6, 100):
        pipeline.run(float(second))
        if prompt.first_token_at is not None:
            break
    assert prompt.first_token_at is not None
    assert 0.5 < predicted_s / (prompt.first_token_at - 5.0) < 2.0
