"""The session opens on the provider that works, says which and why, and names its runtime."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from modelstore.graph import build_shard_graph, shard_blobs
from shoal.errors import InternalError
from shoal.types import LayerRange
from tests.support.shards import TinyModel, make_tiny_model, open_chain
from worker.session import CPU_PROVIDER, Session, runtime_summary

WHOLE = LayerRange(0, 3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3)


@pytest.fixture
def graph(tiny: TinyModel) -> bytes:
    return build_shard_graph(tiny.manifest, WHOLE)


def test_a_provider_that_is_not_there_falls_back_to_the_next_and_says_so(tiny: TinyModel, graph: bytes) -> None:
    wanted = ("QNNExecutionProvider", "CUDAExecutionProvider", CPU_PROVIDER)
    session = Session(graph, tiny.blob_directory, providers=wanted)
    assert session.provider == CPU_PROVIDER
    assert session.skipped == dict.fromkeys(wanted[:2], "not part of this onnxruntime")


def test_nothing_is_skipped_by_default(tiny: TinyModel, graph: bytes) -> None:
    session = Session(graph, tiny.blob_directory)
    assert (session.provider, session.skipped) == (runtime_summary().execution_provider, {})


def test_an_error_names_every_provider_tried_and_why(tmp_path: Path, graph: bytes) -> None:
    with pytest.raises(InternalError, match=r"CUDAExecutionProvider: not part.*CPUExecutionProvider: .*[0-9a-f]{64}"):
        Session(graph, tmp_path, providers=("CUDAExecutionProvider", CPU_PROVIDER))


def test_a_damaged_graph_is_an_error_of_ours(tiny: TinyModel, graph: bytes) -> None:
    with pytest.raises(InternalError, match="no execution provider loads"):
        Session(graph[: len(graph) // 2], tiny.blob_directory)


def test_a_session_knows_what_its_weights_take(tiny: TinyModel) -> None:
    for layers in (WHOLE, LayerRange(1, 2)):
        session = Session(build_shard_graph(tiny.manifest, layers), tiny.blob_directory)
        assert session.weight_bytes == sum(blob.num_bytes for blob in shard_blobs(tiny.manifest, layers))


def test_inputs_and_outputs_are_named_as_promised(tiny: TinyModel) -> None:
    middle = Session(build_shard_graph(tiny.manifest, LayerRange(1, 2)), tiny.blob_directory)
    steady = {"pad_index", "unpad_index", "seqlens_k", "query_seqlens", "total_sequence_length"}
    assert set(middle.input_names) == steady | {"hidden", "past_key_0", "past_value_0"}
    assert set(middle.output_names) == {"hidden_out", "present_key_0", "present_value_0"}
    whole = Session(build_shard_graph(tiny.manifest, WHOLE), tiny.blob_directory)
    assert {"token_ids", "logit_rows", "past_key_2"} <= set(whole.input_names)
    assert "logits" in whole.output_names


def test_a_closed_shard_gives_its_memory_back_and_cannot_run(tiny: TinyModel) -> None:
    chain = open_chain(tiny.manifest, tiny.blob_directory)
    chain.prefill([5, 6, 7])
    chain.close()
    with pytest.raises(AttributeError):
        chain.decode(5, 3)


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    program = "from worker.session import runtime_summary; print(runtime_summary().kernel_fingerprint)"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == runtime_summary().kernel_fingerprint


def test_a_binding_keeps_what_it_runs_on_until_it_is_gone_itself(tiny: TinyModel, graph: bytes) -> None:
    session = Session(graph, tiny.blob_directory)
    runtime = weakref.ref(session._session)
    binding = session.binding()

    session.close()
    assert runtime() is not None
    del binding
    assert runtime() is None
