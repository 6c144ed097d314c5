"""Asks an orchestrator for one answer after another, in the process of the batch or wherever it was sent.

Knows the SDK and what holds for lines that do not say; not who wants the answers. Made by `shoal batch`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from batch.prompts import Prompt
from shoal.client import AsyncClient
from shoal.generation import Generation


class Asker:
    """Has one connection, for the event loop of its first question. defaults: of lines that do not say, as the SDK's."""

    def __init__(self, server: str, defaults: Mapping[str, Any]) -> None:
        self._client = AsyncClient(server)
        self._defaults = defaults

    async def ask(self, prompt: Prompt) -> Generation:
        return await self._client.generate(
            prompt.text, messages=prompt.messages, **{**self._defaults, **prompt.options}
        )

    async def close(self) -> None:
        await self._client.close()


def asking(server: str, defaults: Mapping[str, Any]) -> Callable[[Prompt], Awaitable[Generation]]:
    """An asker's function, for whoever sends this one somewhere and needs no more."""
    return Asker(server, defaults).ask
