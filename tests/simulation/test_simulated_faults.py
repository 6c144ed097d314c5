"""The real cores under everything that goes wrong, a seed each; what a seed stands for is in `scenario`.

`make sim SEEDS=20000` plays more of them; a seed that fails says how to see it again.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from tests.simulation.layers import NUM_LAYERS, LayerKV, answer_to
from tests.simulation.run import play, replay_command
from tests.simulation.scenario import FAULTS
from tests.simulation.world import World

SEEDS_A_TEST = 10
NUM_SEEDS = 200


@functools.cache
def outcome(seed: int) -> Counter[str]:
    """What happened in a seed that was played to its end."""
    return play(seed).summary()


@pytest.mark.parametrize("first", range(1, NUM_SEEDS + 1, SEEDS_A_TEST))
def test_every_answer_is_whole_and_comes_once_whatever_goes_wrong(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        outcome(seed)


def test_a_seed_plays_the_same_each_time() -> None:
    one, other = play(7, is_tracing=True), play(7, is_tracing=True)

    assert one.trace == other.trace
    assert len(one.trace) > 100


def test_a_seed_that_fails_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(world: World) -> None:
        raise AssertionError("lost")

    monkeypatch.setattr(World, "run", fail)

    with pytest.raises(AssertionError, match="lost") as raised:
        play(3)

    assert raised.value.__notes__ == [f"seed 3 failed; see it again with:  {replay_command(3)}"]


def test_seeds_have_what_they_are_for() -> None:
    """Or all of them could pass for nothing going wrong."""
    total = sum((outcome(seed) for seed in range(1, 41)), Counter())

    rare = {what: total[what] for what in (*FAULTS, "rebased", "adopted", "cancelled", "recovered") if total[what] < 3}
    assert not rare
    assert total["finished"] > 80


def test_an_answer_does_not_depend_on_how_its_prompt_is_cut() -> None:
    prompt, layers = [11, 12, 13, 14, 15], [LayerKV(layer) for layer in range(NUM_LAYERS)]

    values: list[int] = []
    for piece in (prompt[:2], prompt[2:]):
        values = piece
        for layer in layers:
            values = layer.feed(values)

    assert answer_to(prompt, 1) == [10 + values[-1] % 90]


def test_an_answer_depends_on_every_token_before_it() -> None:
    answers = {tuple(answer_to([11, 12, first, 14, 15], 8)) for first in range(10, 60)}

    assert len(answers) == 50
