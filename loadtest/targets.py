"""Who is asked: our own gRPC, or any HTTP server that speaks as OpenAI's completions do.

Owns the connections and turns what both say into the same events and the same errors (`shoal.errors`: their reasons are
what reports count). Knows no clock and no plan: `runner` asks, and stamps what comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from loadtest.answers import Arrival, End, Event
from loadtest.openai import UNREADABLE, StreamedAnswer, error_of_response
from loadtest.plan import PlannedRequest
from loadtest.sse import EventTooLong, SseParser
from shoal.client import AsyncClient
from shoal.errors import (
    ConfigError,
    ConnectionFailed,
    DeadlineExceeded,
    ProtocolMismatch,
    RequestCancelled,
    ShoalError,
)
from shoal.resumption import DEFAULT_RESUME_S
from shoal.types import FinishReason

if TYPE_CHECKING:
    import httpx

    from shoal.generation import GenerateOptions

INSTALL_HINT = "install what it needs with: pip install 'shoal[load]'"
# To connect, and for all that is no answer; an answer may take as long as the run.
CONNECT_S = 10.0
# For a server to end its response after it said [DONE]: only then can its connection serve again.
LINGER_S = 1.0


class Target(Protocol):
    """A server under load."""

    async def describe(self) -> str:
        """Make contact and say what is there, for a report; raises a ShoalError if nobody answers."""

    def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
        """Send a request; yield Arrivals and, last, one End. Raises ShoalErrors; closing it early ends the call."""

    async def close(self) -> None: ...


class ShoalTarget:
    """A Shoal orchestrator.

    is_chat: prompts go as the message of a chat; otherwise they are continued as they are. resume_s: how long it is tried
    to go on with a stream that broke off. One connection serves all calls: four in its place changed neither rates nor gaps
    at 32 streams on loopback, where reading a token costs this process some 0.15 ms.
    """

    def __init__(
        self, address: str, *, model: str = "", is_chat: bool = True, resume_s: float = DEFAULT_RESUME_S
    ) -> None:
        self._address = address
        self._model = model
        self._is_chat = is_chat
        self._client = AsyncClient(address, resume_s=resume_s)

    async def describe(self) -> str:
        try:
            async with asyncio.timeout(CONNECT_S):
                models = await self._client.list_models()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._address} does not answer") from None
        names = ", ".join(model.name for model in models) or "no model"
        return f"{self._model or names} at {self._address} (Shoal)"

    async def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
        prompt = None if self._is_chat else request.prompt
        messages = [{"role": "user", "content": request.prompt}] if self._is_chat else None
        async with self._client.stream(prompt, messages=messages, **self._options(request)) as stream:
            async for delta in stream:
                if delta.token_ids:
                    yield Arrival(len(delta.token_ids))
            answer = stream.result
        if answer.finish_reason is FinishReason.CANCELLED:
            raise RequestCancelled("the orchestrator ended the answer early")
        yield End(
            finish=answer.finish_reason.value,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            served_by=answer.pipeline_id,
            num_preemptions=answer.num_preemptions,
        )

    def _options(self, request: PlannedRequest) -> GenerateOptions:
        options: GenerateOptions = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            # Answers are as long as planned: a model that stops early would make runs differ.
            "ignore_eos": True,
            "qos_class": request.qos,
            "tenant": request.tenant,
        }
        if request.max_tokens_per_s > 0:
            options["max_tokens_per_s"] = request.max_tokens_per_s
        return options

    async def close(self) -> None:
        await self._client.close()


class OpenAiTarget:
    """A server with OpenAI's HTTP interface, such as vLLM, llama.cpp's or OpenAI's own.

    base_url: with the version, as in http://localhost:8000/v1; without any path, /v1 is added. model: "" takes the first
    that the server lists. Classes and pacing have no counterpart there and are not sent; a tenant goes as `user`.
    """

    def __init__(self, base_url: str, *, model: str = "", api_key: str = "", is_chat: bool = True) -> None:
        self._where = without_credentials(base_url)
        self._model = model
        self._is_chat = is_chat
        self._client = _http_client(_checked_url(base_url), api_key)

    async def describe(self) -> str:
        # Asked for also where the model is given: whoever is not there is found out now, and the first request of a run
        # does not pay for imports and a connection.
        with self._errors():
            response = await self._client.get("models", timeout=CONNECT_S)
        if not self._model:
            self._model = self._first_model(response)
        return f"{self._model} at {self._where} (OpenAI)"

    def _first_model(self, response: httpx.Response) -> str:
        if response.status_code != 200:
            raise _refusal(response, response.content)
        try:
            return str(response.json()["data"][0]["id"])
        except UNREADABLE:
            raise ProtocolMismatch(f"{self._where} lists no models; name one with --model") from None

    async def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
        path = "chat/completions" if self._is_chat else "completions"
        with self._errors():
            async with self._client.stream("POST", path, json=self._body(request)) as response:
                if response.status_code != 200:
                    raise _refusal(response, await response.aread())
                if response.headers.get("content-type", "").startswith("application/json"):
                    raise ProtocolMismatch(f"{self._where} does not stream its answers")
                async with aclosing(_data_of_events(response)) as chunks, aclosing(self._read(chunks)) as events:
                    async for event in events:
                        yield event

    async def _read(self, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[Event, None]:
        answer = StreamedAnswer(self._where)
        async for data in chunks:
            if data == "[DONE]":
                break
            num_tokens = answer.add(data)
            if num_tokens:
                yield Arrival(num_tokens)
        yield answer.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                async for _ in chunks:
                    pass

    def _body(self, request: PlannedRequest) -> dict[str, object]:
        text = (
            {"messages": [{"role": "user", "content": request.prompt}]} if self._is_chat else {"prompt": request.prompt}
        )
        tenant = {"user": request.tenant} if request.tenant else {}
        return {
            **text,
            **tenant,
            "model": self._model,
            "max_tokens": request.max_tokens,
            # Not OpenAI's, but vLLM and others keep to the planned length by it, and the rest ignore it.
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ConnectionFailed(f"nobody answers at {self._where}: {error or 'timeout'}") from None
        except httpx.TimeoutException:
            raise DeadlineExceeded(f"{self._where} did not answer in time") from None
        except httpx.HTTPError as error:
            detail = str(error) or type(error).__name__
            raise ConnectionFailed(f"the connection to {self._where} broke: {detail}") from None

    async def close(self) -> None:
        await self._client.aclose()


async def _data_of_events(response: httpx.Response) -> AsyncGenerator[str, None]:
    parser = SseParser()
    async for chunk in response.aiter_raw():
        try:
            events = parser.feed(chunk)
        except EventTooLong as error:
            raise ProtocolMismatch(str(error)) from None
        for event in events:
            yield event


def _http_client(base_url: str, api_key: str) -> httpx.AsyncClient:
    try:
        import httpx
    except ImportError:
        raise ConfigError(f"servers that speak HTTP are asked by httpx, which is not there; {INSTALL_HINT}") from None
    # Compression would hold tokens back until a block of them is full.
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        # A pool with a bound would make requests wait in this process.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        # A proxy for the web, set in the environment, is not meant for this machine.
        trust_env=urlsplit(base_url).hostname not in ("127.0.0.1", "localhost", "::1"),
    )


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_sound = False
    if not is_sound:
        raise ConfigError(f"{without_credentials(url)!r} is no address of a server, like http://host:8000/v1")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def without_credentials(url: str) -> str:
    """A URL as reports may show it: no user, no password, no query."""
    start, separator, rest = url.partition("://")
    address, slash, path = (rest if separator else start).partition("/")
    return f"{start + separator if separator else ''}{address.rpartition('@')[2]}{slash}{path}".split("?")[0]


def _refusal(response: httpx.Response, body: bytes) -> ShoalError:
    where = without_credentials(str(response.request.url))
    return error_of_response(response.status_code, response.headers.get("retry-after", ""), body, where)
