"""The worker process: composes the agent from its configuration and runs it until told to stop."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

from shoal import process
from shoal.config import WorkerConfig
from shoal.types import DeviceMode, DeviceProfile
from worker.agent import Agent
from worker.kv.redis_tier import RedisTier


def run(config: WorkerConfig, profile: DeviceProfile, *, stop_on_stdin_eof: bool = False) -> int:
    """Run a worker until SIGTERM; returns the exit code."""
    worker_id = config.worker_id or f"{profile.name}-{socket.gethostname()}"
    device = with_options(profile, config)

    async def main(stopping: asyncio.Event) -> None:
        home = config.home / "devices" / worker_id
        await Agent(config, device, worker_id, home, lower=lower_tier(config, device)).run(stopping)

    return process.run(main, stop_on_stdin_eof=stop_on_stdin_eof)


def lower_tier(config: WorkerConfig, profile: DeviceProfile) -> RedisTier | None:
    """Where KV blocks are kept below memory; None for a device that keeps none, or has no Redis."""
    if not config.redis_url or not profile.host_kv_bytes:
        return None
    return RedisTier(config.redis_url, profile.link if profile.is_emulated else None)


def with_options(profile: DeviceProfile, config: WorkerConfig) -> DeviceProfile:
    """The profile with what the options say in place of its own threads and mode."""
    threads = config.threads or profile.num_threads
    return dataclasses.replace(
        profile, num_threads=threads, mode=DeviceMode(config.mode) if config.mode else profile.mode
    )
