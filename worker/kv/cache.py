"""Keeps the KV blocks of past prompts, in a worker's memory and in the tier below, and gives them back to slots.

Owns what waits to be copied out of slots, and decides what goes where: `host` has the blocks in memory, `fetches` those on
their way. Every block that is read is checked against the label that is expected; what does not fit is a miss and counted.
Knows block names, no sequences and no frames. One a worker, over all its stages, epochs and pipelines, whose keys and
labels differ. Owned by the compute thread, like the arenas it copies from.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.kv import BlockHash, BlockKey
from shoal.types import KVPolicy, KVTierStatus
from worker.kv.arena import Arena
from worker.kv.block import ChainBlock
from worker.kv.codec import Block, KVCodec, decode_into, encoded_bytes, fitting_codec
from worker.kv.fetches import BlocksFetched, Fetch, Fetches, Found, LowerTier
from worker.kv.host import HOST, HeldBlock, HostBlocks, HostSnapshot, checked, mean_rate
from worker.kv.packed import pack_block
from worker.kv.policy import Standing, Strain, host_codec, lower_codec
from worker.kv.trace import BlockEvent, BlockTrace

# A prompt of 16,384 tokens. What waits takes no memory: it is in its slot.
MAX_PENDING = 256
# Of a slot that ends, at 1-2 ms each: others wait meanwhile.
MAX_RELEASE_UNITS = 8
# Fetched blocks that are taken in at a time: each has to be checked, which takes half a millisecond.
MAX_PROMOTED = 8
# Before any block was computed; what matters is how costs compare.
FIRST_COST_S = 0.05
REDIS = "redis"


@dataclass(frozen=True, slots=True)
class Restored:
    """How a block was written into a slot. is_from_lower: it had to be fetched for that."""

    codec: KVCodec
    is_exact: bool
    is_from_lower: bool


@dataclass(frozen=True, slots=True)
class _Pending:
    """A block that a slot holds and that is to be stored."""

    chain: ChainBlock
    arena: Arena
    slot: int
    is_exact: bool
    cost_s: float


class BlockCache:
    """See the module. With a budget of 0 nothing is kept, fetched, or given to the tier below.

    Invariants: at most MAX_PENDING blocks wait to be copied, each in a slot that still holds it (who empties a slot calls
    release before); and those of `host` and `fetches`.
    """

    def __init__(
        self,
        budget_bytes: int,
        policy: KVPolicy,
        post: Callable[[BlocksFetched], None],
        *,
        lower: LowerTier | None = None,
        trace: BlockTrace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """post: called from the lower tier's thread; brings what it is given to `fetched`, on the owner's."""
        self._policy = policy
        self._post = post
        self._lower = lower if budget_bytes > 0 else None
        self._trace = trace or BlockTrace(None)
        self._clock = clock
        self._host = HostBlocks(budget_bytes, policy, clock, self._trace, self._on_evicted)
        self._fetches = None if self._lower is None else Fetches(self._lower, post)
        self._pending: deque[_Pending] = deque()
        self._lower_mismatches: Counter[str] = Counter()
        self._num_dropped = 0
        self._cost_s = FIRST_COST_S
        self._write_mb_s = 0.0
        # Whether the device is; who measures it says so.
        self.is_hot = False

    @property
    def is_on(self) -> bool:
        return self._host.budget_bytes > 0

    @property
    def has_work(self) -> bool:
        """Whether blocks wait to be copied, which their slots may not hold for long."""
        return bool(self._pending)

    @property
    def has_idle_work(self) -> bool:
        """Whether there is work for a time when nothing else is to be done."""
        return bool(self._pending) or self._host.has_cold

    def holds(self, key: BlockKey) -> bool:
        """Whether a block is in memory, exact or not."""
        return self._host.find(key) is not None

    # Storing

    def store(self, blocks: Iterable[ChainBlock], arena: Arena, slot: int, *, is_exact: bool, cost_s: float) -> None:
        """Have blocks copied that a prompt has just filled.

        is_exact: nothing lossy went into computing them. cost_s: what computing one took.
        """
        if not self.is_on:
            return
        self._cost_s = cost_s
        for chain in blocks:
            if not self._is_wanted(chain.key, is_exact):
                continue
            if len(self._pending) >= MAX_PENDING:
                self._drop(chain)
            else:
                self._pending.append(_Pending(chain, arena, slot, is_exact, cost_s))

    def work(self) -> None:
        """Do one unit of what waits: copy a block, or store an old one more coarsely, to make room or as it grew cold."""
        if not self._pending:
            self._host.cool_one(is_hot=self.is_hot)
            return
        pending = self._pending.popleft()
        block_bytes = encoded_bytes(KVCodec.LOSSLESS, pending.chain.block.shape)
        if not self._is_wanted(pending.chain.key, pending.is_exact):
            return
        if self._host.shrink_one(block_bytes, is_hot=self.is_hot):
            self._pending.appendleft(pending)
        else:
            self._copy(pending, block_bytes)

    def release(self, arena: Arena, slot: int | None = None) -> None:
        """Copy what waits in a slot (None: in any of them) that is about to be emptied; drop what would take too long."""
        leaving = [one for one in self._pending if one.arena is arena and slot in (None, one.slot)]
        if not leaving:
            return
        others = [one for one in self._pending if one.arena is not arena or slot not in (None, one.slot)]
        self._pending = deque(leaving)
        try:
            for _ in range(MAX_RELEASE_UNITS):
                if not self._pending:
                    break
                self.work()
        finally:
            dropped, self._pending = self._pending, deque(others)
        for one in dropped:
            self._drop(one.chain)

    def _is_wanted(self, key: BlockKey, is_exact: bool) -> bool:
        held = self._host.find(key)
        return held is None or (is_exact and not held.is_exact)

    def _copy(self, pending: _Pending, block_bytes: int) -> None:
        chain, started = pending.chain, self._clock()
        values = pending.arena.block(pending.slot, chain.index)
        standing = Standing(is_first=chain.index == 0, is_newest=chain.is_newest)
        strain = Strain(is_full=self._host.is_short_of(block_bytes), is_hot=self.is_hot)
        codec = fitting_codec(values, host_codec(self._policy, standing, strain))
        packed = pack_block(chain.block.label, values, codec, is_exact=pending.is_exact)
        held = self._put(chain, packed, codec, is_exact=pending.is_exact, cost_s=pending.cost_s)
        self._write_mb_s = mean_rate(self._write_mb_s, values.nbytes, self._clock() - started)
        if self._lower is None:
            return
        below = fitting_codec(values, lower_codec(self._policy, standing, strain))
        if below is not codec:
            packed = pack_block(chain.block.label, values, below, is_exact=pending.is_exact)
        is_written = self._write(chain, packed, below)
        if held is not None:
            held.is_written = is_written

    def _put(
        self,
        chain: ChainBlock,
        packed: bytes,
        codec: KVCodec,
        *,
        is_exact: bool,
        cost_s: float,
        is_promoted: bool = False,
    ) -> HeldBlock | None:
        held = self._host.put(
            chain,
            packed,
            codec,
            is_exact=is_exact and codec is KVCodec.LOSSLESS,
            cost_s=cost_s,
            is_promoted=is_promoted,
        )
        if held is None:
            self._drop(chain)
        return held

    def _write(self, chain: ChainBlock, packed: bytes, codec: KVCodec) -> bool:
        if self._lower is None:
            return False
        is_written = self._lower.write(chain.block, packed)
        event = BlockEvent.DEMOTED if is_written else BlockEvent.DROPPED
        self._trace.record(event, chain.block_hash, REDIS, len(packed), codec.value)
        return is_written

    def _on_evicted(self, held: HeldBlock, data: bytes) -> None:
        if not held.is_written:
            self._write(held.chain, data, held.codec)

    def _drop(self, chain: ChainBlock) -> None:
        self._num_dropped += 1
        self._trace.record(BlockEvent.DROPPED, chain.block_hash, HOST, 0, "")

    # Giving back

    def restore(
        self, chain: ChainBlock, out: Block, *, is_exact_only: bool, fetched: Mapping[BlockKey, bytes]
    ) -> Restored | None:
        """Write a block where a slot has it, from memory or what was fetched; None if there is none that may be used."""
        held = self._host.find(chain.key)
        if held is None and chain.key in fetched:
            return self._restore_fetched(chain, fetched[chain.key], out, is_exact_only=is_exact_only)
        packed = self._host.read_into(chain.key, out, is_exact_only=is_exact_only)
        if held is None or packed is None:
            return None
        restored = Restored(held.codec, held.is_exact, held.is_promoted)
        held.is_promoted = False
        if not held.is_written:
            held.is_written = self._write(chain, packed, held.codec)
        return restored

    def _restore_fetched(self, chain: ChainBlock, data: bytes, out: Block, *, is_exact_only: bool) -> Restored | None:
        """One that memory had no room for."""
        payload = checked(data, chain.block, self._lower_mismatches)
        if payload is None or (is_exact_only and not payload.is_exact):
            return None
        codec = KVCodec(payload.codec)
        decode_into(payload.data, codec, out)
        return Restored(codec, payload.is_exact, is_from_lower=True)

    # Fetching

    def prefetch(self, blocks: Sequence[ChainBlock], timeout_s: float, *, is_ahead: bool = False) -> None:
        """Have blocks fetched into memory that it lacks. is_ahead: for no request that there is yet."""
        lacking = [chain for chain in blocks if self._host.find(chain.key) is None]
        if self._fetches is not None and lacking:
            most = self._host.budget_bytes // encoded_bytes(KVCodec.LOSSLESS, lacking[0].block.shape)
            self._fetches.ask(lacking, timeout_s, most, is_ahead=is_ahead)

    def fetch(self, blocks: Sequence[ChainBlock], timeout_s: float, on_ready: Callable[[Found], None]) -> bool:
        """Fetch what memory lacks of these blocks, and call on_ready, from `fetched`, once all has arrived that will.

        Blocks that are on their way already are waited for. False if nothing is: then on_ready is not called.
        """
        self.prefetch(blocks, timeout_s)
        return self._fetches is not None and self._fetches.wait(blocks, on_ready)

    def fetched(self, result: BlocksFetched) -> None:
        """Take in what a fetch brought, a part of it at a time."""
        if self._fetches is None:
            return
        for key in result.asked[:MAX_PROMOTED]:
            fetch = self._fetches.take(key)
            if fetch is None:
                continue  # forgotten meanwhile, or answered twice
            data = result.found.get(key)
            self._fetches.arrived(key, data if data is not None and self._promote(fetch, data) else None)
        if len(result.asked) > MAX_PROMOTED:
            self._post(BlocksFetched(result.asked[MAX_PROMOTED:], result.found))

    def _promote(self, fetch: Fetch, data: bytes) -> bool:
        """Keep a block from the tier below in memory; False if it is not what was asked for."""
        chain = fetch.chain
        payload = checked(data, chain.block, self._lower_mismatches)
        if payload is None:
            return False
        # If it is held, it was computed meanwhile, which is at least as good.
        if self._host.find(chain.key) is None:
            self._host.shrink_one(len(data), is_hot=self.is_hot)
            codec = KVCodec(payload.codec)
            held = self._put(chain, data, codec, is_exact=payload.is_exact, cost_s=self._cost_s, is_promoted=True)
            if held is not None and fetch.is_ahead:
                held.is_promoted = False
        return True

    # What operators want

    def keep(self, block_hashes: Iterable[BlockHash], ttl_s: float) -> None:
        """Pin blocks in memory, those of all stages; one that is not there yet, once it is."""
        if self.is_on:
            self._host.keep(block_hashes, ttl_s)

    def forget(self, block_hashes: Iterable[BlockHash]) -> None:
        """Delete blocks from memory, those of all stages, pinned ones too; what is on its way to it does not arrive."""
        names = frozenset(block_hashes)
        self._host.forget(names)
        self._pending = deque(one for one in self._pending if one.chain.block_hash not in names)
        if self._fetches is not None:
            self._fetches.forget(names)

    def snapshot(self) -> HostSnapshot:
        snapshot = self._host.snapshot()
        status = replace(snapshot.status, dropped_writes=self._num_dropped, write_mb_s=self._write_mb_s)
        return replace(snapshot, status=status, lower_mismatches=dict(self._lower_mismatches))

    def lower_status(self, snapshot: HostSnapshot) -> KVTierStatus:
        """The tier below, with what was found wrong here of what came from it; any thread may ask."""
        if self._lower is None:
            return KVTierStatus(REDIS, state="off")
        status = self._lower.status()
        mismatches = Counter(status.mismatches) + Counter(snapshot.lower_mismatches)
        return replace(status, mismatches=dict(mismatches))

    def close(self) -> None:
        """End the trace; the cache cannot be used afterwards."""
        self._trace.close()

    def check_invariants(self) -> None:
        self._host.check_invariants()
        if self._fetches is not None:
            self._fetches.check_invariants()
        assert len(self._pending) <= MAX_PENDING
