"""The report of the field's benchmark, from canned results."""

from __future__ import annotations

import copy
import html
import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from canned_field import entry
from rich.console import Console

from penstock.benchmarks.contenders import LIMIT, OURS, VIEWS
from penstock.benchmarks.field import words
from penstock.benchmarks.field.cells import FieldConfig
from penstock.benchmarks.field.page import draw_picture, render
from penstock.benchmarks.field.plots import rate_axis
from penstock.benchmarks.field.summary import (
    load_note,
)
from penstock.benchmarks.field.table import print_report
from penstock.benchmarks.peers.catalogue import PEERS

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).parents[2]


def cell(workload: str, contenders: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    data = {"samples": 8000, "bytes": 320 << 20, "shards": 16, "format": "tar"}
    given = {
        "workload": workload, "title": f"the workload {workload}", "store": "local", "ranks": 1, "delay_ms": None,
        "batch_size": 64, "date": "2026-01-02T03:04:05+00:00", "data": data, "contenders": dict(contenders),
        "refused": {}, "notes": {}, "loads": [0.5, 0.7],
    }  # fmt: skip
    return given | more


@pytest.fixture
def report() -> dict[str, Any]:
    three = {
        OURS: entry(900.0, 1000.0, 1100.0),
        LIMIT: entry(2000.0, 2000.0, 2100.0),
        "litdata": entry(450.0, 500.0, 550.0, version="0.2.76"),
        "mosaicml-streaming": entry(9.0, 10.0, 11.0, version="0.13.0"),
    }
    peers = ("litdata", "mosaicml-streaming", "grain")
    return {
        "version": 1,
        "command": "penstock bench --full",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "A <Fast> CPU", "cores": 4, "system": "Linux 6 x86_64", "load_1m": 0.4, "memory_bytes": 1},
        "versions": {"python": "3.11", "torch": "2.13"},
        "settings": FieldConfig(rounds=3).to_dict(),
        "peers": {
            name: {word: getattr(PEERS[name], word) for word in ("advice", "source", "setup", "order")}
            for name in peers
        },
        "cells": [
            cell("bytes-40k", three, refused={"grain": "it <crashed> & ended"}, notes={"litdata": "half a pass"}),
            cell("tokens", three, store="s3-delay", ranks=2, delay_ms=20.0),
            cell("tokens", {}, store="s3", refused={OURS: "there is no S3 server here"}),
        ],
    }


class _Reader(HTMLParser):
    """What a page consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.heads: list[str] = []
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._in_head = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_head = tag == "h2" or (self._in_head and tag != "small")
        if tag == "h2":
            self.heads.append("")
        given = dict(attributes)
        self.fetched += [str(given[name]) for name in ("src", "srcset", "data", "xlink:href") if name in given]
        self.links += [str(given["href"])] if "href" in given else []

    def handle_endtag(self, tag: str) -> None:
        self._in_head = self._in_head and tag != "h2"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_head:
            self.heads[-1] += data


def test_the_page_shows_every_comparison_and_fetches_nothing(report: dict[str, Any]) -> None:
    text = render(report)
    page = _Reader()
    page.feed(text)
    assert [head.strip() for head in page.heads] == [
        "First pass, as a multiple of the best other loader",
        "All comparisons",
        "raw bytes, 40 KB",
        "tokens, 2,048 per sample",
        "Not measured",
        "How the others are set up",
        "How it is measured",
    ]
    assert page.tags.count("figure") == 3  # the ratios, and the two comparisons that were measured
    assert page.tags.count("table") == 3
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert page.fetched == []
    assert sorted(page.links) == sorted(peer["source"] for peer in report["peers"].values())
    assert "url(" not in text
    assert "@import" not in text
    for told in ("it <crashed> & ended", "A <Fast> CPU", "half a pass", "there is no S3 server here", "2.00x", "0.50"):
        assert told in page.text
    for peer in report["peers"].values():
        assert peer["advice"] in page.text


def test_a_report_without_peers_or_without_any_result_is_drawn_too(report: dict[str, Any]) -> None:
    alone = copy.deepcopy(report) | {"peers": {}}
    alone["cells"] = [cell("tokens", {OURS: entry(1000.0)})]
    assert "<figure>" in render(alone)
    assert "ratios'" not in render(alone)
    assert "<figure" not in render(report | {"cells": [report["cells"][2]]})
    assert "</html>" in render(report | {"cells": []})
    picture = ElementTree.fromstring(draw_picture(report))  # a browser shows no file that is not well-formed
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert draw_picture(alone) == ""


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal(report: dict[str, Any], width: int, capsys: pytest.CaptureFixture[str]) -> None:
    many = report | {"cells": report["cells"] * 3}
    for each in (report, many):
        print_report(each, Console(width=width, highlight=False))
        out = capsys.readouterr().out
        assert max(map(len, map(str.rstrip, out.splitlines()))) <= width
        assert "…" not in out
        assert "s3 +20ms x2" in out
        assert "2.00x" in out
        assert "grain was not measured" in out
    assert ("quartiles" in out) == (width == 120)


@pytest.mark.parametrize("least", [50.0, 5.0, 0.01])
def test_a_bar_that_is_half_as_long_is_half_as_fast(least: float) -> None:
    axis = rate_axis([100.0, least])
    whole = axis.place(100.0) - axis.start
    assert whole == pytest.approx(axis.stop - axis.start)
    assert axis.place(least) - axis.start == pytest.approx(whole * least / 100)
    assert axis.ticks()[0] == 0.0
    assert all(axis.start - 0.1 <= axis.place(tick) <= axis.stop + 0.1 for tick in axis.ticks())
    assert 2 <= len(axis.ticks()) <= 6


def rows_of(page: str) -> list[list[str]]:
    """The cells of the table of all comparisons."""
    table = page[page.index("<h2>All comparisons") :].partition("</table>")[0]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]


def test_the_tiles_are_of_the_rows_that_are_shown(report: dict[str, Any]) -> None:
    views = report["cells"][0]["contenders"] | {VIEWS: entry(300.0, 300.0, 300.0), "spdl-view": entry(600.0)}
    page = render(report | {"cells": [cell("bytes-40k", views), report["cells"][1]]})
    tiles = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page))
    _, _, *rows = rows_of(page)
    ratios = [float(row[4].removesuffix("x")) for row in rows]
    assert ratios == [2.0, 0.5, 2.0]  # bytes objects, views, tokens
    assert tiles["comparisons"] == str(len(rows)) == "3"
    assert tiles["faster than the best other"] == "2 of 3"
    assert (tiles["least"], tiles["most"]) == ("0.50x", "2.00x")
    assert tiles["share of the bare loop"] == "0.15 to 0.50"


def test_every_column_says_whose_and_what_it_is(report: dict[str, Any]) -> None:
    page = render(report)
    groups, heads, *rows = rows_of(page)
    assert groups == ["", "samples per second in the first pass", "CPU time a sample", "first batch after"]
    spans = [int(span) for span in re.findall(r"colspan='(\d+)'", page)]
    assert sum(spans) == len(heads) == len(rows[0])
    starts = [sum(spans[:number]) for number in range(len(spans))]
    for start, span in zip(starts, spans, strict=True):
        assert len(set(heads[start : start + span])) == span  # no name twice
    assert not {"its", "peer's", "loop's"} & set(heads)


def test_passes_that_were_cut_are_marked_wherever_their_rates_stand(report: dict[str, Any]) -> None:
    cut = copy.deepcopy(report["cells"][0])
    for each in cut["contenders"]["litdata"]["rounds"]:
        each["whole_passes"] = 0
    page = render(report | {"cells": [cut]})
    _, _, row = rows_of(page)
    assert (row[1], row[2], row[5]) == ("1.00k", "~500", "2.00k")
    assert page.count(">~500<") == 2  # in the table, and beside its bar
    assert "~500 (475 to 525)" in page
    assert "~ marks a pass that was cut" in page


def test_the_picture_says_what_it_shows_and_names_rows_as_the_page_does(report: dict[str, Any]) -> None:
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(draw_picture(report)).iter(f"{SVG}text")]
    assert texts[0] == "First pass: penstock and the best other loader"
    assert texts[1] == "4 cores of A <Fast> CPU; 3 rounds in turn"
    for told in ("faster", "slower (medians)", "quartiles of the rounds", "0.5x", "1x", "2x"):
        assert told in texts
    assert "times as fast as the best other loader (logarithmic)" in texts
    _, _, *rows = rows_of(render(report))
    drawn = [text.partition(" / ")[0] for text in texts if " / " in text]
    assert drawn == [html.unescape(row[0]) for row in rows[:2]]
    assert drawn == ["raw bytes, 40 KB", "tokens, 2,048 per sample, from S3 +20 ms, 2 ranks"]


def test_the_readme_has_the_figures_and_names_of_the_kept_results() -> None:
    def read(name: str) -> dict[str, list[str]]:
        _, _, *rows = rows_of(render(json.loads((ROOT / "benchmarks" / "results" / name).read_text())))
        return {html.unescape(row[0]): row for row in rows}

    known, epyc, older = read("field.json"), read("field-epyc.json"), read("field-older-xeon.json")
    table = (ROOT / "README.md").read_text().partition("| | penstock | best other |")[2]
    lines = [line.split(" | ") for line in table.splitlines()[2:] if line.startswith("| ")]
    told = [line for line in lines if line[0].removeprefix("| ") in known]
    assert len(told) == 9
    for line in told:
        name = line[0].removeprefix("| ")
        row = known[name]
        assert line[4:6] == [other[name][4] if name in other else "–" for other in (epyc, older)]
        assert line[1:4] == [f"**{row[1]}**", f"{row[2]} {html.unescape(row[3])}", row[4]]
        assert line[6] == row[5]


def test_numbers_are_said_as_people_read_them() -> None:
    assert [words.rate(each) for each in (None, 7.25, 42, 999.6, 9_940, 123_456, 2.5e6)] == [
        "–", "7.2", "42", "1.00k", "9.94k", "123k", "2.50M",
    ]  # fmt: skip
    assert [words.times(each) for each in (None, 0.71, 9.97, 117.6)] == ["–", "0.71x", "10.0x", "118x"]
    assert [words.seconds(each) for each in (0.0123, 1.5, 120)] == ["12 ms", "1.5 s", "120 s"]
    assert [words.tick(each) for each in (0.0, 500.0, 10_000.0, 2e6)] == ["0", "500", "10k", "2M"]
    assert "busy" in load_note([9.0, 10.0], 4)
    assert "busy" not in load_note([0.5], 4)
