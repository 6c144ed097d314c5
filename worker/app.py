"""The worker process: composes the agent from its configuration and runs it until told to stop."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

from shoal import process
from shoal.config import WorkerConfig
from shoal.types import DeviceProfile
from worker.agent import Agent


def run(config: WorkerConfig, profile: DeviceProfile, *, stop_on_stdin_eof: bool = False) -> int:
    """Run a worker until SIGTERM; returns the exit code."""
    worker_id = config.worker_id or f"{profile.name}-{socket.gethostname()}"
    if config.threads:
        profile = dataclasses.replace(profile, num_threads=config.threads)

    async def main(stopping: asyncio.Event) -> None:
        await Agent(config, profile, worker_id, config.home / "devices" / worker_id).run(stopping)

    return process.run(main, stop_on_stdin_eof=stop_on_stdin_eof)
