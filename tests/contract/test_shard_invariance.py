"""A row's result depends on its own sequence only, bit for bit: not on cuts, company, chunks, slots or what was before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelstore.graph import build_shard_graph
from orchestrator.tokenizer import Tokenizer
from shoal.errors import InternalError
from shoal.types import LayerRange
from tests.support.english import TEXT
from tests.support.guests import Guest, continue_greedily, run_together
from tests.support.real_model import real_manifest, real_store
from tests.support.resident import on_linux, resident_bytes_at
from tests.support.shards import ShardChain, TinyModel, make_shape, make_tiny_model, make_tokens, open_chain
from worker.kv.arena import MAX_CHUNK_TOKENS, Arena
from worker.session import Session
from worker.shard import Shard, ShardBatch, ShardRow

NUM_LAYERS = 4
VOCAB = 288

# Weight type, embedding type, precision, tied.
KINDS = [
    ("Q4_1", "Q8_0", "int8", True),
    ("Q4_1", "Q4_1", "int8", False),
    ("Q4_0", "Q4_0", "int8", False),
    ("Q5_1", "Q5_K", "int8", True),
    ("Q5_K", "Q5_0", "int8", False),
    ("Q2_K", "Q4_K", "int8", True),
    ("Q3_K", "Q3_K", "int8", True),
    ("Q6_K", "Q6_K", "int8", True),
    ("Q4_K", "Q2_K", "int8", False),
    ("Q8_0", "F16", "int8", True),
    ("F16", "F16", "int8", False),
    ("F16", "F16", "int4", True),
    ("F32", "F16", "int4-asym", False),
    ("F16", "F16", "float32", True),
    ("F32", "F32", "float32", False),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=NUM_LAYERS, weight_type="Q4_1", is_tied=True)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def any_model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyModel:
    weights, embedding, precision, is_tied = request.param
    folder = tmp_path_factory.mktemp("any")
    return make_tiny_model(
        folder,
        num_layers=NUM_LAYERS,
        precision=precision,
        weight_type=weights,
        embedding_type=embedding,
        is_tied=is_tied,
        # Some types have blocks of 256 values.
        hidden=256 if "K" in weights + embedding else 64,
        ffn=256 if "K" in weights + embedding else 96,
    )


def open_tiny(model: TinyModel, cuts: Sequence[int] = (), **options: int) -> ShardChain:
    return open_chain(model.manifest, model.blob_directory, cuts, **options)


def open_whole(
    model: TinyModel, *, num_slots: int = 4, slot_tokens: int = 128, kv_tokens: int | None = None
) -> tuple[Shard, Arena]:
    """The whole model in one shard, with its arena in sight."""
    layers = LayerRange(0, NUM_LAYERS)
    shape = make_shape(model.manifest, layers, num_slots=num_slots, slot_tokens=slot_tokens)
    shape = replace(shape, kv_tokens=kv_tokens or shape.kv_tokens)
    arena = Arena(shape)
    return Shard(shape, Session(build_shard_graph(model.manifest, layers), model.blob_directory), arena), arena


def make_guests() -> list[Guest]:
    lengths_chunks = [(23, 5), (40, 64), (2, 8), (36, 12), (1, 4), (18, 6)]
    slots, arrivals = (3, 0, 6, 7, 2, 5), (0, 3, 4, 1, 6, 2)
    return [
        Guest(slot, make_tokens(length, VOCAB, seed=length), arrives, chunk)
        for (length, chunk), slot, arrives in zip(lengths_chunks, slots, arrivals, strict=True)
    ]


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 3), (1, 2, 3)])
def test_any_cut_computes_what_the_whole_does(any_model: TinyModel, cuts: tuple[int, ...]) -> None:
    prompt = make_tokens(21, VOCAB)
    whole = continue_greedily(open_tiny(any_model), prompt, 5)
    assert np.array_equal(continue_greedily(open_tiny(any_model, cuts), prompt, 5), whole)


def test_a_cut_computes_what_the_whole_does_where_projections_are_not_fused(tmp_path: Path) -> None:
    mixed = {f"blk.{layer}.{part}.weight": "Q8_0" for layer in range(3) for part in ("attn_v", "ffn_up")}
    model = make_tiny_model(tmp_path, num_layers=3, weight_type="Q4_1", tensor_types=mixed)
    prompt = make_tokens(21, VOCAB)
    whole = continue_greedily(open_tiny(model), prompt, 5)
    assert np.array_equal(continue_greedily(open_tiny(model, (1, 2)), prompt, 5), whole)


def test_a_sequence_alone_equals_itself_among_others(any_model: TinyModel) -> None:
    guests = make_guests()
    run_together(open_tiny(any_model, num_slots=8), guests, steps=14)
    for guest in guests:
        alone = continue_greedily(open_tiny(any_model), guest.token_ids, len(guest.logits))
        assert np.array_equal(np.stack(guest.logits), alone), f"the guest in slot {guest.slot}"


def test_chunks_do_not_matter(tiny: TinyModel) -> None:
    chain, prompt = open_tiny(tiny, slot_tokens=256), make_tokens(132, VOCAB)
    whole = continue_greedily(chain, prompt, 3, chunk=132)
    for chunk in (2, 3, 16, 64, 130):
        assert np.array_equal(continue_greedily(chain, prompt, 3, chunk=chunk), whole), f"chunks of {chunk}"


def test_slots_do_not_matter(tiny: TinyModel) -> None:
    chain, prompt = open_tiny(tiny, num_slots=5), make_tokens(20, VOCAB)
    first = continue_greedily(chain, prompt, 3, slot=0)
    for slot in range(1, 5):
        assert np.array_equal(continue_greedily(chain, prompt, 3, slot=slot), first), f"slot {slot}"


def test_a_shard_of_one_slot_computes_what_others_do(tiny: TinyModel) -> None:
    prompt = make_tokens(20, VOCAB)
    one = continue_greedily(open_tiny(tiny, num_slots=1), prompt, 3)
    assert np.array_equal(one, continue_greedily(open_tiny(tiny, num_slots=4), prompt, 3))


def test_more_threads_do_not_matter(tiny: TinyModel) -> None:
    prompt = make_tokens(40, VOCAB)
    one = continue_greedily(open_tiny(tiny), prompt, 3)
    assert np.array_equal(continue_greedily(open_tiny(tiny, num_threads=2), prompt, 3), one)


def test_a_solo_row_is_the_same_whatever_the_other_slots_hold(any_model: TinyModel) -> None:
    quiet, busy = open_tiny(any_model), open_tiny(any_model, (1, 3))
    for slot in (0, 2, 3):
        busy.prefill(make_tokens(30, VOCAB, seed=slot), slot=slot)
    prompt = make_tokens(20, VOCAB)
    logits = [chain.prefill(prompt, slot=slot) for chain, slot in ((quiet, 0), (busy, 1))]
    for position in range(20, 24):
        token = int(logits[0].argmax())
        logits = [chain.decode(token, position, slot=slot, solo=True) for chain, slot in ((quiet, 0), (busy, 1))]
        assert np.array_equal(logits[0], logits[1])


def test_rolling_back_forgets_without_a_trace(tiny: TinyModel) -> None:
    chain, prompt = open_tiny(tiny), make_tokens(20, VOCAB)
    chain.prefill(prompt)
    before = chain.decode(7, 20)
    chain.run([ShardRow(0, 20, 5, wants_logits=False)], make_tokens(5, VOCAB, seed=9))
    assert np.array_equal(chain.decode(7, 20), before)


@pytest.mark.parametrize("is_released", [True, False])
def test_a_slot_can_be_used_again(tiny: TinyModel, is_released: bool) -> None:
    chain, prompt = open_tiny(tiny), make_tokens(20, VOCAB)
    fresh = continue_greedily(chain, prompt, 3)
    chain.prefill(make_tokens(90, VOCAB, seed=5))
    if is_released:
        chain.release(0)
    assert np.array_equal(continue_greedily(chain, prompt, 3), fresh)


def test_a_full_slot_does_not_hinder_a_long_chunk_beside_it(tiny: TinyModel) -> None:
    chain = open_tiny(tiny, slot_tokens=250)
    prompt, other = make_tokens(249, VOCAB), make_tokens(240, VOCAB, seed=1)
    chain.prefill(prompt, chunk=83)
    rows = [ShardRow(0, 249, 1, wants_logits=True), ShardRow(1, 0, 240, wants_logits=True)]
    together = chain.run(rows, [5, *other])
    assert np.array_equal(together[0], chain.decode(5, 249))
    assert np.array_equal(together[1], chain.prefill(other, slot=2, chunk=240))


def test_more_slot_ranges_than_are_kept_bound_work(tiny: TinyModel) -> None:
    chain = open_tiny(tiny, num_slots=12)
    expected = {slot: chain.prefill(make_tokens(6, VOCAB, seed=slot), slot=slot) for slot in range(12)}
    for low in range(11):
        for high in range(low + 1, 12):
            rows = [ShardRow(slot, 0, 6, wants_logits=True) for slot in (low, high)]
            tokens = [token for slot in (low, high) for token in make_tokens(6, VOCAB, seed=slot)]
            assert np.array_equal(chain.run(rows, tokens), np.stack([expected[low], expected[high]]))


def test_a_larger_step_elsewhere_does_not_disturb_what_is_bound(tiny: TinyModel) -> None:
    prompt, other = make_tokens(4, VOCAB), make_tokens(60, VOCAB, seed=1)
    expected = continue_greedily(open_tiny(tiny), prompt, 3)
    chain = open_tiny(tiny)
    chain.prefill(prompt)
    first = chain.decode(int(expected[0].argmax()), 4)
    chain.prefill(other, slot=1, chunk=60)
    second = chain.decode(int(expected[1].argmax()), 5)
    assert np.array_equal(np.stack([first, second]), expected[1:])


def test_a_step_that_wants_no_logits_returns_none(tiny: TinyModel) -> None:
    chain = open_tiny(tiny)
    assert chain.run([ShardRow(0, 0, 8, wants_logits=False)], make_tokens(8, VOCAB)).shape == (0, VOCAB)
    assert chain.decode(5, 8).shape == (VOCAB,)


def test_an_unaligned_payload_is_read_as_it_is(tiny: TinyModel) -> None:
    head, tail = open_tiny(tiny, (2,)).shards
    rows = (ShardRow(0, 0, 4, wants_logits=True),)
    hidden = head.run(ShardBatch(rows, np.array(make_tokens(4, VOCAB))))
    received = np.frombuffer(b"?" + hidden.tobytes(), np.float32, offset=1, count=hidden.size).reshape(hidden.shape)
    assert not received.flags.aligned
    expected = tail.run(ShardBatch(rows, hidden.copy())).copy()
    assert np.array_equal(tail.run(ShardBatch(rows, received)), expected)


@pytest.mark.parametrize(
    ("rows", "solo", "message"),
    [
        ((), False, "needs rows"),
        ((ShardRow(0, 0, 2, False), ShardRow(0, 2, 2, False)), False, "slot of its own"),
        ((ShardRow(0, 0, 2, False),), True, "one row of one token"),
        ((ShardRow(0, 0, 1, False), ShardRow(1, 0, 1, False)), True, "one row of one token"),
        ((ShardRow(0, 5, 1, False),), False, "from token 5, but it holds 4"),
        ((ShardRow(0, 4, MAX_CHUNK_TOKENS + 1, False),), False, "at most"),
        ((ShardRow(0, 4, 125, False),), False, "a slot of this shard holds 128"),
        (
            (ShardRow(0, 4, 100, False), ShardRow(1, 0, 100, False)),
            False,
            "would hold 204 tokens; this shard holds 160",
        ),
    ],
)
def test_a_step_that_may_not_run_is_refused_and_changes_nothing(
    tiny: TinyModel, rows: tuple[ShardRow, ...], solo: bool, message: str
) -> None:
    shard, arena = open_whole(tiny, kv_tokens=160)
    shard.run(ShardBatch((ShardRow(0, 0, 4, False),), np.array(make_tokens(4, VOCAB))))
    before = arena.array[:, :, 0, :, :4].copy()
    with pytest.raises(InternalError, match=message):
        shard.run(ShardBatch(rows, np.zeros(sum(row.num_tokens for row in rows), np.int64), solo))
    assert (arena.length(0), arena.length(1)) == (4, 0)
    assert np.array_equal(arena.array[:, :, 0, :, :4], before)
    shard.check_invariants()


def test_a_payload_of_another_size_than_its_rows_is_refused(tiny: TinyModel) -> None:
    shard, _ = open_whole(tiny)
    with pytest.raises(InternalError, match=r"4 tokens came with an array \(3,\)"):
        shard.run(ShardBatch((ShardRow(0, 0, 4, False),), np.zeros(3, np.int64)))


@on_linux
def test_a_step_touches_only_the_memory_of_the_tokens_it_writes(tiny: TinyModel) -> None:
    shard, arena = open_whole(tiny, num_slots=16, slot_tokens=20_000)
    shard.run(ShardBatch((ShardRow(9, 0, 64, False),), np.array(make_tokens(64, VOCAB))))
    rows = (ShardRow(0, 0, 1, True), ShardRow(9, 64, 1, True), ShardRow(15, 0, 3, True))
    shard.run(ShardBatch(rows, np.array(make_tokens(5, VOCAB))))
    resident = resident_bytes_at(arena.pointer(0, 0, 0))
    assert 69 * 4 * 2 * 2 * 16 * 4 <= resident <= shard.kv_bytes
    assert shard.kv_bytes < 1 << 20
    for slot in (0, 9, 15):
        shard.release(slot)
    assert resident_bytes_at(arena.pointer(0, 0, 0)) == shard.kv_bytes == 0


@pytest.mark.e2e
def test_the_real_model_cut_in_three_computes_what_the_whole_does() -> None:
    manifest, blob_directory = real_manifest(), real_store().root / "blobs"
    prompt = Tokenizer(manifest.tokenizer).encode(TEXT, add_special=False)[:100]
    whole, cut = (open_chain(manifest, blob_directory, cuts) for cuts in ((), (11, 21)))
    expected = continue_greedily(whole, prompt, 12, chunk=100)
    assert np.array_equal(continue_greedily(cut, prompt, 12, chunk=64), expected)
    assert np.array_equal(continue_greedily(cut, prompt, 12, slot=2, chunk=34), expected)


@pytest.mark.e2e
def test_a_sequence_alone_equals_itself_among_others_on_the_real_model() -> None:
    manifest, blob_directory = real_manifest(), real_store().root / "blobs"
    text = Tokenizer(manifest.tokenizer).encode(TEXT, add_special=False)
    guests = [
        Guest(slot=5, token_ids=text[:50], arrives=0, chunk=20),
        Guest(slot=1, token_ids=text[100:164], arrives=2, chunk=32),
        Guest(slot=2, token_ids=text[200:230], arrives=4, chunk=16),
    ]
    run_together(open_chain(manifest, blob_directory, num_slots=8), guests, steps=12)
    alone = open_chain(manifest, blob_directory)
    for guest in guests:
        assert np.array_equal(continue_greedily(alone, guest.token_ids, len(guest.logits)), np.stack(guest.logits))
