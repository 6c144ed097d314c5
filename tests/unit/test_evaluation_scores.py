"""Perplexity, divergence, and the loss between two models on the same tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluation.scores import Scores, divergences, log_probabilities, loss_of, token_losses


def test_equal_logits_make_every_token_as_likely_as_any() -> None:
    log_p = log_probabilities(np.zeros((2, 8), np.float32))
    losses = token_losses(log_p, np.array([0, 5]))
    assert Scores(losses, np.zeros(2), np.ones(2, np.bool_)).perplexity == pytest.approx(8.0)


def test_logits_of_any_size_have_probabilities() -> None:
    log_p = log_probabilities(np.array([[1e4, 0.0, -1e4]], np.float32))
    assert log_p[0].tolist() == [0.0, -1e4, -2e4]


def test_a_distribution_does_not_diverge_from_itself() -> None:
    log_p = log_probabilities(np.random.default_rng(0).standard_normal((3, 9)).astype(np.float32))
    assert divergences(log_p, log_p).tolist() == [0.0, 0.0, 0.0]


def test_divergence_is_that_of_kullback_and_leibler() -> None:
    log_p, log_q = (np.log(np.array([shares], np.float32)) for shares in ([0.5, 0.5], [0.25, 0.75]))
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergences(log_p, log_q)[0] == pytest.approx(expected, rel=1e-5)


def test_loss_is_how_much_perplexity_rises() -> None:
    reference = np.array([1.0, 2.0, 3.0])
    loss = loss_of(reference + 0.01, reference)
    assert loss.share == pytest.approx(math.expm1(0.01))
    assert loss.error == pytest.approx(0.0, abs=1e-12)


def test_differences_that_spread_make_a_loss_uncertain() -> None:
    loss = loss_of(np.array([0.1, -0.1, 0.1, -0.1]), np.zeros(4))
    assert loss.error == pytest.approx(0.0577, rel=0.01)


def test_the_uncertainty_of_a_loss_is_one_of_the_perplexity_as_the_loss_is() -> None:
    loss = loss_of(np.log([4.0, 1.0, 4.0, 1.0]), np.zeros(4))
    spread = math.log(2.0) / math.sqrt(3)
    assert [loss.share, loss.error] == pytest.approx([1.0, 2 * spread])


def test_rounding_makes_no_divergence_negative() -> None:
    log_p = log_probabilities(np.zeros((1, 8), np.float32))
    assert divergences(log_p, log_p + np.float32(1e-6)).tolist() == [0.0]


def test_scores_of_a_text_are_means_of_its_tokens() -> None:
    scores = Scores(np.array([0.0, 2.0]), np.array([0.1, 0.3]), np.array([True, False]))
    assert [scores.perplexity, scores.divergence, scores.agreement] == pytest.approx([math.e, 0.2, 0.5])


def test_one_token_says_nothing_of_the_spread() -> None:
    assert loss_of(np.array([1.0]), np.array([0.5])).error == 0.0
