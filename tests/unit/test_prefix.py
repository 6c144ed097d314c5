"""What a pipeline is believed to hold: learned, unlearned, and forgotten from the ends of prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.prefix import PrefixIndex
from shoal.kv import BlockHash


def names(text: str) -> tuple[BlockHash, ...]:
    """Blocks of a prompt, one for each letter; those of prompts that begin alike are the same."""
    return tuple(BlockHash(text[:stop].encode()) for stop in range(1, len(text) + 1))


def test_nothing_is_known_of_a_new_pipeline() -> None:
    assert PrefixIndex().match(names("abc")) == 0


def test_leading_blocks_of_a_prompt_are_found_up_to_the_first_that_is_not_known() -> None:
    index = PrefixIndex()
    index.learn(names("abc"))

    assert index.match(names("abcd")) == 3
    assert index.match(names("abxd")) == 2
    assert index.match(names("xbc")) == 0
    assert index.match(()) == 0


def test_what_follows_a_block_that_was_forgotten_is_out_of_reach() -> None:
    index = PrefixIndex()
    index.learn(names("abcd"))
    index.forget(names("abcd")[1:2])

    assert index.match(names("abcd")) == 1


def test_forgetting_what_is_not_known_does_nothing() -> None:
    index = PrefixIndex()
    index.learn(names("a"))
    index.forget(names("xyz"))

    assert len(index) == 1


def test_the_end_of_the_prompt_that_was_not_used_for_longest_goes_first() -> None:
    index = PrefixIndex(max_blocks=5)
    index.learn(names("abc"))
    index.learn(names("xy"))
    index.learn(names("xyz"))

    assert index.match(names("abc")) == 2
    assert index.match(names("xyz")) == 3


def test_a_prefix_that_others_share_outlives_what_follows_it() -> None:
    index = PrefixIndex(max_blocks=4)
    for last in "cdefgh":
        index.learn(names("ab" + last))

    assert index.match(names("abh")) == 3
    assert index.match(names("abc")) == 2


def test_asking_for_a_prompt_does_not_keep_it() -> None:
    index = PrefixIndex(max_blocks=2)
    index.learn(names("ab"))
    assert index.match(names("ab")) == 2
    index.learn(names("xy"))

    assert index.match(names("ab")) == 0


prompts = st.text("ab", min_size=1, max_size=6)
events = st.lists(st.tuples(st.sampled_from(["learn", "learn", "forget"]), prompts, st.integers(0, 5)), max_size=40)


@given(max_blocks=st.integers(1, 8), script=events)
def test_whatever_happens_it_is_bounded_in_order_and_knows_only_what_it_was_told(
    max_blocks: int, script: list[tuple[str, str, int]]
) -> None:
    index, learned = PrefixIndex(max_blocks), set[BlockHash]()
    for event, text, start in script:
        if event == "learn":
            index.learn(names(text))
            learned |= set(names(text))
            assert index.match(names(text)) == min(len(text), max_blocks)
        else:
            index.forget(names(text)[start:])
            learned -= set(names(text)[start:])
            assert index.match(names(text)) <= max(start, 0)
        index.check_invariants()
        assert len(index) <= max_blocks
        assert learned.issuperset(names(text)[: index.match(names(text))])
