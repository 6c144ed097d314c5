"""How a stage's part of a block lies in Redis: as values of a few consecutive layers, and a manifest that lists them.

Pure: cuts packed blocks into values, finds the values that make up a stage's layers, and joins them, also where they were
cut for other stages. Whatever is read may be damaged or somebody else's; what is wrong is a reason, never an exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.kv import BlockHash, BlockKey, layer_key
from shoal.types import LayerRange
from worker.kv.block import HEADER_BYTES, Mismatch, Payload, StageBlock, pack
from worker.kv.codec import KVCodec, encoded_bytes
from worker.kv.packed import CODECS, unpack_block

# Redis does best with values of 128-256 KiB, and jemalloc rounds one that is just over a power of two up by a quarter; the
# 64 bytes are for what Redis keeps beside them.
MAX_VALUE_BYTES = 256 * 1024 - 64

# The most precise first.
_RANKS = {codec.value: rank for rank, codec in enumerate((KVCodec.LOSSLESS, KVCodec.INT8, KVCodec.K4V4))}


class Damage(StrEnum):
    """Why values that are sound by themselves are not a block."""

    MIXED_CODECS = "mixed_codecs"
    MISSING_VALUE = "missing_value"


@dataclass(frozen=True, slots=True)
class Entry:
    """A manifest's word on one value."""

    layers: LayerRange
    codec: str
    is_exact: bool
    num_bytes: int

    @property
    def field(self) -> bytes:
        return b"%d-%d" % (self.layers.start, self.layers.stop)

    @property
    def content(self) -> bytes:
        return b"%b:%d:%d" % (self.codec.encode(), self.is_exact, self.num_bytes)

    @property
    def rank(self) -> tuple[bool, int]:
        """Less is better: what is exact first, then by the codec."""
        return not self.is_exact, _RANKS[self.codec]

    def key(self, block_hash: BlockHash) -> BlockKey:
        return layer_key(block_hash, self.layers)


def read_entry(field: bytes, content: bytes) -> Entry | None:
    """None for what no worker of this version wrote."""
    start, _, stop = field.partition(b"-")
    codec, is_exact, num_bytes = (*content.split(b":"), b"", b"", b"")[:3]
    numbers = (start, stop, is_exact, num_bytes)
    if not all(number.isdigit() and len(number) < 10 for number in numbers):
        return None
    name = codec.decode("ascii", "replace")
    if name not in CODECS or not int(start) < int(stop) or int(is_exact) > 1:
        return None
    return Entry(LayerRange(int(start), int(stop)), name, bool(int(is_exact)), int(num_bytes))


def read_manifest(fields: Mapping[bytes, bytes]) -> list[Entry]:
    entries = (read_entry(field, content) for field, content in fields.items())
    return [entry for entry in entries if entry is not None]


def lossless_bytes(block: StageBlock) -> int:
    """What the values of a block take if they are bit-exact, without their headers."""
    return encoded_bytes(KVCodec.LOSSLESS, block.shape)


def cut(block: StageBlock, packed: bytes) -> list[tuple[Entry, bytes]] | Mismatch:
    """Make the values of a packed block, in the order of layers, each at most MAX_VALUE_BYTES if a layer fits that.

    They begin at multiples of a number of layers that depends on the codec alone, so that stages with other layers make the
    same values where they can.
    """
    payload = unpack_block(packed, block.label)
    if isinstance(payload, Mismatch):
        return payload
    layers = block.label.layers
    layer_bytes = len(payload.data) // len(layers)
    step = max(1, (MAX_VALUE_BYTES - HEADER_BYTES) // layer_bytes)
    values = []
    start = layers.start
    while start < layers.stop:
        part = LayerRange(start, min(layers.stop, (start // step + 1) * step))
        data = _slice(payload.data, layers, part)
        label = replace(block.label, key=layer_key(block.block_hash, part), layers=part)
        value = pack(label, payload.codec, data, is_exact=payload.is_exact)
        values.append((Entry(part, payload.codec, payload.is_exact, len(value)), value))
        start = part.stop
    return values


def choose(entries: Sequence[Entry], layers: LayerRange) -> list[Entry] | None:
    """The values to read for these layers, in order, all of one codec: the most precise there is; None if some lack."""
    for rank in sorted({entry.rank for entry in entries}):
        codec = next(entry.codec for entry in entries if entry.rank == rank)
        chosen = _cover([entry for entry in entries if entry.codec == codec and entry.rank <= rank], layers)
        if chosen is not None:
            return chosen
    return None


def join(block: StageBlock, entries: Sequence[Entry], values: Sequence[bytes]) -> bytes | tuple[Entry, str]:
    """Make the packed block of chosen values; or tell which of them is wrong, and the reason."""
    payloads: list[Payload] = []
    for entry, value in zip(entries, values, strict=True):
        label = replace(block.label, key=entry.key(block.block_hash), layers=entry.layers)
        payload = unpack_block(value, label)
        if isinstance(payload, Mismatch):
            return entry, payload.value
        # What was read is newer than the manifest, and may be of another codec by now.
        if payloads and payload.codec != payloads[0].codec:
            return entry, Damage.MIXED_CODECS.value
        payloads.append(payload)
    layers = block.label.layers
    parts = []
    start = layers.start
    for entry, payload in zip(entries, payloads, strict=True):
        part = LayerRange(start, min(layers.stop, entry.layers.stop))
        parts.append(_slice(payload.data, entry.layers, part))
        start = part.stop
    is_exact = all(payload.is_exact for payload in payloads)
    return pack(block.label, payloads[0].codec, b"".join(parts), is_exact=is_exact)


def _cover(entries: Sequence[Entry], layers: LayerRange) -> list[Entry] | None:
    chosen: list[Entry] = []
    start = layers.start
    while start < layers.stop:
        reaching = [entry for entry in entries if entry.layers.start <= start < entry.layers.stop]
        if not reaching:
            return None
        # The one that brings the most; of those the one that brings least besides.
        best = max(reaching, key=lambda entry: (min(entry.layers.stop, layers.stop), -entry.num_bytes))
        chosen.append(best)
        start = best.layers.stop
    return chosen


def _slice(data: memoryview, layers: LayerRange, part: LayerRange) -> memoryview:
    """The bytes of some of the layers: a block is its layers one after the other, all of one size."""
    layer_bytes = len(data) // len(layers)
    return data[(part.start - layers.start) * layer_bytes : (part.stop - layers.start) * layer_bytes]
