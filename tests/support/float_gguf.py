"""Writes a GGUF file anew with its weights as floats: to quantise from, for want of a model that never was quantised.

Reads and writes through the `gguf` package, and dequantises with it, so that it shares no code with what it feeds.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize


def write_as_floats(source: Path, target: Path, dtype: type[np.float16] | type[np.float32] = np.float16) -> Path:
    """Write `target` with all that `source` says and holds, matrices as this type and vectors as float32; return it."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(str(target), architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *of_items = field.types
            writer.add_key_value(name, field.contents(), kind, of_items[0] if of_items else None)
    for tensor in reader.tensors:
        stored = np.asarray(tensor.data)
        values = dequantize(stored.reshape(1, -1), tensor.tensor_type).reshape(tensor.shape[::-1])
        writer.add_tensor(tensor.name, values.astype(dtype if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
