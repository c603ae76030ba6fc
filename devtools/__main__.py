"""Run one of the tools: ``python -m devtools CASE [ARGUMENTS]``; without arguments, list them."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import sys
import textwrap
from pathlib import Path

_FOLDER = Path(__file__).parent
_PARTS = {
    "arguments",
    "equality_cases",
    "mixture_peers",
    "paced_steps",
    "simulation_rank",
    "single_pass",
    "single_start",
    "step_account",
    "worlds",
}  # of other tools
_USAGE = "usage: python -m devtools CASE [ARGUMENTS]\n\nCASE --help tells its arguments.\n"


def cases() -> dict[str, str]:
    """Each tool that is run by hand, and the first sentence about it."""
    files = {path.stem: path for path in _FOLDER.glob("[!_]*.py")}
    files |= {path.parent.name: path for path in _FOLDER.glob("*/__main__.py")}
    return {name: _first_sentence(files[name].read_text()) for name in sorted(files.keys() - _PARTS)}


def _first_sentence(text: str) -> str:
    doc = ast.get_docstring(ast.parse(text)) or ""
    paragraph = " ".join(doc.split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=\.) ", paragraph)[0].rstrip(".")


def main() -> None:
    known = cases()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in known:
        del sys.argv[1]
        runpy.run_module(f"{_FOLDER.name}.{name}", run_name="__main__", alter_sys=True)
    elif name in ("", "-h", "--help"):
        print(_listing(known))
        sys.exit(0)
    else:
        sys.exit(f"devtools has no case {name!r}\n\n{_listing(known)}")


def _listing(known: dict[str, str]) -> str:
    indent = max(map(len, known)) + 4
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    rows = [
        textwrap.fill(about, width, initial_indent=f"  {name}".ljust(indent), subsequent_indent=" " * indent)
        for name, about in known.items()
    ]
    return "\n".join([_USAGE, *rows])


if __name__ == "__main__":
    main()
