"""Heads of 256 values are exact on processors of any size of cache, because chunks of their prompts end at borders.

onnxruntime takes keys by blocks as large as the level 2 cache allows, and asks the C library how large that is: here a
library that is loaded before it gives the answer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelstore.manifest import WIDE_HEAD_BORDER

ROOT = Path(__file__).parents[2]
KIB = 1024
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

long sysconf(int name) {
    if (name == _SC_LEVEL2_CACHE_SIZE) return LEVEL2_BYTES;
    return ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
}
"""


def preload(folder: Path, cache_kib: int) -> dict[str, str]:
    """The environment of a process that is told of so much level 2 cache."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("there is no C compiler, or no Linux, to tell a process of another processor's cache")
    source, library = folder / "cache.c", folder / "cache.so"
    source.write_text(SOURCE)
    define = f"-DLEVEL2_BYTES={cache_kib * KIB}L"
    subprocess.run([compiler, "-shared", "-fPIC", define, "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def digests(folder: Path, border: int, environment: dict[str, str]) -> dict[str, set[str]]:
    """The different results of each prompt, over all cuts of it."""
    command = [sys.executable, "-m", "tests.support.wide_heads", str(folder / "model"), str(border)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return {num_prompt: set(found) for num_prompt, found in json.loads(run.stdout).items()}


def test_cuts_of_a_prompt_do_not_matter_on_this_processor(tmp_path: Path) -> None:
    found = digests(tmp_path, WIDE_HEAD_BORDER, {})
    assert {num_prompt: len(one) for num_prompt, one in found.items()} == {"289": 1, "300": 1, "70": 1}


@pytest.mark.parametrize("cache_kib", [256, 1024, 1280, 2048])
def test_cuts_of_a_prompt_do_not_matter_on_a_processor_with_this_much_cache(tmp_path: Path, cache_kib: int) -> None:
    found = digests(tmp_path, WIDE_HEAD_BORDER, preload(tmp_path, cache_kib))
    assert {num_prompt: len(one) for num_prompt, one in found.items()} == {"289": 1, "300": 1, "70": 1}


@pytest.mark.parametrize(("cache_kib", "border"), [(1024, 0), (1280, 64)])
def test_without_borders_or_with_wider_ones_cuts_would_matter(tmp_path: Path, cache_kib: int, border: int) -> None:
    """If this fails, onnxruntime does not cut sums any more, and the border can go (ADR 28)."""
    found = digests(tmp_path, border, preload(tmp_path, cache_kib))
    assert len(found["300"]) > 1
