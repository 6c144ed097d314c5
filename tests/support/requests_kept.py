"""Records of requests and logs of answers, with defaults for what a test is not about.

Used by the tests of what is kept of requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from orchestrator.core.sequence import QosTargets
from orchestrator.record import AnswerLog, RequestRecord
from shoal.types import KVReuse, NumericClass, QosClass, SamplingParams
from shoal.v1 import types_pb2
from tests.support.builders import STOP_ID, make_sequence

WALL_S = 5000.0
RECORD_ID = b"r" * 16


def make_record(number: int = 1, **fields: Any) -> RequestRecord:
    """One of a builder's sequence, whose clock the wall clock is WALL_S ahead of; request ids are r-1, r-2, ..."""
    record = RequestRecord.of(
        make_sequence(number, num_prompt=4),
        record_id=bytes([number]) * 16,
        request_id=f"r-{number}",
        stops=(),
        wall_s=WALL_S,
    )
    return replace(record, **fields)


def full_record() -> RequestRecord:
    """One in which no field has its default."""
    return RequestRecord(
        record_id=RECORD_ID,
        request_id="mine \u2713",
        tenant="gold",
        prompt_token_ids=(5, 70_000, 1),
        sampling=SamplingParams(
            temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, repetition_penalty=1.5, presence_penalty=-0.5,
            frequency_penalty=0.25, logit_bias={4: -2.0}, seed=2**63, num_logprobs=0,
        ),
        max_tokens=77,
        stop_ids=frozenset({STOP_ID, 9}),
        stops=("END", "\n\n"),
        numeric=NumericClass.SOLO,
        qos=QosClass.LATENCY,
        targets=QosTargets(ttft_s=0.5, inter_token_s=None),
        max_tokens_per_s=12.5,
        kv_reuse=KVReuse.EXACT,
        trail_id=b"t" * 16,
        accepted_at=1_700_000_000.25,
        deadline_at=1_700_000_060.5,
        num_dropped=3,
        session=b"\x00packed",
    )  # fmt: skip


def make_log(token_ids: Seq[int] = (), *, has_logprobs: bool = False, **fields: Any) -> AnswerLog:
    """Tokens that came at 10.0, 11.0, ..."""
    log = AnswerLog(**fields)
    for index, token_id in enumerate(token_ids):
        log.append(token_id, make_logprobs(token_id) if has_logprobs else None, 10.0 + index)
    return log


def make_logprobs(token_id: int) -> types_pb2.TokenLogprobs:
    top = [types_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)]
    return types_pb2.TokenLogprobs(logprob=-0.5, top=top)
