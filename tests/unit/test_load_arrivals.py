"""When requests are due: as the rate and the burstiness say, from a seed, the same on every machine."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import CONSTANT, MAX_REQUESTS, make_arrivals
from loadtest.seeds import MAX_SEED
from shoal.errors import ConfigError

SEEDS = st.integers(0, MAX_SEED)
BURSTINESS = st.sampled_from([0.1, 0.5, 1.0, 4.0, CONSTANT])


def relative_deviation(times: tuple[float, ...]) -> float:
    gaps = np.diff((0.0, *times))
    return float(gaps.std() / gaps.mean())


class TestTheSchedule:
    @given(SEEDS, BURSTINESS, st.floats(0.01, 1000.0), st.integers(1, 200))
    def test_times_rise_from_the_start(self, seed: int, burstiness: float, rate: float, count: int) -> None:
        times = make_arrivals(rate, seed=seed, burstiness=burstiness, num_requests=count)
        assert len(times) == count
        assert times[0] >= 0.0
        assert all(earlier <= later for earlier, later in pairwise(times))

    @given(SEEDS, BURSTINESS, st.floats(0.1, 100.0))
    def test_a_duration_holds_exactly_the_arrivals_before_its_end(
        self, seed: int, burstiness: float, duration_s: float
    ) -> None:
        within = make_arrivals(5.0, seed=seed, burstiness=burstiness, duration_s=duration_s)
        more = make_arrivals(5.0, seed=seed, burstiness=burstiness, num_requests=len(within) + 1)
        assert more[:-1] == within
        assert all(at_s < duration_s for at_s in within)
        assert more[-1] >= duration_s

    @given(SEEDS, BURSTINESS)
    def test_fewer_arrivals_are_the_first_of_more(self, seed: int, burstiness: float) -> None:
        few = make_arrivals(5.0, seed=seed, burstiness=burstiness, num_requests=10)
        many = make_arrivals(5.0, seed=seed, burstiness=burstiness, num_requests=2000)
        assert many[:10] == few

    @given(SEEDS, BURSTINESS)
    def test_a_higher_rate_is_the_same_schedule_in_less_time(self, seed: int, burstiness: float) -> None:
        slow = make_arrivals(1.0, seed=seed, burstiness=burstiness, num_requests=50)
        fast = make_arrivals(4.0, seed=seed, burstiness=burstiness, num_requests=50)
        assert [4.0 * at_s for at_s in fast] == pytest.approx(slow, abs=4e-6)

    def test_a_duration_too_short_for_any_arrival_has_none(self) -> None:
        assert make_arrivals(1.0, seed=1, burstiness=CONSTANT, duration_s=0.5) == ()


class TestTheSeed:
    # Written down from a run: another machine, or another release of numpy, must not make another schedule.
    def test_a_seed_gives_this_very_poisson_schedule_everywhere(self) -> None:
        assert make_arrivals(2.0, seed=1, num_requests=4) == (0.84896, 1.749057, 2.256672, 2.562149)

    def test_a_seed_gives_this_very_bursty_schedule_everywhere(self) -> None:
        times = make_arrivals(2.0, seed=1, burstiness=0.5, num_requests=4)
        assert times == (0.226352, 0.286419, 0.680684, 0.7946)

    def test_another_seed_gives_another_schedule(self) -> None:
        assert make_arrivals(2.0, seed=1, num_requests=4) != make_arrivals(2.0, seed=2, num_requests=4)

    def test_times_are_whole_microseconds(self) -> None:
        times = make_arrivals(2.0, seed=1, num_requests=100)
        assert all(at_s == round(at_s, 6) for at_s in times)


class TestTheDistribution:
    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_gaps_have_the_mean_and_the_deviation_of_their_gamma_distribution(self, burstiness: float) -> None:
        times = make_arrivals(2.0, seed=3, burstiness=burstiness, num_requests=40_000)
        assert len(times) / times[-1] == pytest.approx(2.0, rel=0.03)
        assert relative_deviation(times) == pytest.approx(1.0 / math.sqrt(burstiness), rel=0.03)

    def test_poisson_arrivals_in_a_second_vary_as_much_as_their_mean(self) -> None:
        times = np.array(make_arrivals(5.0, seed=4, duration_s=4000.0))
        counts = np.bincount(times.astype(int), minlength=4000)
        assert counts.mean() == pytest.approx(5.0, rel=0.03)
        assert counts.var() == pytest.approx(5.0, rel=0.08)

    def test_constant_arrivals_are_evenly_spaced(self) -> None:
        assert make_arrivals(2.0, seed=1, burstiness=CONSTANT, duration_s=2.1) == (0.5, 1.0, 1.5, 2.0)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("field", "arguments"),
        [
            ("rate_per_s", {"rate_per_s": 0.0, "num_requests": 1}),
            ("rate_per_s", {"rate_per_s": math.nan, "num_requests": 1}),
            ("rate_per_s", {"rate_per_s": math.inf, "num_requests": 1}),
            ("burstiness", {"burstiness": 0.0, "num_requests": 1}),
            ("num_requests", {"num_requests": 0}),
            ("num_requests", {"num_requests": MAX_REQUESTS + 1}),
            ("num_requests", {}),
            ("num_requests", {"num_requests": 1, "duration_s": 1.0}),
            ("duration_s", {"duration_s": 0.0}),
            ("duration_s", {"duration_s": math.inf}),
            ("seed", {"seed": -1, "num_requests": 1}),
            ("seed", {"seed": MAX_SEED + 1, "num_requests": 1}),
        ],
    )
    def test_a_value_out_of_range_is_named(self, field: str, arguments: dict[str, float]) -> None:
        with pytest.raises(ConfigError) as caught:
            make_arrivals(**({"rate_per_s": 2.0, "seed": 1} | arguments))  # type: ignore[arg-type]
        assert caught.value.field == field

    def test_a_rate_and_a_duration_that_make_too_many_requests_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="more than 1000000 requests"):
            make_arrivals(1e6, seed=1, duration_s=10.0)
