"""The orchestrator process: composes store, tokenizer, engine, control and servicers, and serves until told to stop."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from orchestrator.admin import AdminServicer
from orchestrator.block_names import BlockNames, load_secret
from orchestrator.catalogue import Catalogue
from orchestrator.control import Control
from orchestrator.conversations import Conversations
from orchestrator.cordons import CordonFile
from orchestrator.core.sequence import QosTargets
from orchestrator.core.tenants import TenantLedger, parse_weights
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.journal import Journal, name_of
from orchestrator.likely_prefixes import LikelyPrefixes
from orchestrator.membership import FleetServicer
from orchestrator.requests import RequestDecoder
from orchestrator.served import ServedRequests
from orchestrator.server import InferenceServicer, drain
from orchestrator.session_homes import FileHome, RedisHome
from orchestrator.sessions import SessionStore
from orchestrator.template_process import TemplateProcess
from orchestrator.tokenizer import Tokenizer
from orchestrator.trails import Trails
from orchestrator.typed_ahead import TypedAhead
from orchestrator.warming import Warmer
from shoal import discovery, process, rpc
from shoal.config import OrchestratorConfig
from shoal.errors import ConnectionFailed
from shoal.redis_link import AsyncRedisLink
from shoal.types import QosClass
from shoal.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    flow_pb2,
    flow_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)

logger = logging.getLogger(__name__)

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (inference_pb2, "InferenceService"),
        (admin_pb2, "AdminService"),
        (fleet_pb2, "FleetService"),
        (flow_pb2, "FlowService"),
    )
)
# The services a client waits for; the others answer from the start.
SERVING_WHEN_READY = ("", SERVICES[0])
# How long calls that still run get to hear of their end.
CLOSE_S = 1.0
# What a Redis that is there takes to answer for the first time.
CONNECT_S = 1.0
# In the home folder: who has it can compute the names of every tenant's blocks.
SECRET_FILE = "kv_secret"
SESSIONS_FILE = "sessions.sqlite"
# Of an address, as what is in Redis for the next orchestrator: a home may have several.
CORDONS_FILE = "cordoned-{port}.json"


def run(config: OrchestratorConfig, *, stop_on_stdin_eof: bool = False) -> int:
    """Run an orchestrator until SIGTERM; returns the exit code."""

    async def main(stopping: asyncio.Event) -> None:
        await Orchestrator(config).run(stopping)

    return process.run(main, stop_on_stdin_eof=stop_on_stdin_eof)


class Orchestrator:
    """All parts of one orchestrator."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        if config.discoverable:
            discovery.require()
        home = Path(config.home)
        self._store = ModelStore(home)
        # Ends with this object, or with the process.
        self._serving = ExitStack()
        manifest = self._serving.enter_context(self._store.serving(config.model))
        self._engine = Engine(TenantLedger(parse_weights(config.tenant_weights)))
        self._hub = FlowHub(
            self._engine.on_frame, lambda worker_id, message: self._control.link_lost(worker_id, message)
        )
        self._planning = ThreadPoolExecutor(1, "planning")
        # A port that is drawn anew has no next orchestrator.
        cordons = CordonFile(home / CORDONS_FILE.format(port=config.port)) if config.port else None
        self._control = Control(
            config, manifest, self._hub, self._engine, self._set_serving, self._planning,
            cordons.read() if cordons else (), cordons.write if cordons else lambda _: None,
        )  # fmt: skip
        self._membership = FleetServicer(self._control, self._hub, manifest, self._store, config.heartbeat_s)
        self._health = HealthServicer()
        self._manifest: Manifest = manifest
        self._link = AsyncRedisLink(config.redis_url) if config.redis_url else None
        self._secret = load_secret(home / SECRET_FILE)
        self._names = BlockNames(manifest.digest, self._secret, self._link)
        self._catalogue = Catalogue(self._link, manifest.config.num_layers)
        self._trails = Trails(self._link)
        self._templates = TemplateProcess()
        self._warmer = Warmer(self._engine)
        likely = LikelyPrefixes()
        self._typed_ahead = TypedAhead(self._engine, self._catalogue, likely)
        self._session_file = FileHome(home / SESSIONS_FILE)
        in_redis = RedisHome(self._link) if self._link is not None else None
        sessions = SessionStore(self._session_file, in_redis, manifest.digest, config.session_ttl_s)
        self._conversations = Conversations(sessions, self._names, self._catalogue, self._engine, self._warmer, likely)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then drain. Raises ConnectionFailed if the port is taken."""
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        port = self._bind(server)
        journal, served = self._make_served(port)
        inference = self._add_services(server, served)
        if self._config.use_sockets:
            self._membership.socket_port = await self._hub.listen(self._config.host)
        await self._open_link(served)
        await server.start()
        watches = (self._control.watch, self._conversations.watch, served.watch, partial(self._announce, port))
        watching = {asyncio.create_task(watch()) for watch in watches}
        logger.info("listening address=%s:%d model=%s", self._config.host, port, self._manifest.name)
        stop = asyncio.create_task(stopping.wait())
        try:
            ended, _ = await asyncio.wait({stop, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in ended & watching:
                task.result()
            await self._set_serving(False)
            await self._warmer.stop()
            is_drained = await drain(inference, self._engine, self._config.drain_s)
            logger.info("draining_ended is_drained=%s", is_drained)
        finally:
            for task in (stop, *watching):
                task.cancel()
            # What told the network of us tells it that we go.
            await asyncio.wait(watching, timeout=CLOSE_S)
            served.close()
            self._control.stop()
            self._planning.shutdown(wait=False, cancel_futures=True)
            await server.stop(CLOSE_S)
            # Nobody asks for one any more.
            self._templates.close()
            await journal.stop()
            await self._trails.stop()
            await self._conversations.stop()
            await self._session_file.close()
            await self._typed_ahead.stop()
            if self._link is not None:
                await self._link.close()
            await self._hub.stop()
            self._serving.close()

    async def _announce(self, port: int) -> None:
        if self._config.discoverable:
            await discovery.announce(self._config.host, port, self._manifest.name)
        await asyncio.Event().wait()

    async def _open_link(self, served: ServedRequests) -> None:
        """Give Redis a moment to be there for the first request; without it, all goes on."""
        is_away = self._link is not None and not await self._link.connect(CONNECT_S)
        await self._conversations.tend(is_expiring=False)
        if not is_away:
            await served.load()

    def _make_served(self, port: int) -> tuple[Journal, ServedRequests]:
        """By the port that the next orchestrator is to have too, for it to find what this one leaves."""
        name = name_of(self._secret, f"{self._config.host}:{port}", self._manifest.digest)
        journal = Journal(self._link, name)
        return journal, ServedRequests(self._engine, journal, self._conversations, self._names, self._trails)

    def _bind(self, server: grpc.aio.Server) -> int:
        address = f"{self._config.host}:{self._config.port}"
        try:
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConnectionFailed(
                f"cannot listen on {address}: it is taken or not ours; choose another --port"
            ) from error

    def _add_services(self, server: grpc.aio.Server, served: ServedRequests) -> InferenceServicer:
        tokenizer = Tokenizer(self._manifest.tokenizer, self._templates.run)
        targets = QosTargets(ttft_s=self._config.ttft_ms / 1e3, inter_token_s=self._config.inter_token_ms / 1e3)
        decoder = RequestDecoder(self._manifest, tokenizer, self._names, QosClass(self._config.qos), targets)
        inference = InferenceServicer(
            self._manifest, tokenizer, decoder, self._engine, self._control,
            self._catalogue, self._conversations, self._warmer, self._typed_ahead, served,
        )  # fmt: skip
        admin = AdminServicer(self._control, self._engine, decoder, self._names, self._conversations, self._warmer)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self._membership, server)
        flow_pb2_grpc.add_FlowServiceServicer_to_server(self._hub, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return inference

    async def _set_serving(self, is_serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for service in SERVING_WHEN_READY:
            await self._health.set(service, states.SERVING if is_serving else states.NOT_SERVING)
        for service in SERVICES[1:]:
            await self._health.set(service, states.SERVING)
