"""How the KV of a running sequence lies in a tier below: in segments of a few tokens, behind the named blocks of its prompt.

A sequence has one trail for all its runs; each stage leaves its layers in it, and stages that cut the layers otherwise read
them. A segment has the header and the checksum of a block, and no name that anybody could share: its key is the trail's.
Pure: names, packs and checks segments, and chooses those to read. What is wrong with one that was read is a reason, never an
exception.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.kv import BlockKey
from shoal.types import LayerRange
from worker.kv.arena import Arena
from worker.kv.block import BlockForm, BlockLabel, Mismatch, Payload
from worker.kv.codec import Block, KVCodec, encoded_bytes
from worker.kv.groups import Damage
from worker.kv.packed import pack_block, unpack_block

# Segments begin at multiples of their tokens, a power of two, so those of any stage begin where one of so many does. With 8
# tokens of 15 layers of the default model (180 KiB) a copy takes 0.08 ms, and a command 0.4 ms of another thread, whatever
# its size: half as many tokens would double the latter, twice as many the tokens that are computed again.
MAX_SEGMENT_TOKENS = 8
# As a value of a block.
MAX_SEGMENT_BYTES = 256 * 1024
_TRAIL_TAG = b"shoal kv trail 1\0"


@dataclass(frozen=True, slots=True)
class Segment:
    """KV of some layers, of the tokens [start, stop) of a sequence."""

    layers: LayerRange
    start: int
    stop: int

    @property
    def field(self) -> bytes:
        """Its name within the trail."""
        return b"%d-%d:%d-%d" % (self.layers.start, self.layers.stop, self.start, self.stop)


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """What is to be stored of a trail. on_lost: called, from any thread, if it could not be."""

    trail_id: bytes
    segment: Segment
    packed: bytes
    on_lost: Callable[[], None]


@dataclass(frozen=True, slots=True)
class TrailPart:
    """What a stage wants of a trail: its layers of the tokens [start, stop)."""

    trail_id: bytes
    form: BlockForm
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FoundSegment:
    segment: Segment
    payload: Payload


@dataclass(frozen=True, slots=True)
class FoundTrail:
    """What was found of a part: chosen segments in the order of `choose`, sound, and the token that they reach to."""

    part: TrailPart
    segments: tuple[FoundSegment, ...]
    stop: int

    @property
    def is_exact(self) -> bool:
        return all(found.payload.is_exact for found in self.segments)


def token_bytes(form: BlockForm) -> int:
    """What a token takes at a stage."""
    return encoded_bytes(KVCodec.LOSSLESS, (len(form.layers), 2, form.num_kv_heads, 1, form.head_dim))


def segment_tokens(form: BlockForm) -> int:
    """Tokens of a stage's segments."""
    tokens = MAX_SEGMENT_TOKENS
    while tokens > 1 and tokens * token_bytes(form) > MAX_SEGMENT_BYTES:
        tokens //= 2
    return tokens


def segment_bytes(form: BlockForm, segment: Segment) -> int:
    """What a segment takes, without its header."""
    num_tokens = segment.stop - segment.start
    return encoded_bytes(KVCodec.LOSSLESS, (len(segment.layers), 2, form.num_kv_heads, num_tokens, form.head_dim))


def read_field(field: bytes) -> Segment | None:
    """None for what no worker of this version wrote."""
    layers, _, tokens = field.partition(b":")
    numbers = (*layers.split(b"-"), *tokens.split(b"-"))
    if len(numbers) != 4 or not all(number.isdigit() and len(number) < 10 for number in numbers):
        return None
    first, last, start, stop = map(int, numbers)
    return Segment(LayerRange(first, last), start, stop) if first < last and start < stop else None


def pack_segment(trail_id: bytes, form: BlockForm, segment: Segment, values: Block, *, is_exact: bool) -> bytes:
    """values: [L, 2, K, T, D] of the segment's layers and tokens; is_exact: nothing lossy went into computing them."""
    return pack_block(_label(trail_id, form, segment), values, KVCodec.LOSSLESS, is_exact=is_exact)


def unpack_segment(data: bytes, trail_id: bytes, form: BlockForm, segment: Segment) -> Payload | Mismatch:
    """The payload of a segment, lossless; or why the bytes are not that segment."""
    payload = unpack_block(data, _label(trail_id, form, segment))
    if isinstance(payload, Payload) and payload.codec != KVCodec.LOSSLESS.value:
        return Mismatch.OTHER_CODEC
    return payload


def choose(segments: Iterable[Segment], part: TrailPart) -> tuple[list[Segment], int]:
    """The segments to read, in the order of their first tokens, and the token that they reach to at all layers.

    Where only some of them are read, all tokens before the first one that is not are there.
    """
    layers = part.form.layers
    reach = dict.fromkeys(range(layers.start, layers.stop), part.start)
    chosen = []
    for segment in sorted(segments, key=lambda one: (one.start, -one.stop, -len(one.layers))):
        common = range(max(layers.start, segment.layers.start), min(layers.stop, segment.layers.stop))
        reaching = [layer for layer in common if segment.start <= reach[layer] < segment.stop]
        if reaching:
            chosen.append(segment)
            reach.update(dict.fromkeys(reaching, segment.stop))
    stop = min(part.stop, *reach.values())
    return [segment for segment in chosen if segment.start < stop], stop


def check_segments(
    part: TrailPart, chosen: Sequence[Segment], values: Iterable[bytes | None], stop: int
) -> tuple[FoundTrail, str]:
    """Make what was found of values read in the order chosen, up to the first that is unsound; and why it is, or empty.

    stop: what all that was chosen reaches to. Fewer values than chosen: the rest did not come.
    """
    found: list[FoundSegment] = []
    reason = ""
    for segment, data in zip(chosen, values, strict=False):
        payload = None if data is None else unpack_segment(data, part.trail_id, part.form, segment)
        if not isinstance(payload, Payload):
            reason = Damage.MISSING_VALUE.value if payload is None else payload.value
            break
        found.append(FoundSegment(segment, payload))
    reached = stop if len(found) == len(chosen) else max(part.start, chosen[len(found)].start)
    return FoundTrail(part, tuple(found), reached), reason


def fill(arena: Arena, slot: int, part: TrailPart, found: FoundSegment) -> None:
    """Write into a slot what a segment has of a part; who fills it tells set_length."""
    layers, segment = part.form.layers, found.segment
    first, last = max(layers.start, segment.layers.start), min(layers.stop, segment.layers.stop)
    start, stop = max(part.start, segment.start), min(part.stop, segment.stop)
    if first >= last or start >= stop:
        return
    sizes = (len(segment.layers), 2, part.form.num_kv_heads, segment.stop - segment.start, part.form.head_dim)
    values = np.frombuffer(found.payload.data, "<f4").reshape(sizes)
    wanted = values[first - segment.layers.start : last - segment.layers.start, :, :, start - segment.start :]
    arena.tokens(slot, start, stop)[first - layers.start : last - layers.start] = wanted[..., : stop - start, :]


def _label(trail_id: bytes, form: BlockForm, segment: Segment) -> BlockLabel:
    return BlockLabel(
        key=BlockKey(hashlib.sha256(_TRAIL_TAG + trail_id).digest()),
        model_digest=form.model_digest,
        layers=segment.layers,
        num_kv_heads=form.num_kv_heads,
        num_tokens=segment.stop - segment.start,
        head_dim=form.head_dim,
        position=segment.start,
    )
