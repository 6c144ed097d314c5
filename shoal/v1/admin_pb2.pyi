from shoal.v1 import fleet_pb2 as _fleet_pb2
from shoal.v1 import inference_pb2 as _inference_pb2
from shoal.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("moved", "num_sequences", "took_s")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    moved: str
    num_sequences: int
    took_s: float
    def __init__(self, moved: _Optional[str] = ..., num_sequences: _Optional[int] = ..., took_s: _Optional[float] = ...) -> None: ...

class CordonRequest(_message.Message):
    __slots__ = ("worker_id", "is_cordoned")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_CORDONED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    is_cordoned: bool
    def __init__(self, worker_id: _Optional[str] = ..., is_cordoned: _Optional[bool] = ...) -> None: ...

class CordonResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PlannedDevice(_message.Message):
    __slots__ = ("worker_id", "profile", "times", "is_declared", "links")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    IS_DECLARED_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    profile: _fleet_pb2.DeviceProfile
    times: _fleet_pb2.DeviceTimes
    is_declared: bool
    links: _containers.RepeatedCompositeFieldContainer[_fleet_pb2.LinkFigures]
    def __init__(self, worker_id: _Optional[str] = ..., profile: _Optional[_Union[_fleet_pb2.DeviceProfile, _Mapping]] = ..., times: _Optional[_Union[_fleet_pb2.DeviceTimes, _Mapping]] = ..., is_declared: _Optional[bool] = ..., links: _Optional[_Iterable[_Union[_fleet_pb2.LinkFigures, _Mapping]]] = ...) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("devices", "pipelines", "plan_json")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[PlannedDevice]
    pipelines: _containers.RepeatedCompositeFieldContainer[PipelineStatus]
    plan_json: str
    def __init__(self, devices: _Optional[_Iterable[_Union[PlannedDevice, _Mapping]]] = ..., pipelines: _Optional[_Iterable[_Union[PipelineStatus, _Mapping]]] = ..., plan_json: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "model", "ready", "waiting_for", "devices", "pipelines", "num_running", "num_waiting", "uptime_s", "departed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    ready: bool
    waiting_for: str
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    pipelines: _containers.RepeatedCompositeFieldContainer[PipelineStatus]
    num_running: int
    num_waiting: int
    uptime_s: float
    departed: _containers.RepeatedCompositeFieldContainer[DepartedDevice]
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., ready: _Optional[bool] = ..., waiting_for: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ..., pipelines: _Optional[_Iterable[_Union[PipelineStatus, _Mapping]]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., uptime_s: _Optional[float] = ..., departed: _Optional[_Iterable[_Union[DepartedDevice, _Mapping]]] = ...) -> None: ...

class DepartedDevice(_message.Message):
    __slots__ = ("worker_id", "why", "ago_s", "has_left")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    HAS_LEFT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    why: str
    ago_s: float
    has_left: bool
    def __init__(self, worker_id: _Optional[str] = ..., why: _Optional[str] = ..., ago_s: _Optional[float] = ..., has_left: _Optional[bool] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("worker_id", "profile", "runtime", "state", "layers", "telemetry", "link_to_next", "decode_ms", "execution_provider", "pipeline_id", "thermal_state", "thermal_cause", "max_batch", "steps_per_s", "is_cordoned", "standby_layers", "prefetch_bytes", "prefetched_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    LINK_TO_NEXT_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_PROVIDER_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    THERMAL_STATE_FIELD_NUMBER: _ClassVar[int]
    THERMAL_CAUSE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    IS_CORDONED_FIELD_NUMBER: _ClassVar[int]
    STANDBY_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    profile: _fleet_pb2.DeviceProfile
    runtime: _fleet_pb2.RuntimeSummary
    state: str
    layers: _types_pb2.LayerRange
    telemetry: _fleet_pb2.Telemetry
    link_to_next: str
    decode_ms: float
    execution_provider: str
    pipeline_id: str
    thermal_state: str
    thermal_cause: str
    max_batch: int
    steps_per_s: float
    is_cordoned: bool
    standby_layers: _containers.RepeatedCompositeFieldContainer[_types_pb2.LayerRange]
    prefetch_bytes: int
    prefetched_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., profile: _Optional[_Union[_fleet_pb2.DeviceProfile, _Mapping]] = ..., runtime: _Optional[_Union[_fleet_pb2.RuntimeSummary, _Mapping]] = ..., state: _Optional[str] = ..., layers: _Optional[_Union[_types_pb2.LayerRange, _Mapping]] = ..., telemetry: _Optional[_Union[_fleet_pb2.Telemetry, _Mapping]] = ..., link_to_next: _Optional[str] = ..., decode_ms: _Optional[float] = ..., execution_provider: _Optional[str] = ..., pipeline_id: _Optional[str] = ..., thermal_state: _Optional[str] = ..., thermal_cause: _Optional[str] = ..., max_batch: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., is_cordoned: _Optional[bool] = ..., standby_layers: _Optional[_Iterable[_Union[_types_pb2.LayerRange, _Mapping]]] = ..., prefetch_bytes: _Optional[int] = ..., prefetched_bytes: _Optional[int] = ...) -> None: ...

class PipelineStatus(_message.Message):
    __slots__ = ("pipeline_id", "epoch", "num_slots", "used_slots", "kv_tokens", "used_kv_tokens", "context_tokens", "decode_tokens_per_s", "prefill_tokens_per_s", "hop_ms", "completion_tokens_total", "prompt_tokens_total", "mode", "num_running", "num_waiting", "max_batch", "steps_per_s", "worker_ids")
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
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
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
    num_running: int
    num_waiting: int
    max_batch: int
    steps_per_s: float
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_slots: _Optional[int] = ..., used_slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., used_kv_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., decode_tokens_per_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., hop_ms: _Optional[float] = ..., completion_tokens_total: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., mode: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_batch: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class RouteCandidate(_message.Message):
    __slots__ = ("pipeline_id", "ruled_out", "score_ms", "queue_ms", "prefill_ms", "inter_token_ms", "cached_tokens", "num_stages")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    RULED_OUT_FIELD_NUMBER: _ClassVar[int]
    SCORE_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    ruled_out: str
    score_ms: float
    queue_ms: float
    prefill_ms: float
    inter_token_ms: float
    cached_tokens: int
    num_stages: int
    def __init__(self, pipeline_id: _Optional[str] = ..., ruled_out: _Optional[str] = ..., score_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., inter_token_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., num_stages: _Optional[int] = ...) -> None: ...

class RouteDecision(_message.Message):
    __slots__ = ("at_ms", "pipeline_id", "reason", "candidates")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    at_ms: float
    pipeline_id: str
    reason: str
    candidates: _containers.RepeatedCompositeFieldContainer[RouteCandidate]
    def __init__(self, at_ms: _Optional[float] = ..., pipeline_id: _Optional[str] = ..., reason: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[RouteCandidate, _Mapping]]] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("at_ms", "what", "detail")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    at_ms: float
    what: str
    detail: str
    def __init__(self, at_ms: _Optional[float] = ..., what: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "tenant", "qos_class", "state", "prompt_tokens", "completion_tokens", "finish", "routes", "events")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    qos_class: _types_pb2.QosClass
    state: str
    prompt_tokens: int
    completion_tokens: int
    finish: str
    routes: _containers.RepeatedCompositeFieldContainer[RouteDecision]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., qos_class: _Optional[_Union[_types_pb2.QosClass, str]] = ..., state: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., finish: _Optional[str] = ..., routes: _Optional[_Iterable[_Union[RouteDecision, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("prompt", "chat", "tokens", "tenant", "ttl_s", "is_public")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    IS_PUBLIC_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    chat: _inference_pb2.ChatInput
    tokens: _inference_pb2.TokenInput
    tenant: str
    ttl_s: float
    is_public: bool
    def __init__(self, prompt: _Optional[str] = ..., chat: _Optional[_Union[_inference_pb2.ChatInput, _Mapping]] = ..., tokens: _Optional[_Union[_inference_pb2.TokenInput, _Mapping]] = ..., tenant: _Optional[str] = ..., ttl_s: _Optional[float] = ..., is_public: _Optional[bool] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("prompt_tokens", "kept_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    kept_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "num_turns", "num_tokens", "kept_tokens", "idle_s", "expires_in_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    num_turns: int
    num_tokens: int
    kept_tokens: int
    idle_s: float
    expires_in_s: float
    def __init__(self, session_id: _Optional[str] = ..., num_turns: _Optional[int] = ..., num_tokens: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., idle_s: _Optional[float] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ("num_blocks_deleted", "num_blocks_shared")
    NUM_BLOCKS_DELETED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SHARED_FIELD_NUMBER: _ClassVar[int]
    num_blocks_deleted: int
    num_blocks_shared: int
    def __init__(self, num_blocks_deleted: _Optional[int] = ..., num_blocks_shared: _Optional[int] = ...) -> None: ...
