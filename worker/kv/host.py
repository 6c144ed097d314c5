"""The KV blocks in a worker's memory, and what is known of each: its codec, whether it is exact, when it was used.

Owns the tier in memory and counts what in it was damaged. Stores more coarsely, where the policy allows it, what has grown
cold, and what is old where room is short, before any is lost. Knows no slots and no tier below: `cache` brings blocks in,
takes them out, and is told what was lost. Owned by the compute thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoal.kv import BlockHash, BlockKey
from shoal.types import KVPolicy, KVTierStatus
from worker.kv.block import ChainBlock, Mismatch, Payload, StageBlock
from worker.kv.codec import Block, KVCodec, decode, decode_into, fitting_codec
from worker.kv.packed import pack_block, unpack_block
from worker.kv.policy import CODECS, COLD_AFTER_S, Standing, Strain, coarser, host_codec
from worker.kv.tiers import HostTier
from worker.kv.trace import BlockEvent, BlockTrace

HOST = "host"
# Blocks that are to be pinned once they are here.
MAX_PIN_WISHES = 1024
# Of the budget, what pinned blocks may take: the rest is for what is asked for now.
PIN_SHARE = 0.5


@dataclass(slots=True, eq=False)
class HeldBlock:
    """A block in memory. is_written: the tier below has it. is_promoted: it came from there
    for a request, and was not used since.
    """

    chain: ChainBlock
    codec: KVCodec
    is_exact: bool
    num_bytes: int
    used_at: float
    is_written: bool = False
    is_promoted: bool = False


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """The tier as it was; blocks grow older while nothing happens. Times are those of the cache's clock."""

    status: KVTierStatus = field(default_factory=lambda: KVTierStatus(HOST))
    oldest_used_at: float = 0.0
    mean_used_at: float = 0.0
    lower_mismatches: Mapping[str, int] = field(default_factory=dict)

    def status_at(self, now: float) -> KVTierStatus:
        if not self.status.num_blocks:
            return self.status
        return replace(self.status, oldest_s=now - self.oldest_used_at, mean_age_s=now - self.mean_used_at)


class HostBlocks:
    """See the module.

    Invariants:
    - what is known of blocks and what the tier holds are the same keys, with the same number of bytes;
    - the former is in the order of use, the block not used for longest first;
    - only a block that is stored without loss counts as exact;
    - where the policy is exact, no block waits to grow cold, else each that was used since it was looked at for that;
    - `keep` pins no block that brings what is pinned above PIN_SHARE of the budget.
    """

    def __init__(
        self,
        budget_bytes: int,
        policy: KVPolicy,
        clock: Callable[[], float],
        trace: BlockTrace,
        on_evicted: Callable[[HeldBlock, bytes], None],
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._trace = trace
        self._tell_evicted = on_evicted
        self._tier = HostTier(budget_bytes, clock, self._on_evicted)
        self._held: OrderedDict[BlockKey, HeldBlock] = OrderedDict()
        self._keys_of: dict[BlockHash, set[BlockKey]] = {}
        self._sum_used_at = 0.0
        # What may grow cold, the block to be looked at next first.
        self._warm: OrderedDict[BlockKey, None] = OrderedDict()
        self._pin_wishes: dict[BlockHash, float] = {}
        self._num_inexact_misses = 0
        self._read_mb_s = 0.0
        self.mismatches: Counter[str] = Counter()

    @property
    def budget_bytes(self) -> int:
        return self._tier.budget_bytes

    def find(self, key: BlockKey) -> HeldBlock | None:
        return self._held.get(key)

    def is_short_of(self, num_bytes: int) -> bool:
        """Whether so many more bytes would cost other blocks their place."""
        return self._tier.used_bytes + num_bytes > self._tier.budget_bytes

    def put(
        self,
        chain: ChainBlock,
        packed: bytes,
        codec: KVCodec,
        *,
        is_exact: bool,
        cost_s: float,
        is_promoted: bool = False,
    ) -> HeldBlock | None:
        """Store a block, or new bytes for one; None if they were refused: then what there was is as before."""
        key = chain.key
        if not self._tier.put(key, packed, parent=chain.parent, cost_s=cost_s):
            return None
        self._unhold(key)
        now = self._clock()
        held = HeldBlock(chain, codec, is_exact, len(packed), now, is_written=is_promoted, is_promoted=is_promoted)
        self._held[key] = held
        self._sum_used_at += now
        self._keys_of.setdefault(chain.block_hash, set()).add(key)
        self._note_use(key)
        parent = chain.parent
        if parent is not None and parent in self._held and parent not in self._warm:
            # It may have been spared as the newest of its prefix.
            self._note_use(parent)
        until = self._pin_wishes.pop(chain.block_hash, now)
        if until > now:
            self._pin([key], until - now)
        self._record(BlockEvent.PROMOTED if is_promoted else BlockEvent.ALLOCATED, held)
        return held

    def read_into(self, key: BlockKey, out: Block, *, is_exact_only: bool) -> bytes | None:
        """Write a block where a slot has it, and give its packed bytes; None, a miss, if there is none to be used."""
        held = self._held.get(key)
        if held is not None and is_exact_only and not held.is_exact:
            self._num_inexact_misses += 1
            return None
        started = self._clock()
        data = self._tier.get([key]).get(key)
        if held is None or data is None:
            return None
        payload = checked(data, held.chain.block, self.mismatches)
        if payload is not None:
            decode_into(payload.data, KVCodec(payload.codec), out)
        self._tier.release([key])
        if payload is None:
            self._delete(key)
            return None
        now = self._clock()
        self._read_mb_s = mean_rate(self._read_mb_s, out.nbytes, now - started)
        self._sum_used_at += now - held.used_at
        held.used_at = now
        self._held.move_to_end(key)
        self._note_use(key)
        self._record(BlockEvent.HIT, held)
        return data

    def shrink_one(self, need_bytes: int, *, is_hot: bool) -> bool:
        """Store the coldest block that may lose more, more coarsely, if room is short; False if there is none."""
        if self._policy is KVPolicy.EXACT or not self.is_short_of(need_bytes):
            return False
        strain, cold_since = Strain(is_full=True, is_hot=is_hot), self._clock() - COLD_AFTER_S
        return any(
            self._coarsen(key, held, is_cold=held.used_at < cold_since, strain=strain)
            for key, held in self._held.items()
            if held.codec is not CODECS[-1]
        )

    @property
    def has_cold(self) -> bool:
        """Whether a block is to be looked at because it has grown cold, by what others were used since.

        So a device that nobody uses keeps what it has.
        """
        if not self._warm:
            return False
        newest = next(reversed(self._held.values()))
        return newest.used_at - self._held[next(iter(self._warm))].used_at > COLD_AFTER_S

    def cool_one(self, *, is_hot: bool) -> None:
        """Store the block that has been cold for longest as coarsely as the policy wants it; once after each use."""
        if not self.has_cold:
            return
        key, _ = self._warm.popitem(last=False)
        self._coarsen(key, self._held[key], is_cold=True, strain=Strain(is_hot=is_hot))

    def _coarsen(self, key: BlockKey, held: HeldBlock, *, is_cold: bool, strain: Strain) -> bool:
        """Store a block as coarsely as it may be; False if it stays as it is."""
        standing = Standing(held.chain.index == 0, self._tier.is_tail(key), is_cold)
        codec = host_codec(self._policy, standing, strain)
        return coarser(codec, held.codec) is not held.codec and self._shrink(key, held, codec)

    def _shrink(self, key: BlockKey, held: HeldBlock, codec: KVCodec) -> bool:
        data = self._tier.peek(key)
        assert data is not None
        payload = checked(data, held.chain.block, self.mismatches)
        if payload is None:
            self._delete(key)
            return True
        block = decode(payload.data, KVCodec(payload.codec), held.chain.block.shape)
        if fitting_codec(block, codec) is not codec:
            return False
        packed = pack_block(held.chain.block.label, block, codec, is_exact=False)
        if not self._tier.recode(key, packed):
            return False
        held.codec, held.is_exact, held.num_bytes = codec, False, len(packed)
        self._record(BlockEvent.DEMOTED, held)
        return True

    def keep(self, block_hashes: Iterable[BlockHash], ttl_s: float) -> None:
        """Pin blocks, those of all stages, the first ones if not all may be; one that is not here yet, once it is."""
        now = self._clock()
        self._pin_wishes = {block_hash: until for block_hash, until in self._pin_wishes.items() if until > now}
        here: list[BlockKey] = []
        for block_hash in dict.fromkeys(block_hashes):
            keys = self._keys_of.get(block_hash)
            if keys:
                here.extend(keys)
            elif len(self._pin_wishes) < MAX_PIN_WISHES:
                self._pin_wishes[block_hash] = max(now + ttl_s, self._pin_wishes.get(block_hash, now))
        self._pin(here, ttl_s)

    def _pin(self, keys: Iterable[BlockKey], ttl_s: float) -> None:
        left_bytes = self.budget_bytes * PIN_SHARE - self._tier.pinned_bytes()
        may_be: list[BlockKey] = []
        for key in keys:
            more_bytes = 0 if self._tier.is_pinned(key) else self._held[key].num_bytes
            if more_bytes > max(0.0, left_bytes):
                break
            left_bytes -= more_bytes
            may_be.append(key)
        self._tier.pin(may_be, ttl_s)

    def forget(self, block_hashes: Iterable[BlockHash]) -> None:
        """Delete blocks, those of all stages, pinned ones too."""
        for block_hash in block_hashes:
            self._pin_wishes.pop(block_hash, None)
            for key in list(self._keys_of.get(block_hash, ())):
                self._record(BlockEvent.FORGOTTEN, self._held[key])
                self._delete(key)

    def snapshot(self) -> HostSnapshot:
        """Without what the cache alone knows: writes that were dropped, and their rate."""
        stats, count = self._tier.stats, len(self._held)
        status = KVTierStatus(
            tier=HOST,
            state="ok" if self.budget_bytes else "off",
            budget_bytes=self.budget_bytes,
            used_bytes=self._tier.used_bytes,
            num_blocks=count,
            hits=stats.hits,
            misses=stats.misses + self._num_inexact_misses,
            puts=stats.puts + stats.replacements,
            evictions=stats.evictions,
            mismatches=dict(self.mismatches),
            read_mb_s=self._read_mb_s,
        )
        if not count:
            return HostSnapshot(status)
        return HostSnapshot(status, next(iter(self._held.values())).used_at, self._sum_used_at / count)

    def check_invariants(self) -> None:
        self._tier.check_invariants()
        assert self._tier.num_blocks == len(self._held)
        for key, held in self._held.items():
            data = self._tier.peek(key)
            assert data is not None
            assert len(data) == held.num_bytes
            assert held.codec is KVCodec.LOSSLESS or not held.is_exact
            assert key in self._keys_of[held.chain.block_hash]
        assert sum(map(len, self._keys_of.values())) == len(self._held)
        assert self._warm.keys() <= self._held.keys()
        assert not (self._warm and self._policy is KVPolicy.EXACT)
        used = [held.used_at for held in self._held.values()]
        assert used == sorted(used), "blocks are not in the order of use"

    def _on_evicted(self, key: BlockKey, data: bytes) -> None:
        held = self._unhold(key)
        assert held is not None
        self._record(BlockEvent.EVICTED, held)
        self._tell_evicted(held, data)

    def _note_use(self, key: BlockKey) -> None:
        if self._policy is not KVPolicy.EXACT:
            self._warm[key] = None
            self._warm.move_to_end(key)

    def _delete(self, key: BlockKey) -> None:
        self._tier.delete([key])
        self._unhold(key)

    def _unhold(self, key: BlockKey) -> HeldBlock | None:
        held = self._held.pop(key, None)
        if held is None:
            return None
        self._sum_used_at -= held.used_at
        self._warm.pop(key, None)
        keys = self._keys_of[held.chain.block_hash]
        keys.remove(key)
        if not keys:
            del self._keys_of[held.chain.block_hash]
        return held

    def _record(self, event: BlockEvent, held: HeldBlock) -> None:
        self._trace.record(event, held.chain.block_hash, HOST, held.num_bytes, held.codec.value)


def checked(data: bytes, block: StageBlock, mismatches: Counter[str]) -> Payload | None:
    """The payload of a block; None, counted by its reason, if the bytes are not that block."""
    payload = unpack_block(data, block.label)
    if isinstance(payload, Mismatch):
        mismatches[payload.value] += 1
        return None
    return payload


def mean_rate(before_mb_s: float, num_bytes: int, elapsed_s: float) -> float:
    """A mean over the last transfers, in MB/s; a time too short to be measured says nothing."""
    if elapsed_s <= 0.0:
        return before_mb_s
    now_mb_s = num_bytes / elapsed_s / 1e6
    return now_mb_s if before_mb_s == 0.0 else before_mb_s + (now_mb_s - before_mb_s) / 8
