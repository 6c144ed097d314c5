"""Plain values as protobuf messages and back, for both sides of every call.

A message of another version that says what is not known here is refused with a typed error, never guessed at. Knows no
transport: `rpc` has the calls and the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from shoal.errors import InvalidRequest, ProtocolMismatch
from shoal.types import (
    ContextOverflow,
    DeviceLimits,
    DeviceMode,
    DeviceProfile,
    FinishReason,
    KVPolicy,
    KVReuse,
    KVTierStatus,
    LayerRange,
    QosClass,
    SamplingParams,
    ShardShape,
    Telemetry,
)
from shoal.v1 import fleet_pb2, inference_pb2, types_pb2

K = TypeVar("K")
E = TypeVar("E")

SAMPLING_FIELDS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "num_logprobs",
)


def sampling_from_proto(message: types_pb2.SamplingParams, *, seed: int) -> SamplingParams:
    """Fill absent fields with their defaults, and an absent seed with the given one."""
    present: dict[str, Any] = {name: getattr(message, name) for name in SAMPLING_FIELDS if message.HasField(name)}
    return SamplingParams(**{"seed": seed, **present}, logit_bias=dict(message.logit_bias))


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Set every field, so that no side fills in defaults of its own (num_logprobs: absent if None)."""
    fields: dict[str, Any] = {name: getattr(params, name) for name in SAMPLING_FIELDS}
    return types_pb2.SamplingParams(**fields, logit_bias=params.logit_bias)


_PROFILE_FIELDS: Final = (
    "name",
    "kind",
    "memory_bytes",
    "speed",
    "allow_direct_links",
    "max_batch",
    "is_emulated",
    "fallback_timeout_ms",
    "host_kv_bytes",
)
_LIMITS_FIELDS: Final = (
    "moderate_c",
    "hot_c",
    "critical_c",
    "low_battery_percent",
    "critical_battery_percent",
    "busy_load",
    "max_batch",
    "steps_per_s",
)
_MODE_TO_PROTO: Final = {
    DeviceMode.MIXED: fleet_pb2.DEVICE_MODE_MIXED,
    DeviceMode.LATENCY: fleet_pb2.DEVICE_MODE_LATENCY,
    DeviceMode.THROUGHPUT: fleet_pb2.DEVICE_MODE_THROUGHPUT,
}
_MODE_FROM_PROTO: Final = {value: mode for mode, value in _MODE_TO_PROTO.items()}
_KV_POLICIES: Final = frozenset(policy.value for policy in KVPolicy)


def profile_to_proto(profile: DeviceProfile) -> fleet_pb2.DeviceProfile:
    """Leave out what concerns the device alone: its threads and how it is emulated."""
    fields: dict[str, Any] = {name: getattr(profile, name) for name in _PROFILE_FIELDS}
    limits: dict[str, Any] = {name: getattr(profile.limits, name) for name in _LIMITS_FIELDS}
    return fleet_pb2.DeviceProfile(
        **fields,
        mode=_MODE_TO_PROTO[profile.mode],
        limits=fleet_pb2.DeviceLimits(**limits),
        kv_policy=profile.kv_policy.value,
    )


def profile_from_proto(message: fleet_pb2.DeviceProfile) -> DeviceProfile:
    """A mode of a later version counts as mixed, and a KV policy that is none as exact."""
    fields: dict[str, Any] = {name: getattr(message, name) for name in _PROFILE_FIELDS}
    limits: dict[str, Any] = {name: getattr(message.limits, name) for name in _LIMITS_FIELDS}
    limits |= {name: tuple(limits[name]) for name in ("max_batch", "steps_per_s")}
    mode = _MODE_FROM_PROTO.get(message.mode, DeviceMode.MIXED)
    kv_policy = KVPolicy(message.kv_policy) if message.kv_policy in _KV_POLICIES else KVPolicy.EXACT
    return DeviceProfile(**fields, mode=mode, limits=DeviceLimits(**limits), kv_policy=kv_policy)


_TELEMETRY_FIELDS: Final = (
    "rss_bytes",
    "kv_bytes",
    "weight_bytes",
    "free_memory_bytes",
    "cpu_load",
    "is_charging",
    "other_load",
    "clock",
    "busy_s",
)
_SENSOR_FIELDS: Final = ("temperature_c", "battery_percent")
_KV_TIER_FIELDS: Final = (
    "tier",
    "state",
    "budget_bytes",
    "used_bytes",
    "num_blocks",
    "hits",
    "misses",
    "puts",
    "evictions",
    "dropped_writes",
    "oldest_s",
    "mean_age_s",
    "read_mb_s",
    "write_mb_s",
    "queued_bytes",
    "max_queued_bytes",
)


def telemetry_to_proto(telemetry: Telemetry) -> fleet_pb2.Telemetry:
    fields: dict[str, Any] = {name: getattr(telemetry, name) for name in (*_TELEMETRY_FIELDS, *_SENSOR_FIELDS)}
    return fleet_pb2.Telemetry(**fields, kv_tiers=map(kv_tier_to_proto, telemetry.kv_tiers))


def telemetry_from_proto(message: fleet_pb2.Telemetry) -> Telemetry:
    fields: dict[str, Any] = {name: getattr(message, name) for name in _TELEMETRY_FIELDS}
    sensors: dict[str, Any] = {name: getattr(message, name) for name in _SENSOR_FIELDS if message.HasField(name)}
    return Telemetry(**fields, **sensors, kv_tiers=tuple(map(kv_tier_from_proto, message.kv_tiers)))


def kv_tier_to_proto(status: KVTierStatus) -> fleet_pb2.KVTierStatus:
    fields: dict[str, Any] = {name: getattr(status, name) for name in _KV_TIER_FIELDS}
    return fleet_pb2.KVTierStatus(**fields, mismatches=status.mismatches)


def kv_tier_from_proto(message: fleet_pb2.KVTierStatus) -> KVTierStatus:
    fields: dict[str, Any] = {name: getattr(message, name) for name in _KV_TIER_FIELDS}
    return KVTierStatus(**fields, mismatches=dict(message.mismatches))


_SHAPE_FIELDS: Final = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "hidden_size",
    "vocab_size",
    "num_slots",
    "slot_tokens",
    "kv_tokens",
    "is_first",
    "is_last",
)


def shape_to_proto(shape: ShardShape) -> fleet_pb2.ShardShape:
    fields: dict[str, Any] = {name: getattr(shape, name) for name in _SHAPE_FIELDS}
    return fleet_pb2.ShardShape(**fields)


def shape_from_proto(message: fleet_pb2.ShardShape) -> ShardShape:
    fields: dict[str, Any] = {name: getattr(message, name) for name in _SHAPE_FIELDS}
    return ShardShape(**fields)


def layers_to_proto(layers: LayerRange | None) -> types_pb2.LayerRange:
    """None, no layers at all, is (0, 0)."""
    return types_pb2.LayerRange(start=layers.start, stop=layers.stop) if layers else types_pb2.LayerRange()


def layers_from_proto(message: types_pb2.LayerRange) -> LayerRange | None:
    return LayerRange(message.start, message.stop) if message.stop > message.start else None


_QOS_TO_PROTO: Final = {
    QosClass.LATENCY: types_pb2.QOS_CLASS_LATENCY,
    QosClass.BALANCED: types_pb2.QOS_CLASS_BALANCED,
    QosClass.THROUGHPUT: types_pb2.QOS_CLASS_THROUGHPUT,
}
_QOS_FROM_PROTO: Final = {value: qos for qos, value in _QOS_TO_PROTO.items()}
_REUSE_TO_PROTO: Final = {
    KVReuse.POLICY: inference_pb2.KV_REUSE_UNSPECIFIED,
    KVReuse.EXACT: inference_pb2.KV_REUSE_EXACT,
    KVReuse.NONE: inference_pb2.KV_REUSE_NONE,
}
_REUSE_FROM_PROTO: Final = {value: reuse for reuse, value in _REUSE_TO_PROTO.items()}
_OVERFLOW_TO_PROTO: Final = {
    ContextOverflow.REFUSE: inference_pb2.CONTEXT_OVERFLOW_UNSPECIFIED,
    ContextOverflow.WINDOW: inference_pb2.CONTEXT_OVERFLOW_WINDOW,
}
_OVERFLOW_FROM_PROTO: Final = {value: overflow for overflow, value in _OVERFLOW_TO_PROTO.items()}
_FINISH_TO_PROTO: Final = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
}
_FINISH_FROM_PROTO: Final = {value: reason for reason, value in _FINISH_TO_PROTO.items()}


def qos_to_proto(qos: QosClass) -> types_pb2.QosClass:
    return _QOS_TO_PROTO[qos]


def qos_from_proto(value: types_pb2.QosClass, default: QosClass) -> QosClass:
    """Unspecified is the default; raises InvalidRequest for a class of a later version."""
    if value == types_pb2.QOS_CLASS_UNSPECIFIED:
        return default
    return _known(_QOS_FROM_PROTO, value, "qos_class", "a QoS class this server knows")


def kv_reuse_to_proto(reuse: KVReuse) -> inference_pb2.KVReuse:
    return _REUSE_TO_PROTO[reuse]


def kv_reuse_from_proto(value: inference_pb2.KVReuse) -> KVReuse:
    """Raises InvalidRequest for a way of a later version."""
    return _known(_REUSE_FROM_PROTO, value, "kv_reuse", "a way to use stored KV that this server knows")


def overflow_to_proto(overflow: ContextOverflow) -> inference_pb2.ContextOverflow:
    return _OVERFLOW_TO_PROTO[overflow]


def overflow_from_proto(value: inference_pb2.ContextOverflow) -> ContextOverflow:
    """Raises InvalidRequest for a way of a later version."""
    return _known(_OVERFLOW_FROM_PROTO, value, "context_overflow", "a way to go on that this server knows")


def finish_to_proto(reason: FinishReason) -> types_pb2.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(value: types_pb2.FinishReason) -> FinishReason:
    if value not in _FINISH_FROM_PROTO:
        raise ProtocolMismatch(f"finish reason {value} is unknown here: client and server are of different versions")
    return _FINISH_FROM_PROTO[value]


def _known(values: Mapping[K, E], value: K, field: str, what: str) -> E:
    """Raises InvalidRequest for a value of a later version."""
    if value not in values:
        raise InvalidRequest(field, f"{value} is not {what}")
    return values[value]
