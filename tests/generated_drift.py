"""Checks that shoal/v1 is what protoc makes of proto/; run by `make lint`. Exits with 1 and the names that differ."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent


def drifted() -> list[str]:
    """Names of generated files that differ from what the protos give now."""
    protos = sorted((ROOT / "proto/shoal/v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *outputs, *map(str, protos)]) != 0:
            return ["protoc failed"]
        fresh = {path.name: path.read_bytes() for path in Path(folder, "shoal/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "shoal/v1").glob("*_pb2*")}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


if __name__ == "__main__":
    names = drifted()
    if names:
        sys.stderr.write(f"generated code is not up to date: {', '.join(names)}; run `make proto`\n")
    sys.exit(bool(names))
