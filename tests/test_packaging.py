"""What is installed is what is in the tree, under the one name penstock."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("storage", "loader", "trainer", "benchmarks", "cli")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders_with_code() -> list[Path]:
    """The folders of the rooms, relative to the root, that hold Python files."""
    return sorted({path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")})


def test_the_listed_packages_are_the_packages_of_the_tree(project: dict[str, Any]) -> None:
    setuptools = project["tool"]["setuptools"]
    in_tree = {"penstock": "."} | {".".join(("penstock", *folder.parts)): str(folder) for folder in folders_with_code()}
    assert setuptools["package-dir"] == in_tree
    assert sorted(setuptools["packages"]) == sorted(in_tree)


def test_every_folder_with_code_is_a_package() -> None:
    assert [str(folder) for folder in folders_with_code() if not (ROOT / folder / "__init__.py").exists()] == []


def test_type_checkers_see_every_room() -> None:
    types = ROOT / ".types" / "penstock"
    assert {path.name for path in types.iterdir()} == {"__init__.py", "__init__.pyi", "py.typed", *ROOMS}
    assert all(path.exists() for path in types.iterdir())


def test_every_extra_that_a_message_names_can_be_installed(project: dict[str, Any]) -> None:
    named = {
        extra
        for path in [ROOT / "__init__.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
        for group in re.findall(r"penstock\[([\w,-]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert named
    assert named <= set(project["project"]["optional-dependencies"])


def test_every_dependency_is_pinned_where_tests_run(project: dict[str, Any]) -> None:
    pinned = {
        _normal(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    extras = project["project"]["optional-dependencies"]
    needed = {
        _normal(re.match(r"[\w.-]+", text).group())  # type: ignore[union-attr]
        for text in [*project["project"]["dependencies"], *(text for extra in extras.values() for text in extra)]
    }
    assert needed - {"penstock"} <= pinned


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def test_a_wheel_puts_nothing_but_penstock_into_site_packages(tmp_path: Path) -> None:
    # From a copy: building writes beside the sources.
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    copy = tmp_path / "copy"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if name.startswith(("tests/", ".types/")) or not (ROOT / name).is_file():
            continue
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ZipFile(tmp_path / done.stdout.split()[-1]).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"penstock"}
    code = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert {f"penstock/{name}" for name in code | {"__init__.py", "py.typed"}} <= set(names)


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def import_penstock() -> None:
    from penstock import DistributedDataLoader, open_store

    assert DistributedDataLoader.__module__ == "penstock.loader.data_loader"
    assert open_store.__module__ == "penstock.storage.resolve"


def test_a_spawned_process_can_import_penstock() -> None:
    process = multiprocessing.get_context("spawn").Process(target=import_penstock)
    process.start()
    process.join(120)
    assert process.exitcode == 0
