"""Arrows between rooms go storage <- loader <- tools and storage <- trainer, <- benchmarks, cli; none in a circle."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("storage", "loader", "tools", "trainer", "benchmarks", "cli")

ALLOWED = {
    "storage": {"storage"},
    "loader": {"loader", "storage"},
    "tools": {"tools", "loader", "storage"},
    "trainer": {"trainer", "storage"},
    "benchmarks": {"benchmarks", "tools", "trainer", "loader", "storage", ""},
    "cli": {"cli", "benchmarks", "tools", "trainer", "loader", "storage", ""},
}
# The trainer takes any iterable of batches; recipes name what makes it. The loader's face hands on names of the tools,
# and imports them when they are used.
ALSO_ALLOWED = {"penstock.loader.tools": {"tools"}}

# The floors of a room, from the ground up: a folder or file imports from floors below its own, and from its own folder.
FLOORS = {
    "storage": (
        {"errors", "process", "sizes", "store", "store_link", "suggestions", "threads"},
        {"aws_profile", "checks", "hashing", "memory", "ranges", "ray_cluster", "urls"},
        {"files"},
        {"memory_store", "own_folder"},
        {"retrying"},
        {"options"},
        {"caching", "clients", "encryption"},
        {"observability"},
        {"resolve"},
    ),
    "loader": (
        {"counters", "errors", "progress"},
        {"metrics"},
        {"arrow_arrays", "limits", "order"},
        {"columns"},
        {"formats"},
        {"dataset"},
        {"ranks", "reading"},
        {"decoding"},
        {"packing"},
        {"pipeline"},
        {"config"},
        {"sources"},
        {"sampler"},
        {"assembly"},
        {"streams"},
        {"run"},
        {"serving", "views"},
        {"data_loader"},
        {"integrations", "tools"},
    ),
    "tools": (
        {"batch_types", "delivery_records", "doctor", "members", "packing", "simulation"},
        {"coverage", "verify_chunks"},
        {"attempts", "mixed_audit"},
        {"audit", "inspect", "pack", "verify"},
        {"index_costs", "recheck", "state_file"},
    ),
    "trainer": (
        {"computing", "errors", "stopwatch"},
        {"options", "ranks", "reproducibility"},
        {"imports"},
        {"compression", "parallel", "watch"},
        {"checkpoint", "data"},
        {"server"},
        {"diloco", "evaluation", "steps"},
        {"report", "weights"},
        {"config"},
        {"recipes", "run"},
        {"parts"},
        {"asynchronous"},
        {"trainer"},
        {"on_ray"},
        {"__main__"},
    ),
}


@dataclass(frozen=True)
class Import:
    """``module`` imports ``target``, or from it, at ``line``, wherever that stands; ``for_types``: not when it runs."""

    module: str
    target: str
    line: int
    for_types: bool = False


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("penstock", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def modules_of(root: Path) -> dict[str, Path]:
    """The file of every module of the rooms by its full name."""
    return {module_name(path, root): path for room in ROOMS for path in sorted((root / room).rglob("*.py"))}


def packages_of(root: Path) -> set[str]:
    return {module_name(path, root) for room in ROOMS for path in (root / room).rglob("__init__.py")} | {"penstock"}


def names_type_checking(test: ast.expr) -> bool:
    return any("TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in ast.walk(test))


def find_imports(module: str, tree: ast.Module, modules: set[str], packages: set[str]) -> Iterator[Import]:
    """The imports of a module, wherever they stand; of ``from x import y``, x.y where that is a module."""
    package = module if module in packages else module.rpartition(".")[0]

    def visit(node: ast.AST, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(module, name.name, node.lineno, for_types)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*above, *([base] if base else [])))
            for name in node.names:
                full = f"{base}.{name.name}"
                yield Import(module, full if full in modules | packages else base, node.lineno, for_types)
        elif isinstance(node, ast.If) and names_type_checking(node.test):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, for_types)
        elif not isinstance(node, ast.expr):  # which hold no imports
            for child in ast.iter_child_nodes(node):
                yield from visit(child, for_types)

    yield from visit(tree, False)


def room_of(module: str) -> str | None:
    """The room of a module of ours ('' for the face), None for anybody else's."""
    top, _, rest = module.partition(".")
    if top != "penstock":
        return None
    room = rest.partition(".")[0]
    return room if room in ROOMS else ""


def find_wrong_arrows(imports: list[Import]) -> list[str]:
    wrong = []
    for found in imports:
        source, target = room_of(found.module), room_of(found.target)
        if source is None or target is None:
            continue
        if target not in ALLOWED[source] | ALSO_ALLOWED.get(found.module, set()):
            wrong.append(f"{found.module}:{found.line} imports {found.target}")
    return wrong


def floor_of(module: str) -> tuple[str, str, int] | None:
    """The room of a module, its folder or file there, and that one's floor; None where there are no floors."""
    parts = module.split(".")
    if len(parts) < 3 or parts[1] not in FLOORS:
        return None
    numbers = [number for number, names in enumerate(FLOORS[parts[1]]) if parts[2] in names]
    return parts[1], parts[2], numbers[0] if numbers else -1


def find_wrong_floors(imports: list[Import]) -> list[str]:
    """Imports inside a room that go up or across, and what has no floor."""
    wrong = []
    for found in imports:
        source, target = floor_of(found.module), floor_of(found.target)
        if source is None:
            continue
        if source[2] < 0:
            wrong.append(f"{source[0]}/{source[1]} has no floor")
        elif target is not None and source[0] == target[0] and source[1] != target[1] and target[2] >= source[2]:
            wrong.append(f"{found.module}:{found.line} imports {found.target}")
    return wrong


def find_cycle(imports: list[Import]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for found in imports:
        if found.target != found.module:
            graph.setdefault(found.module, set()).add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return list(exc.args[1])
    return []


def all_imports(root: Path) -> list[Import]:
    files, packages = modules_of(root), packages_of(root)
    modules, found = set(files), list[Import]()
    for name, path in files.items():  # one tree at a time: many keep the garbage collector busy
        found += find_imports(name, ast.parse(path.read_text(), str(path)), modules, packages)
    return found


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    found = all_imports(ROOT)
    assert len({one.module for one in found}) > 40  # the tree was read
    return found


def test_arrows_between_rooms_go_one_way(imports: list[Import]) -> None:
    assert find_wrong_arrows(imports) == []


def test_folders_of_a_room_import_only_what_lies_below_them(imports: list[Import]) -> None:
    assert find_wrong_floors(imports) == []


def test_order_and_simulation_are_arithmetic_alone(imports: list[Import]) -> None:
    allowed = {"numpy", "penstock.loader.errors", *sys.stdlib_module_names}
    outside = [
        one
        for one in imports
        if one.module.startswith(("penstock.loader.order", "penstock.tools.simulation"))
        and not one.target.startswith(("penstock.loader.order", "penstock.tools.simulation"))
        and one.target not in allowed
        and one.target.partition(".")[0] not in allowed
    ]
    assert outside == []


def test_no_module_is_imported_in_a_cycle(imports: list[Import]) -> None:
    assert find_cycle(imports) == []


def test_storage_does_without_torch(imports: list[Import]) -> None:
    with_torch = [
        one
        for one in imports
        if room_of(one.module) == "storage" and one.target.partition(".")[0] == "torch" and not one.for_types
    ]
    assert with_torch == []


def test_no_lock_can_be_left_taken_by_an_interrupt() -> None:
    of_threading = r"threading\.(Condition|Event|Thread|Timer|Barrier|(Bounded)?Semaphore)"
    makes = re.compile(
        rf"\b({of_threading}|queue\.Queue|ThreadPoolExecutor)\((?!self\._lock\))|[= ]futures\.Future\(\)"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: use storage/threads/interruptible.py, daemon_pool.py, or queue.SimpleQueue"
        for room in ("storage", "loader", "trainer")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.name != "interruptible.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if makes.search(line)
    ]
    assert found == []


def test_rooms_are_imported_as_parts_of_penstock(imports: list[Import]) -> None:
    assert [one for one in imports if one.target.partition(".")[0] in ROOMS] == []


FOLDERS: Mapping[str, str] = {
    "storage/__init__.py": "",
    "storage/store.py": "",
    "loader/__init__.py": "from .plan import x",
    "loader/plan.py": "from ..storage import store",
    "trainer/__init__.py": "",
    "trainer/__main__.py": "from ..storage import store",
    "benchmarks/__init__.py": "from ..trainer import x\nfrom .. import x",
    "cli/__init__.py": "import penstock.loader.plan",
}


def write_tree(root: Path, changes: Mapping[str, str] = FOLDERS) -> list[Import]:
    for name, text in {**FOLDERS, **changes}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return all_imports(root)


def test_a_tree_in_order_passes(tmp_path: Path) -> None:
    imports = write_tree(tmp_path)
    assert len(imports) == 6
    assert find_wrong_arrows(imports) == []
    assert find_cycle(imports) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("storage/store.py", "from ..loader import plan"),
        ("storage/store.py", "import penstock.loader.plan"),
        ("storage/store.py", "def f():\n    from ..loader.plan import x"),
        ("storage/store.py", "from .. import loader"),
        ("loader/plan.py", "from ..trainer import x"),
        ("loader/plan.py", "try:\n    from penstock import x\nexcept ImportError:\n    pass"),
        ("trainer/step.py", "from ..loader.plan import x"),
        ("trainer/__main__.py", "from ..loader.plan import x"),
        ("trainer/step.py", "from ..benchmarks import x"),
        ("benchmarks/run.py", "from ..cli import x"),
    ],
)
def test_a_wrong_arrow_is_found_wherever_it_stands(tmp_path: Path, module: str, text: str) -> None:
    assert len(find_wrong_arrows(write_tree(tmp_path, {module: text}))) == 1


def test_an_import_from_a_floor_above_is_found(tmp_path: Path) -> None:
    up = write_tree(
        tmp_path, {"loader/order/spans.py": "from ..reading.records import x", "loader/order/__init__.py": ""}
    )
    assert [text.partition(":")[0] for text in find_wrong_floors(up) if "no floor" not in text] == [
        "penstock.loader.order.spans"
    ]
    homeless = write_tree(tmp_path, {"loader/attic.py": "import os"})
    assert "loader/attic has no floor" in find_wrong_floors(homeless)


def test_a_cycle_is_found_in_functions_and_for_types_too(tmp_path: Path) -> None:
    back = "from .read import y"
    typed = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {back}"
    late = f"def f():\n    {back}"
    for text in (back, typed, late):
        assert find_cycle(write_tree(tmp_path, {"loader/read.py": "from .plan import x", "loader/plan.py": text}))
