"""What clients call: InferenceService.

A servicer method decodes and checks a request (`requests`), makes one call into the engine, and encodes what comes back;
a request that is a turn of a session takes its history from `conversations`, and leaves what it became there. Text lives
here: the engine knows token ids only. Errors are translated by `rpc`, nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from modelstore.manifest import Manifest
from orchestrator.catalogue import Catalogue
from orchestrator.control import Control
from orchestrator.conversation import SessionKey
from orchestrator.conversations import Conversations, Turn
from orchestrator.core.sequence import Sequence, SequenceState
from orchestrator.engine import Answer, Engine, TokenEvent
from orchestrator.requests import DecodedRequest, RequestDecoder, session_id_of, tenant_of
from orchestrator.text import TextStream
from orchestrator.tokenizer import Tokenizer
from orchestrator.typed_ahead import TypedAhead
from orchestrator.warming import Warmer
from shoal import messages, rpc
from shoal.errors import ContextExceeded, NotReady, ShoalError
from shoal.kv import BLOCK_TOKENS
from shoal.types import FinishReason
from shoal.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

# Encoding more than this takes milliseconds, which others' tokens would wait for.
LONG_REQUEST_BYTES = 16 << 10
# What a token of a session's history counts as, of text: it has to be named, not to be encoded.
HISTORY_TOKEN_BYTES = 1

T = TypeVar("T")


@dataclass(slots=True)
class _Served:
    """A request while it is being answered.

    sent: the token ids that the client's stream took. turn: of its session. num_dropped: tokens that this left out.
    """

    request_id: str
    answer: Answer
    text: TextStream
    accepted_at: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0
    sent: list[int] = field(default_factory=list)
    turn: Turn | None = None
    num_dropped: int = 0


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        decoder: RequestDecoder,
        engine: Engine,
        control: Control,
        catalogue: Catalogue,
        conversations: Conversations,
        warmer: Warmer,
        typed_ahead: TypedAhead,
    ) -> None:
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._engine = engine
        self._control = control
        self._catalogue = catalogue
        self._conversations = conversations
        self._warmer = warmer
        self._typed_ahead = typed_ahead
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

    @rpc.unary
    async def Anticipate(  # noqa: N802
        self, request: inference_pb2.AnticipateRequest, context: Any
    ) -> inference_pb2.AnticipateResponse:
        tenant, history = tenant_of(request.tenant), tuple[int, ...]()
        if request.session_id:
            history = await self._conversations.history(SessionKey(tenant, session_id_of(request.session_id)))
        typed = await decoded(partial(self._decoder.typed, request, tenant, history), request, len(history))
        asked = await self._typed_ahead.prefetch(typed)
        return inference_pb2.AnticipateResponse(num_prefixes=asked.num_prefixes, num_blocks=asked.num_blocks)

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
                served.sent.append(event.token_id)
                if end is not None:
                    self._typed_ahead.learn(sequence)
                    saving = self._end_turn(served, end)
                    if saving is not None:
                        # Goes on where the client leaves meanwhile.
                        await asyncio.shield(saving)
                    yield inference_pb2.GenerateResponse(finished=_finished(served, end))
                    break
        except (asyncio.CancelledError, GeneratorExit):
            self._end_turn(served, FinishReason.CANCELLED)
            raise
        except ShoalError as error:
            ended = error.reason
            raise
        finally:
            self._engine.abort(sequence.sequence_id, why)
            if served.turn is not None:
                self._conversations.leave(served.turn)
            logger.info(
                "request_ended request_id=%r finish=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d pipeline=%s",
                served.request_id, ended, len(sequence.prompt_token_ids), sequence.num_restored, served.num_tokens,
                served.answer.pipeline.pipeline_id,
            )  # fmt: skip

    async def _admit(self, request: inference_pb2.GenerateRequest, time_left_s: float | None) -> _Served:
        accepted_at = time.monotonic()
        if self.is_draining:
            raise NotReady("this orchestrator is shutting down; ask another or try again later", retry_after_s=5.0)
        turn = await self._begin_turn(request)
        with ExitStack() as undo:
            if turn is not None:
                undo.callback(self._conversations.leave, turn)
            asked = await self._decode(request, accepted_at, time_left_s, turn)
            request_id, sequence = asked.request_id or uuid.uuid4().hex, asked.sequence
            await self._control.wait_serving()
            await self._look_up(sequence)
            answer = self._submit(sequence, request_id, turn)
            undo.pop_all()
        logger.info(
            "request_accepted request_id=%r prompt_tokens=%d qos=%s tenant=%r pipeline=%s",
            request_id, len(sequence.prompt_token_ids), sequence.qos.value, sequence.tenant,
            answer.pipeline.pipeline_id,
        )  # fmt: skip
        text = TextStream(self._tokenizer, asked.stops)
        return _Served(request_id, answer, text, accepted_at, turn=turn, num_dropped=asked.num_dropped)

    async def _begin_turn(self, request: inference_pb2.GenerateRequest) -> Turn | None:
        if not request.session_id:
            return None
        return await self._conversations.begin(SessionKey(tenant_of(request.tenant), session_id_of(request.session_id)))

    def _end_turn(self, served: _Served, why: FinishReason) -> asyncio.Task[None] | None:
        """Leave to a session what its turn has become, nothing if that is no token; the task ends when it is stored."""
        turn = served.turn
        if turn is None or turn.is_over or not served.sent:
            return None
        return self._conversations.end(turn, served.answer.sequence, served.sent, why)

    async def _decode(
        self, request: inference_pb2.GenerateRequest, now: float, time_left_s: float | None, turn: Turn | None
    ) -> DecodedRequest:
        history = () if turn is None else turn.session.token_ids
        decode = partial(
            self._decoder.decode,
            request,
            sequence_id=self._engine.new_sequence_id(),
            seed=secrets.randbits(53),
            now=now,
            time_left_s=time_left_s,
            history=history,
            room_tokens=self._engine.sequence_tokens,
        )
        return await decoded(decode, request, len(history))

    async def _look_up(self, sequence: Sequence) -> None:
        """Find how much of a prompt Redis has, where that may be more than workers have in memory."""
        blocks = sequence.restorable_blocks
        if self._engine.keeps_blocks and self._engine.known_blocks(blocks) < len(blocks):
            sequence.num_stored_blocks = await self._catalogue.stored_prefix(blocks)

    def _submit(self, sequence: Sequence, request_id: str, turn: Turn | None) -> Answer:
        try:
            answer = self._engine.submit(sequence, request_id)
        except ContextExceeded as error:
            if turn is None or not turn.session.num_turns:
                raise
            raise ContextExceeded(
                f"session {turn.key.session_id!r} has {len(turn.session.token_ids)} tokens, and this turn adds "
                f"{len(sequence.prompt_token_ids) - len(turn.session.token_ids)}: {error.message}, or let it go on "
                "with its first and last tokens (context_overflow), or begin a new one with what matters of it",
                field="session_id",
            ) from error
        if sequence.state is SequenceState.WAITING:
            self._warmer.make_way()
        return answer

    def _accepted(self, served: _Served) -> inference_pb2.Accepted:
        sequence = served.answer.sequence
        return inference_pb2.Accepted(
            request_id=served.request_id,
            model=self._manifest.name,
            prompt_tokens=len(sequence.prompt_token_ids),
            seed=sequence.sampling.seed,
            dropped_tokens=served.num_dropped,
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


async def decoded(decode: Callable[[], T], request: Message, num_history: int = 0) -> T:
    """Decode a request, which may go on from so many tokens of a session; a long one in another thread."""
    is_long = request.ByteSize() + num_history * HISTORY_TOKEN_BYTES > LONG_REQUEST_BYTES
    return await asyncio.to_thread(decode) if is_long else decode()


def _finished(served: _Served, finish: FinishReason) -> inference_pb2.Finished:
    decode_s = served.last_token_at - served.first_token_at
    sequence, pipeline = served.answer.sequence, served.answer.pipeline
    return inference_pb2.Finished(
        finish_reason=messages.finish_to_proto(finish),
        prompt_tokens=len(sequence.prompt_token_ids),
        completion_tokens=served.num_tokens,
        ttft_ms=(served.first_token_at - served.accepted_at) * 1e3,
        tokens_per_s=(served.num_tokens - 1) / decode_s if served.num_tokens > 1 and decode_s > 0 else 0.0,
        pipeline=[
            inference_pb2.StageSummary(
                worker_id=member.worker_id, layers=messages.layers_to_proto(member.layers), device=member.device
            )
            for member in pipeline.members
        ],
        pipeline_id=pipeline.pipeline_id,
        queue_ms=sequence.queue_s * 1e3,
        num_preemptions=sequence.num_preemptions,
        cache=_cache_use(sequence),
    )


def _cache_use(sequence: Sequence) -> inference_pb2.CacheUse:
    restored = sequence.restored
    if restored is None or not restored.num_blocks:
        return inference_pb2.CacheUse(is_exact=True)
    return inference_pb2.CacheUse(
        cached_tokens=restored.num_blocks * BLOCK_TOKENS,
        from_redis_tokens=restored.num_from_redis * BLOCK_TOKENS,
        codec=restored.codec,
        is_exact=restored.is_exact,
    )


async def drain(servicer: InferenceServicer, engine: Engine, drain_s: float) -> bool:
    """Accept no more requests and wait for what runs, at most drain_s; True if everything ended."""
    servicer.is_draining = True
    deadline = time.monotonic() + drain_s
    while not engine.is_idle and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return engine.is_idle
