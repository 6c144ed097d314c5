"""A block's values in their stored form: what a `codec` made of them, behind the header of `block`.

Pure. Whoever reads stored bytes reads them by this, so a payload that it gives can be decoded. Called by the tiers.
"""

from __future__ import annotations

from worker.kv.block import BlockLabel, Mismatch, Payload, pack, unpack
from worker.kv.codec import Block, KVCodec, encode, encoded_bytes

CODECS = frozenset(codec.value for codec in KVCodec)


def pack_block(label: BlockLabel, values: Block, codec: KVCodec, *, is_exact: bool) -> bytes:
    """Encode and pack; is_exact: of the values. Stored with a lossy codec they are not."""
    return pack(label, codec.value, encode(values, codec), is_exact=is_exact and codec is KVCodec.LOSSLESS)


def unpack_block(data: bytes, label: BlockLabel) -> Payload | Mismatch:
    """The payload of a block, as long as its codec makes it; or why the bytes are not that block."""
    payload = unpack(data, label, CODECS)
    if isinstance(payload, Mismatch):
        return payload
    is_whole = len(payload.data) == encoded_bytes(KVCodec(payload.codec), label.shape)
    return payload if is_whole else Mismatch.OTHER_SHAPE
