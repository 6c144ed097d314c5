"""What the numpy reference is told of a model: its numbers and its float32 tensors, read from files in a second way.

GGUF files by the `gguf` package and its own dequantisation, Hugging Face's folders by hand. Shares no code with the readers
that are judged by it. Tensors go by GGUF's names; in llama's files there rows are rotated in neighbouring pairs.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from tests.support.reference_rope import Angles, linear, llama3, plain, yarn

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Numbers:
    """angle_rates, local_angle_rates: radians a position of each pair, for layers that see all or a window."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    windows: tuple[int, ...]
    angles: Angles
    local_angles: Angles
    is_gemma: bool = False
    score_scale: float = 0.0
    logit_cap: float = 0.0
    score_cap: float = 0.0


class ModelFile(Protocol):
    numbers: Numbers
    is_paired: bool

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Floats: ...


class GgufReference:
    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self._architecture = reader.fields["general.architecture"].contents()
        self.is_paired = self._architecture == "llama"
        self.numbers = self._read_numbers()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Floats:
        tensor = self._tensors[name]
        # A plain array, and one row, since rows are dequantised in small pieces, which takes several times as long.
        stored = np.asarray(tensor.data)
        weight: Floats = dequantize(stored.reshape(1, -1), tensor.tensor_type).astype(np.float32, copy=False)
        return weight.reshape(tuple(int(size) for size in tensor.shape[::-1]))

    def _number(self, name: str, default: float | None = None) -> float:
        found = self._fields.get(f"{self._architecture}.{name}")
        if found is None and default is not None:
            return default
        return float(self._fields[f"{self._architecture}.{name}"].contents())

    def _read_numbers(self) -> Numbers:
        num_layers, num_heads = int(self._number("block_count")), int(self._number("attention.head_count"))
        is_gemma = self._architecture == "gemma3"
        window = int(self._number("attention.sliding_window", 0))
        head_dim = self.tensor("blk.0.attn_output.weight").shape[1] // num_heads
        angles = plain(head_dim, self._number("rope.freq_base"))
        if self.has("rope_freqs.weight"):
            angles = Angles(angles.rates / self.tensor("rope_freqs.weight"))
        elif "rope.scaling.factor" in "".join(self._fields):
            angles = linear(angles, self._number("rope.scaling.factor"))
        return Numbers(
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(self._number("attention.head_count_kv")),
            head_dim=head_dim,
            epsilon=self._number("attention.layer_norm_rms_epsilon"),
            windows=tuple(0 if is_gemma and layer % 6 == 5 else window for layer in range(num_layers)),
            angles=angles,
            local_angles=plain(head_dim, 10000.0) if is_gemma else angles,
            is_gemma=is_gemma,
            logit_cap=self._number("final_logit_softcapping", 0.0),
        )


@dataclass(slots=True)
class HfReference:
    folder: Path
    is_paired: bool = False
    _places: dict[str, tuple[Path, int, dict[str, Any]]] = field(default_factory=dict)
    numbers: Numbers = field(init=False)

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            self._places |= {name: (path, 8 + length, entry) for name, entry in header.items() if name[0] != "_"}
        self.numbers = _hf_numbers(json.loads((self.folder / "config.json").read_text()))

    def has(self, name: str) -> bool:
        return self._name(name) in self._places

    def tensor(self, name: str) -> Floats:
        path, base, entry = self._places[self._name(name)]
        start, stop = entry["data_offsets"]
        data = path.read_bytes()[base + start : base + stop]
        values: Floats
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        values = values.reshape(entry["shape"])
        return values + np.float32(1) if self.numbers.is_gemma and name.endswith("norm.weight") else values

    @property
    def _is_fused(self) -> bool:
        return "model.layers.0.mlp.gate_up_proj.weight" in self._places

    def _name(self, name: str) -> str:
        if not name.startswith("blk."):
            ends = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
            return f"{ends[name.removesuffix('.weight')]}.weight"
        _, layer, part, suffix = name.split(".")
        return f"model.layers.{layer}.{self._part(part)}.{suffix}"

    def _part(self, part: str) -> str:
        kind, _, which = part.partition("_")
        match kind, which:
            case "attn", "norm":
                return "input_layernorm"
            case "attn", "qkv":
                return "self_attn.qkv_proj"
            case "ffn", "up" if self._is_fused:
                return "mlp.gate_up_proj"
            case "attn", "q" | "k" | "v" | "output":
                return f"self_attn.{which[0]}_proj"
            case "attn", _:
                return f"self_attn.{which}"
            case "ffn", "norm":
                return "pre_feedforward_layernorm" if self.numbers.is_gemma else "post_attention_layernorm"
            case "post", _:
                if not self.numbers.is_gemma:
                    return part
                return "post_attention_layernorm" if which == "attention_norm" else "post_feedforward_layernorm"
        return f"mlp.{which}_proj"


class FusedReference:
    """A model whose file has queries, keys and values as one tensor, and gate and up as another, as if it had them apart."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self.numbers, self.is_paired = file.numbers, file.is_paired

    def has(self, name: str) -> bool:
        return self._file.has(name)

    def tensor(self, name: str) -> Floats:
        part = name.split(".")[2] if name.startswith("blk.") else name
        if part in ("ffn_gate", "ffn_up"):
            both = self._file.tensor(name.replace("ffn_gate", "ffn_up"))
            return both[: len(both) // 2] if part == "ffn_gate" else both[len(both) // 2 :]
        if part not in ("attn_q", "attn_k", "attn_v"):
            return self._file.tensor(name)
        fused = self._file.tensor(name.replace(part, "attn_qkv"))
        query_rows, key_rows = (n * self.numbers.head_dim for n in (self.numbers.num_heads, self.numbers.num_kv_heads))
        starts = {"attn_q": 0, "attn_k": query_rows, "attn_v": query_rows + key_rows}
        return fused[starts[part] :][: query_rows if part == "attn_q" else key_rows]


def _hf_numbers(config: dict[str, Any]) -> Numbers:
    head_dim, num_layers, is_gemma = config["head_dim"], config["num_hidden_layers"], "gemma" in config["model_type"]
    angles = plain(head_dim, config["rope_theta"])
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    match scaling["rope_type"]:
        case "linear":
            stretched = linear(angles, scaling["factor"])
        case "llama3":
            stretched = llama3(angles, scaling=scaling)
        case "yarn":
            stretched = yarn(angles, base=config["rope_theta"], scaling=scaling)
        case _:
            stretched = angles
    return Numbers(
        num_layers=num_layers,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        epsilon=config["rms_norm_eps"],
        windows=_hf_windows(config, num_layers, is_gemma=is_gemma),
        angles=stretched,
        local_angles=plain(head_dim, config["rope_local_base_freq"]) if is_gemma else stretched,
        is_gemma=is_gemma,
        score_scale=config["query_pre_attn_scalar"] ** -0.5 if is_gemma else 0.0,
        logit_cap=config.get("final_logit_softcapping") or 0.0,
        score_cap=config.get("attn_logit_softcapping") or 0.0,
    )


def _hf_windows(config: dict[str, Any], num_layers: int, *, is_gemma: bool) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    if "layer_types" in config:
        return tuple(window if kind == "sliding_attention" else 0 for kind in config["layer_types"])
    if is_gemma:
        return tuple(
            0 if (layer + 1) % config["sliding_window_pattern"] == 0 else window for layer in range(num_layers)
        )
    if config["model_type"] in ("mistral", "phi3"):
        return (window,) * num_layers
    first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else num_layers
    return tuple(window if layer >= first else 0 for layer in range(num_layers))
