"""Rounding float weights to blocks: how near the values stay, and that rows of any length can be rounded."""

from __future__ import annotations

import numpy as np
import pytest

from modelstore.requantize import (
    FLOAT32,
    INT4,
    INT4_ASYM,
    INT8,
    Floats,
    Precisions,
    changes,
    restored,
    round_rows,
    uniform,
)
from shoal.errors import InvalidRequest


def relative_error(values: Floats, precision: str) -> float:
    rounded = restored(round_rows(values, precision), values.shape[1])
    return float(np.linalg.norm(rounded - values) / np.linalg.norm(values))


def normal_rows(rows: int = 64, columns: int = 256, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def rounded_by_the_largest(values: Floats) -> Floats:
    """4 bits with scales from the largest value alone, as Q4_0 does."""
    blocks = values.reshape(len(values), -1, 32)
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)
    scale = top / -8
    rounded = np.clip(np.rint(blocks / scale), -8, 7) * scale
    return rounded.reshape(values.shape).astype(np.float32)


@pytest.mark.parametrize(("precision", "most"), [(INT8, 0.006), (INT4, 0.082), (INT4_ASYM, 0.079)])
def test_normal_values_lose_no_more_than_was_measured(precision: str, most: float) -> None:
    assert relative_error(normal_rows(), precision) < most


def test_searched_scales_beat_the_largest_value() -> None:
    values = normal_rows()
    plain = float(np.linalg.norm(rounded_by_the_largest(values) - values) / np.linalg.norm(values))
    assert relative_error(values, INT4) < 0.95 * plain


def test_blocks_off_centre_keep_more_with_a_zero_point_of_their_own() -> None:
    values = np.abs(normal_rows())
    assert relative_error(values, INT4_ASYM) < 0.6 * relative_error(values, INT4)


def test_values_on_a_grid_of_sixteen_steps_are_kept_at_4_bits() -> None:
    steps = np.tile(np.arange(16, dtype=np.float32), (3, 2)) - 8
    for precision in (INT4, INT4_ASYM):
        np.testing.assert_allclose(restored(round_rows(steps * 0.25, precision), 32), steps * 0.25, atol=1e-6)


@pytest.mark.parametrize("num_values", [1, 31, 33, 40, 100])
@pytest.mark.parametrize("precision", [INT8, INT4, INT4_ASYM])
def test_rows_that_are_no_whole_number_of_blocks_are_filled_up(precision: str, num_values: int) -> None:
    values = normal_rows(5, num_values)
    arrays = round_rows(values, precision)
    assert arrays["scale"].shape == (5, -(-num_values // 32))
    assert restored(arrays, num_values).shape == values.shape
    assert relative_error(values, precision) < 0.1


@pytest.mark.parametrize("precision", [INT8, INT4, INT4_ASYM])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-30, 1e37])
def test_values_of_any_size_stay_numbers(precision: str, size: float) -> None:
    values = normal_rows(2, 64) * np.float32(size)
    rounded = restored(round_rows(values, precision), 64)
    assert np.isfinite(rounded).all()
    assert np.abs(rounded - values).max() <= max(0.5 * size, 1e-43)


@pytest.mark.parametrize(
    ("precision", "source_bits", "is_changed"),
    [(INT4, 8, True), (INT4, 4, False), (INT8, 8, False), (INT8, 4, False), (FLOAT32, 4, True)],
)
def test_quantised_weights_change_if_they_get_fewer_bits_or_become_floats(
    precision: str, source_bits: int, is_changed: bool
) -> None:
    assert changes(precision, source_bits) is is_changed


def test_the_ends_stay_at_8_bits_where_layers_get_4() -> None:
    assert (uniform(INT4).ends, uniform(FLOAT32).ends) == (INT8, FLOAT32)


def test_each_layer_may_have_a_precision_of_its_own() -> None:
    mixed = Precisions((INT4, INT8))
    assert [mixed.of_layer(index) for index in (0, 1)] == [INT4, INT8]


@pytest.mark.parametrize("make", [lambda: uniform("int3"), lambda: Precisions((INT8, "int3"))])
def test_an_unknown_precision_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(InvalidRequest, match="precision: int3 is none of float32, int8, int4, int4-asym"):
        make()
