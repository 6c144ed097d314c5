"""Finding each other on the local network: an orchestrator tells of itself by multicast DNS, and workers look for it.

The only importer of zeroconf, which comes with shoal[discovery] and is imported where it is used. It knows names and
addresses; whom to join is for `worker.joining` to decide. Nobody proves who he is: a name is no more than a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from shoal.config import DISCOVER
from shoal.errors import ConfigError, ConnectionFailed
from shoal.types import PROTOCOL_VERSION

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

logger = logging.getLogger(__name__)

SERVICE = "_shoal._tcp.local."
# How long answers are waited for: they come within a second, or are asked for again after one.
LOOK_S = 3.0
RESOLVE_MS = 1000
# A network answers faster; a firewall that drops never does.
CONNECT_S = 1.0
# All there is as yet; a worker joins no orchestrator that wants more.
PLAINTEXT = "plaintext"
ANY_HOST = ("0.0.0.0", "::")
# What container engines leave in the root of a container.
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
# A DNS label has no more.
MAX_NAME_BYTES = 63
# Of one orchestrator; each is tried.
MAX_ADDRESSES = 16


@dataclass(frozen=True, slots=True)
class Announced:
    """An orchestrator that told of itself. addresses: HOST:PORT. protocol_version: 0 if it said none."""

    name: str
    addresses: tuple[str, ...]
    model: str = ""
    protocol_version: int = PROTOCOL_VERSION
    security: str = PLAINTEXT

    def __str__(self) -> str:
        return f"{self.name} at {', '.join(self.addresses) or 'no address'}" + (
            f" ({self.model})" if self.model else ""
        )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where somebody looked. addresses: of this machine's interfaces, IPv4."""

    addresses: tuple[str, ...]
    is_container: bool

    @property
    def is_cut_off(self) -> bool:
        return all(ip_address(one).is_loopback for one in self.addresses)


def require() -> None:
    """Raise ConfigError where the library is not installed."""
    try:
        import zeroconf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"discovery on the network is not installed ({error}); install it with: pip install 'shoal[discovery]', or join "
            "by address: --join HOST:PORT",
            field=DISCOVER,
        ) from None


def surroundings() -> Surroundings:
    """Look at this machine."""
    is_up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    addresses = (
        item.address
        for name, items in psutil.net_if_addrs().items()
        for item in items
        if name in is_up and item.family is socket.AF_INET
    )
    return Surroundings(tuple(addresses), any(Path(mark).exists() for mark in CONTAINER_MARKS))


def addresses_of(host: str, here: Surroundings) -> tuple[str, ...]:
    """Under which addresses others reach a listener on a host. Raises ConfigError for one that has no IPv4 address."""
    if host in ANY_HOST:
        outward = tuple(one for one in here.addresses if not ip_address(one).is_loopback)
        return outward or here.addresses
    try:
        return tuple({item[4][0]: None for item in socket.getaddrinfo(host, None, socket.AF_INET)})  # type: ignore[misc]
    except OSError as error:
        raise ConfigError(
            f"host = {host!r} has no IPv4 address ({error.strerror}), and discovery tells of those alone; use 0.0.0.0",
            field="host",
        ) from None


async def announce(host: str, port: int, model: str) -> None:
    """Tell of the orchestrator at host and port until cancelled. Where that cannot be, says so in the log and returns."""
    try:
        addresses = addresses_of(host, surroundings())
        if all(ip_address(one).is_loopback for one in addresses):
            logger.warning("discoverable_here_only host=%s message=devices elsewhere need --host 0.0.0.0 here", host)
        async with announced(addresses, port, model) as told:
            logger.info("discoverable name=%s service=%s addresses=%s", told.name, SERVICE, ",".join(told.addresses))
            await asyncio.Event().wait()
    except (ConfigError, ConnectionFailed) as error:
        logger.error("not_discoverable message=%s; workers can join by address", error.message)


@contextlib.asynccontextmanager
async def announced(addresses: Iterable[str], port: int, model: str) -> AsyncIterator[Announced]:
    """Tell of an orchestrator as long as this context lasts, on the interfaces that have these addresses.

    A name that is taken gets a number. Raises ConfigError without the library, ConnectionFailed without multicast.
    """
    require()
    from zeroconf.asyncio import AsyncServiceInfo

    hosts = tuple(addresses)
    label = f"{socket.gethostname().partition('.')[0][:40] or 'shoal'}-{port}"
    properties = {"protocol": str(PROTOCOL_VERSION), "model": model, "security": PLAINTEXT}
    async with _zeroconf(hosts) as link:
        info = AsyncServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port,
            addresses=[socket.inet_aton(one) for one in hosts],
            properties=properties,
        )
        await (await link.async_register_service(info, allow_name_change=True))
        try:
            yield Announced(_name_of(info.name), tuple(f"{one}:{port}" for one in hosts), model)
        finally:
            await link.async_unregister_all_services()


async def look(seconds: float = LOOK_S, interfaces: Iterable[str] = ()) -> list[Announced]:
    """Ask for orchestrators and wait so long for answers. interfaces: by address; none: all of this machine.

    Raises ConfigError without the library, ConnectionFailed without multicast.
    """
    require()
    from zeroconf import DNSQuestionType, ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

    names: set[str] = set()

    def on_change(*, name: str, state_change: ServiceStateChange, **_: object) -> None:
        (names.discard if state_change is ServiceStateChange.Removed else names.add)(name)

    async with _zeroconf(tuple(interfaces) or surroundings().addresses) as link:
        # Answers for all: one for us alone would reach only one of those who share the port on this machine.
        ask = DNSQuestionType.QM
        browser = AsyncServiceBrowser(link.zeroconf, [SERVICE], handlers=[on_change], question_type=ask)
        try:
            await asyncio.sleep(seconds)
        finally:
            await browser.async_cancel()
        infos = [AsyncServiceInfo(SERVICE, name) for name in sorted(names)]
        are_known = await asyncio.gather(*(info.async_request(link.zeroconf, RESOLVE_MS, ask) for info in infos))
        return [_to_announced(info) for info, is_known in zip(infos, are_known, strict=True) if is_known]


async def reachable(addresses: Iterable[str]) -> str | None:
    """The first of the addresses where somebody listens; None: nobody does, as far as can be seen from here."""
    known = tuple(addresses)
    are_open = await asyncio.gather(*map(_is_open, known))
    return next((address for address, is_open in zip(known, are_open, strict=True) if is_open), None)


async def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True


@contextlib.asynccontextmanager
async def _zeroconf(addresses: tuple[str, ...]) -> AsyncIterator[AsyncZeroconf]:
    """What speaks multicast DNS on the interfaces with these addresses."""
    from zeroconf import Error, IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    where = ", ".join(addresses) or "no interface"
    try:
        link = AsyncZeroconf(interfaces=list(addresses), ip_version=IPVersion.V4Only)
    except (OSError, Error) as error:
        raise ConnectionFailed(f"multicast DNS (UDP port 5353) cannot be used on {where}: {error}") from error
    try:
        yield link
    except Error as error:
        raise ConnectionFailed(f"multicast DNS on {where} failed: {type(error).__name__} {error}") from error
    finally:
        await link.async_close()


def _to_announced(info: AsyncServiceInfo) -> Announced:
    """What a service says of itself, whoever it is."""
    from zeroconf import IPVersion

    said = {key: _printable(value or "") for key, value in info.decoded_properties.items()}
    version = said.get("protocol", "")
    addresses = info.parsed_addresses(IPVersion.V4Only)[:MAX_ADDRESSES]
    return Announced(
        name=_name_of(info.name),
        addresses=tuple(f"{one}:{info.port}" for one in addresses if info.port),
        model=said.get("model", ""),
        protocol_version=int(version) if version.isascii() and version.isdigit() else 0,
        security=said.get("security", PLAINTEXT),
    )


def _name_of(full_name: str) -> str:
    return _printable(full_name.removesuffix(f".{SERVICE}"))


def _printable(text: str) -> str:
    """It goes into logs and terminals."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_NAME_BYTES])
