"""Sampling: the order of operations, exact against a slow reference, and its randomness."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InternalError
from shoal.types import SamplingParams
from worker.sampling import Logits, Sampler, draw_uniform

VOCAB = 3000


def make_logits(seed: int, size: int = VOCAB, spread: float = 2.0) -> Logits:
    return np.random.default_rng(seed).normal(0.0, spread, size).astype(np.float32)


def log_of(*probabilities: float) -> Logits:
    return np.array([math.log(probability) for probability in probabilities], dtype=np.float32)


def sample_once(logits: Logits, params: SamplingParams, position: int = 0) -> int:
    return Sampler(params).sample(logits, position).token_id


def draw_counts(logits: Logits, params: SamplingParams, num_draws: int) -> Counter[int]:
    return Counter(sample_once(logits, params, position) for position in range(num_draws))


def kept_by_reference(logits: Logits, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Ids in order and their unnormalised probabilities, by sorting everything and filtering one step at a time."""
    order = np.lexsort((np.arange(logits.size), -logits.astype(np.float64)))
    weights = np.exp((logits[order].astype(np.float64) - float(logits.max())) / params.temperature)
    if params.top_k:
        order, weights = order[: params.top_k], weights[: params.top_k]
    if params.top_p < 1.0:
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        order, weights = order[before < params.top_p * weights.sum()], weights[before < params.top_p * weights.sum()]
    is_likely = weights >= params.min_p * weights[0]
    return order[is_likely], weights[is_likely]


def sample_by_reference(logits: Logits, params: SamplingParams, position: int) -> int:
    order, weights = kept_by_reference(logits, params)
    target = draw_uniform(params.seed, position) * weights.sum()
    return int(order[min(int(np.searchsorted(np.cumsum(weights), target, side="right")), order.size - 1)])


def chi_square(counts: Counter[int], probabilities: dict[int, float], num_draws: int) -> float:
    return sum((counts[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in probabilities.items())


def test_temperature_zero_takes_the_highest_logit() -> None:
    logits = make_logits(1)
    assert sample_once(logits, SamplingParams()) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-300])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    logits = make_logits(2)
    assert sample_once(logits, SamplingParams(temperature=temperature, top_p=0.9)) == int(logits.argmax())


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.zeros(500, dtype=np.float32)
    logits[[40, 7, 400]] = 3.0
    assert sample_once(logits, SamplingParams()) == 7


def test_top_k_takes_the_lowest_ids_of_equal_logits() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    assert set(draw_counts(logits, SamplingParams(temperature=1.0, top_k=3), 60)) == {0, 1, 2}


def test_minus_zero_and_zero_are_equal_logits() -> None:
    logits = np.array([-0.0, 0.0, -0.0, 0.0, -5.0], dtype=np.float32)
    assert set(draw_counts(logits, SamplingParams(temperature=1.0, top_k=2), 40)) == {0, 1}


def test_draws_follow_the_softmax() -> None:
    probabilities = {0: 0.4, 1: 0.3, 2: 0.15, 3: 0.1, 4: 0.05}
    counts = draw_counts(log_of(*probabilities.values()), SamplingParams(temperature=1.0, seed=3), 4000)
    assert chi_square(counts, probabilities, 4000) < 18.5  # 99.9th percentile at 4 degrees of freedom


def test_draws_follow_the_temperature() -> None:
    raw = np.array([0.5, 0.3, 0.2])
    sharpened = raw**2 / (raw**2).sum()
    counts = draw_counts(log_of(*raw), SamplingParams(temperature=0.5, seed=4), 4000)
    assert chi_square(counts, dict(enumerate(sharpened.tolist())), 4000) < 13.8  # 99.9 % at 2
    assert chi_square(counts, dict(enumerate(raw.tolist())), 4000) > 100.0


def test_draws_after_filters_follow_the_renormalised_probabilities() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.75, seed=5)
    counts = draw_counts(log_of(0.5, 0.3, 0.1, 0.1), params, 4000)
    assert set(counts) == {0, 1}
    assert chi_square(counts, {0: 0.625, 1: 0.375}, 4000) < 10.8  # 99.9 % at 1


def test_a_flat_distribution_reaches_tokens_beyond_the_first_sorted_head() -> None:
    counts = draw_counts(np.zeros(VOCAB, dtype=np.float32), SamplingParams(temperature=1.0, seed=6), 600)
    quarters = Counter(token * 4 // VOCAB for token in counts.elements())
    assert chi_square(quarters, dict.fromkeys(range(4), 0.25), 600) < 16.3  # 99.9 % at 3


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 6.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=40),
        SamplingParams(temperature=0.8, top_k=1000, top_p=0.9),
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=1.3, min_p=0.05),
        SamplingParams(temperature=1.0, top_k=500, top_p=0.97, min_p=0.02),
    ],
)
def test_sampling_equals_the_reference_that_sorts_everything(params: SamplingParams, spread: float) -> None:
    logits = make_logits(7, spread=spread)
    expected = [sample_by_reference(logits, params, position) for position in range(60)]
    assert [sample_once(logits, params, position) for position in range(60)] == expected


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.01, 10.0),
    top_k=st.sampled_from([0, 1, 2, 5, 300, 5000]),
    top_p=st.floats(1e-6, 1.0),
    min_p=st.floats(0.0, 0.999),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(sampling_params, st.integers(0, 50), st.sampled_from([0.0, 0.5, 5.0, 1e4]), st.sampled_from([1, 2, 300, 700]))
def test_filters_always_leave_a_token_and_only_those_they_keep(
    params: SamplingParams, seed: int, spread: float, size: int
) -> None:
    logits = make_logits(seed, size, spread)
    sampled = sample_once(logits, params, position=seed)
    # The reference sums in another order, so it may put a cut one token earlier or later.
    kept, _ = kept_by_reference(logits, params)
    highest_out = np.sort(logits)[::-1][min(kept.size, size - 1)]
    assert logits[sampled] >= highest_out


@settings(max_examples=30, deadline=None)
@given(sampling_params, st.integers(0, 10_000))
def test_same_seed_and_position_draw_the_same_token_whatever_was_sampled_before(
    params: SamplingParams, position: int
) -> None:
    logits = make_logits(8, 700)
    busy = Sampler(params)
    for earlier in range(3):
        busy.sample(make_logits(earlier, 700), position + earlier + 1)
    assert busy.sample(logits, position) == Sampler(params).sample(logits, position)


@pytest.mark.parametrize(("uniform", "token_id"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.75, 3), (1 - 2**-53, 3)])
def test_a_number_on_the_border_of_two_tokens_belongs_to_the_later(
    monkeypatch: pytest.MonkeyPatch, uniform: float, token_id: int
) -> None:
    monkeypatch.setattr("worker.sampling.draw_uniform", lambda seed, position: uniform)
    assert sample_once(np.zeros(4, dtype=np.float32), SamplingParams(temperature=1.0)) == token_id


def test_another_seed_or_position_draws_other_numbers() -> None:
    numbers = {draw_uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400


def philox(counter: int, key: int) -> int:
    """First word of Philox4x64-10, written from the paper."""
    c0, c1, c2, c3 = counter, 0, 0, 0
    k0, k1, mask = key, 0, 2**64 - 1
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(c2 * 0xCA5A826395121157, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c0


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (42, 1), (2**64 - 1, 8191)])
def test_the_number_of_a_seed_and_position_is_that_of_the_published_generator(seed: int, position: int) -> None:
    # The authors' known answer for counter 0 and key 0; numpy counts up before it draws.
    assert philox(0, 0) == 0x16554D9ECA36314C
    assert draw_uniform(seed, position) == (philox(position + 1, seed) >> 11) / 2**53


def test_uniform_numbers_are_even_over_positions() -> None:
    tenths = Counter(int(draw_uniform(9, position) * 10) for position in range(3000))
    assert chi_square(tenths, dict.fromkeys(range(10), 0.1), 3000) < 27.9  # 99.9 % at 9


def test_logit_bias_is_added_before_the_choice() -> None:
    logits = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert sample_once(logits, SamplingParams(logit_bias={0: 2.5})) == 0
    assert sample_once(logits, SamplingParams(logit_bias={2: -100.0})) == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_the_prompt() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    positive = np.array([3.0, 2.0], dtype=np.float32)
    negative = np.array([-1.0, -1.5], dtype=np.float32)
    assert Sampler(params, [0]).sample(positive, 1).token_id == 1
    assert Sampler(params, [0]).sample(negative, 1).token_id == 1
    assert Sampler(params, []).sample(positive, 1).token_id == 0


def test_repetition_penalty_counts_what_was_generated_and_only_once() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=1.5))
    logits = np.array([3.0, 2.5, 1.9], dtype=np.float32)
    assert [sampler.sample(logits, position).token_id for position in range(4)] == [0, 1, 0, 0]


def test_presence_penalty_applies_to_generated_tokens_once_and_not_to_the_prompt() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=1.0), prompt_token_ids=[0])
    logits = np.array([3.0, 2.5, 1.8], dtype=np.float32)
    assert [sampler.sample(logits, position).token_id for position in range(4)] == [0, 1, 0, 0]


def test_frequency_penalty_grows_with_each_use() -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=0.5), prompt_token_ids=[0, 0, 0, 0])
    logits = np.array([3.0, 2.2, 0.0], dtype=np.float32)
    assert [sampler.sample(logits, position).token_id for position in range(5)] == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("num_restored", [0, 1, 7])
def test_a_sampler_restored_from_its_history_goes_on_as_before(num_restored: int) -> None:
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={5: 1.0},
        seed=11,
    )
    rows = [make_logits(row, 40) for row in range(12)]
    whole = Sampler(params, [1, 2, 2])
    tokens = [whole.sample(rows[i], 3 + i).token_id for i in range(12)]
    restored = Sampler(params, [1, 2, 2], generated=tokens[:num_restored])
    for i in range(num_restored, 12):
        restored.sample(rows[i], 3 + i)
    assert restored.generated == whole.generated == tuple(tokens)


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = make_logits(12)
    before = logits.copy()
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={1: 5.0})
    Sampler(params, [1, 2, 3], [4]).sample(logits, 0)
    assert np.array_equal(logits, before)


def test_a_penalty_that_overflows_single_precision_still_samples() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1e-40)
    assert Sampler(params, [1]).sample(np.array([5.0, 4.0], dtype=np.float32), 0).token_id == 1


def test_the_largest_logits_still_sample() -> None:
    logits = np.array([3e38, -3e38] + [0.0] * 500, dtype=np.float32)
    assert sample_once(logits, SamplingParams(temperature=1.0)) == 0


def test_logprobs_are_of_the_raw_logits_before_temperature_bias_and_penalties() -> None:
    params = SamplingParams(
        temperature=0.3, top_k=1, repetition_penalty=1.8, logit_bias={2: 50.0}, num_logprobs=2, presence_penalty=1.0
    )
    sampled = Sampler(params, [0], [1]).sample(log_of(0.5, 0.3, 0.2), 0)
    assert sampled.token_id == 2
    assert sampled.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [token for token, _ in sampled.top] == [0, 1]
    assert [math.exp(logprob) for _, logprob in sampled.top] == pytest.approx([0.5, 0.3], abs=1e-6)


def test_the_top_is_ordered_by_probability_then_id() -> None:
    logits = np.array([1.0, 2.0, 1.0, 3.0, 2.0], dtype=np.float32)
    top = Sampler(SamplingParams(num_logprobs=4)).sample(logits, 0).top
    assert [token for token, _ in top] == [3, 1, 4, 0]


def test_no_logprobs_unless_asked_for_and_none_beside_the_chosen_for_zero() -> None:
    logits = make_logits(13)
    assert Sampler(SamplingParams()).sample(logits, 0).logprob is None
    zero = Sampler(SamplingParams(num_logprobs=0)).sample(logits, 0)
    assert zero.logprob is not None
    assert zero.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_is_an_internal_error_that_says_so(bad: float) -> None:
    logits = make_logits(14)
    logits[[17, 99]] = bad
    with pytest.raises(InternalError, match=r"2 logits that are NaN or infinite at position 6 .* token 17"):
        Sampler(SamplingParams()).sample(logits, 6)


def test_a_failed_sample_is_not_recorded() -> None:
    sampler = Sampler(SamplingParams())
    with pytest.raises(InternalError):
        sampler.sample(np.array([math.nan, 1.0], dtype=np.float32), 0)
    assert sampler.generated == ()
