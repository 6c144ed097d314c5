"""Traces are read, written, shrunk and made: lengths and gaps as they should be, shared blocks as they were."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.traces import (
    SHIPPED,
    Trace,
    TraceEntry,
    convert_mooncake,
    format_trace,
    make_trace,
    parse_trace,
    read_trace,
    write_trace,
)
from shoal.errors import ConfigError
from shoal.types import QosClass

ENTRY = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def line(**fields: object) -> str:
    return json.dumps(ENTRY | fields)


def without(field: str) -> str:
    return json.dumps({name: value for name, value in ENTRY.items() if name != field})


def mooncake(*requests: tuple[int, int, int, list[int]]) -> list[str]:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return [json.dumps(dict(zip(names, request, strict=True))) for request in requests]


@st.composite
def entries(draw: st.DrawFn) -> TraceEntry:
    length = draw(st.integers(1, 64))
    return TraceEntry(
        timestamp_ms=0.0,
        input_tokens=length,
        output_tokens=draw(st.integers(0, 500)),
        hash_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=-(-length // 8)))),
        qos=draw(st.sampled_from([None, *QosClass])),
        tenant=draw(st.text(st.characters(categories=["L", "N"]), max_size=8)),
    )


class TestReading:
    def test_a_line_in_mooncake_s_format_is_a_request(self) -> None:
        trace = parse_trace([line(timestamp=27482, input_length=600)], "t.jsonl")
        assert trace == Trace((TraceEntry(27482.0, 600, 5, (0, 1)),), block_tokens=512, origin="t.jsonl")

    def test_fields_of_ours_are_read(self) -> None:
        first = line(qos="latency", tenant="app", conversation="c", turn=0)
        second = line(timestamp=1.5, conversation="c", turn=1)
        trace = parse_trace([first, second], "t.jsonl")
        assert trace.entries[0] == TraceEntry(0.0, 600, 5, (0, 1), QosClass.LATENCY, "app", "c", 0)
        assert trace.entries[1].turn == 1

    def test_comments_and_empty_lines_are_passed_over(self) -> None:
        assert len(parse_trace(["# words", "", " # words", line(), "  "], "t.jsonl").entries) == 1

    def test_fields_of_other_tools_are_passed_over(self) -> None:
        assert parse_trace([line(session_id="x")], "t").entries == parse_trace([line()], "t").entries

    def test_a_request_may_share_nothing(self) -> None:
        assert parse_trace([without("hash_ids")], "t").entries[0].hash_ids == ()

    @given(st.lists(entries(), min_size=1, max_size=5))
    def test_what_was_written_is_read_back(self, written: list[TraceEntry]) -> None:
        trace = Trace(tuple(written), block_tokens=8, origin="made by hand")
        assert parse_trace(format_trace(trace).split("\n"), "t") == trace

    def test_a_file_is_written_and_read_by_its_path(self, tmp_path: Path) -> None:
        trace = make_trace(1, num_conversations=2)
        write_trace(tmp_path / "t.jsonl", trace)
        assert read_trace(str(tmp_path / "t.jsonl")) == trace


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ("{", "not valid JSON"),
            ("[" * 100_000, "not valid JSON"),
            ("[]", "must be a JSON object with the fields timestamp, input_length"),
            (without("timestamp"), "timestamp is missing; it must be a number of milliseconds"),
            (without("input_length"), "input_length is missing"),
            (line(timestamp=-1), "timestamp = -1 is not allowed; it must be a number of milliseconds, 0 or more"),
            (line(timestamp=float("nan")), "timestamp = NaN is not allowed"),
            (line(timestamp="0"), 'timestamp = "0" is not allowed'),
            (line(input_length=0), "input_length = 0 is not allowed; it must be a whole number of tokens from 1"),
            (line(input_length=True), "input_length = true is not allowed"),
            (line(output_length=1.5), "output_length = 1.5 is not allowed"),
            (line(hash_ids=[-1]), "hash_ids = [-1] is not allowed; it must be a list of whole numbers"),
            (line(hash_ids=7), "hash_ids = 7 is not allowed"),
            (line(hash_ids=[0, 1, 2]), "hash_ids has 3 blocks; it must have at most 2: 600 tokens in blocks of 300"),
            (line(qos="fast"), "it must be one of latency, balanced, throughput"),
            (line(qos=[]), "it must be one of latency, balanced, throughput"),
            (line(tenant="x" * 65), "it must be at most 64 printable characters"),
            (line(turn=1), "turn = 1 is not allowed; it must be 0, without a conversation"),
            (line(conversation="a", turn=0), "it must be 1, the next turn of conversation a"),
            (line(conversation="b", turn=2), "it must be 0, the next turn of conversation b"),
            (line(timestamp=4), "it must be at least that of the request before, 5"),
            ("# block_tokens = 8", "block_tokens must be 1 or more, and come before all requests"),
        ],
    )
    def test_a_bad_line_is_told_with_file_number_and_what_is_allowed(self, bad: str, message: str) -> None:
        good = line(timestamp=5, conversation="a", turn=0)
        if bad.startswith("{") and '"timestamp": 0' in bad:
            bad = bad.replace('"timestamp": 0', '"timestamp": 5')
        with pytest.raises(ConfigError) as caught:
            parse_trace(["# block_tokens = 300", good, bad], "some/t.jsonl")
        assert caught.value.message.startswith("some/t.jsonl:3: ")
        assert message in caught.value.message

    def test_a_trace_without_requests_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="t: there is no request in this trace"):
            parse_trace(["# block_tokens = 8", ""], "t")

    def test_an_unknown_name_is_told_what_there_is(self) -> None:
        with pytest.raises(ConfigError, match="no trace 'big'; shipped are chats, small"):
            read_trace("big")


class TestMooncake:
    def test_lengths_shrink_and_gaps_and_hash_ids_stay(self) -> None:
        lines = mooncake((27482, 6955, 520, list(range(14))), (30535, 6472, 260, [*range(12), 99]))
        trace = convert_mooncake(lines, scale=64, floor=8)
        assert trace.block_tokens == 8
        assert trace.entries == (
            TraceEntry(0.0, 109, 9, tuple(range(14))),
            TraceEntry(3053.0, 102, 8, (*range(12), 99)),
        )

    def test_a_short_request_gets_the_floor(self) -> None:
        (entry,) = convert_mooncake(mooncake((0, 100, 3, [0])), scale=64, floor=8).entries
        assert (entry.input_tokens, entry.output_tokens, entry.hash_ids) == (8, 8, (0,))

    def test_a_long_request_gets_the_ceiling_and_its_first_blocks(self) -> None:
        (entry,) = convert_mooncake(mooncake((0, 5120, 1, list(range(10)))), scale=64, ceiling=20).entries
        assert (entry.input_tokens, entry.hash_ids) == (20, (0, 1, 2))

    def test_answers_may_have_a_scale_of_their_own(self) -> None:
        (entry,) = convert_mooncake(mooncake((0, 640, 340, [0, 1])), scale=64, output_scale=8).entries
        assert (entry.input_tokens, entry.output_tokens) == (10, 43)

    def test_speed_up_shrinks_the_gaps(self) -> None:
        lines = mooncake((1000, 600, 9, [0, 1]), (5000, 600, 9, [0, 1]))
        assert [entry.timestamp_ms for entry in convert_mooncake(lines, speed_up=2.0).entries] == [0.0, 2000.0]

    def test_only_the_first_requests_may_be_kept(self) -> None:
        lines = mooncake((9, 600, 9, [0, 1]), (3, 600, 9, [0, 2]), (6, 600, 9, [0, 3]))
        kept = convert_mooncake(lines, max_requests=2).entries
        assert [(entry.timestamp_ms, entry.hash_ids) for entry in kept] == [(0.0, (0, 2)), (3.0, (0, 3))]

    @given(st.integers(1, 200_000), st.sampled_from([1, 2, 32, 64, 128]))
    def test_every_length_keeps_its_number_of_blocks(self, length: int, scale: int) -> None:
        num_blocks = -(-length // 512)
        trace = convert_mooncake(mooncake((0, length, 1, list(range(num_blocks)))), scale=scale, floor=1)
        (entry,) = trace.entries
        assert len(entry.hash_ids) == num_blocks
        assert (num_blocks - 1) * trace.block_tokens < entry.input_tokens <= num_blocks * trace.block_tokens

    def test_a_converted_trace_can_be_read_again(self) -> None:
        trace = convert_mooncake(mooncake((7, 6955, 520, list(range(14)))), speed_up=3.0)
        assert parse_trace(format_trace(trace).split("\n"), "t") == trace

    @pytest.mark.parametrize(
        ("field", "arguments"),
        [
            ("scale", {"scale": 0}),
            ("scale", {"scale": 60}),
            ("scale", {"scale": 256}),
            ("output_scale", {"output_scale": 0}),
            ("floor", {"floor": 0}),
            ("ceiling", {"floor": 8, "ceiling": 7}),
            ("speed_up", {"speed_up": 0.0}),
            ("max_requests", {"max_requests": 0}),
        ],
    )
    def test_a_size_out_of_range_is_named(self, field: str, arguments: dict[str, int]) -> None:
        with pytest.raises(ConfigError) as caught:
            convert_mooncake(mooncake((0, 600, 9, [0, 1])), **arguments)  # type: ignore[arg-type]
        assert caught.value.field == field

    def test_a_trace_without_requests_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="there is no request in this trace"):
            convert_mooncake([""])

    def test_where_it_came_from_is_kept_without_folders(self) -> None:
        trace = convert_mooncake(mooncake((0, 600, 9, [0, 1])), where="some/conversation.jsonl", speed_up=2.0)
        assert trace.origin == "conversation.jsonl in Mooncake's format, lengths / 64 from 8 up, speed-up 2"

    def test_a_bad_line_is_told_with_its_number(self) -> None:
        with pytest.raises(ConfigError, match=r"conversation\.jsonl:2: not valid JSON"):
            convert_mooncake([*mooncake((0, 600, 9, [0, 1])), "{"], where="conversation.jsonl")


class TestMaking:
    def test_the_shipped_trace_is_what_its_first_lines_say(self) -> None:
        assert SHIPPED.names() == ("chats", "small")
        text = files("loadtest").joinpath("data", "small.jsonl").read_text(encoding="utf-8")
        made = make_trace(7, num_conversations=24, rate_per_s=0.5, max_turns=4, block_tokens=8, max_input_tokens=256)
        assert format_trace(made) == text
        assert f"# origin: {made.origin}\n" in text

    def test_the_shipped_trace_has_turns_classes_and_tenants(self) -> None:
        small = read_trace("small").entries
        assert max(entry.turn for entry in small) == 3
        assert {entry.qos for entry in small} == set(QosClass)
        assert {entry.tenant for entry in small} == {"app", "batch"}
        assert all(entry.input_tokens <= 256 for entry in small)

    @given(st.integers(0, 2**64 - 1))
    def test_a_made_trace_is_valid(self, seed: int) -> None:
        trace = make_trace(seed, num_conversations=8)
        assert parse_trace(format_trace(trace).split("\n"), "t") == trace

    @given(st.integers(0, 2**64 - 1))
    def test_a_turn_shares_the_full_blocks_of_the_turn_before_and_no_more(self, seed: int) -> None:
        before: dict[str, TraceEntry] = {}
        for entry in make_trace(seed, num_conversations=8).entries:
            if entry.turn:
                earlier = before[entry.conversation]
                num_full = earlier.input_tokens // 8
                assert entry.hash_ids[:num_full] == earlier.hash_ids[:num_full]
                assert set(entry.hash_ids) & set(earlier.hash_ids) == set(earlier.hash_ids[:num_full])
                assert entry.input_tokens > earlier.input_tokens + earlier.output_tokens
            before[entry.conversation] = entry

    def test_hash_ids_cover_every_prompt_and_are_numbered_as_they_come(self) -> None:
        seen: list[int] = []
        for entry in make_trace(5).entries:
            assert len(entry.hash_ids) == -(-entry.input_tokens // 8)
            seen.extend(hash_id for hash_id in entry.hash_ids if hash_id not in seen)
        assert seen == list(range(len(seen)))

    def test_conversations_begin_with_one_of_two_system_prompts(self) -> None:
        firsts = [entry for entry in make_trace(5).entries if entry.turn == 0]
        assert len({entry.hash_ids[0] for entry in firsts}) == 2
        assert len({entry.hash_ids[:4] for entry in firsts}) == 2

    def test_another_seed_makes_another_trace(self) -> None:
        assert make_trace(1).entries != make_trace(2).entries
