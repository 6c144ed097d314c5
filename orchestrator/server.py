"""What clients and operators call: InferenceService and AdminService.

A servicer method decodes and checks a request, makes one call into engine or control, and encodes what comes back. Text
lives here: the engine knows token ids only. Errors are translated by `rpc`, nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from modelstore.manifest import Manifest
from orchestrator.control import Control
from orchestrator.core.sequence import Sequence as AnswerSequence
from orchestrator.engine import Answer, Engine, TokenEvent
from orchestrator.pipeline import StageMember
from orchestrator.text import TextStream
from orchestrator.tokenizer import Tokenizer
from shoal import rpc
from shoal.errors import ContextExceeded, InvalidRequest, ModelNotFound, NotReady, ShoalError
from shoal.types import FinishReason, NumericClass, QosClass
from shoal.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 256
# Encoding more than this takes milliseconds, which others' tokens would wait for.
LONG_REQUEST_BYTES = 16 << 10
MAX_STOPS = 8
MAX_STOP_CHARS = 256
MAX_REQUEST_ID_CHARS = 128


@dataclass(slots=True)
class _Served:
    """A request while it is being answered."""

    request_id: str
    answer: Answer
    members: Sequence[StageMember]
    text: TextStream
    accepted_at: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, engine: Engine, control: Control) -> None:
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._engine = engine
        self._control = control
        self.is_draining = False

    @rpc.unary
    async def ListModels(  # noqa: N802 - servicer methods are named as in the proto
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        config = self._manifest.config
        summary = inference_pb2.ModelSummary(
            name=self._manifest.name,
            digest=self._manifest.digest,
            architecture=config.architecture,
            num_layers=config.num_layers,
            context_tokens=config.context_tokens,
            ready=self._engine.pipeline is not None,
        )
        return inference_pb2.ListModelsResponse(models=[summary])

    @rpc.stream
    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        accepted_at = time.monotonic()
        served = await self._admit(request, accepted_at)
        sequence = served.answer.sequence
        ended = "cancelled"
        try:
            yield inference_pb2.GenerateResponse(accepted=self._accepted(served))
            while True:
                event = await served.answer.next()
                delta, end = self._take(served, event)
                yield inference_pb2.GenerateResponse(delta=delta)
                if end is not None:
                    ended = end.value
                    yield inference_pb2.GenerateResponse(finished=_finished(served, end))
                    break
        except ShoalError as error:
            ended = error.reason
            raise
        finally:
            self._engine.abort(sequence.sequence_id)
            logger.info(
                "request_ended request_id=%r finish=%s prompt_tokens=%d completion_tokens=%d",
                served.request_id, ended, len(sequence.prompt_token_ids), served.num_tokens,
            )  # fmt: skip

    async def _admit(self, request: inference_pb2.GenerateRequest, accepted_at: float) -> _Served:
        if self.is_draining:
            raise NotReady("this orchestrator is shutting down; ask another or try again later", retry_after_s=5.0)
        sequence = await self._to_sequence(request, accepted_at)
        text = TextStream(self._tokenizer, _checked_stops(request.stop))
        request_id = _checked_request_id(request.request_id)
        pipeline = await self._control.wait_serving()
        answer = self._engine.submit(sequence)
        logger.info("request_accepted request_id=%r prompt_tokens=%d", request_id, len(sequence.prompt_token_ids))
        return _Served(request_id, answer, pipeline.members, text, accepted_at)

    async def _to_sequence(self, request: inference_pb2.GenerateRequest, now: float) -> AnswerSequence:
        if request.model not in ("", self._manifest.name):
            raise ModelNotFound(
                f"model {request.model!r} is not served here; {self._manifest.name!r} is", field="model"
            )
        sampling = rpc.sampling_from_proto(request.sampling, seed=secrets.randbits(53))
        sampling.validate(self._manifest.config.vocab_size)
        max_tokens = request.max_tokens if request.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        if max_tokens < 1:
            raise InvalidRequest("max_tokens", f"{max_tokens} is out of range; it must be at least 1")
        qos = rpc.qos_from_proto(request.qos_class)
        if request.ByteSize() > LONG_REQUEST_BYTES:
            token_ids = await asyncio.to_thread(self._prompt_token_ids, request)
        else:
            token_ids = self._prompt_token_ids(request)
        return AnswerSequence(
            sequence_id=self._engine.new_sequence_id(),
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=frozenset() if request.ignore_eos else self._tokenizer.stop_ids,
            numeric=NumericClass.SOLO if qos is QosClass.LATENCY else NumericClass.SHARED,
            qos=qos,
            arrived_at=now,
        )

    def _prompt_token_ids(self, request: inference_pb2.GenerateRequest) -> Sequence[int]:
        match request.WhichOneof("input"):
            case "prompt":
                self._check_length("prompt", len(request.prompt.encode()))
                token_ids: Sequence[int] = self._tokenizer.encode(request.prompt, add_special=True)
            case "chat":
                messages = [{"role": one.role, "content": one.content} for one in request.chat.messages]
                self._check_length("chat", sum(len(one["content"].encode()) for one in messages))
                token_ids = self._tokenizer.encode_chat(messages)
            case "tokens":
                token_ids = request.tokens.token_ids
                vocab_size = self._manifest.config.vocab_size
                for token_id in token_ids:
                    if token_id >= vocab_size:
                        raise InvalidRequest("tokens.token_ids", f"{token_id} is not in the vocabulary of {vocab_size}")
            case _:
                raise InvalidRequest("input", "is missing: give prompt, chat or tokens")
        if not token_ids:
            raise InvalidRequest(request.WhichOneof("input") or "input", "is empty; it must have at least one token")
        return token_ids

    def _check_length(self, field: str, num_bytes: int) -> None:
        """Refuse, before any work goes into it, text that cannot fit the context however it is cut into tokens."""
        least_tokens = num_bytes // self._tokenizer.max_token_bytes
        if least_tokens >= self._manifest.config.context_tokens:
            raise ContextExceeded(
                f"the prompt has {num_bytes} bytes, which are {least_tokens} tokens or more; the context is "
                f"{self._manifest.config.context_tokens}: shorten the prompt",
                field=field,
            )

    def _accepted(self, served: _Served) -> inference_pb2.Accepted:
        sequence = served.answer.sequence
        return inference_pb2.Accepted(
            request_id=served.request_id,
            model=self._manifest.name,
            prompt_tokens=len(sequence.prompt_token_ids),
            seed=sequence.sampling.seed,
        )

    def _take(self, served: _Served, event: TokenEvent) -> tuple[inference_pb2.Delta, FinishReason | None]:
        """Turn a token into what the client gets of it, and say whether and why it is the last."""
        now = served.last_token_at = time.monotonic()
        served.first_token_at = served.first_token_at or now
        served.num_tokens += 1
        pushed = served.text.push(event.token_id)
        text, finish = pushed.text, event.finish
        if pushed.is_stopped:
            finish = FinishReason.STOP
        elif finish is not None:
            text += served.text.finish()
        delta = inference_pb2.Delta(index=event.index, token_ids=[event.token_id], text=text)
        if event.logprobs is not None:
            delta.logprobs.append(event.logprobs)
        return delta, finish


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, control: Control) -> None:
        self._control = control

    @rpc.unary
    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        return self._control.status()


def _finished(served: _Served, finish: FinishReason) -> inference_pb2.Finished:
    decode_s = served.last_token_at - served.first_token_at
    return inference_pb2.Finished(
        finish_reason=rpc.finish_to_proto(finish),
        prompt_tokens=len(served.answer.sequence.prompt_token_ids),
        completion_tokens=served.num_tokens,
        ttft_ms=(served.first_token_at - served.accepted_at) * 1e3,
        tokens_per_s=(served.num_tokens - 1) / decode_s if served.num_tokens > 1 and decode_s > 0 else 0.0,
        pipeline=[
            inference_pb2.StageSummary(
                worker_id=member.worker_id, layers=rpc.layers_to_proto(member.layers), device=member.device
            )
            for member in served.members
        ],
    )


def _checked_stops(stops: Sequence[str]) -> Sequence[str]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                "stop", f"a stop string has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARS}"
            )
    return list(stops)


def _checked_request_id(request_id: str) -> str:
    if not request_id:
        return uuid.uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequest("request_id", f"must be at most {MAX_REQUEST_ID_CHARS} printable characters")
    return request_id


async def drain(servicer: InferenceServicer, engine: Engine, drain_s: float) -> bool:
    """Accept no more and wait for what runs, at most drain_s; True if everything ended."""
    servicer.is_draining = True
    deadline = time.monotonic() + drain_s
    while not engine.is_idle and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return engine.is_idle
