"""Builds the ONNX graph of a shard: layers [start, stop) of a stored model, weights left outside in the model's blobs.

Decides which operators compute a layer, so that any cut of the layers computes bit for bit what the whole does. Reads only
the manifest and never a weight; the orchestrator sends the bytes to the workers of a placement. Made for onnxruntime 1.32
or later on a CPU. All rows of a step are packed into one [T, E] array; only attention sees them as [S, Q], by two gathers.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from modelstore.manifest import ArrayEntry, BlobEntry, Linear, Manifest, ModelConfig
from shoal.types import LayerRange

OPSET = 21
IR_VERSION = 10
# Lets a worker say what it holds without reading the graph; must match worker.session.
WEIGHT_BYTES_KEY = "shoal.weight_bytes"

_TYPES = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8}
_BITS = {"int4": 4, "int4_cz": 4, "int8": 8}


def shard_blobs(manifest: Manifest, layers: LayerRange) -> tuple[BlobEntry, ...]:
    """The blobs a worker needs for these layers, each once."""
    blobs = [manifest.rope, *manifest.layers[layers.start : layers.stop]]
    is_last = layers.stop == manifest.config.num_layers
    if layers.start == 0 or (is_last and manifest.config.is_head_tied):
        blobs.insert(0, manifest.embedding)
    if is_last:
        blobs.append(manifest.head)
    return tuple({blob.digest: blob for blob in blobs}.values())


def build_shard_graph(manifest: Manifest, layers: LayerRange, *, accuracy_level: int = 4) -> bytes:
    """Build the serialised graph of a shard.

    accuracy_level: 4 rounds activations to 8 bits before each packed weight, as fast kernels need; 0 keeps float32.
    """
    config = manifest.config
    assert layers.stop <= config.num_layers, f"{layers} of {config.num_layers} layers"
    graph = _Graph(accuracy_level)
    _declare_inputs(graph, config, layers)
    normed, residual = _enter(graph, manifest, layers)
    branch = ""
    for index, blob in enumerate(manifest.layers[layers.start : layers.stop]):
        if index > 0:
            normed, residual = graph.skip_norm(residual, branch, blob, "attn_norm", config)
        attended = _attention(graph, manifest, blob, index, normed)
        normed, residual = graph.skip_norm(residual, attended, blob, "ffn_norm", config)
        branch = _feed_forward(graph, blob, normed)
    _leave(graph, manifest, layers, graph.node("Add", [residual, branch]))
    weight_bytes = sum(blob.num_bytes for blob in shard_blobs(manifest, layers))
    return graph.serialize(f"layers {layers}", {WEIGHT_BYTES_KEY: str(weight_bytes)})


class _Graph:
    """Collects nodes, inputs, outputs and external initialisers, and names what is between them."""

    def __init__(self, accuracy_level: int) -> None:
        self._accuracy_level = accuracy_level
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._num_names = 0

    def input(self, name: str, kind: int, shape: list[int | str]) -> None:
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))

    def output(self, name: str, shape: list[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def fresh(self) -> str:
        self._num_names += 1
        return f"v{self._num_names}"

    def node(self, op: str, inputs: list[str], *, outputs: list[str] | None = None, **attributes: Any) -> str:
        """Add a node; return its first output."""
        outputs = outputs or [self.fresh()]
        self._nodes.append(helper.make_node(op, inputs, outputs, **attributes))
        return outputs[0]

    def contrib(self, op: str, inputs: list[str], *, outputs: list[str] | None = None, **attributes: Any) -> str:
        """Add one of the operators that onnxruntime brings along."""
        return self.node(op, inputs, outputs=outputs, domain="com.microsoft", **attributes)

    def constant(self, values: list[int], kind: int = TensorProto.INT64) -> str:
        name = f"c_{kind}_" + "_".join(map(str, values))
        self._initializers[name] = helper.make_tensor(name, kind, [len(values)], values)
        return name

    def external(self, blob: BlobEntry, array: ArrayEntry, shape: tuple[int, ...] | None = None) -> str:
        """An initialiser that lies in a blob, seen with its own shape or another of the same size."""
        shape = array.shape if shape is None else shape
        name = f"{blob.digest[:16]}_{array.offset}_{len(shape)}"
        if name not in self._initializers:
            tensor = onnx.TensorProto(name=name, data_type=_TYPES[array.dtype], dims=shape)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            place = {"location": blob.digest, "offset": str(array.offset), "length": str(array.num_bytes)}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
            self._initializers[name] = tensor
        return name

    def linear(self, blob: BlobEntry, weight: Linear, x: str) -> str:
        """x [T, K] times a packed weight [N, K] -> [T, N]."""
        if weight.kind == "float32":
            return self.node("MatMul", [x, self.external(blob, weight.arrays["w"])])
        y = self._matmul_bits(blob, weight, x)
        if weight.kind != "int4_cz":
            return y
        num_blocks = -(-weight.k // weight.block)
        split = self.node("Reshape", [x, self.constant([-1, num_blocks, weight.block])])  # [T, B, block]
        sums = self.node("ReduceSum", [split, self.constant([2])], keepdims=0)  # [T, B]
        correction = self.external(blob, weight.arrays["correction"])
        return self.node("Add", [y, self.node("MatMul", [sums, correction])])

    def _matmul_bits(self, blob: BlobEntry, weight: Linear, x: str) -> str:
        num_blocks = -(-weight.k // weight.block)
        bits = _BITS[weight.kind]
        q = self.external(blob, weight.arrays["q"], (weight.n, num_blocks, weight.block * bits // 8))
        inputs = [x, q, self.external(blob, weight.arrays["scale"])]
        if "zero" in weight.arrays:
            inputs.append(self.external(blob, weight.arrays["zero"]))
        sizes: dict[str, Any] = {"K": weight.k, "N": weight.n, "bits": bits, "block_size": weight.block}
        return self.contrib("MatMulNBits", inputs, accuracy_level=self._accuracy_level, **sizes)

    def norm(self, x: str, blob: BlobEntry, name: str, config: ModelConfig) -> str:
        gamma = self.external(blob, blob.arrays[name])
        return self.node("SimplifiedLayerNormalization", [x, gamma], axis=-1, epsilon=config.rms_epsilon, stash_type=1)

    def skip_norm(self, x: str, skip: str, blob: BlobEntry, name: str, config: ModelConfig) -> tuple[str, str]:
        """The norm of x + skip, and x + skip."""
        normed, total = self.fresh(), self.fresh()
        inputs = [x, skip, self.external(blob, blob.arrays[name])]
        outputs = [normed, "", "", total]
        self.contrib("SkipSimplifiedLayerNormalization", inputs, outputs=outputs, epsilon=config.rms_epsilon)
        return normed, total

    def serialize(self, name: str, metadata: dict[str, str]) -> bytes:
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, initializer=list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="shoal")
        helper.set_model_props(model, metadata)
        serialized: bytes = model.SerializeToString()
        return serialized


def _declare_inputs(graph: _Graph, config: ModelConfig, layers: LayerRange) -> None:
    if layers.start == 0:
        graph.input("token_ids", TensorProto.INT64, ["T"])
    else:
        graph.input("hidden", TensorProto.FLOAT, ["T", config.hidden_size])
    graph.input("pad_index", TensorProto.INT64, ["S", "Q"])
    graph.input("unpad_index", TensorProto.INT64, ["T"])
    graph.input("seqlens_k", TensorProto.INT32, ["S"])
    graph.input("query_seqlens", TensorProto.INT32, ["S"])
    graph.input("total_sequence_length", TensorProto.INT32, [])
    if layers.stop == config.num_layers:
        graph.input("logit_rows", TensorProto.INT64, ["R"])
    for index in range(len(layers)):
        for half in ("key", "value"):
            shape: list[int | str] = ["S", config.num_kv_heads, "C", config.head_dim]
            graph.input(f"past_{half}_{index}", TensorProto.FLOAT, shape)
            graph.output(f"present_{half}_{index}", shape)


def _enter(graph: _Graph, manifest: Manifest, layers: LayerRange) -> tuple[str, str]:
    """The first layer's normed input and residual [T, E]."""
    config, blob = manifest.config, manifest.layers[layers.start]
    if layers.start == 0:
        residual = _embed(graph, manifest.embedding, "token_ids")
        return graph.norm(residual, blob, "attn_norm", config), residual
    # Adding zero looks idle, but another norm kernel than the whole graph's here would change the last bits.
    zero = graph.node("Mul", ["hidden", graph.constant([0], TensorProto.FLOAT)])
    return graph.skip_norm("hidden", zero, blob, "attn_norm", config)


def _embed(graph: _Graph, blob: BlobEntry, token_ids: str) -> str:
    table = blob.linears["token_embd"]
    if table.kind == "float32":
        return graph.node("Gather", [graph.external(blob, table.arrays["w"]), token_ids], axis=0)
    data = graph.external(blob, table.arrays["q"], (table.n, table.k))
    inputs = [data, token_ids, graph.external(blob, table.arrays["scale"])]
    return graph.contrib("GatherBlockQuantized", inputs, bits=8, block_size=table.block, gather_axis=0, quantize_axis=1)


def _attention(graph: _Graph, manifest: Manifest, blob: BlobEntry, index: int, normed: str) -> str:
    config = manifest.config
    qkv = _fused_or_joined(graph, blob, normed, "attn_qkv", ("attn_q", "attn_k", "attn_v"))  # [T, (H + 2K) D]
    padded = graph.node("Gather", [qkv, "pad_index"], axis=0)  # [S, Q, (H + 2K) D]
    past = [f"past_key_{index}", f"past_value_{index}"]
    rotary = [graph.external(manifest.rope, manifest.rope.arrays[name]) for name in ("cos", "sin")]
    lengths = ["seqlens_k", "total_sequence_length"]
    inputs = [padded, "", "", *past, *lengths, *rotary, "", "", "", "", "", "", "", "query_seqlens"]
    outputs = [graph.fresh(), f"present_key_{index}", f"present_value_{index}"]
    heads: dict[str, Any] = {"num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads}
    graph.contrib("GroupQueryAttention", inputs, outputs=outputs, do_rotary=1, rotary_interleaved=0, **heads)
    flat = graph.node("Reshape", [outputs[0], graph.constant([-1, config.num_heads * config.head_dim])])  # [S Q, H D]
    rows = graph.node("Gather", [flat, "unpad_index"], axis=0)  # [T, H D]
    return graph.linear(blob, blob.linears["attn_out"], rows)


def _feed_forward(graph: _Graph, blob: BlobEntry, normed: str) -> str:
    if "ffn_gate_up" in blob.linears:
        both = graph.linear(blob, blob.linears["ffn_gate_up"], normed)
        gate, up = graph.fresh(), graph.fresh()
        graph.node("Split", [both], outputs=[gate, up], axis=-1, num_outputs=2)
    else:
        gate = graph.linear(blob, blob.linears["ffn_gate"], normed)
        up = graph.linear(blob, blob.linears["ffn_up"], normed)
    activated = graph.contrib("QuickGelu", [gate], alpha=1.0)
    return graph.linear(blob, blob.linears["ffn_down"], graph.node("Mul", [activated, up]))


def _fused_or_joined(graph: _Graph, blob: BlobEntry, x: str, fused: str, parts: tuple[str, ...]) -> str:
    if fused in blob.linears:
        return graph.linear(blob, blob.linears[fused], x)
    return graph.node("Concat", [graph.linear(blob, blob.linears[part], x) for part in parts], axis=-1)


def _leave(graph: _Graph, manifest: Manifest, layers: LayerRange, hidden: str) -> None:
    config = manifest.config
    if layers.stop < config.num_layers:
        graph.node("Identity", [hidden], outputs=["hidden_out"])
        graph.output("hidden_out", ["T", config.hidden_size])
        return
    rows = graph.node("Gather", [hidden, "logit_rows"], axis=0)  # [R, E]
    normed = graph.norm(rows, manifest.head, "output_norm", config)
    graph.node("Identity", [_head(graph, manifest, normed)], outputs=["logits"])
    graph.output("logits", ["R", config.vocab_size])


def _head(graph: _Graph, manifest: Manifest, normed: str) -> str:
    if not manifest.config.is_head_tied:
        return graph.linear(manifest.head, manifest.head.linears["output"], normed)
    blob, table = manifest.embedding, manifest.embedding.linears["token_embd"]
    if table.kind == "float32":
        return graph.node("Gemm", [normed, graph.external(blob, table.arrays["w"])], transB=1)
    return graph.linear(blob, table, normed)
