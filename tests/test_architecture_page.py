"""ARCHITECTURE.md names every file, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("storage", "loader", "tools", "trainer", "benchmarks", "cli", "devtools")
ALIKE = {
    "benchmarks/contenders",
    "cli",
    "devtools",
    "loader/integrations",
}  # folders of which one sentence tells all files
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def folder_list() -> dict[str, str]:
    """What the list of folders in ARCHITECTURE.md says of each folder of a room, by the folder's path."""
    said: dict[str, str] = {}
    above: list[str] = []
    for line in ARCHITECTURE.split("```")[1].splitlines():
        entry = re.match(r"( {0,4})(\w+)/ ", line)
        if entry:
            above = [*above[: len(entry[1]) // 2], entry[2]]
        if above and above[0] in ROOMS:
            folder = "/".join(above)
            said[folder] = said.get(folder, "") + line.removeprefix(entry[0] if entry else "") + "\n"
    return said


def test_the_list_of_folders_names_every_file() -> None:
    said = folder_list()
    files = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert set(said) == {path.parent.as_posix() for path in files}
    untold = []
    for path in files:
        told = said[path.parent.as_posix()]
        starts = tuple(re.findall(r"(\w+_)\*", told))
        named = path.name.startswith(("__", *starts)) or path.stem in re.findall(r"\w+", told)
        if not named and path.parent.as_posix() not in ALIKE:
            untold.append(str(path))
    assert untold == []


def test_the_list_of_folders_fits_a_page() -> None:
    assert [line for line in ARCHITECTURE.split("```")[1].splitlines() if len(line) > 120] == []


def test_every_test_that_a_page_names_is_there() -> None:
    """By its path from the root or, in the table of what the trainer promises, from its tests."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = [(page.name, name) for page in pages for name in re.findall(r"`([\w./]*test_\w+\.py)`", page.read_text())]
    assert len(named) > 40
    assert [name for name in named if not any((ROOT / base / name[1]).exists() for base in ("", "tests/trainer"))] == []


def test_every_file_that_the_architecture_names_is_there() -> None:
    paths = [path for room in (*ROOMS, "tests", "docs") for path in (ROOT / room).rglob("*.*")]
    there = {f"/{path.relative_to(ROOT)}" for path in (*paths, *ROOT.glob("*.*"))}
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|md|toml))`", ARCHITECTURE)
    assert len(named) > 30
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []
    for folder, words in folder_list().items():
        for name in re.findall(r"\b[a-z]\w*_\w*[a-z]\b", words):  # no words of English
            assert f"/{folder}/{name}.py" in there, f"{folder} has no {name}.py"
