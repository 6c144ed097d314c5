"""Finds the orchestrator that a worker is to join where it was told to look for one on the local network.

Decides whom to join of those who answered, says what is looked for and found, and why there may be nobody. Looking itself is
`shoal.discovery`'s. Called by `worker.app`, before there is an agent: from then on the address stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from shoal import discovery
from shoal.discovery import LOOK_S, PLAINTEXT, SERVICE, Announced, Surroundings
from shoal.errors import ConfigError, ConnectionFailed, ProtocolMismatch
from shoal.types import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

# Between two looks; the last one again and again.
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
# Ports and names in a message: more are no help.
MAX_NAMED = 8


async def find(
    name: str,
    *,
    look: Callable[[], Awaitable[list[Announced]]] = discovery.look,
    reach: Callable[[Collection[str]], Awaitable[str | None]] = discovery.reachable,
    here: Callable[[], Surroundings] = discovery.surroundings,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> str:
    """Look until there is an orchestrator to join, and return its address. name: of the one that is meant; empty: any.

    Raises ConfigError if several could be meant or the library is missing, ProtocolMismatch if it is of another version.
    """
    attempt, told = 0, ""
    while True:
        seen = here()
        logger.log(
            logging.INFO if attempt == 0 else logging.DEBUG,
            "discovering service=%s name=%s look_s=%g on=%s", SERVICE, name or "any", LOOK_S, ",".join(seen.addresses),
        )  # fmt: skip
        found: list[Announced] = []
        try:
            found = await look()
            one = choose(found, name)
            address = None if one is None else await reach(one.addresses)
            why = why_nobody(found, name, seen) if one is None else why_unreachable(one)
        except ConnectionFailed as error:
            address, why = None, f"{error.message}; {_by_address()}"
        if address is not None and one is not None:
            logger.info("discovered name=%s address=%s model=%s", one.name, address, one.model)
            return address
        wait_s = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
        if why != told:
            logger.warning("found_nobody retry_s=%g message=%s", wait_s, why)
            told = why
        await pause(wait_s)
        attempt += 1


def choose(found: Sequence[Announced], name: str) -> Announced | None:
    """The one to join; None: there is none yet. Raises as `find`."""
    meant = [one for one in found if not name or one.name == name]
    able = [one for one in meant if one.protocol_version == PROTOCOL_VERSION and one.security == PLAINTEXT]
    if len(able) > 1:
        names = "; ".join(map(str, able[:MAX_NAMED]))
        raise ConfigError(
            f"{len(able)} orchestrators answer on this network: {names}. Say which: --join discover:{able[0].name}, or by "
            "address: --join HOST:PORT",
            field="join",
        )
    if meant and not able:
        one = meant[0]
        if one.security != PLAINTEXT:
            raise ProtocolMismatch(
                f"{one} wants connections secured by {one.security!r}, which this worker does not know"
            )
        raise ProtocolMismatch(
            f"{one} speaks protocol version {one.protocol_version}, this worker {PROTOCOL_VERSION}: update the older one"
        )
    return able[0] if able else None


def why_nobody(found: Sequence[Announced], name: str, here: Surroundings) -> str:
    """What is known of the reason that there is nobody to join, and what to do."""
    if found:
        others = "; ".join(map(str, found[:MAX_NAMED]))
        return f"no orchestrator named {name} answers on this network, but these do: {others}"
    reasons = []
    if here.is_cut_off:
        reasons.append("this machine has no network interface but loopback, so it can find only its own orchestrators")
    if here.is_container:
        reasons.append(
            "this worker runs in a container, which multicast does not leave or enter unless it shares the host's network"
        )
    reasons += [
        "perhaps none runs with --discoverable and a --host of this network (0.0.0.0)",
        "a firewall may drop UDP port 5353, here or there",
        "it may be in another subnet or a guest network: multicast stays within one",
        "the access point or switch may not pass multicast on between devices",
    ]
    return (
        f"no orchestrator answered within {LOOK_S:g} s to multicast DNS for {SERVICE} on "
        f"{', '.join(here.addresses) or 'no interface'}: {'; '.join(reasons)}; {_by_address()}"
    )


def why_unreachable(one: Announced) -> str:
    return (
        f"{one} tells of itself, but nobody answers there: a firewall may drop its TCP port, or it listens on another "
        f"network (its --host); {_by_address()}"
    )


def _by_address() -> str:
    return "joining by address needs no discovery: --join HOST:PORT"
