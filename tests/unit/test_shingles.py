"""MinHash over token shingles: what it estimates, what it finds, and that tenants and memory stay apart and bounded."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.core.shingles import SHINGLE_TOKENS, SKETCH_HASHES, PrefixSketches, compare, make_sketch
from shoal.kv import BlockHash

VOCABULARY = 49_152
# Five standard errors of an estimate over so many hashes: one in millions is farther off.
TOLERANCE = 5 * 0.5 / SKETCH_HASHES**0.5


def text(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def shingles(token_ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(token_ids[at : at + SHINGLE_TOKENS]) for at in range(len(token_ids) - SHINGLE_TOKENS + 1)}


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


class TestComparing:
    @given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=600))
    def test_a_text_resembles_itself_wholly(self, token_ids: list[int]) -> None:
        overlap = compare(make_sketch(token_ids), make_sketch(list(token_ids)))
        assert (overlap.resemblance, overlap.containment) == (1.0, 1.0)

    @settings(deadline=None)
    @given(st.integers(0, 2**32), st.integers(0, 1500), st.integers(20, 1500), st.integers(20, 1500))
    def test_the_estimate_is_close_to_jaccard(self, seed: int, shared: int, mine: int, theirs: int) -> None:
        common = text(seed, shared)
        one, other = common + text(seed + 1, mine), common + text(seed + 2, theirs)
        both, all_of_them = shingles(one) & shingles(other), shingles(one) | shingles(other)
        overlap = compare(make_sketch(one), make_sketch(other))
        assert overlap.resemblance == pytest.approx(len(both) / len(all_of_them), abs=TOLERANCE)

    def test_short_texts_are_compared_exactly(self) -> None:
        one, other = text(1, 90), text(1, 90)[:40] + text(2, 60)
        both, all_of_them = shingles(one) & shingles(other), shingles(one) | shingles(other)
        overlap = compare(make_sketch(one), make_sketch(other))
        assert overlap.resemblance == len(both) / len(all_of_them)
        assert overlap.num_shared == len(both)

    def test_texts_without_a_shingle_in_common_share_nothing(self) -> None:
        assert compare(make_sketch(text(1, 500)), make_sketch(text(2, 500))).containment == 0.0

    def test_an_empty_text_is_no_evidence(self) -> None:
        assert compare(make_sketch([]), make_sketch(text(1, 80))).num_evidence == 0

    def test_the_order_of_tokens_matters(self) -> None:
        token_ids = text(1, 200)
        assert compare(make_sketch(token_ids), make_sketch(token_ids[::-1])).containment < 0.1

    def test_a_sketch_is_no_longer_than_its_bound_for_any_text(self) -> None:
        assert len(make_sketch(text(1, 10_000)).hashes) == SKETCH_HASHES

    def test_another_process_makes_the_same_sketch(self) -> None:
        program = (
            "from orchestrator.core.shingles import make_sketch; print(sorted(make_sketch(range(900)).hashes)[:3])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str(sorted(make_sketch(range(900)).hashes)[:3])


@pytest.fixture(scope="module")
def thousand() -> tuple[PrefixSketches, list[list[int]]]:
    """The texts of a thousand prefixes that begin with the same system prompt, and their sketches."""
    sketches, system = PrefixSketches(1_000), text(1, 128)
    texts = [system + text(number + 100, 256 + number % 256) for number in range(1_000)]
    for number, token_ids in enumerate(texts):
        sketches.add("tenant", name(number), make_sketch(token_ids))
    return sketches, texts


class TestFinding:
    @pytest.mark.parametrize("number", [0, 123, 456, 789, 999])
    def test_half_a_prompt_finds_its_prefix_among_a_thousand(
        self, thousand: tuple[PrefixSketches, list[list[int]]], number: int
    ) -> None:
        sketches, texts = thousand
        found = sketches.find("tenant", make_sketch(texts[number][: len(texts[number]) // 2]), 3)
        assert found[0].prefix == name(number)

    @pytest.mark.parametrize("number", [0, 123, 456, 789, 999])
    def test_a_prompt_finds_the_prefix_that_it_goes_on_from(
        self, thousand: tuple[PrefixSketches, list[list[int]]], number: int
    ) -> None:
        sketches, texts = thousand
        assert sketches.find("tenant", make_sketch(texts[number] + text(9, 700)), 1)[0].prefix == name(number)

    def test_what_shares_more_comes_first(self) -> None:
        sketches, prompt = PrefixSketches(8), text(1, 600)
        sketches.add("tenant", name(1), make_sketch(prompt[:128]))
        sketches.add("tenant", name(2), make_sketch(prompt[:512]))
        assert [one.prefix for one in sketches.find("tenant", make_sketch(prompt), 8)] == [name(2), name(1)]

    def test_of_equal_ones_the_shorter_comes_first(self) -> None:
        sketches, whole = PrefixSketches(8), text(1, 190)
        sketches.add("tenant", name(1), make_sketch(whole))
        sketches.add("tenant", name(2), make_sketch(whole[:120]))
        assert sketches.find("tenant", make_sketch(whole[:80]), 1)[0].prefix == name(2)

    def test_nothing_is_found_for_an_unknown_text(self, thousand: tuple[PrefixSketches, list[list[int]]]) -> None:
        assert thousand[0].find("tenant", make_sketch(text(77_777, 400)), 3) == []

    def test_a_few_words_are_no_evidence(self) -> None:
        sketches, whole = PrefixSketches(8), text(1, 80)
        sketches.add("tenant", name(1), make_sketch(whole))
        assert sketches.find("tenant", make_sketch(whole[: SHINGLE_TOKENS + 1]), 3) == []
        assert sketches.find("tenant", make_sketch(whole[: SHINGLE_TOKENS + 2]), 3)

    def test_tenants_do_not_find_each_other(self) -> None:
        sketches = PrefixSketches(8)
        sketches.add("theirs", name(1), make_sketch(text(1, 400)))
        assert sketches.find("ours", make_sketch(text(1, 400)), 3) == []

    def test_what_is_removed_is_not_found(self) -> None:
        sketches = PrefixSketches(8)
        sketches.add("tenant", name(1), make_sketch(text(1, 400)))
        sketches.remove("tenant", [name(1), name(2)])
        assert sketches.find("tenant", make_sketch(text(1, 400)), 3) == []

    def test_what_was_found_outlives_what_was_not(self) -> None:
        sketches = PrefixSketches(2)
        sketches.add("tenant", name(1), make_sketch(text(1, 200)))
        sketches.add("tenant", name(2), make_sketch(text(2, 200)))
        sketches.find("tenant", make_sketch(text(1, 200)), 1)
        sketches.add("tenant", name(3), make_sketch(text(3, 200)))
        assert sketches.find("tenant", make_sketch(text(1, 200)), 1)
        assert not sketches.find("tenant", make_sketch(text(2, 200)), 1)


class PrefixMachine(RuleBasedStateMachine):
    """Adds, removes and finds in any order; a model knows what may be there."""

    MAX = 5

    def __init__(self) -> None:
        super().__init__()
        self.sketches = PrefixSketches(self.MAX)
        self.known: set[tuple[str, BlockHash]] = set()

    @rule(scope=st.sampled_from("ab"), number=st.integers(0, 9))
    def add(self, scope: str, number: int) -> None:
        self.sketches.add(scope, name(number), make_sketch(text(number, 80)))
        self.known.add((scope, name(number)))
        assert self.sketches.find(scope, make_sketch(text(number, 80)), 1)[0].prefix == name(number)

    @rule(scope=st.sampled_from("ab"), number=st.integers(0, 9))
    def remove(self, scope: str, number: int) -> None:
        self.sketches.remove(scope, [name(number)])
        self.known.discard((scope, name(number)))
        assert not self.sketches.find(scope, make_sketch(text(number, 80)), 1)

    @rule(scope=st.sampled_from("ab"), number=st.integers(0, 9))
    def find(self, scope: str, number: int) -> None:
        found = {(scope, one.prefix) for one in self.sketches.find(scope, make_sketch(text(number, 80)[:50]), 9)}
        assert found <= self.known & {(scope, name(number))}

    @invariant()
    def it_holds_together(self) -> None:
        self.sketches.check_invariants()
        assert len(self.sketches) <= self.MAX


TestAnyOrder = PrefixMachine.TestCase
TestAnyOrder.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
