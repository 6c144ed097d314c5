"""What a workload file may say, what it means, and what a user is told who gets it wrong."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.amounts import Amount, Shape, fixed
from loadtest.plan import Slo
from loadtest.workloads import DEFAULT_SLOS, SHIPPED, Stream, Workload, load_workload, parse_workload
from shoal.errors import ConfigError
from shoal.types import QosClass

LEAST = 'name = "a"\nprompt_tokens = 16\noutput_tokens = 8\n'


def parse(*streams: str, top: str = 'name = "w"\n', end: str = "") -> Workload:
    return parse_workload(top + "".join(f"[[stream]]\n{stream}\n" for stream in streams) + end, "w.toml")


def only_stream(text: str) -> Stream:
    return parse(text).streams[0]


class TestShipped:
    def test_all_shipped_workloads_are_found_and_named_as_their_files(self) -> None:
        assert SHIPPED.names() == ("batch", "chat", "mixed")
        assert all(load_workload(name).name == name for name in SHIPPED.names())

    def test_mixed_has_all_classes_and_two_tenants(self) -> None:
        streams = load_workload("mixed").streams
        assert {stream.qos for stream in streams} == set(QosClass)
        assert {stream.tenant for stream in streams} == {"app", "batch"}

    @pytest.mark.parametrize("name", ["chat", "mixed", "batch"])
    def test_lengths_suit_phones(self, name: str) -> None:
        for stream in load_workload(name).streams:
            assert stream.prompt_tokens.minimum >= 16
            longest = stream.prefix_tokens + stream.prompt_tokens.maximum
            assert (stream.max_prompt_tokens if stream.turns.maximum > 1 else longest) <= 256
            assert 8 <= stream.output_tokens.minimum <= stream.output_tokens.maximum <= 128


class TestStreams:
    def test_a_stream_needs_a_name_and_lengths_only(self) -> None:
        assert only_stream(LEAST) == Stream("a", fixed(16), fixed(8))

    def test_all_fields_are_read(self) -> None:
        text = LEAST + (
            'share = 2\nqos = "latency"\ntenant = "t"\nprefix_tokens = 8\nnum_prefixes = 3\nthink_s = 1\n'
            "turns = { distribution = 'uniform', min = 1, max = 4 }\nmax_prompt_tokens = 99\nmax_tokens_per_s = 5\n"
        )
        assert only_stream(text) == Stream(
            name="a",
            prompt_tokens=fixed(16),
            output_tokens=fixed(8),
            share=2.0,
            qos=QosClass.LATENCY,
            tenant="t",
            prefix_tokens=8,
            num_prefixes=3,
            turns=Amount(Shape.UNIFORM, 1, 4),
            think_s=1.0,
            max_prompt_tokens=99,
            max_tokens_per_s=5.0,
        )

    def test_a_length_may_be_lognormal_within_bounds(self) -> None:
        text = LEAST.replace("= 16", "= { distribution = 'lognormal', median = 40, sigma = 0.5, min = 16, max = 90 }")
        assert only_stream(text).prompt_tokens == Amount(Shape.LOGNORMAL, 16, 90, 40.0, 0.5)

    def test_rates_are_shares_of_their_sum(self) -> None:
        other = LEAST.replace('"a"', '"b"')
        workload = parse(LEAST + "rate_per_s = 0.5", other + "rate_per_s = 1.5")
        assert workload.rate_per_s == 2.0
        assert [stream.share for stream in workload.streams] == [0.5, 1.5]

    def test_shares_alone_give_no_rate(self) -> None:
        assert parse(LEAST + "share = 3").rate_per_s is None


class TestObjectives:
    def test_without_a_word_they_are_mlperf_s(self) -> None:
        assert parse(LEAST).slos == {
            QosClass.LATENCY: Slo(ttft_s=0.5, tpot_s=0.03),
            QosClass.BALANCED: Slo(ttft_s=2.0, tpot_s=0.1),
            QosClass.THROUGHPUT: Slo(),
        }

    def test_what_a_file_says_of_a_class_replaces_that_alone(self) -> None:
        slos = parse(LEAST, end="[slo.latency]\nttft_ms = 800\n").slos
        assert slos == DEFAULT_SLOS | {QosClass.LATENCY: Slo(ttft_s=0.8, tpot_s=0.03)}

    def test_0_asks_for_nothing(self) -> None:
        slos = parse(LEAST, end="[slo.balanced]\ntpot_ms = 0\ne2e_ms = 9000\n").slos
        assert slos[QosClass.BALANCED] == Slo(ttft_s=2.0, tpot_s=None, e2e_s=9.0)


class TestAmounts:
    @given(st.integers(0, 2**32), st.integers(1, 50), st.integers(0, 50), st.sampled_from(Shape))
    def test_what_is_drawn_is_within_bounds(self, seed: int, least: int, width: int, shape: Shape) -> None:
        amount = Amount(shape, least, least + width, median=20.0, sigma=1.5)
        rng = np.random.Generator(np.random.PCG64(seed))
        assert all(least <= amount.draw(rng) <= least + width for _ in range(20))

    def test_a_uniform_amount_reaches_both_ends(self) -> None:
        rng = np.random.Generator(np.random.PCG64(1))
        assert {Amount(Shape.UNIFORM, 1, 3).draw(rng) for _ in range(100)} == {1, 2, 3}

    def test_half_of_a_lognormal_amount_is_below_its_median(self) -> None:
        rng = np.random.Generator(np.random.PCG64(1))
        drawn = [Amount(Shape.LOGNORMAL, 1, 10_000, 100.0, 0.5).draw(rng) for _ in range(4000)]
        assert np.median(drawn) == pytest.approx(100, rel=0.05)
        assert np.log(drawn).std() == pytest.approx(0.5, rel=0.05)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("stream", "message"),
        [
            ('name = "a"\noutput_tokens = 8', "stream a: prompt_tokens is missing; it must be a whole number"),
            (LEAST + "colour = 1", "stream a: colour is not a field of a workload; fields are name, share"),
            (LEAST + 'qos = "fast"', "stream a: qos = 'fast' is not allowed; it must be one of latency, balanced, thr"),
            (LEAST + "share = 0", "stream a: share = 0 is not allowed; it must be a number above 0"),
            (LEAST + "share = nan", "stream a: share = nan is not allowed"),
            (LEAST + "num_prefixes = true", "stream a: num_prefixes = true is not allowed; it must be a whole number"),
            (LEAST + "prefix_tokens = -1", "it must be a whole number of tokens from 0 to"),
            (LEAST + "prefix_tokens = 2", "stream a: prefix_tokens = 2 is not allowed; it must be 0 or at least 4"),
            (LEAST + f'tenant = "{"x" * 65}"', "it must be at most 64 printable characters"),
            (LEAST + "turns = 0", "stream a: turns.tokens = 0 is not allowed; it must be a whole number from 1 to 100"),
            (LEAST + "max_tokens_per_s = -1", "it must be a number from 0 (no pacing) to 1000"),
            (
                LEAST + "max_prompt_tokens = 15",
                "it must be at least prefix_tokens and the longest of prompt_tokens, 16",
            ),
            (
                LEAST.replace("16", "3"),
                "stream a: prompt_tokens.tokens = 3 is not allowed; it must be a whole number from 4",
            ),
            (LEAST.replace("16", "'16'"), "stream a: prompt_tokens = '16' is not allowed"),
            (LEAST.replace("16", "{ distribution = 'normal' }"), "distribution is one of fixed, uniform, lognormal"),
            (LEAST.replace("16", "{ min = 1 }"), "prompt_tokens.distribution = None is not allowed"),
            (
                LEAST.replace("16", "{ distribution = 'uniform', min = 9, max = 8 }"),
                "stream a: prompt_tokens.max = 8 is not allowed; it must be at least min, 9",
            ),
            (
                LEAST.replace("16", "{ distribution = 'uniform', min = 9 }"),
                "stream a: prompt_tokens.max is missing; it must be a whole number from 4",
            ),
            (
                LEAST.replace("16", "{ distribution = 'uniform', min = 9, max = 9, sigma = 1 }"),
                "stream a: prompt_tokens.sigma is not a field",
            ),
        ],
    )
    def test_a_wrong_field_is_told_with_file_stream_and_what_is_allowed(self, stream: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse(stream)
        assert re.match(r"w\.toml:[2-6]: stream a: ", caught.value.message)
        assert message in caught.value.message
        assert caught.value.field.startswith("stream a: ")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("name = ", "w.toml:1: not valid TOML: "),
            ('name = "w"', "w.toml: stream is missing; it must be tables [[stream]], at least one"),
            ('name = "w"\nstream = []', "w.toml:2: stream = [] is not allowed; it must be tables [[stream]]"),
            ('name = "w"\nstream = [1]', "w.toml:2: stream = 1 is not allowed; it must be tables [[stream]]"),
            (f"[[stream]]\n{LEAST}", "w.toml: name is missing; it must be a text that is not empty"),
            (f'name = ""\n[[stream]]\n{LEAST}', "w.toml:1: name = '' is not allowed"),
            (f'name = "w"\n[[stream]]\n{LEAST}[[stream]]\n{LEAST}', "two streams have one name"),
            (
                f'name = "w"\n[slo.fast]\n[[stream]]\n{LEAST}',
                "w.toml:2: slo.fast = {} is not allowed; it must be tables",
            ),
            (f'name = "w"\n[slo.latency]\nttft = 1\n[[stream]]\n{LEAST}', "slo.latency.ttft is not a field"),
            (
                f'name = "w"\n[slo.latency]\nttft_ms = -1\n[[stream]]\n{LEAST}',
                "a number of milliseconds, or 0 for none",
            ),
            (f'name = "w"\n[[stream]]\n{LEAST}[[stream]]\nshare = 0', "w.toml:7: stream 2: share = 0 is not allowed"),
        ],
    )
    def test_a_wrong_file_is_told_with_what_is_allowed(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_workload(text, "w.toml")
        assert message in caught.value.message

    @pytest.mark.parametrize("other", ["share = 1", ""])
    def test_rates_and_shares_do_not_mix(self, other: str) -> None:
        with pytest.raises(ConfigError, match="rate_per_s must be given for all streams and share for none"):
            parse(LEAST + "rate_per_s = 1", LEAST.replace('"a"', '"b"') + other)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (f'name = "w"\n# two\n\n[[stream]]\n{LEAST}qos = "x"\n', "w.toml:8: stream a: qos"),
            (f'name = "w"\r\n\r\n[[stream]]\r\n{LEAST}qos = "x"\n', "w.toml:7: stream a: qos"),
            ('name = "w"\n[[stream]]\nname = "a"\n', "w.toml:2: stream a: prompt_tokens is missing"),
            (
                f'name = "w"\n[[stream]]\n{LEAST}turns.min = 1\nturns.max = 2\n',
                "w.toml:6: stream a: turns.distribution",
            ),
            (f'name = "w"\n[[stream]]\n{LEAST}[[stream]]\n{LEAST}', "w.toml:7: stream.name = 'a': two streams"),
            (
                f'name = "w"\n[[stream]]\n{LEAST}\n[slo.latency]\ntpot_ms = 1\nttft = 1\n',
                "w.toml:9: slo.latency.ttft is",
            ),
            ('stream = [\n  1,\n  2,\n]\nname = "w"\n', "w.toml:1: stream = 1"),
            ('name = "w"\nx = ' + "[" * 100_000, "nested too deeply"),
        ],
    )
    def test_the_line_is_where_the_statement_begins(self, text: str, told: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_workload(text, "w.toml")
        assert told in caught.value.message

    def test_shares_whose_sum_is_infinite_are_refused(self) -> None:
        other = LEAST.replace('"a"', '"b"')
        with pytest.raises(ConfigError, match=r"w\.toml:6: stream a: share = 1e\+308 is not allowed.* finite sum"):
            parse(LEAST + "share = 1e308", other + "share = 1e308")

    def test_a_number_longer_than_any_float_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="a number above 0"):
            parse(LEAST + f"share = 1{'0' * 400}")

    def test_an_unknown_name_is_told_what_there_is(self) -> None:
        with pytest.raises(ConfigError, match="no workload 'chess'; shipped are batch, chat, mixed"):
            load_workload("chess")

    def test_a_file_that_is_no_text_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "w.toml"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match=r"w\.toml: cannot be read"):
            load_workload(str(path))

    def test_a_file_is_read_by_its_path(self, tmp_path: Path) -> None:
        path = tmp_path / "w.toml"
        path.write_text(f'name = "mine"\n[[stream]]\n{LEAST}')
        assert load_workload(str(path)).name == "mine"
