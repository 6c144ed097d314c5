"""Traces of many turns: what the shipped one is, and that every made one keeps the rules of traces."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.conversations import CONTEXT_TOKENS, make_conversations
from loadtest.traces import Trace, TraceEntry, format_trace, parse_trace, read_trace

BLOCK = 64
seeds = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def chats() -> Trace:
    return read_trace("chats")


def reuses(trace: Trace) -> Counter[int]:
    """How often each full block came again."""
    uses = Counter(hash_id for entry in trace.entries for hash_id in entry.hash_ids[: entry.input_tokens // BLOCK])
    return Counter({hash_id: count - 1 for hash_id, count in uses.items()})


class TestShipped:
    def test_it_is_what_its_first_lines_say(self) -> None:
        made = make_conversations(1)
        assert format_trace(made) == files("loadtest").joinpath("data", "chats.jsonl").read_text(encoding="utf-8")
        assert made.origin.startswith("loadtest.conversations.make_conversations(1, num_starts=400,")

    def test_a_tenth_of_its_blocks_have_most_of_the_reuse(self, chats: Trace) -> None:
        counts = sorted(reuses(chats).values(), reverse=True)
        assert 0.6 < sum(counts[: len(counts) // 10]) / sum(counts) < 0.85

    def test_most_reuse_comes_within_ten_minutes(self, chats: Trace) -> None:
        used_ms: dict[int, float] = {}
        gaps_ms = []
        for entry in chats.entries:
            gaps_ms += [entry.timestamp_ms - used_ms[hash_id] for hash_id in entry.hash_ids if hash_id in used_ms]
            used_ms |= dict.fromkeys(entry.hash_ids, entry.timestamp_ms)
        assert 0.7 < sum(gap <= 600_000 for gap in gaps_ms) / len(gaps_ms) < 0.9

    def test_some_conversations_come_back_after_a_quarter_of_an_hour(self, chats: Trace) -> None:
        turn_ms: dict[str, float] = {}
        returned = set()
        for entry in chats.entries:
            if entry.turn and entry.timestamp_ms - turn_ms[entry.conversation] > 900_000:
                returned.add(entry.conversation)
            turn_ms[entry.conversation] = entry.timestamp_ms
        assert len(turn_ms) / 10 < len(returned) < len(turn_ms) / 2

    def test_the_first_system_prompt_is_the_most_popular(self, chats: Trace) -> None:
        firsts = Counter(entry.hash_ids[0] for entry in chats.entries if entry.tenant == "app" and entry.turn == 0)
        (_, most), (_, next_most), *_ = firsts.most_common()
        assert 1.2 < most / next_most < 3.5


class TestMaking:
    @settings(max_examples=20)
    @given(seeds)
    def test_a_made_trace_is_valid(self, seed: int) -> None:
        trace = make_conversations(seed, num_starts=12)
        assert parse_trace(format_trace(trace).split("\n"), "t") == trace

    @settings(max_examples=20)
    @given(seeds)
    def test_a_turn_shares_the_full_blocks_of_the_turn_before_and_no_more(self, seed: int) -> None:
        before: dict[str, TraceEntry] = {}
        for entry in make_conversations(seed, num_starts=12).entries:
            if entry.turn:
                earlier = before[entry.conversation]
                kept = earlier.hash_ids[: earlier.input_tokens // BLOCK]
                assert entry.hash_ids[: len(kept)] == kept
                assert set(entry.hash_ids) & set(earlier.hash_ids) == set(kept)
                assert entry.input_tokens > earlier.input_tokens + earlier.output_tokens
            if entry.conversation:
                before[entry.conversation] = entry

    @settings(max_examples=20)
    @given(seeds)
    def test_all_fits_the_context_and_every_prompt_is_covered_by_blocks(self, seed: int) -> None:
        for entry in make_conversations(seed, num_starts=12).entries:
            assert entry.input_tokens + entry.output_tokens <= CONTEXT_TOKENS
            assert len(entry.hash_ids) == -(-entry.input_tokens // BLOCK)

    def test_tenants_share_no_blocks(self) -> None:
        owners: dict[int, set[str]] = {}
        for entry in make_conversations(1).entries:
            for hash_id in entry.hash_ids:
                owners.setdefault(hash_id, set()).add(entry.tenant)
        assert all(len(tenants) == 1 for tenants in owners.values())

    def test_another_seed_makes_another_trace(self) -> None:
        assert make_conversations(1, num_starts=8).entries != make_conversations(2, num_starts=8).entries
