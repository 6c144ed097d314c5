"""What is kept of a request and of its answer comes back as it was, or as far as it is whole."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from orchestrator.record import SEGMENT_TOKENS, AnswerLog, RequestRecord, unpack_log, unpack_record
from shoal.types import FinishReason, SamplingParams, SequenceId
from tests.support.builders import make_sequence
from tests.support.requests_kept import RECORD_ID, full_record, make_log, make_record


def segments_of(log: AnswerLog) -> list[bytes | None]:
    return [log.pack_segment(index) for index in range(-(-len(log.token_ids) // SEGMENT_TOKENS))]


def stored(log: AnswerLog) -> AnswerLog:
    return unpack_log(log.pack_state(), segments_of(log))


def test_a_record_comes_back_as_it_was() -> None:
    assert unpack_record(RECORD_ID, full_record().pack()) == full_record()


def test_a_record_of_what_has_no_deadline_and_no_session_comes_back_as_it_was() -> None:
    record = make_record(deadline_at=None, session=b"", prompt_token_ids=())

    assert unpack_record(record.record_id, record.pack()) == record


@pytest.mark.parametrize(
    "packed",
    [None, b"", b"SHJ1", full_record().pack()[:-1], full_record().pack() + b"x", b"SHJ0" + full_record().pack()[4:]],
    ids=["none", "empty", "begun", "cut", "longer", "another version"],
)
def test_what_is_no_record_is_none(packed: bytes | None) -> None:
    assert unpack_record(RECORD_ID, packed) is None


def test_a_changed_byte_is_noticed_wherever_it_is() -> None:
    packed = full_record().pack()

    for index in range(len(packed)):
        changed = packed[:index] + bytes([packed[index] ^ 1]) + packed[index + 1 :]
        assert unpack_record(RECORD_ID, changed) is None


def test_a_sequence_is_made_again_as_it_was_with_times_of_this_process() -> None:
    sequence = make_sequence(7, arrived_at=20.0, deadline_at=50.0, tenant="gold", max_tokens_per_s=5.0)
    sequence.trail_id, sequence.sampling = b"t" * 16, SamplingParams(temperature=0.5, seed=99)
    record = RequestRecord.of(sequence, record_id=RECORD_ID, request_id="r", stops=("x",), wall_s=1000.0)
    log = make_log([8, 9], num_recoveries=2, num_preemptions=1, has_changed_kernels=True)

    again = record.to_sequence(SequenceId(1), log, (), wall_s=700.0)

    assert (again.arrived_at, again.deadline_at) == (320.0, 350.0)
    assert (again.output_token_ids, again.num_recoveries, again.num_preemptions) == ([8, 9], 2, 1)
    assert again.has_changed_kernels
    for name in ("prompt_token_ids", "sampling", "max_tokens", "stop_ids", "numeric", "qos", "tenant", "targets"):
        assert getattr(again, name) == getattr(sequence, name)
    assert (again.max_tokens_per_s, again.kv_reuse, again.trail_id) == (5.0, sequence.kv_reuse, b"t" * 16)
    again.check_invariants()


@pytest.mark.parametrize("num_tokens", [0, 1, SEGMENT_TOKENS - 1, SEGMENT_TOKENS, SEGMENT_TOKENS + 1, 200])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_log_comes_back_as_it_was(num_tokens: int, has_logprobs: bool) -> None:
    log = make_log(range(70_000, 70_000 + num_tokens), has_logprobs=has_logprobs, is_left=True, num_recoveries=3)

    assert stored(log) == log
    stored(log).check_invariants()


def test_why_an_answer_is_complete_comes_back_with_what_its_client_was_told() -> None:
    log = make_log([1, 2], finish=FinishReason.STOP, finished=b"\xffmessage", written_at=3.5)

    assert stored(log) == log


@pytest.mark.parametrize(
    ("parts", "num_known"),
    [
        ([0, 1, None], 2 * SEGMENT_TOKENS),
        ([0, None, 2], SEGMENT_TOKENS),
        ([None, 1, 2], 0),
        ([2, 1, 0], 2),
    ],
    ids=["the last is missing", "one amid them is missing", "the first is missing", "one that is not full is first"],
)
def test_of_an_answer_with_gaps_what_comes_before_them_is_known(parts: Seq[int | None], num_known: int) -> None:
    log = make_log(range(2 * SEGMENT_TOKENS + 2), finish=FinishReason.LENGTH, finished=b"said")
    segments = [None if index is None else log.pack_segment(index) for index in parts]

    again = unpack_log(log.pack_state(), segments)

    assert len(again.token_ids) == num_known
    assert (again.finish, again.finished) == (None, b"")


def test_a_damaged_segment_ends_what_is_known() -> None:
    log = make_log(range(SEGMENT_TOKENS + 3), has_logprobs=True)
    first, second = segments_of(log)
    assert second is not None

    again = unpack_log(log.pack_state(), [first, second[:-1] + bytes([second[-1] ^ 1])])

    assert again.token_ids == list(range(SEGMENT_TOKENS))
    assert len(again.logprobs) == SEGMENT_TOKENS


@pytest.mark.parametrize("state", [None, b"", b"{}", b"[1]", b"\xff", b'{"finish": "nonsense"}'])
def test_tokens_are_known_also_without_a_state_that_can_be_read(state: bytes | None) -> None:
    again = unpack_log(state, segments_of(make_log([4, 5])))

    assert again == AnswerLog(token_ids=[4, 5])


def test_what_is_cut_off_takes_its_logprobs_with_it() -> None:
    log = make_log([4, 5, 6], has_logprobs=True)

    log.cut(1)

    assert log.token_ids == [4]
    log.check_invariants()


def test_an_answer_that_has_logprobs_of_a_part_of_its_tokens_has_none() -> None:
    log = make_log(range(SEGMENT_TOKENS), has_logprobs=True)
    log.append(5, None, 99.0)

    kept = unpack_log(log.pack_state(), [log.pack_segment(index) for index in range(2)])

    assert (len(kept.token_ids), kept.logprobs) == (SEGMENT_TOKENS + 1, [])
