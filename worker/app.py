"""The worker process: composes the agent from its configuration and runs it until told to stop."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

from shoal import process
from shoal.config import WorkerConfig
from shoal.types import DeviceMode, DeviceProfile
from worker.agent import Agent


def run(config: WorkerConfig, profile: DeviceProfile, *, stop_on_stdin_eof: bool = False) -> int:
    """Run a worker until SIGTERM; returns the exit code."""
    worker_id = config.worker_id or f"{profile.name}-{socket.gethostname()}"
    device = with_options(profile, config)

    async def main(stopping: asyncio.Event) -> None:
        await Agent(config, device, worker_id, config.home / "devices" / worker_id).run(stopping)

    return process.run(main, stop_on_stdin_eof=stop_on_stdin_eof)


def with_options(profile: DeviceProfile, config: WorkerConfig) -> DeviceProfile:
    """The profile with what the options say in place of its own threads and mode."""
    threads = config.threads or profile.num_threads
    return dataclasses.replace(
        profile, num_threads=threads, mode=DeviceMode(config.mode) if config.mode else profile.mode
    )
