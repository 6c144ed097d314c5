"""The bytes of frames and activations on a link: golden bytes of each body, cuts at every position, hostile input.

Workers and orchestrators of one protocol version must agree on these bytes. Where a change is meant, raise
PROTOCOL_VERSION and print the new ones: `python -m tests.contract.test_wire`.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.codec import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameBuffer,
    body_bytes,
    pack_activations,
    pack_frame,
    unpack_activations,
)
from shoal.errors import InternalError, ProtocolMismatch
from shoal.v1 import flow_pb2, types_pb2

HIDDEN = np.array([[0.0, -1.5, 3.25], [1e-3, -0.0, 65536.0]], np.float32)  # [T, E]

RESTORED = flow_pb2.RestoredBlocks(num_blocks=2, num_from_redis=1, codec="int8", is_exact=False)

FRAMES = {
    "link_hello": flow_pb2.Frame(
        link_hello=flow_pb2.LinkHello(
            protocol_version=1, worker_id="phone-1", incarnation=2**40 + 1, link_token=b"\x00\xff"
        )
    ),
    "step": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=300,
        to_stage=0,
        step=flow_pb2.Step(
            step=7,
            rows=[
                flow_pb2.StepRow(
                    sequence_id=9,
                    slot=2,
                    position=0,
                    num_tokens=3,
                    sample=True,
                    start=flow_pb2.SequenceStart(
                        sampling=types_pb2.SamplingParams(
                            temperature=0.5, top_k=0, top_p=1.0, logit_bias={5: -2.0}, seed=2**63
                        ),
                        prompt_token_ids=[1, 300],
                        stop_token_ids=[2],
                    ),
                ),
                flow_pb2.StepRow(sequence_id=10, slot=0, position=41, num_tokens=1),
            ],
            token_ids=[1, 300, 49151, 0],
            burst_steps=15,
            stamps_ns=[1, 2**60],
        ),
    ),
    "step_with_activations": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=1,
        to_stage=1,
        step=flow_pb2.Step(
            step=8,
            rows=[flow_pb2.StepRow(sequence_id=9, slot=2, position=3, num_tokens=2)],
            activations=pack_activations(HIDDEN),
            dtype=flow_pb2.ACTIVATION_DTYPE_FLOAT32,
            solo=True,
        ),
    ),
    "step_result": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=1,
        to_stage=-1,
        step_result=flow_pb2.StepResult(
            step=8,
            tokens=[
                flow_pb2.SampledToken(
                    sequence_id=9,
                    position=5,
                    token_id=266,
                    logprobs=types_pb2.TokenLogprobs(
                        logprob=-0.5, top=[types_pb2.TokenLogprob(token_id=266, logprob=-0.5)]
                    ),
                )
            ],
            burst_steps=4,
            stamps_ns=[5],
        ),
    ),
    "cancel": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=1,
        to_stage=0,
        cancel=flow_pb2.Cancel(sequences=[flow_pb2.SequenceRef(sequence_id=9, slot=2)]),
    ),
    "step_failed": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=1,
        to_stage=-1,
        step_failed=flow_pb2.StepFailed(step=8, stage=1, reason="INTERNAL", message="é"),
    ),
    "restore": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=1,
        to_stage=1,
        restore=flow_pb2.Restore(
            sequence_id=9,
            slot=2,
            block_hashes=[b"\x01\xff", b"\x02"],
            is_exact_only=True,
            fetch_timeout_ms=12.5,
            restored=RESTORED,
        ),
    ),
    "restored": flow_pb2.Frame(
        pipeline_id="p1", epoch=1, to_stage=-1, restored=flow_pb2.Restored(sequence_id=9, restored=RESTORED)
    ),
    "prefetch": flow_pb2.Frame(
        pipeline_id="p1", epoch=1, to_stage=0, prefetch=flow_pb2.Prefetch(block_hashes=[b"\x01"], timeout_ms=0.5)
    ),
    "keep_blocks": flow_pb2.Frame(
        pipeline_id="p1", epoch=1, to_stage=0, keep_blocks=flow_pb2.KeepBlocks(block_hashes=[b"\x01"], ttl_s=60.0)
    ),
    "forget_blocks": flow_pb2.Frame(
        pipeline_id="p1", epoch=1, to_stage=0, forget_blocks=flow_pb2.ForgetBlocks(block_hashes=[b"\x01", b"\x02"])
    ),
    "step_with_names": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=1,
        to_stage=0,
        step=flow_pb2.Step(
            step=1,
            rows=[
                flow_pb2.StepRow(
                    sequence_id=9, start=flow_pb2.SequenceStart(block_hashes=[b"\x01", b"\x02"], is_kv_exact=True)
                )
            ],
        ),
    ),
    "step_of_a_run_that_goes_on": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=2,
        to_stage=0,
        step=flow_pb2.Step(
            step=1,
            rows=[
                flow_pb2.StepRow(
                    sequence_id=9,
                    position=41,
                    num_tokens=1,
                    sample=True,
                    start=flow_pb2.SequenceStart(trail_id=b"\x03\xff", answer_token_ids=[300, 2]),
                )
            ],
            token_ids=[2],
        ),
    ),
    "restore_with_trail": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=2,
        to_stage=1,
        restore=flow_pb2.Restore(
            sequence_id=9,
            is_exact_only=True,
            trail_id=b"\x03\xff",
            num_tokens=300,
            restored=flow_pb2.RestoredBlocks(num_blocks=2, codec="f32", is_exact=True, num_tokens=140),
        ),
    ),
    "cancel_that_will_resume": flow_pb2.Frame(
        pipeline_id="p1",
        epoch=2,
        to_stage=0,
        cancel=flow_pb2.Cancel(sequences=[flow_pb2.SequenceRef(sequence_id=9, slot=2, will_resume=True)]),
    ),
    "echo": flow_pb2.Frame(
        pipeline_id="p1", epoch=1, to_stage=1, echo=flow_pb2.Echo(sent_ns=2**60, payload=b"\x00\xff")
    ),
    "echo_that_comes_back": flow_pb2.Frame(
        pipeline_id="p1", epoch=1, to_stage=0, echo=flow_pb2.Echo(sent_ns=2**60, is_reply=True)
    ),
}

GOLDEN = {
    "link_hello": "1800000022160801120770686f6e652d3118818080808020220200ff",
    "step": (
        "600000000a02703110ac022a57080712340809100220032801322a0a200d0000003f10001d0000803f42070805150000"
        "00c04880808080808080808001120301ac021a01021206080a182920011a0701ac02ffff0200300f420a018080808080"
        "80808010"
    ),
    "step_with_activations": (
        "340000000a027031100118022a2a0808120808091002180320022218000000000000c0bf000050406f12833a00000080"
        "0000804728013801"
    ),
    "step_result": ("2b0000000a0270311001180132210808121808091005188a02220f0d000000bf1208088a0215000000bf1804220105"),
    "cancel": "0e0000000a02703110013a060a0408091002",
    "step_failed": "1c0000000a027031100118014212080810011a08494e5445524e414c2202c3a9",
    "restore": "2c0000000a027031100118024a22080910021a0201ff1a01022001290000000000002940320a080210011a04696e7438",
    "restored": "180000000a02703110011801520e0809120a080210011a04696e7438",
    "prefetch": "140000000a02703110015a0c0a010111000000000000e03f",
    "keep_blocks": "140000000a0270311001620c0a0101110000000000004e40",
    "forget_blocks": "0e0000000a02703110016a060a01010a0102",
    "step_with_names": "180000000a02703110012a100801120c080932082201012201022801",
    "step_of_a_run_that_goes_on": "220000000a02703110022a1a0801121308091829200128013209320203ff3a03ac02021a0102",
    "restore_with_trail": "230000000a027031100218024a1908092001320c08021a036633322001288c013a0203ff40ac02",
    "cancel_that_will_resume": "100000000a02703110023a080a06080910021801",
    "echo": "180000000a02703110011802720e08808080808080808010120200ff",
    "echo_that_comes_back": "140000000a0270311001720c088080808080808080101801",
}
GOLDEN_ACTIVATIONS = "000000000000c0bf000050406f12833a0000008000008047"
# A field that a later version knows, number 15 of wire type 0, before the epoch.
UNKNOWN_FIELD = bytes.fromhex("0a02703178051003")


def packed_together() -> bytes:
    return b"".join(pack_frame(frame) for frame in FRAMES.values())


def with_length(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_has_its_golden_bytes(name: str) -> None:
    assert pack_frame(FRAMES[name]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", FRAMES)
def test_golden_bytes_are_read_as_the_frame_they_were(name: str) -> None:
    assert FrameBuffer().feed(bytes.fromhex(GOLDEN[name])) == [FRAMES[name]]


def test_every_body_of_a_frame_has_golden_bytes() -> None:
    bodies = {field.name for field in flow_pb2.Frame.DESCRIPTOR.oneofs_by_name["body"].fields}

    assert {frame.WhichOneof("body") for frame in FRAMES.values()} == bodies


def test_the_length_before_a_frame_is_four_bytes_little_endian() -> None:
    packed = pack_frame(FRAMES["step"])

    assert packed[:HEADER_BYTES] == (len(packed) - 4).to_bytes(4, "little")
    assert body_bytes(packed[:HEADER_BYTES]) == len(packed) - 4


def test_activations_have_their_golden_bytes() -> None:
    assert pack_activations(HIDDEN).hex() == GOLDEN_ACTIVATIONS


def test_activations_are_packed_by_rows_whatever_their_layout_in_memory() -> None:
    assert pack_activations(np.asfortranarray(HIDDEN)) == pack_activations(HIDDEN)


def test_activations_of_the_wrong_size_are_refused_with_the_numbers() -> None:
    with pytest.raises(InternalError, match="24 bytes of activations do not hold 3 x 3"):
        unpack_activations(pack_activations(HIDDEN), 3, 3)


def test_frames_come_out_whole_wherever_the_bytes_are_cut() -> None:
    stream = packed_together()
    for cut in range(len(stream) + 1):
        buffer = FrameBuffer()

        frames = buffer.feed(stream[:cut]) + buffer.feed(stream[cut:])

        assert frames == list(FRAMES.values()), f"cut at byte {cut}"


def test_frames_come_out_as_soon_as_their_last_byte_is_there() -> None:
    buffer = FrameBuffer()
    counts = [len(buffer.feed(bytes([byte]))) for byte in packed_together()]

    assert sum(counts) == len(FRAMES)
    stop = 0
    for frame in FRAMES.values():
        stop += len(pack_frame(frame))
        assert counts[stop - 1] == 1


def test_an_empty_frame_is_a_frame() -> None:
    assert FrameBuffer().feed(bytes(4)) == [flow_pb2.Frame()]


def test_the_end_of_a_stream_yields_nothing() -> None:
    assert FrameBuffer().feed(b"") == []


def test_the_longest_frame_allowed_is_waited_for() -> None:
    assert FrameBuffer().feed(struct.pack("<I", MAX_FRAME_BYTES) + b"\x00") == []


@pytest.mark.parametrize("num_bytes", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_an_absurd_length_is_refused_before_its_bytes_come(num_bytes: int) -> None:
    with pytest.raises(ProtocolMismatch, match=f"a frame of {num_bytes} bytes"):
        FrameBuffer().feed(struct.pack("<I", num_bytes))


@pytest.mark.parametrize("body", [b"\xff" * 8, b"GET / HT", b"\x22\x7f", b"\x0a\x02\xff\xfe"], ids=repr)
def test_bytes_that_are_no_frame_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolMismatch, match="not a frame"):
        FrameBuffer().feed(with_length(body))


def test_a_field_of_a_later_version_is_passed_over() -> None:
    (frame,) = FrameBuffer().feed(with_length(UNKNOWN_FIELD))

    assert (frame.pipeline_id, frame.epoch) == ("p1", 3)


@given(st.binary(max_size=200))
def test_whatever_comes_is_frames_or_refused(garbage: bytes) -> None:
    try:
        frames = FrameBuffer().feed(garbage)
    except ProtocolMismatch:
        return
    assert HEADER_BYTES * len(frames) <= len(garbage)


STEPS = st.builds(
    flow_pb2.Step,
    step=st.integers(0, 2**64 - 1),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    activations=st.binary(max_size=200),
    burst_steps=st.integers(0, 2**32 - 1),
    solo=st.booleans(),
    stamps_ns=st.lists(st.integers(0, 2**64 - 1), max_size=8),
)
ANY_FRAMES = st.builds(
    flow_pb2.Frame,
    pipeline_id=st.text(max_size=10),
    epoch=st.integers(0, 2**64 - 1),
    to_stage=st.integers(-(2**31), 2**31 - 1),
    step=STEPS,
)


@given(st.lists(ANY_FRAMES, max_size=5), st.integers(1, 50))
def test_frames_survive_the_wire_in_pieces_of_any_size(frames: list[flow_pb2.Frame], size: int) -> None:
    stream = b"".join(pack_frame(frame) for frame in frames)
    buffer = FrameBuffer()

    received = [frame for start in range(0, len(stream), size) for frame in buffer.feed(stream[start : start + size])]

    assert received == frames


@given(st.integers(0, 5), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_activations_survive_the_wire_bit_for_bit(num_tokens: int, hidden_size: int, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, (num_tokens, hidden_size), np.uint32)

    unpacked = unpack_activations(pack_activations(bits.view(np.float32)), num_tokens, hidden_size)

    assert np.array_equal(unpacked.view(np.uint32), bits)
    assert not unpacked.flags.writeable


if __name__ == "__main__":
    for name, frame in FRAMES.items():
        print(f'    "{name}": "{pack_frame(frame).hex()}",')  # noqa: T201
    print(f'GOLDEN_ACTIVATIONS = "{pack_activations(HIDDEN).hex()}"')  # noqa: T201
