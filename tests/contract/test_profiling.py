"""Measuring a shape with the real shard code, on a tiny model of which only the sizes are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.shape import NUM_LAYERS, measure_command
from shoal.errors import InvalidRequest, NotReady, ShardDoesNotFit
from shoal.v1 import fleet_pb2
from tests.support.compute import Bench, bench, model, start
from tests.support.fleet import make_device
from tests.support.shards import TinyModel, make_tiny_model
from worker import profiling
from worker.profiling import ROWS, MeasureShape, ShapeMeasured, _ShardTimes, measure

__all__ = ["bench", "model", "start"]

NOW_S = 1_800_000_000.0


def command_of(tiny: TinyModel) -> fleet_pb2.Measure:
    command = measure_command(tiny.manifest)
    assert command is not None
    return command


def test_every_number_of_rows_is_timed_without_any_weight(model: TinyModel, tmp_path: Path) -> None:
    times = measure(command_of(model), make_device(), tmp_path, NOW_S)

    assert (times.shape_digest, times.measured_at_s) == (command_of(model).shape_digest, NOW_S)
    assert [rows for rows, _ in times.layer_s] == [rows for rows, _ in times.head_s] == list(ROWS)
    assert all(seconds > 0.0 for _, seconds in times.layer_s)
    assert times.prefill_token_s > 0.0
    assert times.pass_s > 0.0


def test_more_rows_are_never_said_to_take_less(model: TinyModel, tmp_path: Path) -> None:
    seconds = [seconds for _, seconds in measure(command_of(model), make_device(), tmp_path, NOW_S).layer_s]
    assert seconds == sorted(seconds)


def test_the_time_of_the_head_is_without_that_of_the_layers_before_it(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = iter([_ShardTimes(4, ((1, 0.008), (2, 0.016)), 0.512), _ShardTimes(2, ((1, 0.010), (2, 0.005)), 0.0)])
    monkeypatch.setattr(profiling, "_time", lambda *_: next(passes))

    times = measure(command_of(model), make_device(), tmp_path, NOW_S)

    assert times.layer_s == ((1, 0.002), (2, 0.004))
    assert [seconds for _, seconds in times.head_s] == pytest.approx([0.006, 0.0])
    assert times.prefill_token_s == pytest.approx(0.002)


def test_nothing_is_left_of_the_holes(model: TinyModel, tmp_path: Path) -> None:
    measure(command_of(model), make_device(), tmp_path, NOW_S)
    assert list(tmp_path.iterdir()) == []


def test_a_device_too_small_for_a_few_layers_says_so_before_it_loads_any(model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ShardDoesNotFit, match="measuring a few layers does not fit"):
        measure(command_of(model), make_device(memory_bytes=1 << 20), tmp_path, NOW_S)


@pytest.mark.parametrize("name", ["../escape", "", "/etc/passwd", "ABC"])
def test_a_file_name_that_is_no_digest_is_refused(model: TinyModel, tmp_path: Path, name: str) -> None:
    command = command_of(model)
    command.blobs[0].digest = name
    with pytest.raises(InvalidRequest, match="lower-case hex"):
        measure(command, make_device(), tmp_path, NOW_S)


def test_a_command_with_too_few_slots_is_refused(model: TinyModel, tmp_path: Path) -> None:
    command = command_of(model)
    command.head_shape.num_slots = 1
    with pytest.raises(InvalidRequest, match="16 slots"):
        measure(command, make_device(), tmp_path, NOW_S)


def test_the_compute_thread_measures_and_tells(bench: Bench, tmp_path: Path) -> None:
    bench.compute.post(MeasureShape(command_of(bench.model), tmp_path))

    event = bench.next_event()

    assert isinstance(event, ShapeMeasured)
    assert event.times is not None
    assert event.reason == ""


def test_a_worker_that_holds_a_shard_is_not_measured(bench: Bench, tmp_path: Path) -> None:
    bench.load()
    bench.compute.post(MeasureShape(command_of(bench.model), tmp_path))

    event = bench.next_event()

    assert isinstance(event, ShapeMeasured)
    assert (event.times, event.reason) == (None, NotReady.reason)


def test_a_graph_that_cannot_be_loaded_is_told_and_the_thread_lives_on(bench: Bench, tmp_path: Path) -> None:
    command = command_of(bench.model)
    command.layers_graph = b"no graph"
    bench.compute.post(MeasureShape(command, tmp_path))

    event = bench.next_event()

    assert isinstance(event, ShapeMeasured)
    assert event.reason == "INTERNAL"
    bench.load()


def test_models_that_differ_only_in_weights_are_measured_once(make: Callable[..., TinyModel], tmp_path: Path) -> None:
    one, other = command_of(make("one", seed=1)), command_of(make("other", seed=2))
    assert one == other


def test_models_of_another_shape_are_measured_by_themselves(make: Callable[..., TinyModel]) -> None:
    one, other = command_of(make("one", num_layers=3)), command_of(make("other", num_layers=3, vocab=320))
    assert one.shape_digest != other.shape_digest


def test_layers_come_from_the_middle_as_many_as_there_are(make: Callable[..., TinyModel]) -> None:
    command = command_of(make("three", num_layers=3))
    assert (command.layers_shape.num_layers, command.head_shape.num_layers) == (1, 1)
    assert not command.layers_shape.is_last
    assert command.head_shape.is_last
    assert command_of(make("eight", num_layers=8)).layers_shape.num_layers == NUM_LAYERS


def test_a_model_without_a_middle_is_not_measured(make: Callable[..., TinyModel]) -> None:
    assert measure_command(make("two", num_layers=2).manifest) is None


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., TinyModel]:
    return lambda name, **options: make_tiny_model(tmp_path / name, **options)
