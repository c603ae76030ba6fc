"""The report of the field's benchmark, from canned results."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from canned_field import entry
from rich.console import Console

from penstock.benchmarks.contenders import LIMIT, OURS
from penstock.benchmarks.field import words
from penstock.benchmarks.field.cells import FieldConfig
from penstock.benchmarks.field.page import draw_picture, render
from penstock.benchmarks.field.plots import rate_axis
from penstock.benchmarks.field.summary import (
    load_note,
)
from penstock.benchmarks.field.table import print_report
from penstock.benchmarks.peers.catalogue import PEERS


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
        "First pass, as a multiple of the best peer",
        "All comparisons",
        "the workload bytes-40k",
        "the workload tokens",
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


def test_bars_are_logarithmic_where_a_line_would_be_all_that_is_seen() -> None:
    linear, wide = rate_axis([100.0, 50.0]), rate_axis([100.0, 5.0])
    assert not linear.is_log
    assert linear.x(50.0) - linear.left == pytest.approx((linear.right - linear.left) / 2)
    assert linear.ticks()[0] == 0.0
    assert wide.is_log
    assert wide.left < wide.x(5.0) < wide.x(100.0) == pytest.approx(wide.right)
    for axis in (linear, wide):
        assert all(axis.left - 0.1 <= axis.x(tick) <= axis.right + 0.1 for tick in axis.ticks())
        assert 2 <= len(axis.ticks()) <= 6


def test_numbers_are_said_as_people_read_them() -> None:
    assert [words.rate(each) for each in (None, 7.25, 42, 999.6, 9_940, 123_456, 2.5e6)] == [
        "–", "7.2", "42", "1.00k", "9.94k", "123k", "2.50M",
    ]  # fmt: skip
    assert [words.times(each) for each in (None, 0.71, 9.97, 117.6)] == ["–", "0.71x", "10.0x", "118x"]
    assert [words.seconds(each) for each in (0.0123, 1.5, 120)] == ["12 ms", "1.5 s", "120 s"]
    assert [words.tick(each) for each in (0.0, 500.0, 10_000.0, 2e6)] == ["0", "500", "10k", "2M"]
    assert "busy" in load_note([9.0, 10.0], 4)
    assert "busy" not in load_note([0.5], 4)
