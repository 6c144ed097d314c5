from shoal.v1 import fleet_pb2 as _fleet_pb2
from shoal.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "model", "ready", "waiting_for", "devices", "pipeline", "num_running", "num_waiting", "uptime_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    ready: bool
    waiting_for: str
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    pipeline: PipelineStatus
    num_running: int
    num_waiting: int
    uptime_s: float
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., ready: _Optional[bool] = ..., waiting_for: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ..., pipeline: _Optional[_Union[PipelineStatus, _Mapping]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("worker_id", "profile", "runtime", "state", "layers", "telemetry", "link_to_next", "decode_ms", "execution_provider")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    LINK_TO_NEXT_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_PROVIDER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    profile: _fleet_pb2.DeviceProfile
    runtime: _fleet_pb2.RuntimeSummary
    state: str
    layers: _types_pb2.LayerRange
    telemetry: _fleet_pb2.Telemetry
    link_to_next: str
    decode_ms: float
    execution_provider: str
    def __init__(self, worker_id: _Optional[str] = ..., profile: _Optional[_Union[_fleet_pb2.DeviceProfile, _Mapping]] = ..., runtime: _Optional[_Union[_fleet_pb2.RuntimeSummary, _Mapping]] = ..., state: _Optional[str] = ..., layers: _Optional[_Union[_types_pb2.LayerRange, _Mapping]] = ..., telemetry: _Optional[_Union[_fleet_pb2.Telemetry, _Mapping]] = ..., link_to_next: _Optional[str] = ..., decode_ms: _Optional[float] = ..., execution_provider: _Optional[str] = ...) -> None: ...

class PipelineStatus(_message.Message):
    __slots__ = ("pipeline_id", "epoch", "num_slots", "used_slots", "kv_tokens", "used_kv_tokens", "context_tokens", "decode_tokens_per_s", "prefill_tokens_per_s", "hop_ms", "completion_tokens_total", "prompt_tokens_total")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HOP_MS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_slots: _Optional[int] = ..., used_slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., used_kv_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., decode_tokens_per_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., hop_ms: _Optional[float] = ..., completion_tokens_total: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ...) -> None: ...
