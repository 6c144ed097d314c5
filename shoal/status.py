"""What a fleet says of itself, as the SDK's callers get it: devices, pipelines, models.

Plain frozen values made from AdminService and InferenceService messages. Does no I/O. Called by `shoal.client`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.messages import layers_from_proto, profile_from_proto, telemetry_from_proto
from shoal.types import KVPolicy, LayerRange, Telemetry
from shoal.v1 import admin_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A worker and its device.

    layers: None on standby, where pipeline_id is empty. mode: mixed, latency or throughput. decode_ms: median compute of
    a decode step, at first 0. thermal_state: nominal, moderate, hot or critical; thermal_cause: what brought it there.
    max_batch, steps_per_s: what it may do in that state (steps_per_s 0: no limit). host_kv_bytes, kv_policy: what it sets
    apart for KV blocks, and how precisely it keeps them; telemetry.kv_tiers says what is there. is_cordoned: it is given no
    layers until an operator lets it. standby_layers: what it would take over, on standby; prefetched_bytes: what it has of
    the prefetch_bytes of their weights.
    """

    worker_id: str
    device: str
    kind: str
    state: str
    layers: LayerRange | None
    memory_bytes: int
    speed: float
    is_emulated: bool
    telemetry: Telemetry
    link_to_next: str
    decode_ms: float
    execution_provider: str
    kernel_fingerprint: str
    mode: str
    pipeline_id: str
    thermal_state: str
    thermal_cause: str
    max_batch: int
    steps_per_s: float
    host_kv_bytes: int = 0
    kv_policy: KVPolicy = KVPolicy.EXACT
    is_cordoned: bool = False
    standby_layers: tuple[LayerRange, ...] = ()
    prefetch_bytes: int = 0
    prefetched_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """What counts against the device's memory budget: all the worker has resident, weights, KV and the rest."""
        return self.telemetry.rss_bytes


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """A pipeline that serves.

    mode: what its devices are for. max_batch, steps_per_s: what its tightest stage may do now (steps_per_s 0: no limit).
    Rates are over the last ten seconds, totals since it came up; hop_ms is 0 where clocks cannot be compared.
    """

    pipeline_id: str
    epoch: int
    num_slots: int
    used_slots: int
    kv_tokens: int
    used_kv_tokens: int
    context_tokens: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    hop_ms: float
    completion_tokens_total: int
    prompt_tokens_total: int
    mode: str
    worker_ids: tuple[str, ...]
    num_running: int
    num_waiting: int
    max_batch: int
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class DepartedDevice:
    """A device that is gone since ago_s. why: as in "no heartbeat for 5 s". has_left: it wanted to; else it was lost."""

    worker_id: str
    why: str
    ago_s: float
    has_left: bool


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """An orchestrator and its devices. ready: some pipeline serves. waiting_for: what is missing while none does.

    departed: devices that went within the last ten minutes and have not come back, the latest first.
    """

    version: str
    model: str
    ready: bool
    waiting_for: str
    devices: tuple[DeviceStatus, ...]
    pipelines: tuple[PipelineStatus, ...]
    num_running: int
    num_waiting: int
    uptime_s: float
    departed: tuple[DepartedDevice, ...] = ()

    @property
    def pipeline(self) -> PipelineStatus | None:
        """The first, for those who know of one; None before it serves."""
        return self.pipelines[0] if self.pipelines else None

    @property
    def is_complete(self) -> bool:
        """Whether all pipelines serve that devices are a part of, and there is one."""
        serving = {pipeline.pipeline_id for pipeline in self.pipelines}
        return self.ready and all(one.pipeline_id in serving for one in self.devices if one.layers is not None)


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did.

    moved: where the device's layers are now, as in "layers [10, 20) to tablet-1"; empty: it held none. num_sequences:
    answers that were computed or waited there.
    """

    moved: str
    num_sequences: int
    took_s: float


def drained_from_proto(message: admin_pb2.DrainResponse) -> Drained:
    return Drained(message.moved, message.num_sequences, message.took_s)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model that can be asked for."""

    name: str
    digest: str
    architecture: str
    num_layers: int
    context_tokens: int
    ready: bool


def status_from_proto(message: admin_pb2.GetStatusResponse) -> FleetStatus:
    return FleetStatus(
        version=message.version,
        model=message.model,
        ready=message.ready,
        waiting_for=message.waiting_for,
        devices=tuple(_device(device) for device in message.devices),
        pipelines=tuple(_pipeline(pipeline) for pipeline in message.pipelines),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        uptime_s=message.uptime_s,
        departed=tuple(DepartedDevice(one.worker_id, one.why, one.ago_s, one.has_left) for one in message.departed),
    )


def model_from_proto(message: inference_pb2.ModelSummary) -> ModelSummary:
    return ModelSummary(
        name=message.name,
        digest=message.digest,
        architecture=message.architecture,
        num_layers=message.num_layers,
        context_tokens=message.context_tokens,
        ready=message.ready,
    )


def _device(message: admin_pb2.DeviceStatus) -> DeviceStatus:
    profile = profile_from_proto(message.profile)
    return DeviceStatus(
        worker_id=message.worker_id,
        device=message.profile.name,
        kind=message.profile.kind,
        state=message.state,
        layers=layers_from_proto(message.layers),
        memory_bytes=message.profile.memory_bytes,
        speed=message.profile.speed,
        is_emulated=message.profile.is_emulated,
        telemetry=telemetry_from_proto(message.telemetry),
        link_to_next=message.link_to_next,
        decode_ms=message.decode_ms,
        execution_provider=message.execution_provider,
        kernel_fingerprint=message.runtime.kernel_fingerprint,
        mode=profile.mode.value,
        pipeline_id=message.pipeline_id,
        thermal_state=message.thermal_state,
        thermal_cause=message.thermal_cause,
        max_batch=message.max_batch,
        steps_per_s=message.steps_per_s,
        host_kv_bytes=profile.host_kv_bytes,
        kv_policy=profile.kv_policy,
        is_cordoned=message.is_cordoned,
        standby_layers=tuple(LayerRange(one.start, one.stop) for one in message.standby_layers),
        prefetch_bytes=message.prefetch_bytes,
        prefetched_bytes=message.prefetched_bytes,
    )


def _pipeline(message: admin_pb2.PipelineStatus) -> PipelineStatus:
    return PipelineStatus(
        pipeline_id=message.pipeline_id,
        epoch=message.epoch,
        num_slots=message.num_slots,
        used_slots=message.used_slots,
        kv_tokens=message.kv_tokens,
        used_kv_tokens=message.used_kv_tokens,
        context_tokens=message.context_tokens,
        decode_tokens_per_s=message.decode_tokens_per_s,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        hop_ms=message.hop_ms,
        completion_tokens_total=message.completion_tokens_total,
        prompt_tokens_total=message.prompt_tokens_total,
        mode=message.mode,
        worker_ids=tuple(message.worker_ids),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        max_batch=message.max_batch,
        steps_per_s=message.steps_per_s,
    )
