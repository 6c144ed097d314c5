"""What `shoal status` shows of devices and pipeline, as messages.

Reads fleet members, the engine and its pipeline; changes nothing. Called by `control`.
"""

from __future__ import annotations

import time

from orchestrator.core.fleet import Member
from orchestrator.engine import Engine
from shoal import rpc
from shoal.v1 import admin_pb2, fleet_pb2


def pipeline_status(engine: Engine) -> admin_pb2.PipelineStatus | None:
    """Slots, KV and rates of the pipeline that serves; None if none does."""
    pipeline, scheduler, now = engine.pipeline, engine.scheduler, time.monotonic()
    if pipeline is None or scheduler is None:
        return None
    return admin_pb2.PipelineStatus(
        pipeline_id=pipeline.pipeline_id,
        epoch=pipeline.epoch,
        num_slots=pipeline.limits.num_slots,
        used_slots=scheduler.used_slots,
        kv_tokens=pipeline.limits.kv_tokens,
        used_kv_tokens=scheduler.used_kv_tokens,
        context_tokens=pipeline.limits.context_tokens,
        decode_tokens_per_s=engine.decode_rate.per_second(now),
        prefill_tokens_per_s=engine.prefill_rate.per_second(now),
        hop_ms=pipeline.hop_ms(),
        completion_tokens_total=engine.decode_rate.total,
        prompt_tokens_total=engine.prefill_rate.total,
    )


def device_status(
    member: Member, hello: fleet_pb2.Hello, link_to_next: str, execution_provider: str, engine: Engine
) -> admin_pb2.DeviceStatus:
    """A worker: what it said of itself, what it holds, and how it does."""
    decode_ms = 0.0
    if engine.pipeline is not None and member.stage is not None:
        decode_ms = engine.pipeline.stage_ms(member.stage)
    return admin_pb2.DeviceStatus(
        worker_id=member.worker_id,
        profile=hello.profile,
        runtime=hello.runtime,
        state=member.state.value,
        layers=rpc.layers_to_proto(member.layers),
        telemetry=rpc.telemetry_to_proto(member.telemetry),
        link_to_next=link_to_next,
        execution_provider=execution_provider,
        decode_ms=decode_ms,
    )
