"""Telling and looking with the real library, over multicast on loopback alone.

Others may tell of themselves there at the same time, so each test looks for its own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest

from shoal import discovery
from shoal.discovery import SERVICE, Announced, Surroundings
from shoal.errors import ConfigError, ConnectionFailed
from shoal.types import PROTOCOL_VERSION

LOOPBACK = ("127.0.0.1",)


@pytest.fixture
def port() -> Iterator[int]:
    """Of somebody who listens, and so of nobody else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


async def look_for(port: int) -> list[Announced]:
    """All that are at a port; asks again if none is: what was just told is not told again within a second."""
    for _ in range(5):
        found = [one for one in await discovery.look(1.5, LOOPBACK) if one.addresses == (f"127.0.0.1:{port}",)]
        if found:
            return found
    return []


async def test_who_looks_finds_name_address_model_and_version_of_who_tells(port: int) -> None:
    async with discovery.announced(LOOPBACK, port, "smollm2-135m") as told:
        assert await look_for(port) == [told]
    assert told.addresses == (f"127.0.0.1:{port}",)
    assert told.model == "smollm2-135m"
    assert told.protocol_version == PROTOCOL_VERSION
    assert told.name.endswith(f"-{port}")


async def test_who_goes_says_so_to_those_who_look(port: int) -> None:
    async with discovery.announced(LOOPBACK, port, "m") as told:
        looking = asyncio.create_task(discovery.look(4.0, LOOPBACK))
        assert await look_for(port)
    assert told not in await looking


async def test_what_strangers_say_is_taken_for_text_and_no_more(port: int) -> None:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

    link = AsyncZeroconf(interfaces=list(LOOPBACK))
    info = AsyncServiceInfo(
        SERVICE, f"\u202ered-{port}.{SERVICE}", port, addresses=[socket.inet_aton("127.0.0.1")],
        properties={b"model": b"\xff\x1b[2J", b"protocol": b"many", b"security": None},
    )  # fmt: skip
    await (await link.async_register_service(info))
    try:
        [found] = await look_for(port)
    finally:
        await link.async_unregister_all_services()
        await link.async_close()
    assert found.name == f"?red-{port}"
    assert "\x1b" not in found.model
    assert found.protocol_version == 0


async def test_the_first_address_where_somebody_listens_is_reachable(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    assert await discovery.reachable([nobody, f"127.0.0.1:{port}"]) == f"127.0.0.1:{port}"
    assert await discovery.reachable([nobody]) is None
    assert await discovery.reachable([]) is None


# Of the library, which leaves a socket open where it fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_interface_that_is_not_there_is_a_failure_that_says_which() -> None:
    with pytest.raises(ConnectionFailed, match=r"203\.0\.113\.1"):
        await discovery.look(0.0, ["203.0.113.1"])


async def test_an_orchestrator_that_listens_on_loopback_tells_that_others_cannot_join(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shoal.discovery"):
        telling = asyncio.create_task(discovery.announce("127.0.0.1", port, "m"))
        assert await look_for(port)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    assert any("devices elsewhere need --host 0.0.0.0" in record.getMessage() for record in caplog.records)


def test_a_listener_on_all_addresses_is_told_by_those_that_lead_outward() -> None:
    here = Surroundings(("127.0.0.1", "192.168.1.7", "10.0.0.2"), is_container=False)
    assert discovery.addresses_of("0.0.0.0", here) == ("192.168.1.7", "10.0.0.2")
    assert discovery.addresses_of("0.0.0.0", Surroundings(("127.0.0.1",), False)) == ("127.0.0.1",)
    assert discovery.addresses_of("127.0.0.1", here) == ("127.0.0.1",)
    with pytest.raises(ConfigError, match="has no IPv4 address"):
        discovery.addresses_of("::1", here)
