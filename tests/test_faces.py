"""The faces export what users import, and nothing else; what is written for users imports from them alone."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FACES = ("penstock", "penstock.loader", "penstock.loader.integrations", "penstock.storage", "penstock.trainer")
ROOMS = ("loader", "storage", "trainer")
# Raised and caught within a room: no user sees them.
INTERNAL = {
    "AbandonedError",
    "AvoidedError",
    "ClientConfig",
    "CodecConfig",
    "InexactError",
    "LoaderConfig",
    "NotHeldError",
    "NotJoinedError",
    "NotProvenError",
    "OddIntegerError",
    "PoolClosedError",
    "RemoteError",
    "RowError",
    "ServerConfig",
    "UntoldNullsError",
}


def stub_of(face: str) -> Path:
    return ROOT.joinpath(*face.split(".")[1:], "__init__.pyi")


def listed_names(face: str) -> dict[str, str]:
    """Each name of a face and the module that its list says it is from."""
    tree = ast.parse(stub_of(face).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {name.name: f"{face}.{node.module or ''}".rstrip(".") for node in imports for name in node.names}


def public_classes(room: str) -> Iterator[tuple[str, str]]:
    """(name, file) of the errors, warnings and configs that a room defines for others."""
    for path in sorted((ROOT / room).rglob("*.py")):
        for name in re.findall(r"^class ([A-Z]\w*(?:Error|Warning|Config))\b", path.read_text(), re.MULTILINE):
            yield name, str(path.relative_to(ROOT))


@pytest.mark.parametrize("face", FACES)
def test_every_name_of_a_face_is_what_its_home_defines(face: str) -> None:
    module = importlib.import_module(face)
    for name, home in listed_names(face).items():
        if face == "penstock.loader.integrations" and name != "TorchLoader":
            continue  # they import frameworks, which takes seconds; the frameworks' own tests use each
        found = getattr(module, name)
        if isinstance(found, ModuleType):
            assert found.__name__ == f"{face}.{name}"
        else:
            assert found is getattr(importlib.import_module(home), name)


@pytest.mark.parametrize("face", FACES)
def test_a_face_shows_its_list_and_nothing_else(face: str) -> None:
    module = importlib.import_module(face)
    assert dir(module) == sorted(listed_names(face))
    assert sorted(module.__all__) == dir(module)
    with pytest.raises(AttributeError):
        _ = module.importlib


@pytest.mark.parametrize("face", FACES)
def test_a_list_names_each_export_once_for_type_checkers_too(face: str) -> None:
    # In a stub only ``import x as x`` exports x.
    tree = ast.parse(stub_of(face).read_text())
    names = [name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert [name.name for name in names if name.asname != name.name] == []
    assert len({name.name for name in names}) == len(names)


@pytest.mark.parametrize("room", ROOMS)
def test_every_error_warning_and_config_can_be_imported_from_its_rooms_face(room: str) -> None:
    exported = listed_names(f"penstock.{room}")
    hidden = {name: file for name, file in public_classes(room) if name not in exported and name not in INTERNAL}
    assert hidden == {}


def modules_after(statement: str) -> set[str]:
    """The modules that a new interpreter has loaded after a statement."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def foreign(modules: set[str]) -> set[str]:
    """The packages among them that are neither ours nor the standard library's."""
    tops = {name.partition(".")[0] for name in modules}
    started = {name.partition(".")[0] for name in modules_after("pass")}
    return tops - started - set(sys.stdlib_module_names) - {"penstock"}


@pytest.mark.parametrize("face", FACES)
def test_importing_a_face_imports_no_library(face: str) -> None:
    assert foreign(modules_after(f"import {face}")) == {"lazy_loader"}


@pytest.mark.slow
def test_tables_are_read_without_what_takes_long_to_import() -> None:
    loaded = modules_after("import penstock.loader.data_loader, penstock.loader.formats.arrow.parquet")
    assert "pyarrow.parquet" in loaded
    assert "pyarrow.compute" not in loaded


def test_a_plain_loader_imports_what_it_uses(tmp_path: Path) -> None:
    """Every rank pays for imports: mixtures, streams, packing, workers, clouds and views come at their first use."""
    (tmp_path / "tokens.bin").write_bytes(bytes(2 * 64 * 40))
    loaded = modules_after(
        "from penstock import DistributedDataLoader, TokensFormat; "
        f"loader = DistributedDataLoader({str(tmp_path)!r}, batch_size=4, format=TokensFormat(seq_len=64)); "
        "next(iter(loader)); loader.close()"
    )
    ours = {name.removeprefix("penstock.") for name in loaded if name.startswith("penstock.")}
    assert len(ours) <= 128
    unused = (
        "streams",
        "views",
        "integrations",
        "decoding.workers",
        "packing.packer",
        "sampler.mixture",
        "order.mixture",
    )
    assert {name for name in ours if name.startswith(tuple(f"loader.{part}" for part in unused))} == set()
    assert {name for name in ours if name.startswith(("storage.caching", "storage.retrying", "tools"))} == set()
    assert not loaded & {"obstore", "fsspec", "urllib3"}


def test_a_bucket_needs_no_library_of_web_servers() -> None:
    loaded = modules_after(
        "from penstock.storage import open_store; open_store('s3://bucket', storage_options={'access_key': 'a', "
        "'secret_key': 'b', 'endpoint': 'http://127.0.0.1:9'}).close()"
    )
    assert "obstore" in loaded
    assert not loaded & {"urllib3", "html.parser"}


def test_the_order_needs_numpy_and_our_errors_alone() -> None:
    loaded = modules_after("import penstock.loader.order.plan, penstock.loader.order.state")
    assert foreign(loaded) == {"lazy_loader", "numpy"}
    ours = {name for name in loaded if name.startswith("penstock.")}
    assert {name for name in ours if not name.startswith("penstock.loader.order")} == {
        "penstock.loader",
        "penstock.loader.errors",
        "penstock.storage",
        "penstock.storage.errors",
    }


# -- what is written for users ------------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
_PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"\b(penstock(?:\.(?:loader(?:\.integrations)?|storage|trainer))?)(?:[.:](\w+))?((?:[.:]\w+)*)")


def imported_names(code: str) -> Iterator[tuple[str, str]]:
    """(module, name) of everything of ours that code imports; no name for a module as a whole."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "penstock":
            yield from ((str(node.module), name.name) for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((name.name, "") for name in node.names if name.name.partition(".")[0] == "penstock")


def is_from_a_face(module: str, name: str) -> bool:
    return module in FACES and (not name or name in listed_names(module))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_import_from_faces(path: Path) -> None:
    imports = imported_names(path.read_text())
    assert [found for found in imports if not is_from_a_face(*found)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documentation_imports_from_faces(page: Path) -> None:
    imports = [found for code in _PYTHON.findall(page.read_text()) for found in imported_names(code)]
    assert [found for found in imports if not is_from_a_face(*found)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_documentation_names_of_a_room_is_in_its_face(page: Path) -> None:
    text = _PYTHON.sub("", page.read_text())
    named = [(face, name, rest) for face, name, rest in _NAMED.findall(text) if name and face != "penstock"]
    assert [found for found in named if not (is_from_a_face(*found[:2]) and not found[2])] == []
