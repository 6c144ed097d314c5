"""Downloads one file over HTTP into a folder, going on where an earlier try was cut off.

Owns the `.part` file and the retries; a file appears under its name only when its length, and its digest if one is
known, are right. Knows nothing of models or package indexes; `pull` calls it.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.errors import PullFailed

CHUNK_BYTES = 256 << 10
TIMEOUT_S = 30.0
# Waits before the second, third .. try that brought no byte; a try that brought some starts the count again.
RETRY_WAITS_S = (0.5, 2.0)
_RETRYABLE_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")

ByteProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Link:
    """Where a file is. sha256: of its bytes, or empty if unknown."""

    url: str
    file_name: str
    sha256: str


class Downloader:
    """Fetches links over HTTP with one set of certificates (None: Python's); wait is how it waits between tries."""

    def __init__(self, certificates: ssl.SSLContext | None, wait: Callable[[float], None] = time.sleep) -> None:
        self._certificates = certificates
        self._wait = wait

    def fetch(self, link: Link, folder: Path, progress: ByteProgress) -> Path:
        """Download into a folder and return the file; raises PullFailed, leaving a `.part` to go on from."""
        folder.mkdir(parents=True, exist_ok=True)
        # The digest in the name keeps a part from being continued with the bytes of another file.
        part = folder / f"{link.sha256[:16]}{link.file_name}.part"
        was_resumed = part.exists()
        self._fill(link, part, progress)
        if link.sha256 and sha256_of(part) != link.sha256:
            part.unlink()
            if was_resumed:
                return self.fetch(link, folder, progress)
            raise PullFailed(f"{link.file_name} arrived with other content than announced: try again, or another index")
        target = folder / link.file_name
        part.replace(target)
        return target

    def _fill(self, link: Link, part: Path, progress: ByteProgress) -> None:
        """Ask for what lacks until all is there."""
        num_failures = 0
        while True:
            size_before = _size(part)
            problem = self._try(link, part, progress)
            if not problem:
                return
            num_failures = 0 if _size(part) > size_before else num_failures + 1
            if num_failures > len(RETRY_WAITS_S):
                raise PullFailed(f"{link.file_name} cannot be downloaded: {problem}; a new pull goes on from there")
            if num_failures:
                self._wait(RETRY_WAITS_S[num_failures - 1])

    def _try(self, link: Link, part: Path, progress: ByteProgress) -> str:
        """Append what one answer brings; return what went wrong, empty if the file is complete."""
        size = _size(part)
        request = urllib.request.Request(link.url, headers={"Range": f"bytes={size}-", "Accept-Encoding": "identity"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._certificates) as response:
                return _append(response, part, progress)
        except urllib.error.HTTPError as error:
            return _explain_status(error, link, part, size)
        except (OSError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _append(response: http.client.HTTPResponse, part: Path, progress: ByteProgress) -> str:
    start, total = _span(response)
    if start != _size(part):
        # A server without ranges starts again; one that answers another range is treated alike.
        part.unlink(missing_ok=True)
        if start:
            return f"the server answered bytes from {start} on, which were not asked for"
    done = start
    # Unbuffered, so that what has arrived outlives a kill.
    with part.open("ab", buffering=0) as file:
        # read1 gives what has arrived, where read would wait for a full chunk and lose it in a kill.
        while chunk := response.read1(CHUNK_BYTES):
            _write_all(file, chunk)
            done += len(chunk)
            progress(done, max(total, done))
    return "" if done == total or not total else f"the connection ended after {done:,} of {total:,} bytes"


def _write_all(file: IO[bytes], chunk: bytes) -> None:
    """An unbuffered write may take only a part of what it is given."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def _span(response: http.client.HTTPResponse) -> tuple[int, int]:
    """The position of an answer's first byte and the size of the whole, 0 if unknown."""
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        return (int(match[1]), int(match[2])) if match else (-1, 0)
    return 0, int(response.headers.get("Content-Length") or 0)


def _explain_status(error: urllib.error.HTTPError, link: Link, part: Path, size: int) -> str:
    with error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            total = error.headers.get("Content-Range", "").rpartition("/")[2]
            if total == str(size):
                return ""
            part.unlink(missing_ok=True)
            return f"the server has no bytes from {size} on"
        if error.code not in _RETRYABLE_STATUS:
            raise PullFailed(f"{link.file_name} cannot be downloaded: the server answers {error.code} {error.reason}")
        return f"the server answers {error.code} {error.reason}"


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0
