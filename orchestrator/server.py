"""What clients call: InferenceService.

A servicer method decodes and checks a request (`requests`), makes one call into the engine, and encodes what comes back;
a request that is a turn of a session takes its history from `conversations`. What is known of an answer, also when its
stream has broken off, is in `served`. Text lives here: the engine knows token ids only. Errors are translated by `rpc`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from modelstore.manifest import Manifest
from orchestrator.answer import Answer, TokenEvent
from orchestrator.catalogue import Catalogue
from orchestrator.control import Control
from orchestrator.conversation import SessionKey
from orchestrator.conversations import Conversations, Turn
from orchestrator.core.sequence import Sequence, SequenceState
from orchestrator.engine import Engine
from orchestrator.record import RequestRecord
from orchestrator.requests import DecodedRequest, RequestDecoder, session_id_of, tenant_of
from orchestrator.served import Served, ServedRequests, taken_over
from orchestrator.text import TextStream
from orchestrator.tokenizer import Tokenizer
from orchestrator.typed_ahead import TypedAhead
from orchestrator.warming import Warmer
from shoal import messages, rpc
from shoal.errors import ContextExceeded, InvalidRequest, NotReady, ShoalError
from shoal.kv import BLOCK_TOKENS
from shoal.types import FinishReason
from shoal.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

# Encoding more than this takes milliseconds, which others' tokens would wait for.
LONG_REQUEST_BYTES = 16 << 10
# What a token of a session's history counts as, of text: it has to be named, not to be encoded.
HISTORY_TOKEN_BYTES = 1

T = TypeVar("T")


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
        served: ServedRequests,
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
        self._served = served
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
        async with aclosing(self._serve(served)) as responses:
            async for response in responses:
                yield response

    @rpc.stream
    async def Resume(  # noqa: N802
        self, request: inference_pb2.ResumeRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.ResumeResponse, None]:
        self._check_open()
        served = self._served.find(tenant_of(request.tenant), request.request_id)
        logger.info("request_resumed request_id=%r num_tokens=%d", request.request_id, request.num_tokens)
        async with aclosing(self._serve(served, request.num_tokens)) as responses:
            async for response in responses:
                yield inference_pb2.ResumeResponse(response=response)

    async def _serve(self, served: Served, num_known: int = 0) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Send an answer from token num_known on, to its end; what is text of the tokens before is not sent again."""
        ended = "cancelled"
        try:
            await self._served.claim(served)
            await self._served.revive(served)
            yield inference_pb2.GenerateResponse(accepted=self._accepted(served.record))
            text = TextStream(self._tokenizer, served.record.stops, after=served.record.prompt_token_ids[-1])
            for index in itertools.count():
                event = await self._served.token(served, index)
                delta, end = _grown(text, event)
                if end is not None:
                    ended = end.value
                    self._complete(served, index + 1, end, num_known)
                if index >= num_known:
                    yield inference_pb2.GenerateResponse(delta=delta)
                    served.num_sent = max(served.num_sent, index + 1)
                if end is not None:
                    await self._end(served)
                    yield inference_pb2.GenerateResponse(finished=_finished(served, end))
                    return
        except asyncio.CancelledError:
            if self._served.is_reader(served):
                raise
            # Not by the client of this stream, which is to hear of it.
            _uncancel()
            ended = "taken over"
            raise taken_over() from None
        except ShoalError as error:
            ended = error.reason
            if self._served.is_reader(served):
                self._served.fail(served, error)
            raise
        finally:
            _log_end(served, ended)
            self._served.release(served)

    def _complete(self, served: Served, num_tokens: int, end: FinishReason, num_known: int) -> None:
        self._served.complete(served, num_tokens, end, _finished(served, end).SerializeToString())
        if num_known > num_tokens:
            raise InvalidRequest("num_tokens", f"{num_known} is out of range; the answer has {num_tokens}")

    async def _end(self, served: Served) -> None:
        """Have what is to be kept of a complete answer kept, before its client is told that it is."""
        if served.answer is not None:
            self._typed_ahead.learn(served.answer.sequence)
        saving = self._served.end_turn(served)
        if saving is not None:
            # Goes on where the client leaves meanwhile.
            await asyncio.shield(saving)

    def _check_open(self) -> None:
        if self.is_draining:
            raise NotReady("this orchestrator is shutting down; ask another or try again later", retry_after_s=5.0)

    async def _admit(self, request: inference_pb2.GenerateRequest, time_left_s: float | None) -> Served:
        accepted_at = time.monotonic()
        self._check_open()
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
            answer.pipeline_id,
        )  # fmt: skip
        return self._served.add(answer, request_id, asked.stops, turn=turn, num_dropped=asked.num_dropped)

    async def _begin_turn(self, request: inference_pb2.GenerateRequest) -> Turn | None:
        if not request.session_id:
            return None
        return await self._conversations.begin(SessionKey(tenant_of(request.tenant), session_id_of(request.session_id)))

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

    def _accepted(self, record: RequestRecord) -> inference_pb2.Accepted:
        return inference_pb2.Accepted(
            request_id=record.request_id,
            model=self._manifest.name,
            prompt_tokens=len(record.prompt_token_ids),
            seed=record.sampling.seed,
            dropped_tokens=record.num_dropped,
        )


async def decoded(decode: Callable[[], T], request: Message, num_history: int = 0) -> T:
    """Decode a request, which may go on from so many tokens of a session.

    In another thread if it is long, or a chat: that waits for the process of templates, which has its time.
    """
    is_long = request.ByteSize() + num_history * HISTORY_TOKEN_BYTES > LONG_REQUEST_BYTES
    is_chat = request.WhichOneof("input") == "chat"
    return await asyncio.to_thread(decode) if is_long or is_chat else decode()


def _grown(text: TextStream, event: TokenEvent) -> tuple[inference_pb2.Delta, FinishReason | None]:
    """Turn a token into what the client gets of it, and say whether and why it is the last."""
    pushed = text.push(event.token_id)
    grown, finish = pushed.text, event.finish
    if pushed.is_stopped:
        finish = FinishReason.STOP
    elif finish is not None:
        grown += text.finish()
    delta = inference_pb2.Delta(index=event.index, token_ids=[event.token_id], text=grown)
    if event.logprobs is not None:
        delta.logprobs.append(event.logprobs)
    return delta, finish


def _finished(served: Served, finish: FinishReason) -> inference_pb2.Finished:
    """What the client is told at the end, also if it was told before; less of an answer that another orchestrator ended."""
    record, log = served.record, served.log
    if log.finished:
        return inference_pb2.Finished.FromString(log.finished)
    num_tokens, decode_s = len(log.token_ids), log.last_token_at - log.first_token_at
    finished = inference_pb2.Finished(
        finish_reason=messages.finish_to_proto(finish),
        prompt_tokens=len(record.prompt_token_ids),
        completion_tokens=num_tokens,
        ttft_ms=(log.first_token_at - record.accepted_at) * 1e3,
        tokens_per_s=(num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else 0.0,
        num_preemptions=log.num_preemptions,
        num_recoveries=log.num_recoveries,
        has_changed_kernels=log.has_changed_kernels,
    )
    if served.answer is not None:
        _add_course(finished, served.answer)
    return finished


def _add_course(finished: inference_pb2.Finished, answer: Answer) -> None:
    """Say where and how an answer was computed."""
    sequence, pipeline = answer.sequence, answer.pipeline
    for member in pipeline.members if pipeline is not None else ():
        layers = messages.layers_to_proto(member.layers)
        finished.pipeline.add(worker_id=member.worker_id, layers=layers, device=member.device)
    finished.pipeline_id = answer.pipeline_id
    finished.queue_ms = sequence.queue_s * 1e3
    finished.cache.CopyFrom(_cache_use(sequence))


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


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def _log_end(served: Served, ended: str) -> None:
    answer = served.answer
    logger.info(
        "request_ended request_id=%r finish=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d pipeline=%s",
        served.record.request_id, ended, len(served.record.prompt_token_ids),
        0 if answer is None else answer.sequence.num_restored, len(served.log.token_ids),
        "" if answer is None else answer.pipeline_id,
    )  # fmt: skip


async def drain(servicer: InferenceServicer, engine: Engine, drain_s: float) -> bool:
    """Accept no more requests and wait for what runs, at most drain_s; True if everything ended."""
    servicer.is_draining = True
    deadline = time.monotonic() + drain_s
    while not engine.is_idle and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return engine.is_idle
