"""What clients and operators call: InferenceService and AdminService.

A servicer method decodes and checks a request (`requests`), makes one call into engine or control, and encodes what comes
back. Text lives here: the engine knows token ids only. Errors are translated by `rpc`, nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from modelstore.manifest import Manifest
from orchestrator.control import Control
from orchestrator.core.sequence import QosTargets
from orchestrator.engine import Answer, Engine, TokenEvent
from orchestrator.requests import DecodedRequest, RequestDecoder
from orchestrator.text import TextStream
from orchestrator.tokenizer import Tokenizer
from shoal import rpc
from shoal.errors import NotReady, ShoalError
from shoal.types import FinishReason, QosClass
from shoal.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

# Encoding more than this takes milliseconds, which others' tokens would wait for.
LONG_REQUEST_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What the configuration says of requests: the class of those that name none, and what class BALANCED aims at."""

    default_qos: QosClass
    balanced_targets: QosTargets


@dataclass(slots=True)
class _Served:
    """A request while it is being answered."""

    request_id: str
    answer: Answer
    text: TextStream
    accepted_at: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        engine: Engine,
        control: Control,
        options: ServingOptions,
    ) -> None:
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._decoder = RequestDecoder(manifest, tokenizer, options.default_qos, options.balanced_targets)
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
            ready=bool(self._engine.pipelines),
        )
        return inference_pb2.ListModelsResponse(models=[summary])

    @rpc.stream
    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        served = await self._admit(request, context.time_remaining())
        sequence = served.answer.sequence
        ended, why = "cancelled", FinishReason.CANCELLED
        try:
            yield inference_pb2.GenerateResponse(accepted=self._accepted(served))
            while True:
                event = await served.answer.next()
                delta, end = self._take(served, event)
                if end is not None:
                    ended, why = end.value, end
                yield inference_pb2.GenerateResponse(delta=delta)
                if end is not None:
                    yield inference_pb2.GenerateResponse(finished=_finished(served, end))
                    break
        except ShoalError as error:
            ended = error.reason
            raise
        finally:
            self._engine.abort(sequence.sequence_id, why)
            logger.info(
                "request_ended request_id=%r finish=%s prompt_tokens=%d completion_tokens=%d pipeline=%s",
                served.request_id, ended, len(sequence.prompt_token_ids), served.num_tokens,
                served.answer.pipeline.pipeline_id,
            )  # fmt: skip

    async def _admit(self, request: inference_pb2.GenerateRequest, time_left_s: float | None) -> _Served:
        accepted_at = time.monotonic()
        if self.is_draining:
            raise NotReady("this orchestrator is shutting down; ask another or try again later", retry_after_s=5.0)
        decoded = await self._decode(request, accepted_at, time_left_s)
        request_id, sequence = decoded.request_id or uuid.uuid4().hex, decoded.sequence
        await self._control.wait_serving()
        answer = self._engine.submit(sequence, request_id)
        logger.info(
            "request_accepted request_id=%r prompt_tokens=%d qos=%s tenant=%r pipeline=%s",
            request_id, len(sequence.prompt_token_ids), sequence.qos.value, sequence.tenant,
            answer.pipeline.pipeline_id,
        )  # fmt: skip
        return _Served(request_id, answer, TextStream(self._tokenizer, decoded.stops), accepted_at)

    async def _decode(
        self, request: inference_pb2.GenerateRequest, now: float, time_left_s: float | None
    ) -> DecodedRequest:
        def decode() -> DecodedRequest:
            return self._decoder.decode(
                request, sequence_id=sequence_id, seed=secrets.randbits(53), now=now, time_left_s=time_left_s
            )

        sequence_id = self._engine.new_sequence_id()
        return await asyncio.to_thread(decode) if request.ByteSize() > LONG_REQUEST_BYTES else decode()

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
    def __init__(self, control: Control, engine: Engine) -> None:
        self._control = control
        self._engine = engine

    @rpc.unary
    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        return self._control.status()

    @rpc.unary
    async def Explain(  # noqa: N802
        self, request: admin_pb2.ExplainRequest, context: Any
    ) -> admin_pb2.ExplainResponse:
        return self._engine.stories.find(request.request_id).to_proto()


def _finished(served: _Served, finish: FinishReason) -> inference_pb2.Finished:
    decode_s = served.last_token_at - served.first_token_at
    sequence, pipeline = served.answer.sequence, served.answer.pipeline
    return inference_pb2.Finished(
        finish_reason=rpc.finish_to_proto(finish),
        prompt_tokens=len(sequence.prompt_token_ids),
        completion_tokens=served.num_tokens,
        ttft_ms=(served.first_token_at - served.accepted_at) * 1e3,
        tokens_per_s=(served.num_tokens - 1) / decode_s if served.num_tokens > 1 and decode_s > 0 else 0.0,
        pipeline=[
            inference_pb2.StageSummary(
                worker_id=member.worker_id, layers=rpc.layers_to_proto(member.layers), device=member.device
            )
            for member in pipeline.members
        ],
        pipeline_id=pipeline.pipeline_id,
        queue_ms=sequence.queue_s * 1e3,
        num_preemptions=sequence.num_preemptions,
    )


async def drain(servicer: InferenceServicer, engine: Engine, drain_s: float) -> bool:
    """Accept no more and wait for what runs, at most drain_s; True if everything ended."""
    servicer.is_draining = True
    deadline = time.monotonic() + drain_s
    while not engine.is_idle and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return engine.is_idle
