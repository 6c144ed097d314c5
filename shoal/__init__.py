"""What orchestrator and workers agree on, and the client SDK.

`from shoal import Client, AsyncClient` works; a process that needs neither does not pay for importing them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from shoal import client

    return getattr(client, name)
