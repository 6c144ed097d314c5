from shoal.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeviceMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_MODE_UNSPECIFIED: _ClassVar[DeviceMode]
    DEVICE_MODE_MIXED: _ClassVar[DeviceMode]
    DEVICE_MODE_LATENCY: _ClassVar[DeviceMode]
    DEVICE_MODE_THROUGHPUT: _ClassVar[DeviceMode]
DEVICE_MODE_UNSPECIFIED: DeviceMode
DEVICE_MODE_MIXED: DeviceMode
DEVICE_MODE_LATENCY: DeviceMode
DEVICE_MODE_THROUGHPUT: DeviceMode

class AttachRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "shard_loaded", "shard_failed", "links_opened", "link_failed", "leaving", "measured", "links_probed", "blob_prefetched")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SHARD_LOADED_FIELD_NUMBER: _ClassVar[int]
    SHARD_FAILED_FIELD_NUMBER: _ClassVar[int]
    LINKS_OPENED_FIELD_NUMBER: _ClassVar[int]
    LINK_FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    LINKS_PROBED_FIELD_NUMBER: _ClassVar[int]
    BLOB_PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    shard_loaded: ShardLoaded
    shard_failed: ShardFailed
    links_opened: LinksOpened
    link_failed: LinkFailed
    leaving: Leaving
    measured: Measured
    links_probed: LinksProbed
    blob_prefetched: BlobPrefetched
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., shard_loaded: _Optional[_Union[ShardLoaded, _Mapping]] = ..., shard_failed: _Optional[_Union[ShardFailed, _Mapping]] = ..., links_opened: _Optional[_Union[LinksOpened, _Mapping]] = ..., link_failed: _Optional[_Union[LinkFailed, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., links_probed: _Optional[_Union[LinksProbed, _Mapping]] = ..., blob_prefetched: _Optional[_Union[BlobPrefetched, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "load_shard", "open_links", "unload_shard", "measure", "probe_links", "prefetch_blobs", "try_peers")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LOAD_SHARD_FIELD_NUMBER: _ClassVar[int]
    OPEN_LINKS_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_SHARD_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    PROBE_LINKS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_BLOBS_FIELD_NUMBER: _ClassVar[int]
    TRY_PEERS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    load_shard: LoadShard
    open_links: OpenLinks
    unload_shard: UnloadShard
    measure: Measure
    probe_links: ProbeLinks
    prefetch_blobs: PrefetchBlobs
    try_peers: TryPeers
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., load_shard: _Optional[_Union[LoadShard, _Mapping]] = ..., open_links: _Optional[_Union[OpenLinks, _Mapping]] = ..., unload_shard: _Optional[_Union[UnloadShard, _Mapping]] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., probe_links: _Optional[_Union[ProbeLinks, _Mapping]] = ..., prefetch_blobs: _Optional[_Union[PrefetchBlobs, _Mapping]] = ..., try_peers: _Optional[_Union[TryPeers, _Mapping]] = ...) -> None: ...

class DeviceLimits(_message.Message):
    __slots__ = ("moderate_c", "hot_c", "critical_c", "low_battery_percent", "critical_battery_percent", "busy_load", "max_batch", "steps_per_s")
    MODERATE_C_FIELD_NUMBER: _ClassVar[int]
    HOT_C_FIELD_NUMBER: _ClassVar[int]
    CRITICAL_C_FIELD_NUMBER: _ClassVar[int]
    LOW_BATTERY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    CRITICAL_BATTERY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    BUSY_LOAD_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    moderate_c: float
    hot_c: float
    critical_c: float
    low_battery_percent: float
    critical_battery_percent: float
    busy_load: float
    max_batch: _containers.RepeatedScalarFieldContainer[int]
    steps_per_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, moderate_c: _Optional[float] = ..., hot_c: _Optional[float] = ..., critical_c: _Optional[float] = ..., low_battery_percent: _Optional[float] = ..., critical_battery_percent: _Optional[float] = ..., busy_load: _Optional[float] = ..., max_batch: _Optional[_Iterable[int]] = ..., steps_per_s: _Optional[_Iterable[float]] = ...) -> None: ...

class DeviceProfile(_message.Message):
    __slots__ = ("name", "kind", "memory_bytes", "speed", "allow_direct_links", "max_batch", "is_emulated", "mode", "fallback_timeout_ms", "limits", "host_kv_bytes", "kv_policy")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    ALLOW_DIRECT_LINKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    IS_EMULATED_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    HOST_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    memory_bytes: int
    speed: float
    allow_direct_links: bool
    max_batch: int
    is_emulated: bool
    mode: DeviceMode
    fallback_timeout_ms: float
    limits: DeviceLimits
    host_kv_bytes: int
    kv_policy: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., speed: _Optional[float] = ..., allow_direct_links: _Optional[bool] = ..., max_batch: _Optional[int] = ..., is_emulated: _Optional[bool] = ..., mode: _Optional[_Union[DeviceMode, str]] = ..., fallback_timeout_ms: _Optional[float] = ..., limits: _Optional[_Union[DeviceLimits, _Mapping]] = ..., host_kv_bytes: _Optional[int] = ..., kv_policy: _Optional[str] = ...) -> None: ...

class RuntimeSummary(_message.Message):
    __slots__ = ("name", "version", "kernel_fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    kernel_fingerprint: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., kernel_fingerprint: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "profile", "runtime", "flow_address", "socket_address", "times", "held", "links", "machine_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    FLOW_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    incarnation: int
    profile: DeviceProfile
    runtime: RuntimeSummary
    flow_address: str
    socket_address: str
    times: _containers.RepeatedCompositeFieldContainer[DeviceTimes]
    held: HeldShard
    links: _containers.RepeatedCompositeFieldContainer[LinkFigures]
    machine_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., profile: _Optional[_Union[DeviceProfile, _Mapping]] = ..., runtime: _Optional[_Union[RuntimeSummary, _Mapping]] = ..., flow_address: _Optional[str] = ..., socket_address: _Optional[str] = ..., times: _Optional[_Iterable[_Union[DeviceTimes, _Mapping]]] = ..., held: _Optional[_Union[HeldShard, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkFigures, _Mapping]]] = ..., machine_id: _Optional[str] = ...) -> None: ...

class HeldShard(_message.Message):
    __slots__ = ("pipeline_id", "layers", "model_digest", "shape")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    layers: _types_pb2.LayerRange
    model_digest: str
    shape: ShardShape
    def __init__(self, pipeline_id: _Optional[str] = ..., layers: _Optional[_Union[_types_pb2.LayerRange, _Mapping]] = ..., model_digest: _Optional[str] = ..., shape: _Optional[_Union[ShardShape, _Mapping]] = ...) -> None: ...

class DeviceTimes(_message.Message):
    __slots__ = ("shape_digest", "measured_at_s", "layer", "head", "prefill_token_s", "pass_s", "free_bytes")
    SHAPE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEASURED_AT_S_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    shape_digest: str
    measured_at_s: float
    layer: _containers.RepeatedCompositeFieldContainer[RowsTime]
    head: _containers.RepeatedCompositeFieldContainer[RowsTime]
    prefill_token_s: float
    pass_s: float
    free_bytes: int
    def __init__(self, shape_digest: _Optional[str] = ..., measured_at_s: _Optional[float] = ..., layer: _Optional[_Iterable[_Union[RowsTime, _Mapping]]] = ..., head: _Optional[_Iterable[_Union[RowsTime, _Mapping]]] = ..., prefill_token_s: _Optional[float] = ..., pass_s: _Optional[float] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class RowsTime(_message.Message):
    __slots__ = ("rows", "seconds")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    seconds: float
    def __init__(self, rows: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("shape_digest", "layers_graph", "head_graph", "blobs", "layers_shape", "head_shape")
    SHAPE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_GRAPH_FIELD_NUMBER: _ClassVar[int]
    HEAD_GRAPH_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_SHAPE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SHAPE_FIELD_NUMBER: _ClassVar[int]
    shape_digest: str
    layers_graph: bytes
    head_graph: bytes
    blobs: _containers.RepeatedCompositeFieldContainer[BlobRef]
    layers_shape: ShardShape
    head_shape: ShardShape
    def __init__(self, shape_digest: _Optional[str] = ..., layers_graph: _Optional[bytes] = ..., head_graph: _Optional[bytes] = ..., blobs: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., layers_shape: _Optional[_Union[ShardShape, _Mapping]] = ..., head_shape: _Optional[_Union[ShardShape, _Mapping]] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("times", "reason", "message")
    TIMES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    times: DeviceTimes
    reason: str
    message: str
    def __init__(self, times: _Optional[_Union[DeviceTimes, _Mapping]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ProbeLinks(_message.Message):
    __slots__ = ("peers", "link_token")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    LINK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[StageAddress]
    link_token: bytes
    def __init__(self, peers: _Optional[_Iterable[_Union[StageAddress, _Mapping]]] = ..., link_token: _Optional[bytes] = ...) -> None: ...

class TryPeers(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[StageAddress]
    def __init__(self, peers: _Optional[_Iterable[_Union[StageAddress, _Mapping]]] = ...) -> None: ...

class LinkFigures(_message.Message):
    __slots__ = ("worker_id", "rtt_ms", "mbit_s", "kind")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    MBIT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rtt_ms: float
    mbit_s: float
    kind: str
    def __init__(self, worker_id: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., mbit_s: _Optional[float] = ..., kind: _Optional[str] = ...) -> None: ...

class LinksProbed(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkFigures]
    def __init__(self, links: _Optional[_Iterable[_Union[LinkFigures, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "heartbeat_interval_s", "socket_port", "link_token")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PORT_FIELD_NUMBER: _ClassVar[int]
    LINK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    heartbeat_interval_s: float
    socket_port: int
    link_token: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., heartbeat_interval_s: _Optional[float] = ..., socket_port: _Optional[int] = ..., link_token: _Optional[bytes] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("rss_bytes", "kv_bytes", "weight_bytes", "free_memory_bytes", "cpu_load", "temperature_c", "battery_percent", "is_charging", "other_load", "clock", "kv_tiers", "busy_s")
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_LOAD_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    BATTERY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    IS_CHARGING_FIELD_NUMBER: _ClassVar[int]
    OTHER_LOAD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    KV_TIERS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    rss_bytes: int
    kv_bytes: int
    weight_bytes: int
    free_memory_bytes: int
    cpu_load: float
    temperature_c: float
    battery_percent: float
    is_charging: bool
    other_load: float
    clock: float
    kv_tiers: _containers.RepeatedCompositeFieldContainer[KVTierStatus]
    busy_s: float
    def __init__(self, rss_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., free_memory_bytes: _Optional[int] = ..., cpu_load: _Optional[float] = ..., temperature_c: _Optional[float] = ..., battery_percent: _Optional[float] = ..., is_charging: _Optional[bool] = ..., other_load: _Optional[float] = ..., clock: _Optional[float] = ..., kv_tiers: _Optional[_Iterable[_Union[KVTierStatus, _Mapping]]] = ..., busy_s: _Optional[float] = ...) -> None: ...

class KVTierStatus(_message.Message):
    __slots__ = ("tier", "state", "budget_bytes", "used_bytes", "num_blocks", "hits", "misses", "puts", "evictions", "dropped_writes", "mismatches", "oldest_s", "mean_age_s", "read_mb_s", "write_mb_s", "queued_bytes", "max_queued_bytes")
    class MismatchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    PUTS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_WRITES_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    READ_MB_S_FIELD_NUMBER: _ClassVar[int]
    WRITE_MB_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    state: str
    budget_bytes: int
    used_bytes: int
    num_blocks: int
    hits: int
    misses: int
    puts: int
    evictions: int
    dropped_writes: int
    mismatches: _containers.ScalarMap[str, int]
    oldest_s: float
    mean_age_s: float
    read_mb_s: float
    write_mb_s: float
    queued_bytes: int
    max_queued_bytes: int
    def __init__(self, tier: _Optional[str] = ..., state: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., puts: _Optional[int] = ..., evictions: _Optional[int] = ..., dropped_writes: _Optional[int] = ..., mismatches: _Optional[_Mapping[str, int]] = ..., oldest_s: _Optional[float] = ..., mean_age_s: _Optional[float] = ..., read_mb_s: _Optional[float] = ..., write_mb_s: _Optional[float] = ..., queued_bytes: _Optional[int] = ..., max_queued_bytes: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("telemetry",)
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    telemetry: Telemetry
    def __init__(self, telemetry: _Optional[_Union[Telemetry, _Mapping]] = ...) -> None: ...

class BlobRef(_message.Message):
    __slots__ = ("digest", "num_bytes", "is_mapped")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_MAPPED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    num_bytes: int
    is_mapped: bool
    def __init__(self, digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., is_mapped: _Optional[bool] = ...) -> None: ...

class StageAddress(_message.Message):
    __slots__ = ("worker_id", "flow_address", "socket_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FLOW_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    flow_address: str
    socket_address: str
    def __init__(self, worker_id: _Optional[str] = ..., flow_address: _Optional[str] = ..., socket_address: _Optional[str] = ...) -> None: ...

class LoadShard(_message.Message):
    __slots__ = ("pipeline_id", "epoch", "stage", "layers", "model_digest", "graph", "blobs", "shape", "stages", "link_token")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LINK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    epoch: int
    stage: int
    layers: _types_pb2.LayerRange
    model_digest: str
    graph: bytes
    blobs: _containers.RepeatedCompositeFieldContainer[BlobRef]
    shape: ShardShape
    stages: _containers.RepeatedCompositeFieldContainer[StageAddress]
    link_token: bytes
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ..., stage: _Optional[int] = ..., layers: _Optional[_Union[_types_pb2.LayerRange, _Mapping]] = ..., model_digest: _Optional[str] = ..., graph: _Optional[bytes] = ..., blobs: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., shape: _Optional[_Union[ShardShape, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[StageAddress, _Mapping]]] = ..., link_token: _Optional[bytes] = ...) -> None: ...

class ShardShape(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "hidden_size", "vocab_size", "num_slots", "slot_tokens", "kv_tokens", "is_first", "is_last")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_slots: _Optional[int] = ..., slot_tokens: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., is_first: _Optional[bool] = ..., is_last: _Optional[bool] = ...) -> None: ...

class ShardLoaded(_message.Message):
    __slots__ = ("pipeline_id", "epoch", "stage", "weight_bytes", "execution_provider")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_PROVIDER_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    epoch: int
    stage: int
    weight_bytes: int
    execution_provider: str
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ..., stage: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., execution_provider: _Optional[str] = ...) -> None: ...

class OpenLinks(_message.Message):
    __slots__ = ("pipeline_id", "epoch")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    epoch: int
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LinksOpened(_message.Message):
    __slots__ = ("pipeline_id", "epoch", "stage", "link_to_next")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LINK_TO_NEXT_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    epoch: int
    stage: int
    link_to_next: str
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ..., stage: _Optional[int] = ..., link_to_next: _Optional[str] = ...) -> None: ...

class ShardFailed(_message.Message):
    __slots__ = ("pipeline_id", "epoch", "stage", "reason", "message")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    epoch: int
    stage: int
    reason: str
    message: str
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ..., stage: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class LinkFailed(_message.Message):
    __slots__ = ("pipeline_id", "epoch", "stage", "message")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    epoch: int
    stage: int
    message: str
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ..., stage: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class PrefetchBlobs(_message.Message):
    __slots__ = ("blobs",)
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    blobs: _containers.RepeatedCompositeFieldContainer[BlobRef]
    def __init__(self, blobs: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ...) -> None: ...

class BlobPrefetched(_message.Message):
    __slots__ = ("digest", "reason", "message")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    reason: str
    message: str
    def __init__(self, digest: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class UnloadShard(_message.Message):
    __slots__ = ("pipeline_id", "epoch")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    epoch: int
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchBlobRequest(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: str
    offset: int
    def __init__(self, digest: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchBlobResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...
