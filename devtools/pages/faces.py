"""Public names, found in the source without importing it: the site is built where no torch is installed."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The order is that of a name's home: what `penstock` exports, a room does first.
FACES = ("penstock.loader", "penstock.loader.integrations", "penstock.storage", "penstock.trainer")
_EXPORT = re.compile(r"^from (\.[\w.]*) import (\w+) as \2$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class PublicName:
    """A name that a face exports. ``node`` is its definition in ``path``, None for a folder that is a face itself."""

    face: str
    name: str
    path: Path
    node: ast.ClassDef | ast.FunctionDef | ast.Assign | None
    docstring: str

    @property
    def dotted(self) -> str:
        return f"{self.face}.{self.name}"

    @property
    def home(self) -> str:
        """The dotted name where it is defined: a module and what it defines may have one name below their folder."""
        module = self.path.relative_to(ROOT).with_suffix("").parts
        module = module[:-1] if module[-1] == "__init__" else module
        return ".".join(("penstock", *module, *(() if self.node is None else (self.name,))))


def public_names() -> dict[str, PublicName]:
    """All names of the rooms' faces, by name; a name is of one face."""
    found: dict[str, PublicName] = {}
    for face in FACES:
        folder = ROOT.joinpath(*face.split(".")[1:])
        for module, name in _EXPORT.findall((folder / "__init__.pyi").read_text()):
            if name in found:
                raise ValueError(f"{face} and {found[name].face} both export {name}: a heading can name only one")
            found[name] = _define(face, name, folder, module)
    return found


def exported_by_package() -> set[str]:
    """The names that ``penstock`` itself exports."""
    stub = (ROOT / "__init__.pyi").read_text()
    return {name for _, name in _EXPORT.findall(stub)} | set(re.findall(r"^(\w+): ", stub, re.MULTILINE))


def undocumented(names: dict[str, PublicName]) -> list[str]:
    """The names without a docstring, dotted: the reference would have nothing to say about them."""
    return [name.dotted for name in names.values() if not name.docstring]


def _define(face: str, name: str, folder: Path, module: str) -> PublicName:
    path = _module_file(folder, f"{module}{'' if module.endswith('.') else '.'}{name}")
    if path is not None:  # a folder or file that is exported as it is
        return PublicName(
            face=face, name=name, path=path, node=None, docstring=ast.get_docstring(ast.parse(path.read_text())) or ""
        )
    path = _module_file(folder, module)
    while path is not None:
        body = ast.parse(path.read_text()).body
        for place, node in enumerate(body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return PublicName(face=face, name=name, path=path, node=node, docstring=ast.get_docstring(node) or "")
            if isinstance(node, ast.Assign) and [getattr(to, "id", None) for to in node.targets] == [name]:
                text = _string_below(body[place + 1] if place + 1 < len(body) else None)
                return PublicName(face=face, name=name, path=path, node=node, docstring=text)
        path = _next_home(path, name)
    raise ValueError(f"{face}.{name} is exported from {module!r}, which does not define it")


def _module_file(folder: Path, dotted: str) -> Path | None:
    """The file of a module that is named relative to the package in ``folder``; None if there is none."""
    levels = len(dotted) - len(dotted.lstrip("."))
    for _ in range(levels - 1):
        folder = folder.parent
    target = folder.joinpath(*[part for part in dotted.split(".") if part])
    files = (target.with_name(target.name + ".py"), target / "__init__.py")
    return next((file for file in files if file.exists() and target != folder), None)


def _next_home(path: Path, name: str) -> Path | None:
    """Follow a name that a module only hands on, by an import or by a stub beside it."""
    stub = path.with_suffix(".pyi")
    for text in (path.read_text(), stub.read_text() if stub.exists() else ""):
        for module, handed in re.findall(r"from (\.[\w.]*) import (\w+)", text):
            if handed == name:
                return _module_file(path.parent, module)
    return None


def _string_below(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""
