"""The notebooks of the documentation run from top to bottom, and what is stored in them is what they give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from devtools.pages.notebooks import code_cells, page_of_notebook, run_notebook

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def kinds_of_outputs(notebook: dict[str, Any]) -> list[list[str]]:
    return [[output["output_type"] for output in cell["outputs"]] for _, cell, _ in code_cells(notebook)]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_gives_the_outputs_that_it_holds(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cv2", reason="install penstock[images]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    assert kinds_of_outputs(run_notebook(path)) == kinds_of_outputs(json.loads(path.read_text()))


def notebook(*sources: str) -> dict[str, Any]:
    lines = [source.splitlines(keepends=True) for source in sources]
    return {"cells": [{"cell_type": "code", "source": source, "outputs": []} for source in lines]}


def test_cells_share_names_and_the_last_expression_is_the_result(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook("x = 2\nprint('set')", "x + 1", "x = 3;")))
    first, second, third = (cell["outputs"] for _, cell, _ in code_cells(run_notebook(path)))
    assert first == [{"output_type": "stream", "name": "stdout", "text": ["set\n"]}]
    assert second[0]["data"]["text/plain"] == ["3"]
    assert third == []


def test_an_error_names_notebook_and_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook("x = 1", "1 / 0")))
    with pytest.raises(ZeroDivisionError) as caught:
        run_notebook(path)
    assert caught.value.__notes__ == ["in cell 2 of a.ipynb"]


def test_a_notebook_becomes_a_page_with_its_outputs() -> None:
    made = notebook("1 + 1")
    made["cells"][0]["outputs"] = [{"output_type": "execute_result", "data": {"text/plain": ["2"]}}]
    made["cells"].insert(0, {"cell_type": "markdown", "source": ["# Sums"]})
    assert page_of_notebook(json.dumps(made)) == "# Sums\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n"
