"""The stored form of a block: a header that says what the bytes are, the payload, and a checksum over both.

What comes back from a tier may be cut, damaged, of another version, or somebody else's. A reader says what it expects, and
gets the payload or the reason why not, which it counts as a miss: nothing here raises because of what was read. Knows
neither codecs nor tiers: the payload is bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.kv import BLOCK_TOKENS, DIGEST_BYTES, BlockHash, BlockKey, layer_key
from shoal.types import LayerRange

FORMAT_VERSION = 1
_MAGIC = b"SHKV"
_MAX_CODEC_BYTES = 19
# Magic, version, codec (padded with zeros), whether it is exact, key, model digest, first and last layer + 1, KV heads,
# tokens, head size, first position, payload bytes. No padding: every bit means something.
_FIELDS = struct.Struct(f"<4sI{_MAX_CODEC_BYTES}s?{DIGEST_BYTES}s{DIGEST_BYTES}sIIIIIIQ")
# CRC-32 finds every flipped bit, every two, every burst of up to 32, and misses one in 2^32 other accidents. It runs at
# 2.3-2.8 GB/s on an x86-64 core, SHA-256 at 1.5 (by instructions of its own, which small boards lack), BLAKE2b at 0.6. A
# longer checksum would not keep out who can write to a tier: that one could compute it as well.
_CHECKSUM = struct.Struct("<I")
# 128: the payload is as well aligned as the block is.
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Mismatch(StrEnum):
    """Why stored bytes are not the block that was asked for."""

    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    NOT_A_BLOCK = "not_a_block"
    OTHER_VERSION = "other_version"
    BAD_CHECKSUM = "bad_checksum"
    OTHER_KEY = "other_key"
    OTHER_MODEL = "other_model"
    OTHER_LAYERS = "other_layers"
    OTHER_SHAPE = "other_shape"
    OTHER_POSITION = "other_position"
    OTHER_CODEC = "other_codec"


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """What a block is, apart from how it is encoded: KV [L, 2, K, tokens, D] of the layers, from a position on.

    model_digest: 64 hexadecimal digits, as in the manifest. position: of the first token; keys have it rotated in.
    """

    key: BlockKey
    model_digest: str
    layers: LayerRange
    num_kv_heads: int
    num_tokens: int
    head_dim: int
    position: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[L, 2, K, tokens, D]."""
        return len(self.layers), 2, self.num_kv_heads, self.num_tokens, self.head_dim

    def __post_init__(self) -> None:
        if len(self.key) != DIGEST_BYTES or len(bytes.fromhex(self.model_digest)) != DIGEST_BYTES:
            raise ValueError(f"a key and a model digest have {DIGEST_BYTES} bytes: {self}")
        if min(self.num_kv_heads, self.num_tokens, self.head_dim) < 1 or self.position < 0:
            raise ValueError(f"not the shape and place of a block: {self}")


@dataclass(frozen=True, slots=True)
class StageBlock:
    """What one stage stores of a block: the block's name, and the label of the stage's part of it; see BlockForm.block."""

    block_hash: BlockHash
    label: BlockLabel

    @property
    def key(self) -> BlockKey:
        return self.label.key

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.label.shape


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A stage's block in the prefix that it is part of.

    index: how many blocks are before it. parent: the last of those. is_newest: no full block of its prompt follows.
    """

    block: StageBlock
    index: int
    parent: BlockKey | None
    is_newest: bool = False

    @property
    def key(self) -> BlockKey:
        return self.block.key

    @property
    def block_hash(self) -> BlockHash:
        return self.block.block_hash


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What all blocks of a stage have in common."""

    model_digest: str
    layers: LayerRange
    num_kv_heads: int
    head_dim: int

    def block(self, block_hash: BlockHash, index: int) -> StageBlock:
        """The stage's part of a block, the index-th of its sequence."""
        label = BlockLabel(
            key=layer_key(block_hash, self.layers),
            model_digest=self.model_digest,
            layers=self.layers,
            num_kv_heads=self.num_kv_heads,
            num_tokens=BLOCK_TOKENS,
            head_dim=self.head_dim,
            position=index * BLOCK_TOKENS,
        )
        return StageBlock(block_hash, label)

    def chain(
        self, block_hashes: Sequence[BlockHash], start: int = 0, stop: int | None = None
    ) -> tuple[ChainBlock, ...]:
        """The stage's parts of blocks [start, stop), as far as there are, of those that a prompt begins with."""
        last = len(block_hashes) - 1
        parent = layer_key(block_hashes[start - 1], self.layers) if 0 < start <= last else None
        blocks = []
        for index, block_hash in enumerate(block_hashes[start:stop], start):
            blocks.append(ChainBlock(self.block(block_hash, index), index, parent, index == last))
            parent = blocks[-1].key
        return tuple(blocks)


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of a block, a view into what was read, and the codec that made them.

    is_exact: decoding gives the bits that computing the block would. A lossy codec does not, nor does a lossless copy of
    what was computed from lossy blocks.
    """

    codec: str
    data: memoryview
    is_exact: bool


def pack(label: BlockLabel, codec: str, payload: bytes | memoryview, *, is_exact: bool) -> bytes:
    """Make the bytes that a tier stores. Raises ValueError if the codec's name is not 1 to 19 ASCII letters or digits."""
    name = codec.encode()
    if not (codec.isascii() and codec.isalnum() and len(name) <= _MAX_CODEC_BYTES):
        raise ValueError(f"a codec is named by 1 to {_MAX_CODEC_BYTES} ASCII letters or digits, not {codec!r}")
    view = memoryview(payload).cast("B")
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        name,
        is_exact,
        label.key,
        bytes.fromhex(label.model_digest),
        label.layers.start,
        label.layers.stop,
        label.num_kv_heads,
        label.num_tokens,
        label.head_dim,
        label.position,
        len(view),
    )
    return b"".join((fields, _CHECKSUM.pack(_checksum(fields, view)), view))


def unpack(data: bytes | memoryview, expected: BlockLabel, codecs: Collection[str]) -> Payload | Mismatch:
    """Give the payload if the bytes are the expected block, whole, in one of these codecs; else what is wrong first."""
    view = memoryview(data).cast("B")
    damage = _damage(view)
    if damage is not None:
        return damage
    _, _, name, is_exact, key, model, start, stop, *sizes, position, _ = _FIELDS.unpack_from(view)
    codec = name.rstrip(b"\0").decode("ascii", "replace")
    shape = (expected.num_kv_heads, expected.num_tokens, expected.head_dim)
    checks = (
        (Mismatch.OTHER_KEY, key == expected.key),
        (Mismatch.OTHER_MODEL, model == bytes.fromhex(expected.model_digest)),
        (Mismatch.OTHER_LAYERS, (start, stop) == (expected.layers.start, expected.layers.stop)),
        (Mismatch.OTHER_SHAPE, tuple(sizes) == shape),
        (Mismatch.OTHER_POSITION, position == expected.position),
        (Mismatch.OTHER_CODEC, codec in codecs),
    )
    for reason, is_right in checks:
        if not is_right:
            return reason
    return Payload(codec, view[HEADER_BYTES:], is_exact)


def _damage(view: memoryview) -> Mismatch | None:
    """What keeps the bytes from being a whole block of this version, whichever it is."""
    if len(view) < HEADER_BYTES:
        return Mismatch.TRUNCATED
    magic, version, *_, num_payload_bytes = _FIELDS.unpack_from(view)
    if magic != _MAGIC:
        return Mismatch.NOT_A_BLOCK
    if version != FORMAT_VERSION:
        return Mismatch.OTHER_VERSION
    if len(view) != HEADER_BYTES + num_payload_bytes:
        return Mismatch.TRUNCATED if len(view) < HEADER_BYTES + num_payload_bytes else Mismatch.TRAILING_BYTES
    stored = _CHECKSUM.unpack_from(view, _FIELDS.size)[0]
    if stored != _checksum(view[: _FIELDS.size], view[HEADER_BYTES:]):
        return Mismatch.BAD_CHECKSUM
    return None


def _checksum(fields: bytes | memoryview, payload: memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(fields))
