from shoal.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContextOverflow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_OVERFLOW_UNSPECIFIED: _ClassVar[ContextOverflow]
    CONTEXT_OVERFLOW_WINDOW: _ClassVar[ContextOverflow]

class KVReuse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_REUSE_UNSPECIFIED: _ClassVar[KVReuse]
    KV_REUSE_EXACT: _ClassVar[KVReuse]
    KV_REUSE_NONE: _ClassVar[KVReuse]
CONTEXT_OVERFLOW_UNSPECIFIED: ContextOverflow
CONTEXT_OVERFLOW_WINDOW: ContextOverflow
KV_REUSE_UNSPECIFIED: KVReuse
KV_REUSE_EXACT: KVReuse
KV_REUSE_NONE: KVReuse

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenInput(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "chat", "tokens", "sampling", "max_tokens", "stop", "ignore_eos", "qos_class", "request_id", "tenant", "max_tokens_per_s", "ttft_target_ms", "inter_token_target_ms", "session_id", "kv_reuse", "context_overflow")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    QOS_CLASS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KV_REUSE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    chat: ChatInput
    tokens: TokenInput
    sampling: _types_pb2.SamplingParams
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    qos_class: _types_pb2.QosClass
    request_id: str
    tenant: str
    max_tokens_per_s: float
    ttft_target_ms: float
    inter_token_target_ms: float
    session_id: str
    kv_reuse: KVReuse
    context_overflow: ContextOverflow
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., tokens: _Optional[_Union[TokenInput, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., qos_class: _Optional[_Union[_types_pb2.QosClass, str]] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., max_tokens_per_s: _Optional[float] = ..., ttft_target_ms: _Optional[float] = ..., inter_token_target_ms: _Optional[float] = ..., session_id: _Optional[str] = ..., kv_reuse: _Optional[_Union[KVReuse, str]] = ..., context_overflow: _Optional[_Union[ContextOverflow, str]] = ...) -> None: ...

class CacheUse(_message.Message):
    __slots__ = ("cached_tokens", "from_redis_tokens", "codec", "is_exact")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FROM_REDIS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    from_redis_tokens: int
    codec: str
    is_exact: bool
    def __init__(self, cached_tokens: _Optional[int] = ..., from_redis_tokens: _Optional[int] = ..., codec: _Optional[str] = ..., is_exact: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "delta", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    delta: Delta
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "seed", "dropped_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    dropped_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., dropped_tokens: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "prompt_tokens", "completion_tokens", "ttft_ms", "tokens_per_s", "pipeline", "pipeline_id", "queue_ms", "num_preemptions", "cache", "num_recoveries", "has_changed_kernels")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    HAS_CHANGED_KERNELS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _types_pb2.FinishReason
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    tokens_per_s: float
    pipeline: _containers.RepeatedCompositeFieldContainer[StageSummary]
    pipeline_id: str
    queue_ms: float
    num_preemptions: int
    cache: CacheUse
    num_recoveries: int
    has_changed_kernels: bool
    def __init__(self, finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., pipeline: _Optional[_Iterable[_Union[StageSummary, _Mapping]]] = ..., pipeline_id: _Optional[str] = ..., queue_ms: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., cache: _Optional[_Union[CacheUse, _Mapping]] = ..., num_recoveries: _Optional[int] = ..., has_changed_kernels: _Optional[bool] = ...) -> None: ...

class StageSummary(_message.Message):
    __slots__ = ("worker_id", "layers", "device")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    layers: _types_pb2.LayerRange
    device: str
    def __init__(self, worker_id: _Optional[str] = ..., layers: _Optional[_Union[_types_pb2.LayerRange, _Mapping]] = ..., device: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelSummary(_message.Message):
    __slots__ = ("name", "digest", "architecture", "num_layers", "context_tokens", "ready")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    architecture: str
    num_layers: int
    context_tokens: int
    ready: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., architecture: _Optional[str] = ..., num_layers: _Optional[int] = ..., context_tokens: _Optional[int] = ..., ready: _Optional[bool] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelSummary]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelSummary, _Mapping]]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    num_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: GenerateResponse
    def __init__(self, response: _Optional[_Union[GenerateResponse, _Mapping]] = ...) -> None: ...

class AnticipateRequest(_message.Message):
    __slots__ = ("prompt", "chat", "tokens", "tenant", "session_id")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    chat: ChatInput
    tokens: TokenInput
    tenant: str
    session_id: str
    def __init__(self, prompt: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., tokens: _Optional[_Union[TokenInput, _Mapping]] = ..., tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class AnticipateResponse(_message.Message):
    __slots__ = ("num_prefixes", "num_blocks")
    NUM_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_prefixes: int
    num_blocks: int
    def __init__(self, num_prefixes: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...
