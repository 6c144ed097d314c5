"""What operators call: AdminService.

A servicer method decodes and checks a request, makes one call into control, engine, `conversations` or `warming`, and
encodes what comes back. Errors are translated by `rpc`, nowhere else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from orchestrator.block_names import BlockNames
from orchestrator.control import Control
from orchestrator.conversation import Session, SessionKey
from orchestrator.conversations import Conversations
from orchestrator.engine import Engine
from orchestrator.requests import RequestDecoder, session_id_of, tenant_of, warm_ttl_s
from orchestrator.server import decoded
from orchestrator.warming import KVPrompt, Warmer
from shoal import rpc
from shoal.kv import BLOCK_TOKENS
from shoal.types import WorkerId
from shoal.v1 import admin_pb2, admin_pb2_grpc


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(
        self,
        control: Control,
        engine: Engine,
        decoder: RequestDecoder,
        names: BlockNames,
        conversations: Conversations,
        warmer: Warmer,
    ) -> None:
        self._control = control
        self._engine = engine
        self._decoder = decoder
        self._names = names
        self._conversations = conversations
        self._warmer = warmer

    @rpc.unary
    async def GetStatus(  # noqa: N802 - servicer methods are named as in the proto
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        return self._control.status()

    @rpc.unary
    async def Explain(  # noqa: N802
        self, request: admin_pb2.ExplainRequest, context: Any
    ) -> admin_pb2.ExplainResponse:
        return self._engine.stories.find(request.request_id).to_proto()

    @rpc.unary
    async def Drain(  # noqa: N802
        self, request: admin_pb2.DrainRequest, context: Any
    ) -> admin_pb2.DrainResponse:
        drained = await self._control.relief.drain(WorkerId(request.worker_id))
        return admin_pb2.DrainResponse(
            moved=drained.moved.text, num_sequences=drained.moved.num_sequences, took_s=drained.took_s
        )

    @rpc.unary
    async def Cordon(  # noqa: N802
        self, request: admin_pb2.CordonRequest, context: Any
    ) -> admin_pb2.CordonResponse:
        self._control.relief.cordon(WorkerId(request.worker_id), request.is_cordoned)
        return admin_pb2.CordonResponse()

    @rpc.unary
    async def GetPlan(  # noqa: N802
        self, request: admin_pb2.GetPlanRequest, context: Any
    ) -> admin_pb2.GetPlanResponse:
        devices, status = self._control.measuring.planned_devices(), self._control.status()
        return admin_pb2.GetPlanResponse(devices=devices, pipelines=status.pipelines)

    @rpc.unary
    async def Warm(  # noqa: N802
        self, request: admin_pb2.WarmRequest, context: Any
    ) -> admin_pb2.WarmResponse:
        tenant, ttl_s = tenant_of(request.tenant), warm_ttl_s(request.ttl_s)
        token_ids = await decoded(partial(self._decoder.warm_token_ids, request), request)
        kept = token_ids[: len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS]
        if not kept:
            return admin_pb2.WarmResponse(prompt_tokens=len(token_ids))
        await self._control.wait_serving()
        if request.is_public:
            await self._names.make_public(kept)
        blocks = self._names.names(tenant, kept)
        # Computed also where all is believed to be there: the last block has to be, and what is found is certain then.
        sequence = await self._warmer.compute(KVPrompt(tenant, kept, blocks))
        if ttl_s:
            self._warmer.pin(blocks, ttl_s)
        return admin_pb2.WarmResponse(
            prompt_tokens=len(token_ids), kept_tokens=len(kept), cached_tokens=sequence.num_restored
        )

    @rpc.unary
    async def ListSessions(  # noqa: N802
        self, request: admin_pb2.ListSessionsRequest, context: Any
    ) -> admin_pb2.ListSessionsResponse:
        sessions = await self._conversations.sessions(tenant_of(request.tenant))
        now = self._conversations.now()
        return admin_pb2.ListSessionsResponse(sessions=[_session_status(session, now) for session in sessions])

    @rpc.unary
    async def DeleteSession(  # noqa: N802
        self, request: admin_pb2.DeleteSessionRequest, context: Any
    ) -> admin_pb2.DeleteSessionResponse:
        key = SessionKey(tenant_of(request.tenant), session_id_of(request.session_id))
        deletion = await self._conversations.delete(key)
        return admin_pb2.DeleteSessionResponse(
            num_blocks_deleted=deletion.num_deleted, num_blocks_shared=deletion.num_shared
        )


def _session_status(session: Session, now: float) -> admin_pb2.SessionStatus:
    return admin_pb2.SessionStatus(
        session_id=session.key.session_id,
        num_turns=session.num_turns,
        num_tokens=len(session.token_ids),
        kept_tokens=len(session.blocks) * BLOCK_TOKENS,
        idle_s=max(now - session.used_at, 0.0),
        expires_in_s=max(session.expires_at - now, 0.0),
    )
