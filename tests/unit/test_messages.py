"""Plain values as messages and back: nothing is lost on the wire, and what is not known here is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shoal import errors, messages
from shoal.types import (
    ContextOverflow,
    DeviceProfile,
    FinishReason,
    KVPolicy,
    KVReuse,
    KVTierStatus,
    LayerRange,
    QosClass,
    SamplingParams,
    ShardShape,
    Telemetry,
)
from shoal.v1 import fleet_pb2, types_pb2

SAMPLING = SamplingParams(0.5, 40, 0.75, 0.25, 1.5, -1.0, 2.0, {5: -100.0}, 2**64 - 1, 3)


def test_sampling_parameters_survive_the_wire() -> None:
    assert messages.sampling_from_proto(messages.sampling_to_proto(SAMPLING), seed=1) == SAMPLING


def test_absent_sampling_fields_take_their_defaults_and_the_given_seed() -> None:
    assert messages.sampling_from_proto(types_pb2.SamplingParams(), seed=9) == SamplingParams(seed=9)


def test_a_zero_that_was_sent_is_not_taken_for_absent() -> None:
    message = types_pb2.SamplingParams(top_p=0.0, seed=0, num_logprobs=0)

    params = messages.sampling_from_proto(message, seed=9)

    assert (params.top_p, params.seed, params.num_logprobs) == (0.0, 0, 0)


def test_sampling_parameters_are_sent_complete() -> None:
    message = messages.sampling_to_proto(SamplingParams())

    present = {field.name for field, _ in message.ListFields()}
    assert present == {field.name for field in fields(SamplingParams)} - {"logit_bias", "num_logprobs"}


def test_a_profile_survives_the_wire_but_for_what_concerns_the_device_alone() -> None:
    profile = DeviceProfile(
        "phone-x",
        "phone",
        2**33,
        0.5,
        max_batch=4,
        allow_direct_links=False,
        is_emulated=True,
        host_kv_bytes=2**26,
        kv_policy=KVPolicy.COMPACT,
    )

    assert messages.profile_from_proto(messages.profile_to_proto(profile)) == profile


def test_a_kv_policy_of_a_later_version_counts_as_exact() -> None:
    message = fleet_pb2.DeviceProfile(kv_policy="tiny")

    assert messages.profile_from_proto(message).kv_policy is KVPolicy.EXACT


@pytest.mark.parametrize("reuse", KVReuse)
def test_a_way_to_use_stored_kv_survives_the_wire(reuse: KVReuse) -> None:
    assert messages.kv_reuse_from_proto(messages.kv_reuse_to_proto(reuse)) is reuse


def test_an_unknown_way_to_use_stored_kv_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="99 is not a way to use stored KV"):
        messages.kv_reuse_from_proto(99)  # type: ignore[arg-type]


@pytest.mark.parametrize("overflow", ContextOverflow)
def test_what_to_do_with_a_session_that_is_too_long_survives_the_wire(overflow: ContextOverflow) -> None:
    assert messages.overflow_from_proto(messages.overflow_to_proto(overflow)) is overflow


def test_an_unknown_way_to_go_on_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="99 is not a way to go on") as caught:
        messages.overflow_from_proto(99)  # type: ignore[arg-type]

    assert caught.value.field == "context_overflow"


def test_telemetry_survives_the_wire() -> None:
    tier = KVTierStatus("redis", "slow", 1, 2, 3, 4, 5, 6, 7, 8, {"truncated": 9}, 10.5, 11.5, 12.5, 13.5, 14, 15)
    telemetry = Telemetry(1, 2, 3, 4, 0.5, kv_tiers=(KVTierStatus("host"), tier))

    assert messages.telemetry_from_proto(messages.telemetry_to_proto(telemetry)) == telemetry


def test_a_shard_shape_survives_the_wire() -> None:
    shape = ShardShape(10, 3, 64, 576, 49152, 8, 2048, 8192, True, False)

    assert messages.shape_from_proto(messages.shape_to_proto(shape)) == shape


@pytest.mark.parametrize("layers", [LayerRange(0, 10), LayerRange(29, 30), None])
def test_a_layer_range_survives_the_wire(layers: LayerRange | None) -> None:
    assert messages.layers_from_proto(messages.layers_to_proto(layers)) == layers


@pytest.mark.parametrize("qos", QosClass)
def test_a_qos_class_survives_the_wire(qos: QosClass) -> None:
    assert messages.qos_from_proto(messages.qos_to_proto(qos), QosClass.BALANCED) is qos


@pytest.mark.parametrize("reason", FinishReason)
def test_a_finish_reason_survives_the_wire(reason: FinishReason) -> None:
    assert messages.finish_from_proto(messages.finish_to_proto(reason)) is reason


def test_an_unspecified_qos_class_is_the_one_of_the_configuration() -> None:
    assert messages.qos_from_proto(types_pb2.QOS_CLASS_UNSPECIFIED, QosClass.THROUGHPUT) is QosClass.THROUGHPUT


def test_a_qos_class_of_a_later_version_is_refused() -> None:
    unknown: Any = 17

    with pytest.raises(errors.InvalidRequest) as caught:
        messages.qos_from_proto(unknown, QosClass.BALANCED)

    assert caught.value.field == "qos_class"
