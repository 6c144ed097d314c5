"""The worker process: composes the agent from its configuration and runs it until told to stop."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from functools import partial

from shoal import process
from shoal.config import WorkerConfig, parse_link
from shoal.errors import ConfigError
from shoal.types import DeviceMode, DeviceProfile
from worker import joining
from worker.agent import Agent
from worker.kv.redis_tier import RedisTier


def run(
    config: WorkerConfig, profile: DeviceProfile, *, stop_on_stdin_eof: bool = False, linger_s: float | None = None
) -> int:
    """Run a worker until SIGTERM; returns the exit code.

    linger_s: once its standard input has ended it goes on, until it has been without an orchestrator for so long.
    """
    worker_id = config.worker_id or f"{profile.name}-{socket.gethostname()}"
    device = with_options(profile, config)

    async def main(stopping: asyncio.Event) -> None:
        home = config.home / "devices" / worker_id
        joined = await join_of(config, stopping)
        if joined is None:
            return
        agent = Agent(joined, device, worker_id, home, lower=lower_tier(config, device))
        if linger_s is not None:
            process.when_stdin_ends(partial(agent.abandon, linger_s))
        await agent.run(stopping)

    return process.run(main, stop_on_stdin_eof=stop_on_stdin_eof)


async def join_of(config: WorkerConfig, stopping: asyncio.Event) -> WorkerConfig | None:
    """The configuration with the address of the orchestrator, once it is found; None: told to stop before."""
    if config.discovers is None:
        return config
    finding, stop = asyncio.create_task(joining.find(config.discovers)), asyncio.create_task(stopping.wait())
    await asyncio.wait({finding, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not finding.done():
        finding.cancel()
        await asyncio.gather(finding, return_exceptions=True)
        return None
    return dataclasses.replace(config, join=finding.result())


def lower_tier(config: WorkerConfig, profile: DeviceProfile) -> RedisTier | None:
    """Where KV blocks are kept below memory; None for a device that keeps none, or has no Redis."""
    if not config.redis_url or not profile.host_kv_bytes:
        return None
    return RedisTier(config.redis_url, profile.link if profile.is_emulated else None)


def with_options(profile: DeviceProfile, config: WorkerConfig) -> DeviceProfile:
    """The profile with what the options say in place of its own threads, mode and link.

    Raises ConfigError for the link of a device that is not emulated: it has its own.
    """
    link = parse_link(config.link) or profile.link
    if config.link and not profile.is_emulated:
        raise ConfigError(f"link = {config.link!r} cannot be set: {profile.name} is not emulated", field="link")
    mode = DeviceMode(config.mode) if config.mode else profile.mode
    return dataclasses.replace(profile, num_threads=config.threads or profile.num_threads, mode=mode, link=link)
