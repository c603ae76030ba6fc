"""Draws docs/packing.svg: documents of one unit of a lane, and the sequences that the two methods of packing make.

Run: python docs/draw_packing.py (needs matplotlib, in the extra `bench`).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from penstock.loader.packing.config import Packing, PackingMethod
from penstock.loader.packing.packed import Documents, Packed, pack_documents

LENGTHS = [9, 21, 5, 14, 31, 7, 3, 12, 18, 6, 4]
SEQ_LEN = 24
COLOURS = ["#4878cf", "#ee854a", "#6acc64", "#d65f5f", "#956cb4", "#8c613c", "#dc7ec0", "#d5bb67", "#82c6e2"]
PADDING = "#e4e4e4"


def main() -> None:
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    documents = Documents(np.repeat(np.arange(len(LENGTHS)), LENGTHS), offsets)
    mpl.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "svg.hashsalt": "penstock"})
    figure = plt.figure(figsize=(8.6, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 4.2])
    draw_documents(figure.add_subplot(grid[0, :]))
    for column, (method, title) in enumerate(
        (
            ("best_fit", 'method="best_fit": only what is too long is cut'),
            ("concat", 'method="concat": cut every seq_len'),
        )
    ):
        draw_sequences(figure.add_subplot(grid[1, column]), pack(documents, method), title)
    figure.savefig(Path(__file__).with_name("packing.svg"), metadata={"Date": None})


def pack(documents: Documents, method: PackingMethod) -> Packed:
    return pack_documents(documents, Packing(seq_len=SEQ_LEN, method=method, pad=len(LENGTHS)))


def draw_documents(axis: plt.Axes) -> None:
    start = 0
    for number, length in enumerate(LENGTHS):
        draw_piece(axis, start, 0, length, number)
        start += length + 1
    axis.set(xlim=(0, start), ylim=(-0.1, 1.1))
    axis.set_title(
        "A unit of a lane: documents in the epoch's order (4 is longer than seq_len)", loc="left", fontsize=9
    )
    axis.axis("off")


def draw_sequences(axis: plt.Axes, packed: Packed, title: str) -> None:
    rows = packed.fields["tokens"]
    for row, tokens in enumerate(rows):
        begins = np.flatnonzero(packed.fields["position_ids"][row] == 0)
        for low, high in zip(begins, [*begins[1:], SEQ_LEN], strict=True):
            draw_piece(axis, int(low), len(rows) - 1 - row, int(high - low), int(tokens[low]))
    axis.set(xlim=(-0.2, SEQ_LEN + 0.2), ylim=(-1.1, len(rows) + 0.1))
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.annotate("", (0, -0.35), (SEQ_LEN, -0.35), arrowprops={"arrowstyle": "<->", "lw": 0.8})
    axis.text(SEQ_LEN / 2, -0.95, f"seq_len = {SEQ_LEN}", ha="center", fontsize=8)
    axis.axis("off")


def draw_piece(axis: plt.Axes, start: int, row: int, length: int, number: int) -> None:
    is_padding = number == len(LENGTHS)
    colour = PADDING if is_padding else COLOURS[number % len(COLOURS)]
    axis.add_patch(Rectangle((start + 0.06, row + 0.1), length - 0.12, 0.8, fc=colour, ec="none"))
    label = ("padding" if length > 5 else "") if is_padding else str(number)
    axis.text(start + length / 2, row + 0.48, label, ha="center", va="center", fontsize=8)


if __name__ == "__main__":
    main()
