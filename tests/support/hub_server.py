"""A Hugging Face hub on loopback: what the tests of pulling from one ask.

Serves one repository at one commit: its description, and its files in ranges. Can be told to gate it, to cut connections,
to answer with an error status, to send other bytes than announced, and notes what was asked for. The hub's own client
talks to it as to any hub.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY, COMMIT = "fish/tiny", "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_tests"


@dataclass(slots=True)
class HubState:
    """What the hub serves and how badly. asked: the method, file and Range header of each request for a file.

    token: that must be shown, if any; gate: also by those who accepted terms. cut_after_bytes: each next answer with a
    file's bytes ends after so many. status: of all answers, if not 200. announced: digests to tell in place of the true.
    """

    files: dict[str, bytes]
    url: str = ""
    commit: str = COMMIT
    token: str = ""
    is_gated: bool = False
    status: int = 200
    license: str | None = "apache-2.0"
    cut_after_bytes: list[int] = field(default_factory=list)
    announced: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def fetched(self) -> list[str]:
        """The files whose bytes were asked for, in order."""
        return [file for method, file, _ in self.asked if method == "GET"]

    def ranges_of(self, file: str) -> list[str]:
        return [asked for method, name, asked in self.asked if method == "GET" and name == file]

    def sha256_of(self, name: str) -> str:
        return self.announced.get(name) or hashlib.sha256(self.files[name]).hexdigest()


@contextmanager
def serve_hub(files: dict[str, bytes]) -> Iterator[HubState]:
    """Run a hub on a free port of loopback until the block ends."""
    state = HubState(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    state: HubState

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        else:
            self._send_file(path.removeprefix("/"))

    def do_HEAD(self) -> None:
        self._send_file(unquote(urlsplit(self.path).path).removeprefix("/"))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the test output clean."""

    def _describe(self, path: str) -> None:
        """Source: huggingface_hub's HfApi.model_info, which asks this."""
        repository, _, revision = path.partition("/revision/")
        if self._is_refused(repository) or (revision and self._is_unknown(revision)):
            return
        state = self.state
        siblings = [self._sibling(name, len(content)) for name, content in state.files.items()]
        card = {"license": state.license} if state.license else None
        fields = {"id": REPOSITORY, "sha": state.commit, "siblings": siblings, "cardData": card, "private": False}
        self._send(200, json.dumps(fields).encode(), {"Content-Type": "application/json"})

    def _sibling(self, name: str, size: int) -> dict[str, object]:
        lfs = {"sha256": self.state.sha256_of(name), "size": size, "pointerSize": 130}
        return {"rfilename": name, "size": size, "lfs": lfs}

    def _send_file(self, path: str) -> None:
        repository, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        asked = self.headers.get("Range", "")
        self.state.asked.append((self.command, name, asked))
        if self._is_refused(repository) or self._is_unknown(revision):
            return
        if name not in self.state.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = self.state.files[name]
        match = re.fullmatch(r"bytes=(\d+)-", asked)
        start = int(match[1]) if match else 0
        headers = {"ETag": f'"{self.state.sha256_of(name)}"', "X-Repo-Commit": self.state.commit}
        if match:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if match else 200, content[start:], headers, is_file=True)

    def _is_refused(self, repository: str) -> bool:
        """Answer with an error where there is one, as the hub does."""
        state = self.state
        is_known = self.headers.get("Authorization") == f"Bearer {state.token}"
        if state.status != 200:
            self._send(state.status, b"", {})
        elif repository != REPOSITORY or (state.token and not is_known and not state.is_gated):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif state.is_gated and not is_known and "/resolve/" in self.path:
            self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        else:
            return False
        return True

    def _is_unknown(self, revision: str) -> bool:
        if revision in ("main", "v1", self.state.commit):
            return False
        self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return True

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, is_file: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_file and self.state.cut_after_bytes:
            body = body[: self.state.cut_after_bytes.pop(0)]
        self.wfile.write(body)
