"""A real HTTP server on loopback that speaks OpenAI's streaming interface as it is told to, byte for byte.

Runs in a thread of its own. Each request gets the next script: chunks of an event stream, a pause until the client leaves, a
break of the connection, or a plain response. No model, no checks. Used by the tests of the load harness.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.support.server_thread import ServerThread


@dataclass(frozen=True, slots=True)
class Plain:
    """A response that is no stream."""

    status: int = 200
    body: bytes = b"{}"
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)


class Hang:
    """Wait until the client is gone."""


class Break:
    """Reset the connection in mid answer."""


HANG, BREAK = Hang(), Break()
Stream = Sequence[bytes | Hang | Break]
Script = Stream | Plain


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def token(text: str, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields})


def finish(reason: str = "length") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


def error(status: int, headers: tuple[tuple[str, str], ...] = (), **fields: Any) -> Plain:
    return Plain(status, json.dumps({"error": fields}).encode(), headers)


DONE = event(b"[DONE]")
ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
HELLO: Stream = (ROLE, token("Hel"), token("lo"), finish(), usage(3, 2), DONE)
MODELS = Plain(body=json.dumps({"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}).encode())


@dataclass(slots=True)
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any] = field(default_factory=dict)


class OpenAiServer:
    """Serves while its `with` block runs; the last script is played again and again."""

    def __init__(self, *scripts: Script, models: Plain = MODELS) -> None:
        self._scripts = list(scripts or (HELLO,))
        self._models = models
        self._thread = ServerThread(self._serving)
        self.base_url = ""
        self.requests: list[Asked] = []
        self.num_connections = 0
        self.is_hanging = threading.Event()
        self.is_released = threading.Event()

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.base_url = f"http://{host}:{port}/v1"
        yield
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                asked = await _read_request(reader)
                await self._answer(asked, reader, writer)
        writer.close()

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asked.path.endswith("/models"):
            script: Script = self._models
        else:
            self.requests.append(asked)
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        if isinstance(script, Plain):
            _write_plain(writer, script)
        else:
            await self._stream(script, reader, writer)
        await writer.drain()

    async def _stream(self, script: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for entry in script:
            if isinstance(entry, Hang):
                self.is_hanging.set()
                await reader.read()
                self.is_released.set()
                raise ConnectionResetError
            if isinstance(entry, Break):
                await writer.drain()
                raise ConnectionResetError
            writer.write(b"%x\r\n%s\r\n" % (len(entry), entry))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.stop()


async def _read_request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(first.split()[1], headers, json.loads(body) if body else {})


def _write_plain(writer: asyncio.StreamWriter, script: Plain) -> None:
    headers = (*script.headers, ("content-length", str(len(script.body))))
    lines = [f"HTTP/1.1 {script.status} Scripted", *(f"{name}: {value}" for name, value in headers)]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + script.body)
