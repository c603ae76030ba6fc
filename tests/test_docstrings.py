"""Docstrings begin with a verb or a noun phrase; names are the field's, and booleans read as statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("storage", "loader", "tools", "trainer", "benchmarks", "cli", "devtools")

# Properties that users have.
PUBLIC = {"ok", "are_shared"}
# First words that turn a docstring into half a question, whose answer the reader has to put in front.
QUESTIONS = {"What", "Which", "Where", "Whether", "Who", "Whom", "Whose", "How", "When", "Why", "That", "If"}

# Groups of options: ``--help`` prints their docstrings as headings, where "Where checkpoints go, ..." reads well.
PRINTED_BY_HELP = {
    "ActivationConfig",
    "CheckpointConfig",
    "CompileConfig",
    "CompressionConfig",
    "EmaConfig",
    "EvaluateConfig",
    "ParallelConfig",
    "ProfileConfig",
    "ReportConfig",
    "ScheduleConfig",
    "SpikeConfig",
    "StepConfig",
    "TrainerConfig",
    "WarmStartConfig",
}

# Names that say only that somebody said something.
BANNED_NAMES = {"told"}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def files_of(root: Path) -> list[Path]:
    return [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]


def statements_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk through a tree, but not into expressions, most of its nodes."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.expr | ast.arguments):
            yield from statements_of(child)


def find_questions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in statements_of(tree):
        if not isinstance(node, Documented) or getattr(node, "name", "") in PRINTED_BY_HELP:
            continue
        words = (ast.get_docstring(node) or "").split()
        if words and words[0].strip("`,.:;") in QUESTIONS:
            yield node.body[0].lineno, f"the docstring begins with {words[0]!r}: begin with a verb or a noun phrase"


def find_banned_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str) and BANNED_NAMES & set(name.lower().split("_")):
                yield getattr(node, "lineno", 0), f"the name {name!r}: say what it holds"


def find_unclear_properties(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find properties that return a bool and are no statement: ``is_open``, ``has_rows``, ``uses_all`` are."""
    for node in statements_of(tree):
        if not isinstance(node, ast.FunctionDef) or not isinstance(node.returns, ast.Name) or node.returns.id != "bool":
            continue
        first = node.name.strip("_").partition("_")[0]
        is_property = any(getattr(one, "id", "") in {"property", "cached_property"} for one in node.decorator_list)
        if is_property and first not in {"can", "may"} and node.name not in PUBLIC and not first.endswith("s"):
            yield node.lineno, f"the property {node.name!r} is a bool: is_{node.name}, has_{node.name}, or a verb in -s"


def find_flaws(text: str) -> list[str]:
    tree = ast.parse(text)
    found = set(find_questions(tree))
    if any(name in text for name in BANNED_NAMES):
        found |= set(find_banned_names(tree))
    if "property" in text and "-> bool" in text:
        found |= set(find_unclear_properties(tree))
    return [f"{line}: {flaw}" for line, flaw in sorted(found)]


def test_docstrings_and_names_say_what_things_are() -> None:
    files = files_of(ROOT)
    assert len(files) > 300  # the tree was read
    found = [f"{path.relative_to(ROOT)}:{flaw}" for path in files for flaw in find_flaws(path.read_text())]
    assert found == []


def test_only_what_is_there_is_exempt() -> None:
    classes = {name for path in files_of(ROOT) for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
    assert classes >= PRINTED_BY_HELP


@pytest.mark.parametrize(
    "text",
    [
        '"""What a store does."""',
        'class A:\n    """How to train."""',
        'async def f():\n    """\n    Whether it fits.\n    """',
        'class A:\n    @property\n    def f(self):\n        """Where, exactly, it lies."""',
        "told = 1",
        "def f(told): pass",
        "self._told_of_none = True",
        "from x import y as told",
        "class A:\n    @property\n    def open(self) -> bool: ...",
    ],
)
def test_a_flaw_is_found_wherever_it_stands(text: str) -> None:
    assert len(find_flaws(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""Whatever follows."""',
        '"""Return whether it fits."""',
        "retold = teller = 1",
        "@property\ndef is_open(self) -> bool: ...",
    ],
)
def test_good_ones_pass(text: str) -> None:
    assert find_flaws(text) == []
