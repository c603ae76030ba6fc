"""Draws docs/flow.svg: the boxes from a chunk to the device, and the order below them.

Run: python docs/draw_flow.py
"""

from __future__ import annotations

from pathlib import Path

BOXES = (
    ("chunk", "bytes of a shard", "get"),
    ("block", "its columns", "open"),
    ("rows", "a step's samples", "gather"),
    ("batch", "a dict of tensors", "decode, collate"),
    ("device", "the batch on a GPU", "copy"),
)
WIDTH, GAP, LEFT, TOP, HEIGHT = 118, 58, 60, 34, 52
BLUE, ORANGE, GREY = "#4878cf", "#ee854a", "#666666"


def main() -> None:
    total = LEFT + len(BOXES) * WIDTH + (len(BOXES) - 1) * GAP + 10
    size = f'viewBox="0 0 {total} 216" width="{total}" height="216"'
    tip = 'id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, DejaVu Sans, sans-serif">',
        f'<defs><marker {tip}><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>',
        text(4, TOP + 31, "store", anchor="start"),
        arrow(LEFT - 20, TOP + 26, LEFT - 2, TOP + 26),
    ]
    for number, (name, what, step) in enumerate(BOXES):
        left = LEFT + number * (WIDTH + GAP)
        parts.append(
            f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3fb" stroke="{BLUE}"/>'
        )
        parts.append(text(left + WIDTH / 2, TOP + 22, name, weight="bold"))
        parts.append(text(left + WIDTH / 2, TOP + 40, what, size=11))
        if number:
            parts.append(arrow(left - GAP + 2, TOP + 26, left - 2, TOP + 26))
        parts.append(text(left - GAP / 2 if number else LEFT - 18, TOP - 12, step, size=11, colour=GREY))
    order = (LEFT, 146, LEFT + 3 * WIDTH + 2 * GAP)
    parts.append(
        f'<rect x="{order[0]}" y="{order[1]}" width="{order[2] - order[0]}" height="46" rx="6" fill="#fdf3ec" '
        f'stroke="{ORANGE}"/>'
    )
    middle = (order[0] + order[2]) / 2
    parts.append(text(middle, 166, "order: (epoch, position) -&gt; sample id, by arithmetic", weight="bold"))
    parts.append(text(middle, 183, "of manifest, seed, lanes and windows; the state is a few integers", size=11))
    for box, what in ((0, "which chunks, in order of first use"), (2, "which rows, for which step")):
        middle = LEFT + box * (WIDTH + GAP) + WIDTH / 2
        parts.append(arrow(middle, 144, middle, TOP + HEIGHT + 3))
        parts.append(text(middle + 8, 118, what, size=11, anchor="start", colour=GREY))
    Path(__file__).with_name("flow.svg").write_text("\n".join([*parts, "</svg>", ""]))


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    weight: str = "normal",
    anchor: str = "middle",
    colour: str = "#222",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}">'
        f"{words}</text>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{GREY}" fill="none" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    main()
