"""Emulation: the arithmetic of slow devices, slow links and small memories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, ShardDoesNotFit
from shoal.memory import need_bytes
from shoal.types import DeviceProfile, LinkProfile
from worker.emulation import LinkShaper, SlowDown, check_fits

PHONE = DeviceProfile(name="phone-2", kind="phone", memory_bytes=1000)


def test_half_the_speed_takes_twice_the_time() -> None:
    assert SlowDown(0.5).extra_seconds(0.03) == pytest.approx(0.03)


def test_full_speed_waits_for_nothing() -> None:
    assert SlowDown(1.0).extra_seconds(0.5) == 0.0


@given(st.floats(0.01, 1.0), st.floats(0.0, 100.0))
def test_compute_and_wait_together_are_the_time_at_that_speed(speed: float, compute_s: float) -> None:
    assert compute_s + SlowDown(speed).extra_seconds(compute_s) == pytest.approx(compute_s / speed)


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.01, float("nan")])
def test_a_speed_that_waiting_cannot_give_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        SlowDown(speed)


def test_a_link_without_limits_delivers_at_once() -> None:
    assert LinkShaper(LinkProfile()).due(10**9, now=5.0) == 5.0


def test_delay_is_added_to_every_message() -> None:
    shaper = LinkShaper(LinkProfile(delay_ms=5.0))
    assert shaper.due(100, now=1.0) == pytest.approx(1.005)
    assert shaper.due(100, now=1.001) == pytest.approx(1.006)


def test_a_message_takes_its_bits_over_the_rate() -> None:
    # 8 Mbit/s are a million bytes a second.
    assert LinkShaper(LinkProfile(delay_ms=5.0, rate_mbit_s=8.0)).due(20_000, now=1.0) == pytest.approx(1.025)


def test_messages_queue_for_the_rate_but_overlap_in_the_delay() -> None:
    shaper = LinkShaper(LinkProfile(delay_ms=100.0, rate_mbit_s=8.0))
    assert [shaper.due(10_000, now=0.0) for _ in range(3)] == pytest.approx([0.11, 0.12, 0.13])


def test_an_idle_link_saves_up_nothing() -> None:
    shaper = LinkShaper(LinkProfile(rate_mbit_s=8.0))
    shaper.due(10_000, now=0.0)
    assert shaper.due(10_000, now=10.0) == pytest.approx(10.01)


@given(
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 50.0]),
    st.lists(st.tuples(st.integers(0, 10**7), st.floats(0.0, 50.0)), max_size=20),
)
def test_messages_are_never_reordered_even_if_the_clock_steps_back(
    delay_ms: float, rate_mbit_s: float, messages: list[tuple[int, float]]
) -> None:
    shaper = LinkShaper(LinkProfile(delay_ms, rate_mbit_s))
    due_times = [shaper.due(num_bytes, now) for num_bytes, now in messages]
    assert due_times == sorted(due_times)
    assert all(due >= now for due, (_, now) in zip(due_times, messages, strict=True))


@pytest.mark.parametrize("link", [LinkProfile(delay_ms=-1.0), LinkProfile(rate_mbit_s=-1.0)])
def test_a_negative_link_is_refused(link: LinkProfile) -> None:
    with pytest.raises(ConfigError, match="0 \\(not limited\\) or more"):
        LinkShaper(link)


def test_need_counts_weights_with_their_repacked_copy_kv_and_workspace() -> None:
    assert need_bytes(100_000_000, 7) == 230_000_007 + 130 * 2**20


def test_a_shard_of_exactly_the_memory_fits() -> None:
    check_fits(PHONE, 1000, "layers [0, 10)")


def test_a_shard_that_does_not_fit_is_refused_with_device_and_missing_bytes() -> None:
    with pytest.raises(ShardDoesNotFit, match=r"layers \[0, 10\) does not fit on phone-2 \(phone\).* lacks 234"):
        check_fits(PHONE, 1234, "layers [0, 10)")
