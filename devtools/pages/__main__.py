"""Make the pictures and the outputs of the notebooks of the documentation; `make docs` builds the site itself.

- notebooks: run docs/notebooks, and store what their cells print
- pictures: train on two ranks, and draw `penstock top` and the report of that run
- dashboard: train on two ranks, and draw the panels of the Grafana dashboard with what Prometheus recorded
- shots FOLDER PAGE...: photograph pages of build/site, on a desktop and a phone, light and dark
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from pathlib import Path

from .faces import ROOT

NOTEBOOKS = ROOT / "docs" / "notebooks"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m devtools pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["notebooks", "pictures", "dashboard", "shots"])
    parser.add_argument("rest", nargs="*", help="of shots: where to write them, and the pages")
    given = parser.parse_args()
    if given.what == "notebooks":
        store_notebooks()
        return
    if given.what == "dashboard":
        from .dashboard import draw_dashboard

        draw_dashboard(ROOT / "docs" / "pictures")
        return
    from . import pictures

    if given.what == "pictures":
        pictures.draw_pictures(ROOT / "docs" / "pictures")
    else:
        if len(given.rest) < 2:
            parser.error("shots needs a folder and at least one page")
        pictures.take_shots(Path(given.rest[0]).resolve(), given.rest[1:])


def store_notebooks() -> None:
    """Run each notebook in an empty folder and write it with its outputs."""
    # As in the tests. Threads that spin at each of a small model's many barriers take minutes where cores are busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .notebooks import run_notebook

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            notebook = run_notebook(path)
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(text.replace(folder, "/home/me") + "\n")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
