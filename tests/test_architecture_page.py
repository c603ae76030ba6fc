"""ARCHITECTURE.md names every folder, and none that is not there; it fits on three screens."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("storage", "loader", "tools", "trainer", "benchmarks", "cli", "devtools")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
FOLDERS = ARCHITECTURE.partition("## Folders")[2].split("```")[1].splitlines()


def folders_named() -> set[str]:
    """The folders in the list of ARCHITECTURE.md, by their paths."""
    named: set[str] = set()
    above: list[str] = []
    for line in FOLDERS:
        if entry := re.match(r"( {0,4})(\w+)/ +\S", line):
            above = [*above[: len(entry[1]) // 2], entry[2]]
            named.add("/".join(above))
    return named


def test_the_list_of_folders_names_each_that_holds_code() -> None:
    there = {path.parent.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert folders_named() - {"deploy", "tests"} == there


def test_the_page_fits_on_three_screens() -> None:
    lines = ARCHITECTURE.splitlines()
    assert len(lines) <= 180
    assert [line for line in lines if len(line) > 125] == []


def test_every_test_that_a_page_names_is_there() -> None:
    """By its path from the root or, in the table of what the trainer promises, from its tests."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = [(page.name, name) for page in pages for name in re.findall(r"`([\w./]*test_\w+\.py)`", page.read_text())]
    assert len(named) > 40
    assert [name for name in named if not any((ROOT / base / name[1]).exists() for base in ("", "tests/trainer"))] == []


def test_every_file_that_pages_about_the_inside_name_is_there() -> None:
    paths = [path for room in (*ROOMS, "tests", "docs") for path in (ROOT / room).rglob("*.*")]
    there = {f"/{path.relative_to(ROOT)}" for path in (*paths, *ROOT.glob("*.*"))}
    pages = ARCHITECTURE + (ROOT / "docs" / "internals.md").read_text()
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|md|toml))`", pages)
    assert len(named) > 30
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []
    folders = re.findall(r"`((?:\w+/)+)`", pages)
    assert len(folders) > 10
    assert [name for name in folders if not any(f"/{name}" in path for path in there)] == []
