"""Opens shard graphs in onnxruntime and runs them; the only module that imports it.

Decides session options and the execution provider, and says what the runtime is. Knows nothing of rows, slots or KV: it
binds named arrays and pointers. Used by `worker.shard` on the compute thread, and for `runtime_summary` at start.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from shoal.errors import InternalError

logger = logging.getLogger(__name__)

CPU_PROVIDER = "CPUExecutionProvider"
# The graph says what its weights take; must match modelstore.graph.
WEIGHT_BYTES_KEY = "shoal.weight_bytes"
# NPU before GPU before CPU.
PROVIDER_PREFERENCE = (
    "QNNExecutionProvider",
    "CoreMLExecutionProvider",
    "VitisAIExecutionProvider",
    "OpenVINOExecutionProvider",
    "CUDAExecutionProvider",
    "ROCMExecutionProvider",
    "DmlExecutionProvider",
    "WebGpuExecutionProvider",
    CPU_PROVIDER,
)
_LOAD_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.RuntimeException,
    ort_errors.EPFail,
    RuntimeError,
    ValueError,
)
# Instruction sets that decide which kernels run, and with them the last bits of a result.
_KERNEL_FLAG = re.compile("avx.*|fma|f16c|amx.*|asimd.*|i8mm|bf16|sve.*|sme.*")


@dataclass(frozen=True, slots=True)
class RuntimeSummary:
    """The numeric identity of a runtime: equal fingerprints compute bit-equal results."""

    name: str
    version: str
    kernel_fingerprint: str
    execution_provider: str


class Binding:
    """Arrays and pointers bound to the inputs and outputs of a session; keeps what it binds alive."""

    # Released in this order: the runtime's binding uses its session to the end and does not keep it alive.
    __slots__ = ("_binding", "_kept", "_session")

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._kept: dict[str, NDArray[Any]] = {}

    def bind_input(self, name: str, array: NDArray[Any]) -> None:
        """Bind a C-contiguous array without copying it."""
        self._kept[name] = array
        self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def bind_output(self, name: str, array: NDArray[Any]) -> None:
        self._kept[name] = array
        self._binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def bind_in_place(self, source: str, target: str, shape: Sequence[int], pointer: int) -> None:
        """Bind float32 memory that the caller keeps alive as input and output at once."""
        self._binding.bind_input(source, "cpu", 0, np.float32, shape, pointer)
        self._binding.bind_output(target, "cpu", 0, np.float32, shape, pointer)


class Session:
    """A shard's graph, loaded.

    provider: the execution provider that runs it. skipped: for each one tried before it, why not.
    """

    def __init__(
        self,
        graph: bytes,
        blob_directory: Path,
        *,
        num_threads: int = 1,
        providers: Sequence[str] | None = None,
    ) -> None:
        """Load a graph whose weights are files of blob_directory, named by digest.

        providers: to try in this order; by default the preference among those this onnxruntime has. Raises InternalError
        if none loads it.
        """
        options = _options(blob_directory, num_threads)
        self._session, self.provider, self.skipped = _open(graph, options, _candidates(providers))
        if self.skipped:
            logger.warning("provider_fallback provider=%s skipped=%s", self.provider, self.skipped)
        self.input_names = tuple(entry.name for entry in self._session.get_inputs())
        self.output_names = tuple(entry.name for entry in self._session.get_outputs())
        self.weight_bytes = int(self._session.get_modelmeta().custom_metadata_map.get(WEIGHT_BYTES_KEY, 0))
        _drop_mapped_pages(blob_directory)
        _trim_heap()

    def close(self) -> None:
        """Free the weights, as soon as the last binding is gone too."""
        del self._session
        _trim_heap()

    def binding(self) -> Binding:
        return Binding(self._session)

    def run(self, binding: Binding) -> None:
        """Run on what is bound; outputs are in the bound arrays afterwards."""
        self._session.run_with_iobinding(binding._binding)


def runtime_summary() -> RuntimeSummary:
    """Name this runtime and the kernels it takes on this processor."""
    flags = sorted(flag for flag in _cpu_flags() if _KERNEL_FLAG.fullmatch(flag))
    identity = [ort.__version__, platform.machine(), _l2_cache_size(), *flags]
    fingerprint = hashlib.sha256(" ".join(identity).encode()).hexdigest()[:16]
    return RuntimeSummary("onnxruntime", ort.__version__, fingerprint, _candidates(None)[0])


def _options(blob_directory: Path, num_threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # Workers share cores: a thread that spins takes them from the others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(blob_directory))
    options.log_severity_level = 3
    return options


def _candidates(wanted: Sequence[str] | None) -> list[str]:
    if wanted is not None:
        return list(wanted)
    available = ort.get_available_providers()
    return [name for name in PROVIDER_PREFERENCE if name in available]


def _open(
    graph: bytes, options: ort.SessionOptions, providers: Sequence[str]
) -> tuple[ort.InferenceSession, str, dict[str, str]]:
    """Open with the first provider that loads; return also its name and why the others before it did not."""
    skipped: dict[str, str] = {}
    for name in providers:
        if name not in ort.get_available_providers():
            skipped[name] = "not part of this onnxruntime"
            continue
        try:
            session = ort.InferenceSession(graph, options, providers=list(dict.fromkeys((name, CPU_PROVIDER))))
        except _LOAD_ERRORS as error:
            skipped[name] = str(error)
            continue
        if session.get_providers()[0] == name:
            return session, name, skipped
        skipped[name] = "onnxruntime could not start it"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise InternalError(f"no execution provider loads the shard's graph: {reasons}")


def _cpu_flags() -> frozenset[str]:
    if sys.platform != "linux":
        return frozenset((platform.processor(),))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":") for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next((flags for _, _, flags in named), "").split())


def _l2_cache_size() -> str:
    """Attention is computed by blocks that fit this cache, and sums in their order."""
    if sys.platform == "darwin":
        return subprocess.run(("sysctl", "-n", "hw.l2cachesize"), capture_output=True, text=True, check=False).stdout
    path = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    return path.read_text().strip() if path.exists() else ""


def _drop_mapped_pages(directory: Path) -> None:
    """Let go of the pages of mapped blobs: most were read once, to be packed; the others are mapped again when used.

    onnxruntime writes to none of them, so nothing is lost.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    inside = f"{directory.resolve()}/"
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, path = line.split(maxsplit=5)
        if path.startswith(inside):
            start, stop = (int(edge, 16) for edge in place.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def _trim_heap() -> None:
    """Give back what loading freed; glibc keeps it otherwise."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
