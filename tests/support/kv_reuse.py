"""Stages of a real tiny model that keep KV, a prompt of three full blocks for them, and what is asked of them with it.

`open_stages` opens stages that are closed with the test; import it and `model` into a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from shoal.kv import BlockHash, KVScope, chain
from shoal.types import KVPolicy, SamplingParams
from shoal.v1 import flow_pb2
from tests.support.lower_tier import MemoryLowerTier
from tests.support.shards import TinyModel, make_tiny_model, make_tokens
from tests.support.stages import KVKeeping, StageChain, make_restore, make_row, make_start, make_step
from worker.kv.cache import BlockCache

NUM_LAYERS = 3
PROMPT = make_tokens(200, 280, seed=1)
NAMES = chain(KVScope("00" * 32, "f32-rope-1"), PROMPT)
EVERYTHING = 1 << 30
# Of the tiny model: 2 heads of 16.
LAYER_BLOCK_BYTES = 2 * 2 * 64 * 16 * 4
TWO_STAGES = (2,)
SAMPLING = SamplingParams(num_logprobs=20)

Open = Callable[..., StageChain]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("reuse"), num_layers=NUM_LAYERS)


@pytest.fixture
def open_stages(model: TinyModel) -> Iterator[Open]:
    opened: list[StageChain] = []

    def open_with(
        cuts: Sequence[int] = TWO_STAGES,
        *,
        budget_bytes: int = EVERYTHING,
        policy: KVPolicy = KVPolicy.EXACT,
        lower: MemoryLowerTier | None = None,
        caches: Sequence[BlockCache] | None = None,
        kv_tokens: int | None = None,
    ) -> StageChain:
        keeping = KVKeeping(budget_bytes, policy, lower, slot_tokens=256, kv_tokens=kv_tokens)
        opened.append(StageChain(model, cuts, keeping, caches))
        return opened[-1]

    yield open_with
    for stages in opened:
        stages.close()


def prefill(
    stages: StageChain,
    sequence_id: int = 1,
    *,
    slot: int = 0,
    begin: int = 0,
    chunk: int = 64,
    names: Sequence[BlockHash] = NAMES,
    is_kv_exact: bool = True,
    keeps_up: bool = True,
) -> None:
    """Compute the prompt from a token on, in chunks, as a run does after its restore."""
    for position in range(begin, len(PROMPT), chunk):
        piece = PROMPT[position : position + chunk]
        start = make_start(SAMPLING, names=names, is_kv_exact=is_kv_exact) if position == begin else None
        is_end = position + chunk >= len(PROMPT)
        row = make_row(sequence_id, slot=slot, position=position, num_tokens=len(piece), sample=is_end, start=start)
        stages.send(make_step(position + 1, [row], piece))
        if keeps_up:
            stages.keep_up()


def decode(stages: StageChain, sequence_id: int, count: int, *, slot: int = 0) -> list[flow_pb2.SampledToken]:
    for _ in range(count):
        newest = stages.tokens_of(sequence_id)[-1]
        stages.send(make_step(900, [make_row(sequence_id, slot=slot, position=newest.position)], [newest.token_id]))
    return stages.tokens_of(sequence_id)


def restore(stages: StageChain, sequence_id: int = 1, **options: object) -> flow_pb2.RestoredBlocks:
    stages.send(make_restore(sequence_id, NAMES, **options))  # type: ignore[arg-type]
    (restored,) = stages.take_restored()
    assert restored.sequence_id == sequence_id
    return restored.restored


def slot_contents(stages: StageChain, slot: int = 0) -> list[bytes]:
    return [shard.arena.array[:, :, slot, :, : len(PROMPT)].tobytes() for shard in stages.shards]


def answer_without_reuse(open_stages: Open, cuts: Sequence[int] = TWO_STAGES) -> tuple[list[object], list[bytes]]:
    stages = open_stages(cuts, budget_bytes=0)
    prefill(stages)
    contents = slot_contents(stages)
    return list(decode(stages, 1, 5)), contents
