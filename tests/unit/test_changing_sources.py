"""Files that change while a model is imported from them: an error that says so, never the end of the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modelstore.store import ModelStore
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_hf import write_tiny_hf

# In a process of its own, for reading on in a file that has become shorter ends it.
SCRIPT = """
import os, sys
from pathlib import Path
from modelstore.store import ModelStore
from shoal.errors import BadModelFile

def progress(done, total, label):
    if label == "layer 2 of 3":
        os.truncate(sys.argv[3], int(sys.argv[4]))

try:
    ModelStore(Path(sys.argv[2])).import_model(Path(sys.argv[1]), "tiny", progress=progress)
except BadModelFile as error:
    print(error.message)
"""
# Large enough that a layer lies on pages of its own.
HIDDEN, FFN = 256, 512


def gguf_file(folder: Path) -> tuple[Path, Path]:
    path = write_tiny_gguf(folder / "tiny.gguf", hidden=HIDDEN, ffn=FFN)
    return path, path


def gguf_part(folder: Path) -> tuple[Path, Path]:
    write_tiny_gguf(folder / "tiny.gguf", max_tensors_a_file=12, hidden=HIDDEN, ffn=FFN)
    first, *_ = parts = sorted(folder.glob("tiny-*.gguf"))
    return first, parts[1]


def hf_folder(folder: Path) -> tuple[Path, Path]:
    write_tiny_hf(folder / "tiny", hidden=HIDDEN, ffn=FFN)
    return folder / "tiny", folder / "tiny" / "model.safetensors"


@pytest.mark.parametrize("write", [gguf_file, gguf_part, hf_folder])
@pytest.mark.parametrize("kept", [0.0, 0.4])
def test_a_file_that_becomes_shorter_while_it_is_imported_is_named(
    tmp_path: Path, write: Callable[[Path], tuple[Path, Path]], kept: float
) -> None:
    path, shortened = write(tmp_path)
    size = int(kept * shortened.stat().st_size)
    command = (sys.executable, "-c", SCRIPT, str(path), str(tmp_path / "store"), str(shortened), str(size))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, f"ended by {ended.returncode}: {ended.stderr}"
    assert f"{shortened.name} has become shorter while it was read" in ended.stdout
    assert ModelStore(tmp_path / "store").names() == ()
