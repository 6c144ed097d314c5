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
# By what a config calls them.
_ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("QuickGelu", {"alpha": 1.0}),
    "gelu_tanh": ("FastGelu", {}),
}


def shard_blobs(manifest: Manifest, layers: LayerRange) -> tuple[BlobEntry, ...]:
    """The blobs a worker needs for these layers, each once."""
    blobs = [manifest.rope, *manifest.layers[layers.start : layers.stop]]
    is_last = layers.stop == manifest.config.num_layers
    if layers.start == 0 or (is_last and manifest.config.is_head_tied):
        blobs.insert(0, manifest.embedding)
    if is_last:
        blobs.append(manifest.head)
    return tuple({blob.digest: blob for blob in blobs}.values())


def mapped_blobs(manifest: Manifest, layers: LayerRange) -> frozenset[str]:
    """Digests of those that a shard only looks up in; the runtime makes no packed copy of them for its kernels."""
    is_packed = layers.stop == manifest.config.num_layers and manifest.config.is_head_tied
    return frozenset({manifest.rope.digest} if is_packed else {manifest.rope.digest, manifest.embedding.digest})


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
        attended = _attention(graph, manifest, blob, layers.start + index, index, normed)
        normed, residual = graph.skip_norm(residual, attended, blob, "ffn_norm", config)
        branch = _feed_forward(graph, blob, config, normed)
    _leave(graph, manifest, layers, graph.node("Add", [residual, branch]))
    weight_bytes = sum(blob.num_bytes for blob in shard_blobs(manifest, layers))
    return graph.serialize(f"layers {layers}", {WEIGHT_BYTES_KEY: str(weight_bytes)})


def build_layer_graph(manifest: Manifest, index: int, *, accuracy_level: int = 4) -> bytes:
    """Build the graph of one layer as the middle of a model has it, hidden rows to hidden rows, wherever it is."""
    config, blob = manifest.config, manifest.layers[index]
    graph = _Graph(accuracy_level)
    graph.input("hidden", TensorProto.FLOAT, ["T", config.hidden_size])
    _declare_attention(graph, config, 1)
    normed, residual = _enter_inside(graph, blob, config)
    attended = _attention(graph, manifest, blob, index, 0, normed)
    normed, residual = graph.skip_norm(residual, attended, blob, "ffn_norm", config)
    _leave_inside(graph, config, graph.node("Add", [residual, _feed_forward(graph, blob, config, normed)]))
    return graph.serialize(f"layer {index}", {})


def build_embedding_graph(manifest: Manifest) -> bytes:
    """Build the graph from token_ids [T] to the first layer's hidden rows, hidden_out [T, E]."""
    graph = _Graph(0)
    graph.input("token_ids", TensorProto.INT64, ["T"])
    _leave_inside(graph, manifest.config, _embed(graph, manifest))
    return graph.serialize("embedding", {})


def build_head_graph(manifest: Manifest, *, accuracy_level: int = 4) -> bytes:
    """Build the graph from the last layer's hidden rows [R, E] to logits [R, V]."""
    graph = _Graph(accuracy_level)
    graph.input("hidden", TensorProto.FLOAT, ["R", manifest.config.hidden_size])
    _add_logits(graph, manifest, "hidden")
    return graph.serialize("head", {})


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

    def number(self, value: float) -> str:
        """A float32 that is the same for all elements."""
        name = f"n_{value!r}"
        self._initializers[name] = helper.make_tensor(name, TensorProto.FLOAT, [1], [value])
        return name

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
        if "correction" not in weight.arrays:
            return y
        split = self.node("Reshape", [x, self.constant([-1, _num_blocks(weight), weight.block])])  # [T, B, block]
        sums = self.node("ReduceSum", [split, self.constant([2])], keepdims=0)  # [T, B]
        correction = self.external(blob, weight.arrays["correction"])
        return self.node("Add", [y, self.node("MatMul", [sums, correction])])

    def _matmul_bits(self, blob: BlobEntry, weight: Linear, x: str) -> str:
        bits = _bits(weight)
        q = self.external(blob, weight.arrays["q"], (weight.n, _num_blocks(weight), weight.block * bits // 8))
        inputs = [x, q, self.external(blob, weight.arrays["scale"])]
        if "zero" in weight.arrays:
            inputs.append(self.external(blob, weight.arrays["zero"]))
        sizes: dict[str, Any] = {"K": weight.k, "N": weight.n, "bits": bits, "block_size": weight.block}
        return self.contrib("MatMulNBits", inputs, accuracy_level=self._accuracy_level, **sizes)

    def lookup(self, blob: BlobEntry, table: Linear, token_ids: str) -> str:
        """The rows [T, E] of a packed table [V, E]."""
        if table.kind == "float32":
            return self.node("Gather", [self.external(blob, table.arrays["w"]), token_ids], axis=0)
        bits = _bits(table)
        row_values = _num_blocks(table) * table.block
        data = self.external(blob, table.arrays["q"], (table.n, row_values * bits // 8))
        inputs = [data, token_ids, self.external(blob, table.arrays["scale"])]
        if "zero" in table.arrays:
            inputs.append(self.external(blob, table.arrays["zero"]))
        axes: dict[str, Any] = {"gather_axis": 0, "quantize_axis": 1}
        rows = self.contrib("GatherBlockQuantized", inputs, bits=bits, block_size=table.block, **axes)
        if row_values > table.k:
            rows = self.node("Slice", [rows, *(self.constant([value]) for value in (0, table.k, 1))])
        if "correction" not in table.arrays:
            return rows
        columns = self.node("Gather", [self.external(blob, table.arrays["correction"]), token_ids], axis=1)  # [B, T]
        shift = self.node("Unsqueeze", [self.node("Transpose", [columns]), self.constant([2])])  # [T, B, 1]
        split = self.node("Reshape", [rows, self.constant([-1, _num_blocks(table), table.block])])  # [T, B, block]
        return self.node("Reshape", [self.node("Add", [split, shift]), self.constant([-1, table.k])])

    def biased(self, blob: BlobEntry, name: str, x: str) -> str:
        """x [T, N] plus the bias of this name, if the blob has one."""
        return self.node("Add", [x, self.external(blob, blob.arrays[name])]) if name in blob.arrays else x

    def norm(self, x: str, blob: BlobEntry, name: str, config: ModelConfig) -> str:
        gamma = self.external(blob, blob.arrays[name])
        return self.node("SimplifiedLayerNormalization", [x, gamma], axis=-1, epsilon=config.rms_epsilon, stash_type=1)

    def norm_if_any(self, x: str, blob: BlobEntry, name: str, config: ModelConfig) -> str:
        return self.norm(x, blob, name, config) if name in blob.arrays else x

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
    _declare_attention(graph, config, len(layers))
    if layers.stop == config.num_layers:
        graph.input("logit_rows", TensorProto.INT64, ["R"])


def _declare_attention(graph: _Graph, config: ModelConfig, num_layers: int) -> None:
    graph.input("pad_index", TensorProto.INT64, ["S", "Q"])
    graph.input("unpad_index", TensorProto.INT64, ["T"])
    graph.input("seqlens_k", TensorProto.INT32, ["S"])
    graph.input("query_seqlens", TensorProto.INT32, ["S"])
    graph.input("total_sequence_length", TensorProto.INT32, [])
    for index in range(num_layers):
        for half in ("key", "value"):
            shape: list[int | str] = ["S", config.num_kv_heads, "C", config.head_dim]
            graph.input(f"past_{half}_{index}", TensorProto.FLOAT, shape)
            graph.output(f"present_{half}_{index}", shape)


def _enter(graph: _Graph, manifest: Manifest, layers: LayerRange) -> tuple[str, str]:
    """The first layer's normed input and residual [T, E]."""
    config, blob = manifest.config, manifest.layers[layers.start]
    if layers.start == 0:
        residual = _embed(graph, manifest)
        return graph.norm(residual, blob, "attn_norm", config), residual
    return _enter_inside(graph, blob, config)


def _enter_inside(graph: _Graph, blob: BlobEntry, config: ModelConfig) -> tuple[str, str]:
    # Adding zero looks idle, but another norm kernel than the whole graph's here would change the last bits.
    zero = graph.node("Mul", ["hidden", graph.constant([0], TensorProto.FLOAT)])
    return graph.skip_norm("hidden", zero, blob, "attn_norm", config)


def _embed(graph: _Graph, manifest: Manifest) -> str:
    rows = graph.lookup(manifest.embedding, manifest.embedding.linears["token_embd"], "token_ids")
    if manifest.config.embedding_scale == 1.0:
        return rows
    return graph.node("Mul", [rows, graph.number(manifest.config.embedding_scale)])


def _attention(graph: _Graph, manifest: Manifest, blob: BlobEntry, layer: int, index: int, normed: str) -> str:
    """layer: of the model; index: of the shard."""
    config, window = manifest.config, manifest.config.windows[layer]
    qkv = _fused_or_joined(graph, blob, normed, "attn_qkv", ("attn_q", "attn_k", "attn_v"))  # [T, (H + 2K) D]
    qkv = _norm_heads(graph, blob, config, graph.biased(blob, "attn_qkv_bias", qkv))
    padded = graph.node("Gather", [qkv, "pad_index"], axis=0)  # [S, Q, (H + 2K) D]
    past = [f"past_key_{index}", f"past_value_{index}"]
    prefix = "local_" if window and config.local_rope_base else ""
    rotary = [graph.external(manifest.rope, manifest.rope.arrays[prefix + name]) for name in ("cos", "sin")]
    lengths = ["seqlens_k", "total_sequence_length"]
    inputs = [padded, "", "", *past, *lengths, *rotary, "", "", "", "", "", "", "", "query_seqlens"]
    outputs = [graph.fresh(), f"present_key_{index}", f"present_value_{index}"]
    graph.contrib("GroupQueryAttention", inputs, outputs=outputs, **_attention_attributes(config, window))
    flat = graph.node("Reshape", [outputs[0], graph.constant([-1, config.num_heads * config.head_dim])])  # [S Q, H D]
    rows = graph.node("Gather", [flat, "unpad_index"], axis=0)  # [T, H D]
    attended = graph.biased(blob, "attn_out_bias", graph.linear(blob, blob.linears["attn_out"], rows))
    return graph.norm_if_any(attended, blob, "post_attention_norm", config)


def _attention_attributes(config: ModelConfig, window: int) -> dict[str, Any]:
    """Only what differs from the operator's defaults."""
    attributes: dict[str, Any] = {"num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads}
    attributes |= {"do_rotary": 1, "rotary_interleaved": 0}
    if window:
        attributes["local_window_size"] = window
    if config.attention_scale:
        attributes["scale"] = config.attention_scale
    if config.attention_softcap:
        attributes["softcap"] = config.attention_softcap
    return attributes


def _norm_heads(graph: _Graph, blob: BlobEntry, config: ModelConfig, qkv: str) -> str:
    """Each query and key head normed on its own; the attention operator would, but not on a CPU. qkv: [T, (H + 2K) D]."""
    if "attn_q_norm" not in blob.arrays:
        return qkv
    counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    heads = graph.node("Reshape", [qkv, graph.constant([-1, sum(counts), config.head_dim])])  # [T, H + 2K, D]
    parts = [graph.fresh() for _ in counts]
    graph.node("Split", [heads, graph.constant(counts)], outputs=parts, axis=1)
    parts[0] = graph.norm(parts[0], blob, "attn_q_norm", config)
    parts[1] = graph.norm(parts[1], blob, "attn_k_norm", config)
    joined = graph.node("Concat", parts, axis=1)
    return graph.node("Reshape", [joined, graph.constant([-1, sum(counts) * config.head_dim])])


def _feed_forward(graph: _Graph, blob: BlobEntry, config: ModelConfig, normed: str) -> str:
    gate, up = _gate_and_up(graph, blob, normed)
    operator, attributes = _ACTIVATIONS[config.activation]
    activated = graph.contrib(operator, [gate], **attributes)
    down = graph.linear(blob, blob.linears["ffn_down"], graph.node("Mul", [activated, up]))
    return graph.norm_if_any(graph.biased(blob, "ffn_down_bias", down), blob, "post_ffw_norm", config)


def _gate_and_up(graph: _Graph, blob: BlobEntry, normed: str) -> tuple[str, str]:
    """Both [T, F]."""
    is_biased = "ffn_gate_up_bias" in blob.arrays
    if "ffn_gate_up" not in blob.linears and not is_biased:
        gate = graph.linear(blob, blob.linears["ffn_gate"], normed)
        return gate, graph.linear(blob, blob.linears["ffn_up"], normed)
    both = _fused_or_joined(graph, blob, normed, "ffn_gate_up", ("ffn_gate", "ffn_up"))
    gate, up = graph.fresh(), graph.fresh()
    graph.node("Split", [graph.biased(blob, "ffn_gate_up_bias", both)], outputs=[gate, up], axis=-1, num_outputs=2)
    return gate, up


def _fused_or_joined(graph: _Graph, blob: BlobEntry, x: str, fused: str, parts: tuple[str, ...]) -> str:
    if fused in blob.linears:
        return graph.linear(blob, blob.linears[fused], x)
    return graph.node("Concat", [graph.linear(blob, blob.linears[part], x) for part in parts], axis=-1)


def _leave(graph: _Graph, manifest: Manifest, layers: LayerRange, hidden: str) -> None:
    config = manifest.config
    if layers.stop < config.num_layers:
        _leave_inside(graph, config, hidden)
        return
    _add_logits(graph, manifest, graph.node("Gather", [hidden, "logit_rows"], axis=0))


def _leave_inside(graph: _Graph, config: ModelConfig, hidden: str) -> None:
    graph.node("Identity", [hidden], outputs=["hidden_out"])
    graph.output("hidden_out", ["T", config.hidden_size])


def _add_logits(graph: _Graph, manifest: Manifest, rows: str) -> None:
    """rows: [R, E]."""
    config = manifest.config
    normed = graph.norm(rows, manifest.head, "output_norm", config)
    logits = _head(graph, manifest, normed)
    if config.logit_softcap:
        cap = graph.number(config.logit_softcap)
        logits = graph.node("Mul", [graph.node("Tanh", [graph.node("Div", [logits, cap])]), cap])
    graph.node("Identity", [logits], outputs=["logits"])
    graph.output("logits", ["R", config.vocab_size])


def _head(graph: _Graph, manifest: Manifest, normed: str) -> str:
    if not manifest.config.is_head_tied:
        return graph.linear(manifest.head, manifest.head.linears["output"], normed)
    blob, table = manifest.embedding, manifest.embedding.linears["token_embd"]
    if table.kind == "float32":
        return graph.node("Gemm", [normed, graph.external(blob, table.arrays["w"])], transB=1)
    return graph.linear(blob, table, normed)


def _num_blocks(weight: Linear) -> int:
    return -(-weight.k // weight.block)


def _bits(weight: Linear) -> int:
    """Of a kind as "int4" or "int4_cz"."""
    return int(weight.kind.removeprefix("int").removesuffix("_cz"))
