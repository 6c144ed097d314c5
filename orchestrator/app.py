"""The orchestrator process: composes store, tokenizer, engine, control and servicers, and serves until told to stop."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from orchestrator.control import Control
from orchestrator.core.sequence import QosTargets
from orchestrator.core.tenants import TenantLedger, parse_weights
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.membership import FleetServicer
from orchestrator.server import AdminServicer, InferenceServicer, ServingOptions, drain
from orchestrator.tokenizer import Tokenizer
from shoal import process, rpc
from shoal.config import OrchestratorConfig
from shoal.errors import ConnectionFailed
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


def run(config: OrchestratorConfig, *, stop_on_stdin_eof: bool = False) -> int:
    """Run an orchestrator until SIGTERM; returns the exit code."""

    async def main(stopping: asyncio.Event) -> None:
        await Orchestrator(config).run(stopping)

    return process.run(main, stop_on_stdin_eof=stop_on_stdin_eof)


class Orchestrator:
    """All parts of one orchestrator."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        self._store = ModelStore(Path(config.home))
        manifest = self._store.open(config.model)
        self._engine = Engine(TenantLedger(parse_weights(config.tenant_weights)))
        self._hub = FlowHub(
            self._engine.on_frame, lambda worker_id, message: self._control.link_lost(worker_id, message)
        )
        self._control = Control(config, manifest, self._hub, self._engine, self._set_serving)
        self._membership = FleetServicer(self._control, self._hub, manifest, self._store, config.heartbeat_s)
        self._health = HealthServicer()
        self._manifest: Manifest = manifest

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then drain. Raises ConnectionFailed if the port is taken."""
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        inference = InferenceServicer(
            self._manifest, Tokenizer(self._manifest.tokenizer), self._engine, self._control, _options(self._config)
        )
        self._add_services(server, inference)
        port = self._bind(server)
        if self._config.use_sockets:
            self._membership.socket_port = await self._hub.listen(self._config.host)
        await server.start()
        watching = asyncio.create_task(self._control.watch())
        logger.info("listening address=%s:%d model=%s", self._config.host, port, self._manifest.name)
        stop = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait({stop, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await self._set_serving(False)
            is_drained = await drain(inference, self._engine, self._config.drain_s)
            logger.info("draining_ended is_drained=%s", is_drained)
        finally:
            stop.cancel()
            watching.cancel()
            self._control.stop()
            await server.stop(CLOSE_S)
            await self._hub.stop()

    def _bind(self, server: grpc.aio.Server) -> int:
        address = f"{self._config.host}:{self._config.port}"
        try:
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConnectionFailed(
                f"cannot listen on {address}: it is taken or not ours; choose another --port"
            ) from error

    def _add_services(self, server: grpc.aio.Server, inference: InferenceServicer) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self._control, self._engine), server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self._membership, server)
        flow_pb2_grpc.add_FlowServiceServicer_to_server(self._hub, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def _set_serving(self, is_serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for service in SERVING_WHEN_READY:
            await self._health.set(service, states.SERVING if is_serving else states.NOT_SERVING)
        for service in SERVICES[1:]:
            await self._health.set(service, states.SERVING)


def _options(config: OrchestratorConfig) -> ServingOptions:
    targets = QosTargets(ttft_s=config.ttft_ms / 1e3, inter_token_s=config.inter_token_ms / 1e3)
    return ServingOptions(default_qos=QosClass(config.qos), balanced_targets=targets)
