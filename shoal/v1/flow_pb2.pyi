from shoal.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ActivationDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVATION_DTYPE_UNSPECIFIED: _ClassVar[ActivationDtype]
    ACTIVATION_DTYPE_FLOAT32: _ClassVar[ActivationDtype]
ACTIVATION_DTYPE_UNSPECIFIED: ActivationDtype
ACTIVATION_DTYPE_FLOAT32: ActivationDtype

class FlowRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: Frame
    def __init__(self, frame: _Optional[_Union[Frame, _Mapping]] = ...) -> None: ...

class FlowResponse(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: Frame
    def __init__(self, frame: _Optional[_Union[Frame, _Mapping]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("pipeline_id", "epoch", "to_stage", "link_hello", "step", "step_result", "cancel", "step_failed", "restore", "restored", "prefetch", "keep_blocks", "forget_blocks", "echo")
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TO_STAGE_FIELD_NUMBER: _ClassVar[int]
    LINK_HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_RESULT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    STEP_FAILED_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    KEEP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FORGET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    pipeline_id: str
    epoch: int
    to_stage: int
    link_hello: LinkHello
    step: Step
    step_result: StepResult
    cancel: Cancel
    step_failed: StepFailed
    restore: Restore
    restored: Restored
    prefetch: Prefetch
    keep_blocks: KeepBlocks
    forget_blocks: ForgetBlocks
    echo: Echo
    def __init__(self, pipeline_id: _Optional[str] = ..., epoch: _Optional[int] = ..., to_stage: _Optional[int] = ..., link_hello: _Optional[_Union[LinkHello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., step_result: _Optional[_Union[StepResult, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., step_failed: _Optional[_Union[StepFailed, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., restored: _Optional[_Union[Restored, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., keep_blocks: _Optional[_Union[KeepBlocks, _Mapping]] = ..., forget_blocks: _Optional[_Union[ForgetBlocks, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ...) -> None: ...

class Echo(_message.Message):
    __slots__ = ("sent_ns", "payload", "is_reply")
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    IS_REPLY_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    payload: bytes
    is_reply: bool
    def __init__(self, sent_ns: _Optional[int] = ..., payload: _Optional[bytes] = ..., is_reply: _Optional[bool] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "link_token")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LINK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    incarnation: int
    link_token: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., link_token: _Optional[bytes] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step", "rows", "token_ids", "activations", "dtype", "burst_steps", "solo", "stamps_ns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BURST_STEPS_FIELD_NUMBER: _ClassVar[int]
    SOLO_FIELD_NUMBER: _ClassVar[int]
    STAMPS_NS_FIELD_NUMBER: _ClassVar[int]
    step: int
    rows: _containers.RepeatedCompositeFieldContainer[StepRow]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    activations: bytes
    dtype: ActivationDtype
    burst_steps: int
    solo: bool
    stamps_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[StepRow, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., activations: _Optional[bytes] = ..., dtype: _Optional[_Union[ActivationDtype, str]] = ..., burst_steps: _Optional[int] = ..., solo: _Optional[bool] = ..., stamps_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class StepRow(_message.Message):
    __slots__ = ("sequence_id", "slot", "position", "num_tokens", "sample", "start")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    slot: int
    position: int
    num_tokens: int
    sample: bool
    start: SequenceStart
    def __init__(self, sequence_id: _Optional[int] = ..., slot: _Optional[int] = ..., position: _Optional[int] = ..., num_tokens: _Optional[int] = ..., sample: _Optional[bool] = ..., start: _Optional[_Union[SequenceStart, _Mapping]] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("sampling", "prompt_token_ids", "stop_token_ids", "block_hashes", "is_kv_exact", "trail_id", "answer_token_ids")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    IS_KV_EXACT_FIELD_NUMBER: _ClassVar[int]
    TRAIL_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sampling: _types_pb2.SamplingParams
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    is_kv_exact: bool
    trail_id: bytes
    answer_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., is_kv_exact: _Optional[bool] = ..., trail_id: _Optional[bytes] = ..., answer_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "tokens", "burst_steps", "stamps_ns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BURST_STEPS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_NS_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    burst_steps: int
    stamps_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., burst_steps: _Optional[int] = ..., stamps_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("sequence_id", "position", "token_id", "logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    position: int
    token_id: int
    logprobs: _types_pb2.TokenLogprobs
    def __init__(self, sequence_id: _Optional[int] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class SequenceRef(_message.Message):
    __slots__ = ("sequence_id", "slot", "will_resume")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    WILL_RESUME_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    slot: int
    will_resume: bool
    def __init__(self, sequence_id: _Optional[int] = ..., slot: _Optional[int] = ..., will_resume: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceRef]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceRef, _Mapping]]] = ...) -> None: ...

class StepFailed(_message.Message):
    __slots__ = ("step", "stage", "reason", "message")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    step: int
    stage: int
    reason: str
    message: str
    def __init__(self, step: _Optional[int] = ..., stage: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("sequence_id", "slot", "block_hashes", "is_exact_only", "fetch_timeout_ms", "restored", "trail_id", "num_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_ONLY_FIELD_NUMBER: _ClassVar[int]
    FETCH_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    TRAIL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    slot: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    is_exact_only: bool
    fetch_timeout_ms: float
    restored: RestoredBlocks
    trail_id: bytes
    num_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., slot: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., is_exact_only: _Optional[bool] = ..., fetch_timeout_ms: _Optional[float] = ..., restored: _Optional[_Union[RestoredBlocks, _Mapping]] = ..., trail_id: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class RestoredBlocks(_message.Message):
    __slots__ = ("num_blocks", "num_from_redis", "codec", "is_exact", "num_tokens")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FROM_REDIS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_from_redis: int
    codec: str
    is_exact: bool
    num_tokens: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_from_redis: _Optional[int] = ..., codec: _Optional[str] = ..., is_exact: _Optional[bool] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Restored(_message.Message):
    __slots__ = ("sequence_id", "restored")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    restored: RestoredBlocks
    def __init__(self, sequence_id: _Optional[int] = ..., restored: _Optional[_Union[RestoredBlocks, _Mapping]] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("block_hashes", "timeout_ms", "is_ahead", "trail_id", "sequence_id", "slot", "num_tokens")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    IS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    TRAIL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    timeout_ms: float
    is_ahead: bool
    trail_id: bytes
    sequence_id: int
    slot: int
    num_tokens: int
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., timeout_ms: _Optional[float] = ..., is_ahead: _Optional[bool] = ..., trail_id: _Optional[bytes] = ..., sequence_id: _Optional[int] = ..., slot: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class KeepBlocks(_message.Message):
    __slots__ = ("block_hashes", "ttl_s")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_s: float
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class ForgetBlocks(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...
