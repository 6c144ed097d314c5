"""The benchmark's own rule: which pairs count, when measuring ends, and what the verdict on a figure is."""

from collections.abc import Iterator

import pytest

from tests.bench.figures import Figure, from_pairs
from tests.bench.pairs import MAX_FLEET_BUSY_CORES, Load, Pair, PairSet, Plan, Run, collect
from tests.bench.report import Report, to_fields, to_markdown


def make_run(value: float = 1.0, *, busy: float = 1.0, own: float = 1.0) -> Run:
    return Run(value, Load(busy, own))


def make_pair(candidate: float = 1.0, *, is_quiet: bool = True) -> Pair:
    return Pair(make_run(), make_run(candidate), make_run(busy=1.0 if is_quiet else 1.9))


def test_a_ratio_is_against_the_mean_of_both_baselines() -> None:
    pair = Pair(make_run(40.0), make_run(45.0), make_run(60.0))
    assert (pair.ratio, pair.inverse_ratio, pair.difference) == (0.9, 50.0 / 45.0, -5.0)


def test_a_pair_whose_three_runs_were_undisturbed_counts() -> None:
    assert Pair(make_run(busy=1.25), make_run(busy=1.95, own=1.75), make_run(busy=1.2)).counts


@pytest.mark.parametrize("disturbed", ["before", "after"])
def test_a_pair_does_not_count_if_a_baseline_had_company(disturbed: str) -> None:
    runs = {"before": make_run(), "after": make_run(), disturbed: make_run(busy=1.31)}
    assert not Pair(runs["before"], make_run(), runs["after"]).counts


def test_a_pair_does_not_count_if_others_computed_beside_the_pipeline() -> None:
    assert not Pair(make_run(), make_run(busy=2.0, own=1.6), make_run()).counts


def test_a_baseline_that_is_a_fleet_may_keep_two_cores_busy_but_no_others() -> None:
    alone, beside_others = make_run(busy=1.9, own=1.8), make_run(busy=1.9, own=1.5)
    assert not Pair(alone, make_run(), alone).counts
    assert Pair(alone, make_run(), alone, MAX_FLEET_BUSY_CORES).counts
    assert not Pair(alone, make_run(), beside_others, MAX_FLEET_BUSY_CORES).counts


def test_the_bound_of_a_baseline_goes_into_its_pairs() -> None:
    plan, busy = Plan(counted=1, tries=1), make_run(busy=1.9, own=1.9)
    assert not collect(plan, lambda: busy, make_run).counted
    assert collect(plan, lambda: busy, make_run, max_busy_cores=MAX_FLEET_BUSY_CORES).counted


def test_others_are_noticed_beside_a_baseline_that_rests_at_times() -> None:
    assert not Pair(make_run(busy=1.2, own=0.5), make_run(), make_run()).counts


def test_the_median_is_over_the_pairs_that_count() -> None:
    pairs = PairSet((make_pair(1.0), make_pair(9.0, is_quiet=False), make_pair(2.0), make_pair(3.0)))
    assert pairs.median(lambda pair: pair.ratio) == 2.0
    assert pairs.num_discarded == 1


def test_without_a_pair_that_counts_there_is_no_median() -> None:
    assert PairSet((make_pair(is_quiet=False),)).median(lambda pair: pair.ratio) is None


def test_measuring_goes_on_until_enough_pairs_count() -> None:
    busy: Iterator[float] = iter([1.9, 1.0, 1.0, 1.0, 1.0, 1.0])
    pairs = collect(Plan(counted=2, tries=9), lambda: make_run(busy=next(busy)), make_run)
    assert [pair.counts for pair in pairs.pairs] == [False, True, True]


def test_measuring_ends_after_the_tries_even_if_none_counts() -> None:
    pairs = collect(Plan(counted=3, tries=4), lambda: make_run(busy=2.0), make_run)
    assert (len(pairs.pairs), len(pairs.counted), pairs.is_enough) == (4, 0, False)


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("one_worker", 0.97, "aim reached"),
        ("one_worker", 0.90, "gate passed"),
        ("one_worker", 0.89, "gate missed"),
        ("hop", 0.4, "aim reached"),
        ("hop", 1.0, "gate passed"),
        ("hop", 1.1, "gate missed"),
    ],
)
def test_the_verdict_compares_with_gate_and_aim(name: str, value: float, verdict: str) -> None:
    assert Figure(name, value, 3, 0).verdict == verdict


def test_two_quiet_pairs_are_no_result_however_good() -> None:
    figure = from_pairs("one_worker", PairSet((make_pair(), make_pair(), make_pair(is_quiet=False))), lambda _: 1.0)
    assert figure.verdict == "does not count: 2 quiet of 3"


def test_the_report_has_discarded_pairs_too() -> None:
    pairs = PairSet((make_pair(1.0), make_pair(0.5, is_quiet=False)))
    report = Report({"memory": "4 GiB"}, "run", 60.0, [from_pairs("hop", pairs, lambda pair: pair.ratio)])
    fields = to_fields(report)["figures"]
    assert isinstance(fields, list)
    assert [row["counts"] for row in fields[0]["raw"]] == [True, False]
    assert "| 1 / 1 |" in to_markdown(report)
