"""What onnxruntime multiplies by is what each block type stands for, and a row has the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from modelstore.block_types import BLOCK_TYPES
from modelstore.quantize import PackedLinear, pack_linear
from tests.support.blocks import Floats, make_tensor, true_values

ROWS = 65
# Rows and columns: fewer rows than a kernel takes at once, odd numbers of them, odd numbers of blocks.
SMALL_BLOCK_SHAPES = [(1, 32), (7, 96), (70, 160), (288, 256)]
LARGE_BLOCK_SHAPES = [(1, 256), (7, 768), (70, 256)]
CASES = [
    (name, shape)
    for name, kind in BLOCK_TYPES.items()
    for shape in (SMALL_BLOCK_SHAPES if kind.values == 32 else LARGE_BLOCK_SHAPES)
]


def open_weight(packed: PackedLinear, accuracy_level: int) -> Callable[[Floats], Floats]:
    """x [T, K] -> x times the weight [T, N]: the operator, and the correction of kinds that have one added by numpy."""
    bits = 4 if packed.kind.startswith("int4") else 8
    arrays = {name: packed.arrays[name] for name in ("q", "scale", "zero") if name in packed.arrays}
    sizes: dict[str, Any] = {"K": packed.k, "N": packed.n, "bits": bits, "block_size": packed.block}
    node = helper.make_node(
        "MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", accuracy_level=accuracy_level, **sizes
    )
    graph = helper.make_graph(
        [node],
        "multiply",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", packed.k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", packed.n])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(values), name) for name, values in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def multiply(x: Floats) -> Floats:
        y: Floats = session.run(None, {"x": x})[0]
        if "correction" in packed.arrays:
            y = y + x.reshape(len(x), -1, packed.block).sum(axis=2) @ packed.arrays["correction"]
        return y

    return multiply


@pytest.mark.parametrize(("type_name", "shape"), CASES)
def test_the_operator_multiplies_by_what_the_type_stands_for(type_name: str, shape: tuple[int, int]) -> None:
    tensor = make_tensor(type_name, *shape)
    # Rows of the unit matrix bring out the weights one by one.
    found = open_weight(pack_linear([tensor]), 0)(np.eye(shape[1], dtype=np.float32))
    np.testing.assert_allclose(found, true_values(tensor).T, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("type_name", "shape"), CASES)
def test_activations_of_8_bits_give_nearly_the_same(type_name: str, shape: tuple[int, int]) -> None:
    tensor = make_tensor(type_name, *shape)
    x = random_rows(shape[1])
    found = open_weight(pack_linear([tensor]), 4)(x)
    errors = found - x @ true_values(tensor).T
    assert np.abs(errors).max() < 0.05 * np.linalg.norm(x, axis=1).max() * true_values(tensor).std()


@pytest.mark.parametrize(("type_name", "shape"), CASES)
def test_a_row_among_others_has_the_bits_that_it_has_among_fewer(type_name: str, shape: tuple[int, int]) -> None:
    # Without the correction: numpy's product is not what computes it where a model is served.
    packed = pack_linear([make_tensor(type_name, *shape)])
    packed.arrays.pop("correction", None)
    multiply, x = open_weight(packed, 4), random_rows(shape[1])
    whole = multiply(x)
    for count in (2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 64):
        for start in (0, 1, ROWS - count):
            assert np.array_equal(multiply(x[start : start + count]), whole[start : start + count])


def random_rows(k: int) -> Floats:
    return np.random.default_rng(1).standard_normal((ROWS, k), dtype=np.float32)
