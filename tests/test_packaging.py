"""What is installed is what is in the tree, under the one name penstock."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

import penstock

ROOT = Path(__file__).parents[1]
ROOMS = ("storage", "loader", "tools", "trainer", "benchmarks", "cli")


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the project, built from a copy: building writes beside the sources."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if name.startswith(("tests/", ".types/")) or not (ROOT / name).is_file():
            continue
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.mark.slow
def test_a_wheel_puts_nothing_but_penstock_into_site_packages(wheel: Path) -> None:
    assert wheel.name.startswith(f"penstock-{penstock.__version__}-")
    names = ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"penstock"}


@pytest.mark.slow
def test_a_wheel_holds_every_module_face_and_recipe(wheel: Path) -> None:
    files = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for kind in ("*.py", "*.pyi", "*.toml")
        for path in (ROOT / room).rglob(kind)
    }
    faces = {"__init__.pyi", *(f"{room}/__init__.pyi" for room in ("loader", "storage", "trainer"))}
    assert faces - {"__init__.pyi"} <= files
    wanted = files | faces | {"__init__.py", "py.typed"}
    assert {f"penstock/{name}" for name in wanted} - set(ZipFile(wheel).namelist()) == set()


READ = """
import sys
from pathlib import Path

import penstock
from penstock import DistributedDataLoader, audit, pack, verify
from penstock.loader import ConfigError
from penstock.storage import MemoryStore
from penstock.trainer import TrainerConfig

assert Path(penstock.__file__).is_relative_to(sys.prefix), penstock.__file__
assert pack(({"cls": i} for i in range(20)), "shards", progress=False).samples == 20
assert verify("shards", progress=False).ok
with DistributedDataLoader("shards", batch_size=5, audit_dir="audit") as loader:
    print(sorted(n for batch in loader for n in batch["cls"].tolist()))
assert audit("audit").is_exact
"""


@pytest.mark.slow
def test_an_installed_wheel_works_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    install = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "-qq", "--no-deps"]
    subprocess.run([*install, "--no-index", wheel], check=True)
    # What penstock depends on is that of the interpreter that runs this test, whose own penstock is not visible there.
    found = subprocess.run(
        [home / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    Path(found.stdout.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PENSTOCK_CACHE"] = str(tmp_path / "cache")

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(home / "bin" / "python", "-c", READ).strip() == str(list(range(20)))
    assert "penstock COMMAND" in run(home / "bin" / "penstock", "--help")
    assert "20" in run(home / "bin" / "penstock", "inspect", "shards")


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def import_penstock() -> None:
    from penstock import DistributedDataLoader, open_store

    assert DistributedDataLoader.__module__ == "penstock.loader.data_loader"
    assert open_store.__module__ == "penstock.storage.resolve"


@pytest.mark.slow
def test_a_spawned_process_can_import_penstock() -> None:
    process = multiprocessing.get_context("spawn").Process(target=import_penstock)
    process.start()
    process.join(120)
    assert process.exitcode == 0
