"""The words both sides share, as values: ids, ranges, sampling parameters, device profiles, telemetry.

Plain frozen data that the pure cores may import: no I/O, no protobuf, no numpy. Conversions to and from messages live in
`shoal.rpc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NewType

from shoal.errors import InvalidRequest

WorkerId = NewType("WorkerId", str)
PipelineId = NewType("PipelineId", str)
SequenceId = NewType("SequenceId", int)
SlotId = NewType("SlotId", int)

PROTOCOL_VERSION = 3
MAX_TOP_LOGPROBS = 20


class QosClass(Enum):
    LATENCY = "latency"
    BALANCED = "balanced"
    THROUGHPUT = "throughput"


class DeviceMode(Enum):
    """What a device is for.

    LATENCY: a pipeline of its own where the model fits, kept for requests of that class, which others may borrow while it
    idles. THROUGHPUT: part of a pipeline that gathers requests into batches. MIXED: whatever is needed.
    """

    MIXED = "mixed"
    LATENCY = "latency"
    THROUGHPUT = "throughput"


class Objective(Enum):
    """What a plan is good for: a lone stream's tokens, tokens of many streams, or a pipeline for each."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    MIXED = "mixed"


class ThermalState(Enum):
    """How much a device is to be spared: by heat, by its battery, or because other programs need it."""

    NOMINAL = "nominal"
    MODERATE = "moderate"
    HOT = "hot"
    CRITICAL = "critical"


class NumericClass(Enum):
    """How a sequence's decode rows are computed; kept for the sequence's life (facts: kernels differ at one row).

    SHARED rows are bit-identical whoever shares the batch; SOLO rows run alone, faster for one stream.
    """

    SHARED = "shared"
    SOLO = "solo"


class KVPolicy(StrEnum):
    """What a device may store of KV.

    EXACT: only bit-exact blocks. BALANCED: blocks that were not used for a while in 8 bits a value. COMPACT: all but the
    first block of a prefix and its newest in 4.
    """

    EXACT = "exact"
    BALANCED = "balanced"
    COMPACT = "compact"


class KVReuse(Enum):
    """Which stored KV a request may use: what devices' policies allow, only what is bit-equal to computing it, or none."""

    POLICY = "policy"
    EXACT = "exact"
    NONE = "none"


class ContextOverflow(Enum):
    """What to do with a session longer than the context: refuse it, or go on with its first and last tokens."""

    REFUSE = "refuse"
    WINDOW = "window"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"not a layer range: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen; the defaults are greedy. See proto/shoal/v1/types.proto for the ranges."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int | None = None

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field out of its range."""
        checks = (
            ("temperature", self.temperature, 0.0 <= self.temperature <= 10.0, "in [0, 10]; 0 is greedy"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", self.min_p, 0.0 <= self.min_p < 1.0, "in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty <= 10.0, "in (0, 10]"),
            ("presence_penalty", self.presence_penalty, -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", self.frequency_penalty, -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("seed", self.seed, 0 <= self.seed < 2**64, "in [0, 2^64)"),
            (
                "num_logprobs",
                self.num_logprobs,
                self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_TOP_LOGPROBS,
                f"in [0, {MAX_TOP_LOGPROBS}]",
            ),
        )
        for name, value, is_valid, allowed in checks:
            if not is_valid:
                raise InvalidRequest(f"sampling.{name}", f"{value} is out of range; it must be {allowed}")
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    "sampling.logit_bias", f"token {token_id} is not in the vocabulary of {vocab_size}"
                )
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest("sampling.logit_bias", f"{bias} for token {token_id} must be in [-100, 100]")


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A link's one-way delay in milliseconds and its rate in Mbit/s; 0 is not limited."""

    delay_ms: float = 0.0
    rate_mbit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """When a device is to be spared, and how much; 0 stands for no such limit.

    moderate_c, hot_c, critical_c: temperatures from which it is in that state. busy_load: share of its processors that other
    programs take, from which it is MODERATE. max_batch, steps_per_s: for NOMINAL, MODERATE, HOT, CRITICAL; max_batch empty:
    all, three quarters, half and a quarter of what the profile allows (for 8 rows that is 8/6/4/2).
    """

    moderate_c: float = 0.0
    hot_c: float = 0.0
    critical_c: float = 0.0
    low_battery_percent: float = 0.0
    critical_battery_percent: float = 0.0
    busy_load: float = 0.0
    max_batch: tuple[int, ...] = ()
    steps_per_s: tuple[float, ...] = (0.0, 12.0, 6.0, 3.0)


@dataclass(frozen=True, slots=True)
class ThermalModel:
    """How an emulated device warms: heat_c_per_s while it computes at base clock, and Newton's cooling towards ambient_c."""

    ambient_c: float = 25.0
    heat_c_per_s: float = 0.0
    cooling_per_s: float = 0.01


@dataclass(frozen=True, slots=True)
class BatteryModel:
    """How an emulated device's battery empties; capacity_wh 0: it has none. Power in watts."""

    capacity_wh: float = 0.0
    start_percent: float = 100.0
    active_w: float = 0.0
    idle_w: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What a device is able to hold and how fast it is: declared, and enforced where it is emulated.

    memory_bytes: weights, KV and workspace together. speed: relative to the unhindered machine (an emulated device with
    speed 0.5 takes twice as long for its compute). num_threads: intra-op threads. poll_ms: the most that the compute thread
    may poll for a step it expects, instead of sleeping; 0 saves energy. fallback_timeout_ms: a request that its pipeline has
    not started within this time may be taken by another one. thermal, battery: of emulated devices only. host_kv_bytes: the
    part of memory_bytes for KV blocks that no running sequence holds. kv_policy: how precisely those are kept.
    """

    name: str
    kind: str
    memory_bytes: int
    speed: float = 1.0
    num_threads: int = 1
    max_batch: int = 16
    poll_ms: float = 0.0
    allow_direct_links: bool = True
    link: LinkProfile = LinkProfile()
    is_emulated: bool = False
    mode: DeviceMode = DeviceMode.MIXED
    fallback_timeout_ms: float = 200.0
    limits: DeviceLimits = DeviceLimits()
    thermal: ThermalModel = ThermalModel()
    battery: BatteryModel = BatteryModel()
    host_kv_bytes: int = 0
    kv_policy: KVPolicy = KVPolicy.EXACT

    @property
    def shard_bytes(self) -> int:
        """What a shard with its running sequences may take: the memory without what is set apart for kept blocks."""
        return self.memory_bytes - self.host_kv_bytes


@dataclass(frozen=True, slots=True)
class KVTierStatus:
    """A tier of KV blocks as one worker sees it; counts are since the worker started.

    tier: device, host or redis. state: ok; of redis also off, connecting, open or slow. mismatches: by reason, stored bytes
    that were not the block that was asked for. oldest_s, mean_age_s: time since the last use. read_mb_s, write_mb_s: of the
    last transfers, 0 before there was one. queued_bytes: what waits to be written to redis; of what that holds, and loses,
    one worker knows nothing, so bytes, blocks and evictions are 0.
    """

    tier: str
    state: str = "ok"
    budget_bytes: int = 0
    used_bytes: int = 0
    num_blocks: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evictions: int = 0
    dropped_writes: int = 0
    mismatches: Mapping[str, int] = field(default_factory=dict)
    oldest_s: float = 0.0
    mean_age_s: float = 0.0
    read_mb_s: float = 0.0
    write_mb_s: float = 0.0
    queued_bytes: int = 0
    max_queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a device reports as it runs.

    cpu_load, other_load: shares of its processors that the worker and that other programs take. temperature_c and
    battery_percent: None where there is no such sensor. clock: share of the base clock that heat leaves (emulated devices).
    busy_s: how long the compute thread has been at what it does now; 0: it waits.
    """

    rss_bytes: int = 0
    kv_bytes: int = 0
    weight_bytes: int = 0
    free_memory_bytes: int = 0
    cpu_load: float = 0.0
    temperature_c: float | None = None
    battery_percent: float | None = None
    is_charging: bool = False
    other_load: float = 0.0
    clock: float = 1.0
    kv_tiers: tuple[KVTierStatus, ...] = ()
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ShardShape:
    """The sizes of a shard's arrays, as sent with LoadShard.

    kv_tokens: the most tokens all slots together may hold; slot_tokens: the most one may.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    num_slots: int
    slot_tokens: int
    kv_tokens: int
    is_first: bool
    is_last: bool

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 4
