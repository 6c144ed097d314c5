"""How many layers get 4 bits, and in which order: the search and the ranking, without a model."""

from __future__ import annotations

import pytest

from evaluation.choice import most, ranked


@pytest.mark.parametrize("guess", [0, 1, 4, 9, 100])
@pytest.mark.parametrize("limit", [0, 1, 2, 9])
def test_the_largest_count_that_is_met_is_found_wherever_one_looks_first(limit: int, guess: int) -> None:
    for largest in range(limit + 1):
        asked: list[int] = []

        def is_met(count: int, largest: int = largest, asked: list[int] = asked) -> bool:
            asked.append(count)
            return count <= largest

        assert most(limit, is_met, lambda: guess) == largest
        assert set(asked) <= set(range(limit + 1))
        assert len(asked) == len(set(asked)) <= 6


def test_where_none_is_met_no_other_is_looked_at() -> None:
    asked: list[int] = []

    def is_met(count: int) -> bool:
        asked.append(count)
        return False

    assert most(9, is_met, lambda: 5) == 0
    assert asked == [0]


def test_a_guess_that_is_right_is_measured_first_and_then_its_neighbour() -> None:
    asked: list[int] = []

    def is_met(count: int) -> bool:
        asked.append(count)
        return count <= 7

    assert most(8, is_met, lambda: 7) == 7
    assert asked == [0, 7, 8]


def test_layers_are_ranked_by_harm_for_each_byte_that_they_save() -> None:
    assert ranked([0.2, 0.3, 0.1], [100, 300, 20]) == [1, 0, 2]


def test_layers_that_4_bits_do_not_make_smaller_stay_as_they_are() -> None:
    assert ranked([0.2, 0.0, 0.0, 0.1], [10, 0, -5, 10]) == [3, 0]
