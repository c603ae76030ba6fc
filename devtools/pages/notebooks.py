"""Notebooks: run as a kernel would, cell by cell, in one process; stored with what they print; shown as pages.

Tests and this module run them without Jupyter. A cell is plain Python; the value of its last expression is its result.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
_LIMIT = 150_000  # bytes of a picture


def code_cells(notebook: dict[str, Any]) -> Iterator[tuple[int, Cell, str]]:
    """(number from 1, cell, source) of each cell with code."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        yield number, cell, "".join(cell["source"])


def run_notebook(path: Path) -> dict[str, Any]:
    """Run all cells in one namespace, in the current folder, and return the notebook with their outputs.

    Raises:
        Exception: whatever a cell raises, with a note that names the notebook and the cell.
    """
    notebook: dict[str, Any] = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell, source in code_cells(notebook):
        try:
            cell["outputs"] = list(_run_cell(source, f"{path.name}[{number}]", names, number))
        except Exception as exc:
            exc.add_note(f"in cell {number} of {path.name}")
            raise
        cell["execution_count"] = number
    return notebook


def _run_cell(source: str, where: str, names: dict[str, Any], number: int) -> Iterator[Cell]:
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    if printed.getvalue():
        yield {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
    if value is not None:
        yield {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": _views_of(value)}


def _views_of(value: Any) -> dict[str, Any]:
    """Show a value as Jupyter would: as text, and as HTML or a picture where it has them."""
    views: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if callable(draw := getattr(value, "_repr_html_", None)):
        views["text/html"] = draw().splitlines(keepends=True)
    if hasattr(value, "savefig"):  # a figure of matplotlib
        drawn = io.BytesIO()
        value.savefig(drawn, format="png", dpi=80, bbox_inches="tight")
        if drawn.tell() > _LIMIT:
            raise ValueError(f"the picture has {drawn.tell():,} bytes, more than {_LIMIT:,}: draw it smaller")
        views["image/png"] = base64.b64encode(drawn.getvalue()).decode()
    return views


def page_of_notebook(text: str) -> str:
    """The notebook as Markdown: its text, its code, and the outputs that are stored in it."""
    out: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            out.append(source)
            continue
        out.append(f"```python\n{source}\n```")
        out += [shown for output in cell["outputs"] if (shown := _draw(output))]
    return "\n\n".join(out) + "\n"


def _draw(output: Cell) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output["data"]
    if "image/png" in data:
        return f'<img alt="output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        return '<div class="output" markdown="0">' + "".join(data["text/html"]).replace("\n\n", "\n") + "</div>"
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"
