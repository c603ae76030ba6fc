"""Draws docs/demo.svg: the demo's screen, as a terminal shows it.

Run: COLUMNS=92 script -qec "make demo" /dev/null | python docs/draw_demo.py
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main() -> None:
    screen = final_screen(sys.stdin.read())
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    for line in screen:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    svg = console.export_svg(title="make demo", unique_id="penstock-demo")
    # Fonts named in the picture are fetched from nowhere: a page that shows it may not load others.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    Path(__file__).with_name("demo.svg").write_text(svg)


def final_screen(output: str) -> list[str]:
    """The lines as they stand at the end: progress that was drawn over is gone."""
    lines: list[str] = [""]
    for part in re.split(r"(\r?\n|\x1b\[\d*A|\x1b\[2K|\x1b\[\?25[hl]|\r)", output):
        if part in ("\n", "\r\n"):
            lines.append("")
        elif part == "\r" or part.endswith("2K"):
            lines[-1] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part):
            for _ in range(int(part[2:-1] or 1)):
                if len(lines) > 1:
                    lines.pop()
        elif not re.fullmatch(r"\x1b\[\?25[hl]", part):
            lines[-1] += part
    return [line for i, line in enumerate(lines) if line.strip() or (i and lines[i - 1].strip())]


if __name__ == "__main__":
    main()
