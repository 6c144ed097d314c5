"""A request as a sequence: defaults, classes, tenants, targets and deadlines, and what is refused with which words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from modelstore.manifest import BlobEntry, Manifest, ModelConfig
from orchestrator.block_names import BlockNames
from orchestrator.core.qos import LATENCY_TARGETS
from orchestrator.core.sequence import QosTargets, Sequence
from orchestrator.requests import SINK_TOKENS, DecodedRequest, RequestDecoder, session_id_of, warm_ttl_s, windowed
from orchestrator.tokenizer import Tokenizer
from shoal.config import MAX_TARGET_MS
from shoal.errors import InvalidRequest
from shoal.types import KVReuse, NumericClass, QosClass, SequenceId
from shoal.v1 import admin_pb2, inference_pb2, types_pb2
from tests.support.vocabulary import make_tokenizer_data

BALANCED = QosTargets(ttft_s=2.0, inter_token_s=0.1)
EMPTY = BlobEntry("", 0, {}, {})


def make_manifest() -> Manifest:
    data = make_tokenizer_data()
    config = ModelConfig(
        architecture="llama",
        num_layers=1,
        hidden_size=8,
        ffn_sizes=(8,),
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=len(data.tokens),
        context_tokens=64,
        rope_base=1e4,
        rms_epsilon=1e-5,
        is_head_tied=True,
        windows=(0,),
    )
    return Manifest("tiny", "", "", config, "int8", data, EMPTY, EMPTY, (EMPTY,), EMPTY)


MANIFEST = make_manifest()
TOKENIZER = Tokenizer(MANIFEST.tokenizer)
NAMES = BlockNames("ab" * 32, b"s" * 32)


def decode(
    *,
    default_qos: QosClass = QosClass.BALANCED,
    time_left_s: float | None = None,
    history: tuple[int, ...] = (),
    room_tokens: int = 0,
    manifest: Manifest = MANIFEST,
    **fields: Any,
) -> DecodedRequest:
    """Decode a request that arrives at 100.0."""
    request = inference_pb2.GenerateRequest(**{"prompt": "hello", **fields})
    decoder = RequestDecoder(manifest, TOKENIZER, NAMES, default_qos, BALANCED)
    return decoder.decode(
        request,
        sequence_id=SequenceId(5),
        seed=77,
        now=100.0,
        time_left_s=time_left_s,
        history=history,
        room_tokens=room_tokens,
    )


def sequence_of(**options: Any) -> Sequence:
    return decode(**options).sequence


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        decode(**fields)
    return raised.value


def test_a_bare_request_takes_the_defaults() -> None:
    decoded = decode()
    sequence = decoded.sequence

    assert (decoded.request_id, decoded.stops) == ("", ())
    assert (sequence.sequence_id, sequence.max_tokens, sequence.arrived_at) == (5, 256, 100.0)
    assert sequence.prompt_token_ids == tuple(TOKENIZER.encode("hello", add_special=True))
    assert (sequence.tenant, sequence.max_tokens_per_s, sequence.deadline_at) == ("default", 0.0, None)
    assert sequence.sampling.seed == 77
    assert sequence.stop_ids == TOKENIZER.stop_ids


@pytest.mark.parametrize("qos", QosClass, ids=lambda qos: qos.value)
def test_a_request_that_names_no_class_has_the_configured_one(qos: QosClass) -> None:
    assert sequence_of(default_qos=qos).qos is qos


def test_a_request_has_the_class_it_names() -> None:
    sequence = sequence_of(default_qos=QosClass.LATENCY, qos_class=types_pb2.QOS_CLASS_THROUGHPUT)

    assert (sequence.qos, sequence.numeric) == (QosClass.THROUGHPUT, NumericClass.SHARED)


def test_latency_requests_alone_decode_alone() -> None:
    assert sequence_of(qos_class=types_pb2.QOS_CLASS_LATENCY).numeric is NumericClass.SOLO


@pytest.mark.parametrize(
    ("qos_class", "targets"),
    [
        (types_pb2.QOS_CLASS_LATENCY, LATENCY_TARGETS),
        (types_pb2.QOS_CLASS_BALANCED, BALANCED),
        (types_pb2.QOS_CLASS_THROUGHPUT, QosTargets()),
    ],
)
def test_targets_are_those_of_the_class(qos_class: types_pb2.QosClass, targets: QosTargets) -> None:
    assert sequence_of(qos_class=qos_class).targets == targets


def test_a_request_may_bring_its_own_targets_one_by_one() -> None:
    assert sequence_of(ttft_target_ms=300.0).targets == QosTargets(0.3, BALANCED.inter_token_s)
    assert sequence_of(inter_token_target_ms=40.0).targets == QosTargets(BALANCED.ttft_s, 0.04)


def test_the_time_that_the_client_has_left_is_the_deadline() -> None:
    assert sequence_of(time_left_s=2.5).deadline_at == 102.5


def test_a_request_has_the_tenant_and_the_pace_it_names() -> None:
    sequence = sequence_of(tenant="gold", max_tokens_per_s=12.5)

    assert (sequence.tenant, sequence.max_tokens_per_s) == ("gold", 12.5)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("tenant", "x" * 65, "at most 64 printable characters"),
        ("tenant", "a\nb", "at most 64 printable characters"),
        ("max_tokens_per_s", -1.0, "0 (no limit) or from 1 to 1000"),
        ("max_tokens_per_s", 0.01, "0 (no limit) or from 1 to 1000"),
        ("max_tokens_per_s", 1000.5, "0 (no limit) or from 1 to 1000"),
        ("max_tokens_per_s", math.nan, "0 (no limit) or from 1 to 1000"),
        ("max_tokens_per_s", math.inf, "0 (no limit) or from 1 to 1000"),
        *[
            (field, value, "a number of milliseconds above 0 and at most ")
            for field in ("ttft_target_ms", "inter_token_target_ms")
            for value in (0.0, -5.0, MAX_TARGET_MS + 1.0, math.nan, math.inf)
        ],
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    error = refusal(**{field: value})

    assert error.field == field
    assert error.message.startswith(f"{field}: {value!r:.40}")
    assert allowed in error.message


def test_targets_of_an_hour_are_taken() -> None:
    sequence = sequence_of(ttft_target_ms=MAX_TARGET_MS, inter_token_target_ms=MAX_TARGET_MS)

    assert sequence.targets == QosTargets(3600.0, 3600.0)


def test_a_tenant_of_the_longest_name_is_taken() -> None:
    assert sequence_of(tenant="x" * 64).tenant == "x" * 64


@pytest.mark.parametrize("rate", [0.0, 1.0, 1000.0])
def test_paces_at_the_ends_of_the_range_are_taken(rate: float) -> None:
    assert sequence_of(max_tokens_per_s=rate).max_tokens_per_s == rate


def chat(*messages: tuple[str, str]) -> inference_pb2.ChatInput:
    return inference_pb2.ChatInput(
        messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


def test_the_blocks_of_a_prompt_are_named_within_its_tenant() -> None:
    tokens = inference_pb2.TokenInput(token_ids=[5] * 130)

    sequence = sequence_of(prompt=None, tokens=tokens, tenant="gold")

    assert sequence.block_hashes == NAMES.names("gold", [5] * 130)
    assert (len(sequence.block_hashes), sequence.kv_reuse) == (2, KVReuse.POLICY)


def test_a_request_that_wants_nothing_reused_has_no_named_blocks() -> None:
    tokens = inference_pb2.TokenInput(token_ids=[5] * 130)

    sequence = sequence_of(prompt=None, tokens=tokens, kv_reuse=inference_pb2.KV_REUSE_NONE)

    assert (sequence.block_hashes, sequence.kv_reuse) == ((), KVReuse.NONE)


def test_a_turn_follows_what_was_said_before() -> None:
    sequence = sequence_of(history=(5,) * 70)

    assert sequence.prompt_token_ids == (5,) * 70 + tuple(TOKENIZER.encode("hello", add_special=False))
    assert sequence.block_hashes == NAMES.names("default", (5,) * 70)


def test_a_later_turn_of_a_chat_ends_the_answer_before_it() -> None:
    sequence = sequence_of(prompt=None, chat=chat(("user", "bye")), history=(5, 6))

    pasted = "<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    assert sequence.prompt_token_ids == (5, 6, *TOKENIZER.encode(pasted, add_special=False))


def test_a_prompt_to_be_warmed_opens_no_answer() -> None:
    decoder = RequestDecoder(MANIFEST, TOKENIZER, NAMES, QosClass.BALANCED, BALANCED)

    token_ids = decoder.warm_token_ids(admin_pb2.WarmRequest(chat=chat(("system", "be"))))

    assert token_ids == tuple(TOKENIZER.encode("<|im_start|>system\nbe<|im_end|>\n", add_special=False))


@pytest.mark.parametrize("session_id", ["a", "A-z_0.9:x", "x" * 128])
def test_a_plain_name_is_one_of_a_session(session_id: str) -> None:
    assert session_id_of(session_id) == session_id


@pytest.mark.parametrize("session_id", ["", "a b", "a/b", "ä", "a\n", "x" * 129])
def test_another_name_is_not(session_id: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be 1 to 128 letters, digits and characters of - _ \. :"):
        session_id_of(session_id)


@pytest.mark.parametrize("ttl_s", [-0.1, math.nan, math.inf, 30 * 86400.0 + 1])
def test_a_pin_has_a_time_within_bounds(ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match=r"must be from 0 \(not pinned\) to"):
        warm_ttl_s(ttl_s)


HISTORY = tuple(range(1000, 1900))
WINDOW = inference_pb2.CONTEXT_OVERFLOW_WINDOW


def test_a_session_that_fits_is_kept_as_it_is() -> None:
    assert windowed(HISTORY, num_turn=50, max_tokens=50, room_tokens=1000) == HISTORY


def test_a_session_that_is_a_token_too_long_goes_on_with_half_of_the_room() -> None:
    kept = windowed(HISTORY, num_turn=51, max_tokens=50, room_tokens=1000)
    assert kept == HISTORY[:SINK_TOKENS] + HISTORY[SINK_TOKENS - 500 :]
    assert len(kept) == 500


def test_a_long_turn_leaves_less_than_half_of_the_room_to_the_session() -> None:
    kept = windowed(HISTORY, num_turn=600, max_tokens=50, room_tokens=1000)
    assert len(kept) + 600 + 50 == 1000


def test_a_long_answer_is_given_no_more_than_a_quarter_of_the_room() -> None:
    kept = windowed(HISTORY, num_turn=600, max_tokens=5000, room_tokens=1000)
    assert len(kept) + 600 + 250 == 1000


def test_nothing_is_dropped_where_that_would_not_help() -> None:
    assert windowed(HISTORY, num_turn=900, max_tokens=50, room_tokens=1000) == HISTORY


def test_a_session_that_may_drop_tokens_says_how_many_it_dropped() -> None:
    decoded = decode(history=(5,) * 900, room_tokens=1000, max_tokens=150, context_overflow=WINDOW)
    assert decoded.num_dropped == 400
    assert decoded.sequence.prompt_token_ids[:500] == (5,) * 500
    assert len(decoded.sequence.prompt_token_ids) < 520


def test_before_any_pipeline_is_there_the_room_is_what_the_model_can() -> None:
    manifest = replace(MANIFEST, config=replace(MANIFEST.config, context_tokens=1000))
    decoded = decode(manifest=manifest, history=(5,) * 900, max_tokens=150, context_overflow=WINDOW)
    assert decoded.num_dropped == 400


def test_a_session_drops_nothing_that_was_not_allowed_to() -> None:
    decoded = decode(history=(5,) * 900, room_tokens=1000, max_tokens=150)
    assert decoded.num_dropped == 0
    assert decoded.sequence.prompt_token_ids[:900] == (5,) * 900


def test_a_way_to_go_on_of_a_later_version_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="99 is not a way to go on"):
        decode(context_overflow=99)
