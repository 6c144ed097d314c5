"""What a report says of a run: its JSON, its tables, and a page that needs nothing but itself."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from loadtest import plots, tables
from loadtest import report as reports
from loadtest.plan import Record, Slo
from loadtest.ramp import Probe, Ramp, RampEnd
from loadtest.report import (
    FORMAT_VERSION,
    Report,
    make_report,
    to_html,
    to_jsonable,
    warnings,
    write_html,
    write_report,
)
from loadtest.runner import Ending, Outcome
from shoal.errors import ConfigError
from shoal.types import QosClass
from tests.support.load_runs import make_record, make_result, planned

LATENCY, BALANCED, THROUGHPUT = QosClass.LATENCY, QosClass.BALANCED, QosClass.THROUGHPUT
HOSTILE = '<script>alert("x")</script> & $a_b$'


def report_on(*records: Record, ending: Ending = Ending.COMPLETE, ramp: Ramp | None = None, **fields: Any) -> Report:
    outcome = Outcome(make_result(*records, **fields), ending)
    created_at = datetime(2025, 1, 2, 3, 4, tzinfo=UTC)
    return make_report(outcome, created_at=created_at, shoal_version="1.2.3", ramp=ramp, good_share=0.99)


def mixed() -> tuple[Record, ...]:
    return (
        make_record(0, 0.0, qos=LATENCY, tenant="gold"),
        make_record(1, 1.0, qos=LATENCY, tenant="gold", ttft_s=0.9),
        make_record(2, 1.5, qos=BALANCED, num_tokens=9),
        make_record(3, 2.0, qos=BALANCED, error="OVERLOADED"),
        make_record(4, 2.5, qos=THROUGHPUT, ttft_s=3.0),
    )


def make_probe(rate_per_s: float, holds: bool, **fields: Any) -> Probe:
    defaults: dict[str, Any] = {
        "good_share": 1.0 if holds else 0.5, "num_requests": 60, "duration_s": 30.0, "was_cut_short": not holds,
        "is_client_limited": False,
    }  # fmt: skip
    return Probe(rate_per_s, holds, **{**defaults, **fields})


def make_ramp(best_per_s: float = 2.0, end: RampEnd = RampEnd.FOUND) -> Ramp:
    probes = (make_probe(1.0, True), make_probe(2.0, True), make_probe(4.0, False, is_client_limited=True))
    return Ramp(probes, best_per_s, end, Outcome(make_result(*mixed()), Ending.COMPLETE))


# JSON


def test_the_json_says_what_was_run_how_and_what_came_of_it() -> None:
    fields = to_jsonable(report_on(*mixed()))

    assert (fields["format"], fields["version"]) == ("shoal-load-report", FORMAT_VERSION)
    assert (fields["created_at"], fields["shoal_version"]) == ("2025-01-02T03:04:00+00:00", "1.2.3")
    assert (fields["command"], fields["machine"]) == ("shoal load server", "Linux, 2 cores")
    assert fields["target"] == "tiny at 127.0.0.1:1 (Shoal)"
    assert fields["plan"] == {"description": "made by hand", "seed": 7, "concurrency": 0, "num_requests": 5}
    assert fields["statistics"]["overall"]["errors"] == {"OVERLOADED": 1}
    assert [group["name"] for group in fields["statistics"]["by_class"]] == ["latency", "balanced", "throughput"]
    assert (fields["ending"], fields["ramp"]) == ("complete", None)


def test_records_are_in_the_json_only_if_wanted_and_without_their_texts(tmp_path: Path) -> None:
    report = report_on(*mixed())
    write_report(tmp_path / "brief.json", report)
    write_report(tmp_path / "full.json", report, with_records=True)

    brief, full = ((tmp_path / name).read_text() for name in ("brief.json", "full.json"))
    assert "records" not in json.loads(brief)
    refused = json.loads(full)["records"][3]
    assert (refused["number"], refused["class"], refused["error"]) == (3, "balanced", "OVERLOADED")
    assert json.loads(full)["records"][0]["token_at_s"] == pytest.approx([0.2, 0.22, 0.24, 0.26, 0.28])
    assert "once upon a time" not in full


def test_the_json_has_numbers_that_every_reader_takes(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", report_on(), with_records=True)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)["records"] == []


def test_a_report_takes_the_place_of_an_older_one_at_once(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("old")

    write_report(tmp_path / "report.json", report_on(*mixed()))

    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["format"] == "shoal-load-report"


def test_a_ramp_is_in_the_json_with_every_rate_that_was_tried() -> None:
    ramp = to_jsonable(report_on(*mixed(), ramp=make_ramp()))["ramp"]

    assert (ramp["best_per_s"], ramp["end"], ramp["good_share"]) == (2.0, "limit found", 0.99)
    assert [(probe["rate_per_s"], probe["holds"]) for probe in ramp["probes"]] == [
        (1.0, True),
        (2.0, True),
        (4.0, False),
    ]


# What a reader has to know first


@pytest.mark.parametrize(
    ("ending", "how"),
    [
        (Ending.INTERRUPTED, "ended before it was interrupted"),
        (Ending.TIMEOUT, "ended before its time was up"),
        (Ending.LOST, "are known to have ended, for a harness was lost with what it saw"),
    ],
)
def test_a_part_of_a_run_is_marked_as_one(ending: Ending, how: str) -> None:
    cut_off = make_record(1, error="INTERRUPTED" if ending is Ending.INTERRUPTED else "RUN_TIMEOUT")

    said = warnings(report_on(make_record(0), cut_off, ending=ending))

    assert said[0] == f"This is a part of what was planned: 1 of 2 requests {how}."


def test_a_complete_run_with_many_answers_needs_no_warning() -> None:
    assert warnings(report_on(*(make_record(number) for number in range(100)))) == []


def test_few_answers_of_a_class_make_its_p99_rough() -> None:
    assert "Fewer than 100 answers of class latency, balanced, throughput" in warnings(report_on(*mixed()))[0]


def test_a_run_without_an_answer_says_so() -> None:
    assert "No request ended well." in warnings(report_on(make_record(0, error="NOT_READY")))


def test_a_harness_that_is_too_slow_says_so() -> None:
    said = warnings(report_on(*(make_record(number, lag_s=0.5) for number in range(100))))

    assert len(said) == 1
    assert said[0].startswith("Some of this is the harness's doing, not the server's: p99 of the lag of sending is 500")


def test_a_ramp_that_holds_nowhere_says_what_its_figures_are_of() -> None:
    ramp = make_ramp(0.0, RampEnd.NONE_HOLDS)

    assert warnings(report_on(*mixed(), ending=Ending.INTERRUPTED, ramp=ramp))[0].startswith("No rate held")


def test_a_ramp_that_rests_on_few_requests_says_so() -> None:
    many = tuple(replace(probe, num_requests=100) for probe in make_ramp().probes)
    few, enough = (
        warnings(report_on(*mixed(), ramp=ramp)) for ramp in (make_ramp(), replace(make_ramp(), probes=many))
    )

    assert few[0].startswith("The ramp's result rests on 60 requests: fewer than 100 prove little")
    assert not any("rests on" in said for said in enough)


# Tables


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"), (0.0, "0.00 ms"), (0.00042, "0.42 ms"), (0.00996, "10 ms"), (0.0042, "4.2 ms"), (0.1234, "123 ms"),
        (0.9994, "999 ms"), (0.9996, "1.00 s"), (1.234, "1.23 s"), (9.996, "10.0 s"), (12.34, "12.3 s"), (99.96, "100 s"),
        (1234.0, "1234 s"),
    ],
)  # fmt: skip
def test_times_are_shown_in_units_that_suit_them(seconds: float | None, shown: str) -> None:
    assert tables.format_s(seconds) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.99, "99 %"), (0.29, "29 %"), (0.0, "0 %")]
)
def test_only_all_are_a_hundred_per_cent(share: float, shown: str) -> None:
    assert tables.format_share(share) == shown


def test_every_figure_has_a_row_and_every_group_a_column() -> None:
    statistics = report_on(*mixed()).statistics

    table = tables.figures([statistics.overall, *statistics.by_class])

    rows = {row[0]: row[1:] for row in table.rows}
    assert table.header == ("", "overall", "latency", "balanced", "throughput")
    assert all(len(row) == len(table.header) for row in table.rows)
    assert {
        f"{kind} {what}" for kind in ("TTFT", "TPOT", "gap", "e2e") for what in ("mean", "p50", "p90", "p99", "max")
    } <= (rows.keys())
    assert rows["requests"] == ("5", "2", "2", "1")
    assert rows["failed"] == ("1", "0", "1", "0")
    assert rows["met its SLO"] == ("50 %", "50 %", "50 %", "-")
    assert rows["TTFT max"] == ("3.00 s", "900 ms", "200 ms", "3.00 s")
    assert rows["gap p50"][0] == "20 ms"


def test_a_brief_table_fits_a_terminal() -> None:
    statistics = report_on(*mixed()).statistics

    table = tables.figures([statistics.overall, *statistics.by_class], is_brief=True)

    widths = [max(len(row[column]) for row in (table.header, *table.rows)) for column in range(len(table.header))]
    assert sum(widths) + 2 * len(widths) < 80
    assert len(table.rows) < 20


def test_errors_are_counted_by_reason_with_the_first_message_of_each() -> None:
    records = [make_record(number, error=error) for number, error in enumerate(["", "A", "B", "B"])]

    assert tables.errors(records).rows == (("B", "2", "it said B"), ("A", "1", "it said A"))


def test_pipelines_show_what_they_served() -> None:
    def served(number: int, qos: QosClass, pipeline: str) -> Record:
        return replace(make_record(number, qos=qos), served_by=pipeline)

    records = [served(0, LATENCY, "p2"), served(1, LATENCY, "p1"), served(2, BALANCED, "p1"), served(3, BALANCED, "")]

    table = tables.served_by(records)

    assert table.header == ("pipeline", "latency", "balanced")
    assert table.rows == (("p1", "1", "1"), ("p2", "1", "0"))


def test_objectives_say_what_was_asked_for() -> None:
    assert tables.format_slo(Slo(0.5, 0.03, 10.0)) == "TTFT <= 500 ms, TPOT <= 30 ms, e2e <= 10.0 s"
    assert tables.format_slo(Slo()) == "none"


def test_a_line_names_the_slos_in_force_of_the_classes_that_were_asked() -> None:
    statistics = report_on(make_record(0, qos=LATENCY), make_record(1, qos=THROUGHPUT)).statistics

    assert tables.slo_line(statistics) == "SLO: latency TTFT 500 ms, TPOT 50 ms"


def test_a_line_says_what_a_ramp_found_and_on_how_many_requests_that_rests() -> None:
    ended = replace(make_ramp(), end=RampEnd.NO_PLAN, reason="too many requests")

    assert tables.ramp_line(make_ramp()) == (
        "highest rate that holds: 2.00 requests/s (limit found); this rests on 60 requests"
    )
    assert "(no further rate can be planned: too many requests)" in tables.ramp_line(ended)


def test_probes_say_what_became_of_each_rate() -> None:
    rows = tables.probes(make_ramp().probes).rows

    assert rows[1] == ("2.00", "100 %", "yes", "60", "30.0 s", "")
    assert rows[2] == ("4.00", "50 %", "no", "60", "30.0 s", "cut short, limited by the harness")


# The page


class Page(HTMLParser):
    """Collects tags with their attributes, and text outside style sheets; fails at tags that do not match."""

    VOID = ("meta", "link", "br", "img", "hr", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data

    def values(self, attribute: str) -> Iterator[str]:
        for _, attributes in self.tags:
            value = attributes.get(attribute)
            if value is not None:
                yield value


@pytest.fixture(scope="module")
def html() -> str:
    """The page of a ramp with answers, misses and errors of all classes."""
    return to_html(report_on(*mixed(), ramp=make_ramp()))


def test_a_page_needs_nothing_but_itself(html: str) -> None:

    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "image"})
    assert set(page.values("src")) == set()
    assert all(value.startswith("#") for name in ("href", "xlink:href") for value in page.values(name))
    assert "@import" not in html
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))


def test_pictures_take_their_colours_from_the_page_so_that_it_may_be_dark(html: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(pictures) == 4
    assert [re.findall(r"#[0-9a-f]{6}\b", picture) for picture in pictures] == [[], [], [], []]
    assert all("var(--ink)" in picture for picture in pictures)
    used = set(re.findall(r"var\((--[\w-]+)\)", html))
    light, dark = (
        set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", html, re.DOTALL)[:2]
    )
    assert used <= light
    assert light == dark


def test_no_id_is_on_a_page_twice_and_every_reference_leads_somewhere(html: str) -> None:
    ids = list(Page(html).values("id"))
    assert len(set(ids)) == len(ids)
    references = set(re.findall(r"url\(#([^)]*)\)", html)) | set(re.findall(r'href="#([^"]*)"', html))
    assert references <= set(ids)


def test_what_servers_and_users_say_is_text_and_never_markup() -> None:
    request = planned(1, tenant=HOSTILE, stream=HOSTILE)
    hostile = replace(make_record(1, error="INTERNAL", request=request), message=HOSTILE)

    html = to_html(report_on(make_record(0), hostile, target=HOSTILE, command=HOSTILE))

    page = Page(html)
    assert "<script" not in html
    assert page.text.count(HOSTILE) >= 4


def test_a_page_has_all_figures_as_tables_too(html: str) -> None:
    text = Page(html).text

    for said in (
        "TTFT p99", "gap max", "met its SLO", "OVERLOADED", "it said OVERLOADED", "shoal load server", "Linux, 2 cores",
        "made by hand", "2025-01-02 03:04 UTC", "TTFT <= 500 ms, TPOT <= 50 ms", "gold", "cut short",
    ):  # fmt: skip
        assert said in text


def test_the_head_of_a_page_has_its_date_and_seed(html: str) -> None:
    head = html[html.index("<header>") : html.index("</header>")]

    assert "2025-01-02 03:04 UTC" in head
    assert "seed 7" in head


def test_a_page_shows_no_share_where_nothing_was_asked_for_and_on_what_a_ramp_rests(html: str) -> None:
    alone = Page(to_html(report_on(make_record(0, qos=THROUGHPUT)))).text

    assert re.search(r"met their SLO\s*-\s", alone)
    assert "The result rests on 60 requests." in Page(html).text


@pytest.mark.parametrize(
    ("rates", "shown"),
    [
        ([4.76, 5.66, 5.19], ["4.76", "5.19", "5.66"]),
        ([1.0, 2.0, 4.0, 8.0, 4.01, 4.02], ["1.00", "2.00", "4.00", "8.00"]),
        ([3.0], ["3.00"]),
    ],
)
def test_a_ramp_s_picture_has_the_rates_that_were_tried_but_no_two_too_near(
    rates: list[float], shown: list[str]
) -> None:
    ramp = replace(make_ramp(), probes=tuple(make_probe(rate, True) for rate in rates))

    svg = plots.draw_ramp(ramp, 0.99).svg

    assert re.findall(r">(\d+\.\d\d)<", svg) == shown


def test_a_page_draws_every_class_and_its_objectives(html: str) -> None:
    _, first_token, between_tokens, timeline = re.findall(r"<svg.*?</svg>", html, re.DOTALL)

    assert "latency (2)" in first_token
    assert "balanced (1)" in first_token
    assert "balanced (8)" in between_tokens
    assert first_token.count(">SLO<") == between_tokens.count(">SLO<") == 2
    assert "OVERLOADED" in timeline


@pytest.mark.parametrize(
    "records",
    [
        (),
        (make_record(0, error="NOT_READY"),),
        (make_record(0, num_tokens=1),),
        (make_record(0, num_tokens=3, gap_s=0.0, ttft_s=0.0),),
        tuple(make_record(number, error=f"REASON_{number}") for number in range(7)),
        tuple(make_record(number, number * 0.1, num_tokens=40, gap_s=0.001 * (number + 1)) for number in range(50)),
    ],
    ids=["nothing", "only errors", "one token", "no time at all", "many reasons", "many samples"],
)
def test_a_page_can_be_made_of_any_run(records: tuple[Record, ...]) -> None:
    html = to_html(report_on(*records))

    assert "Load report" in Page(html).text
    assert len(html) < 400_000


def test_the_same_run_gives_the_same_page(html: str) -> None:
    assert to_html(report_on(*mixed(), ramp=make_ramp())) == html


def test_a_page_without_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reports, "find_spec", lambda _: None)

    with pytest.raises(ConfigError, match=r"pip install 'shoal\[load\]'"):
        write_html(tmp_path / "report.html", report_on(*mixed()))
    assert list(tmp_path.iterdir()) == []


def test_pictures_share_no_state_with_others_who_draw(html: str) -> None:
    assert "matplotlib.pyplot" not in sys.modules
