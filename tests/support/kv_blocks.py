"""Stage blocks with made-up KV for tests of tiers: chained names, any layers, any codec."""

from __future__ import annotations

import hashlib
import random

from shoal.kv import BLOCK_TOKENS, KVScope, chain
from shoal.types import LayerRange
from worker.kv.block import BlockForm, StageBlock, pack
from worker.kv.codec import KVCodec, encoded_bytes

MODEL_DIGEST = hashlib.sha256(b"a model").hexdigest()
# 2 x 2 heads x 64 tokens x 32 floats: 32 KiB a layer, so a value holds up to seven.
NUM_HEADS, HEAD_DIM = 2, 32
TEN_LAYERS = LayerRange(0, 10)


def make_blocks(
    count: int, layers: LayerRange = TEN_LAYERS, *, name: str = "tenant", head_dim: int = HEAD_DIM
) -> list[StageBlock]:
    """The first blocks of a sequence that depends on the name."""
    tokens = random.Random(name).choices(range(50_000), k=count * BLOCK_TOKENS)
    hashes = chain(KVScope(MODEL_DIGEST, "f32-rope-1"), tokens)
    form = BlockForm(MODEL_DIGEST, layers, NUM_HEADS, head_dim)
    return [form.block(block_hash, index) for index, block_hash in enumerate(hashes)]


def layer_payload(block: StageBlock, layer: int, codec: KVCodec = KVCodec.LOSSLESS) -> bytes:
    """The same for a layer of a block, whichever stage it is asked for."""
    size = encoded_bytes(codec, (1, *block.shape[1:]))
    return random.Random(f"{block.block_hash.hex()} {layer} {codec.value}").randbytes(size)


def pack_stage(block: StageBlock, codec: KVCodec = KVCodec.LOSSLESS, *, is_exact: bool | None = None) -> bytes:
    layers = block.label.layers
    payload = b"".join(layer_payload(block, layer, codec) for layer in range(layers.start, layers.stop))
    exact = codec is KVCodec.LOSSLESS if is_exact is None else is_exact
    return pack(block.label, codec.value, payload, is_exact=exact)
