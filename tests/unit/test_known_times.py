"""Times that a machine remembers: for how long, for whom, and what becomes of them on a slower device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.types import DeviceProfile
from worker.profiling import MAX_AGE_S, MAX_AHEAD_S, MAX_KEPT, KnownTimes, MachineTimes, times_of_device

DIGEST = "ab" * 32
NOW_S = 1_800_000_000.0
TIMES = MachineTimes(
    shape_digest=DIGEST,
    measured_at_s=NOW_S,
    layer_s=((1, 0.001), (2, 0.0015)),
    head_s=((1, 0.004), (2, 0.005)),
    sample_s=0.0001,
    prefill_token_s=0.0002,
    pass_s=0.00005,
)


def profile(**fields: object) -> DeviceProfile:
    return DeviceProfile(name="p", kind="phone", memory_bytes=100 << 20, **fields)  # type: ignore[arg-type]


def test_what_was_kept_is_known_to_every_device_of_the_folder(tmp_path: Path) -> None:
    KnownTimes(tmp_path / "times", 1).keep(TIMES)
    assert KnownTimes(tmp_path / "times", 1).get(DIGEST, NOW_S + 1.0) == TIMES


def test_times_of_other_threads_are_others(tmp_path: Path) -> None:
    KnownTimes(tmp_path, 1).keep(TIMES)
    assert KnownTimes(tmp_path, 2).get(DIGEST, NOW_S) is None


def test_times_of_another_runtime_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KnownTimes(tmp_path, 1).keep(TIMES)
    monkeypatch.setattr("worker.session.ort.__version__", "99.0.0")
    assert KnownTimes(tmp_path, 1).get(DIGEST, NOW_S) is None


def test_times_expire(tmp_path: Path) -> None:
    known = KnownTimes(tmp_path, 1)
    known.keep(TIMES)
    assert known.get(DIGEST, NOW_S + MAX_AGE_S - 1.0) is not None
    assert known.get(DIGEST, NOW_S + MAX_AGE_S + 1.0) is None


def test_times_from_the_future_are_not_believed(tmp_path: Path) -> None:
    known = KnownTimes(tmp_path, 1)
    known.keep(TIMES)
    assert known.get(DIGEST, NOW_S - MAX_AHEAD_S - 1.0) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"shape_digest": "x"}'])
def test_a_damaged_file_counts_as_not_there(tmp_path: Path, text: str) -> None:
    known = KnownTimes(tmp_path, 1)
    known.keep(TIMES)
    next(tmp_path.glob("*.json")).write_text(text, encoding="utf-8")
    assert known.get(DIGEST, NOW_S) is None
    assert known.all(NOW_S) == []


def test_a_folder_that_cannot_be_written_to_only_means_measuring_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    known = KnownTimes(tmp_path / "file", 1)
    known.keep(TIMES)
    assert known.get(DIGEST, NOW_S) is None


def test_a_digest_that_is_a_path_leads_nowhere(tmp_path: Path) -> None:
    assert KnownTimes(tmp_path, 1).get("../../etc/passwd", NOW_S) is None


def test_the_newest_of_many_are_told(tmp_path: Path) -> None:
    known = KnownTimes(tmp_path, 1)
    for number in range(MAX_KEPT + 4):
        known.keep(replace(TIMES, shape_digest=f"{number:064x}", measured_at_s=NOW_S + number))
    told = known.all(NOW_S + MAX_KEPT + 4)
    assert len(told) == MAX_KEPT
    assert told[0].measured_at_s == NOW_S + MAX_KEPT + 3


def test_a_device_at_half_the_speed_takes_twice_as_long_for_its_runs_and_no_longer_for_the_rest() -> None:
    times = times_of_device(TIMES, profile(is_emulated=True, speed=0.5))
    assert [(one.rows, one.seconds) for one in times.layer] == [(1, 0.002), (2, 0.003)]
    assert [one.seconds for one in times.head] == pytest.approx([0.008 + 0.0001, 0.010 + 0.0002])
    assert times.prefill_token_s == pytest.approx(0.0004)
    assert times.pass_s == TIMES.pass_s


def test_a_declared_speed_changes_nothing_of_a_real_device() -> None:
    times = times_of_device(TIMES, profile(speed=0.5))
    assert [one.seconds for one in times.layer] == [0.001, 0.0015]


def test_a_device_says_what_its_profile_leaves_for_a_shard() -> None:
    assert times_of_device(TIMES, profile(host_kv_bytes=10 << 20)).free_bytes == 90 << 20
