"""The documentation site's own pages: the reference has every public name, with an example; links lead on."""

from __future__ import annotations

import importlib
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path, PurePosixPath

import pytest

from devtools.pages import commands, dashboard, faces, links, reference
from penstock.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))}
NAMES = faces.public_names()


@pytest.mark.parametrize("face", faces.FACES)
def test_names_that_are_found_in_the_source_are_those_that_the_face_exports(face: str) -> None:
    found = {name.name for name in NAMES.values() if name.face == face}
    assert found == set(dir(importlib.import_module(face)))


def test_what_the_package_exports_is_in_a_room_or_is_one() -> None:
    exported = set(dir(importlib.import_module("penstock")))
    assert exported <= faces.exported_by_package()
    assert exported - set(NAMES) == {"loader", "storage", "trainer"}


def test_every_public_name_has_one_heading_in_the_reference_and_no_heading_is_of_another() -> None:
    headings = [name for text in PAGES.values() for name in reference.named_in(text)]
    assert sorted(headings) == sorted(NAMES)
    assert reference.missing_names(["### pack\n"], ["pack", "verify"]) == ["verify"]


def test_every_public_name_has_a_docstring() -> None:
    assert faces.undocumented(NAMES) == []


@pytest.mark.parametrize("page", sorted(set(PAGES) - {"errors.md"}))
def test_every_name_of_a_page_is_in_one_of_its_examples(page: str) -> None:
    assert [name for name in reference.named_in(PAGES[page]) if name not in reference.shown_in(PAGES[page])] == []


def test_a_heading_gets_the_docstring_of_its_name_and_code_does_not() -> None:
    text = "### pack\n\n```python\n### pack\n```\n\n### Not a name\n"
    made = reference.insert_docstrings(text, NAMES)
    assert made.count("::: penstock.tools.pack.pack\n") == 1
    assert '<a id="pack"></a><a id="penstock.loader.pack"></a>' in made  # where links of the forge lead
    assert "```python\n### pack\n```" in made
    with pytest.raises(ValueError, match="'unpack', which no face exports"):
        reference.insert_docstrings("### unpack\n", NAMES)


def test_the_reference_of_commands_has_a_row_for_each_option_that_help_lists() -> None:
    page = commands.commands_page()
    for name in COMMANDS:
        help_text = (commands.GOLDEN / f"help-{name}.txt").read_text()
        part = page.partition(f"## penstock {name}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(-h, --help|--[\w.-]+)", part, re.MULTILINE)
        options = re.findall(r"^(?:-h, --help|--[a-z][\w-]*)(?= [A-Z{\[.]| show| [^ ]*\|)", help_text, re.MULTILINE)
        assert rows == options, name
        assert options or name == "state", name
    assert (
        "| `--trainer.steps none\\|INT` | Stop after this many steps; none: after the epochs. (default: none) |" in page
    )


def test_an_option_is_told_from_the_rest_of_the_one_before() -> None:
    help_text = (
        "usage: x [OPTIONS] RUN FILE\nDo it.\nexample: x a \\\nb\n"
        "positional arguments\nRUN A run. (required) FILE A file.\n"
        "options\n\n--seconds S With\n--epochs, whichever ends first.\n--all Take all.\n--bad FILE A file of these.\n"
    )
    made = commands.section("x", help_text)
    assert "| `--seconds S` | With --epochs, whichever ends first. |" in made
    assert "| `--all` | Take all. |" in made
    assert "| `--bad FILE` | A file of these. |" in made
    assert "| `RUN` | A run. (required) |\n| `FILE` | A file. |" in made
    assert "```console\n$ x a b\n```" in made


def rewritten(text: str, real: str = "docs/a.md", page: str = "a.md") -> tuple[str, list[str]]:
    seen: list[str] = []
    return links.rewrite_links(text, PurePosixPath(real), page, lambda path: seen.append(str(path))), seen


def test_links_out_of_the_documentation_lead_to_their_place_on_the_site() -> None:
    assert rewritten("[a](loader.md#batches) [b](https://x.org/a.md) [c](#d)") == (
        "[a](loader.md#batches) [b](https://x.org/a.md) [c](#d)",
        [],
    )
    assert rewritten("[a](../ARCHITECTURE.md#the-plan)") == ("[a](architecture.md#the-plan)", ["ARCHITECTURE.md"])
    assert rewritten("[a](../examples/click_log.py)")[0] == "[a](repository/examples/click_log.py.md)"
    assert rewritten("[a](../examples/integrations)")[0] == "[a](repository/examples/integrations/index.md)"
    assert rewritten("[a](notebooks/vision.ipynb)")[0] == "[a](notebooks/vision.md)"
    assert rewritten("[a](docs/start.md)", "README.md", "about.md")[0] == "[a](start.md)"
    assert rewritten("see [loader.md](loader.md#epochs)")[0] == "see [DistributedDataLoader](loader.md#epochs)"
    assert rewritten("```python\nx[0](../nothing.md)\n```")[1] == []
    with pytest.raises(FileNotFoundError, match=r"docs/a\.md: the link '\.\./nothing\.md'"):
        rewritten("[a](../nothing.md)")


def test_images_in_html_become_those_of_markdown_by_the_colours_of_the_page() -> None:
    picture = (
        '<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="b.png">\n  <img alt="A run" src="a.png">\n'
        "</picture>"
    )
    assert links.images_as_markdown(picture) == "![A run](a.png#only-light)\n![A run](b.png#only-dark)"
    assert links.images_as_markdown('<img src="a.svg" width="480" alt="A">') == "![A](a.svg){ width=480 }"
    assert links.plain_fences("```python torchrun\nx\n```\n```toml\n```\n") == "```python\nx\n```\n```toml\n```\n"


def test_the_dashboard_is_drawn_with_every_panel_and_says_where_nothing_was_recorded() -> None:
    board = json.loads(dashboard.BOARD.read_text())
    lines = {
        "stat Loss": [dashboard.Line(name="", points=((0.0, 0.5), (10.0, 0.25)))],
        "timeseries Loss": [dashboard.Line(name="loss", points=((0.0, 0.5), (10.0, 0.25)))],
        "timeseries Where a rank's time goes": [
            dashboard.Line(name="fetch <1>", points=((0.0, 0.25), (10.0, 0.25))),
            dashboard.Line(name="forward", points=((0.0, 0.5), (10.0, 0.75))),
        ],
    }
    texts = [
        text.text for text in ET.fromstring(dashboard.draw_board(board, lines, dashboard.DARK)).iter() if text.text
    ]
    begins = [panel["title"][:25] for panel in board["panels"]]  # long ones are cut
    assert [text[:25] for text in texts if text[:25] in begins] == begins
    assert texts.count("No data") == len([panel for panel in board["panels"] if panel["type"] != "row"]) - len(lines)
    assert {"0.25", "loss", "fetch <1>", "100%", "10 s"} <= set(texts)


def test_lines_of_a_stacked_panel_lie_upon_each_other() -> None:
    first = dashboard.Line(name="a", points=((0.0, 1.0), (1.0, 2.0)))
    second = dashboard.Line(name="b", points=((1.0, 3.0),))
    assert [line.points for line in dashboard.stack([first, second])] == [
        ((0.0, 1.0), (1.0, 2.0)),
        ((0.0, 1.0), (1.0, 5.0)),
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.456, "percentunit", "45.6%"),
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (1536.0, "bytes", "1.5 KiB"),
        (0.0, "Bps", "0 B/s"),
        (12_345.0, "none", "12.3k"),
        (7.0, "reqps", "7/s"),
    ],
)
def test_numbers_of_the_dashboard_have_its_units(value: float, unit: str, text: str) -> None:
    assert dashboard.write_value(value, unit) == text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 1.0, [0, 0.25, 0.5, 0.75, 1]), (0.0, 339.0, [0, 100, 200, 300, 400]), (-3.0, 10.0, [-5, 0, 5, 10])],
)
def test_ticks_of_the_dashboard_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert dashboard.choose_ticks(low, high) == pytest.approx(ticks)
