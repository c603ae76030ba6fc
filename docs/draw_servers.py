"""Draws docs/servers.svg from a real placement: who talks to whom in a run on a parameter server.

Run: python docs/draw_servers.py (needs matplotlib, in the extra `bench`).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from penstock.trainer.server.placement import BUCKETS, Placement

WORKERS = ["worker-000", "worker-001", "worker-002"]
PLACEMENT = Placement({"shard-0": 1.0, "shard-1": 1.0})
WIDTH, HEIGHT = 2.0, 0.62
INK = {"values": "#4878cf", "batches": "#ee854a"}


def main() -> None:
    mpl.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "svg.hashsalt": "penstock"})
    figure, axis = plt.subplots(figsize=(8.6, 3.4), layout="constrained")
    shards = list(PLACEMENT.weights)
    for row, name in enumerate(WORKERS):
        draw_box(axis, 3.4, row, name, "model, loader", "#d8ecd0")
        for place, _ in enumerate(shards):
            connect(axis, (3.4 + WIDTH, row), (7.2, place + 0.5), "values")
        connect(axis, (3.4, row), (WIDTH, 1.0), "batches")
    for place, name in enumerate(shards):
        held = f"{len(PLACEMENT.buckets_of(name)):,} of {BUCKETS:,} buckets"
        draw_box(axis, 7.2, place + 0.5, name, held, "#e3d8ee")
    draw_box(axis, 0.0, 1.0, "coordinator", "leases, journal", "#f4e3c4")
    axis.text(2.75, -0.72, "leases of batches,\nwhat is trained", ha="center", color=INK["batches"], fontsize=8)
    axis.text(
        6.3,
        -0.72,
        "push: gradients, batch number\npull: weights that changed",
        ha="center",
        color=INK["values"],
        fontsize=8,
    )
    axis.set(xlim=(-0.1, 9.3), ylim=(2.5, -0.9))
    axis.axis("off")
    figure.savefig(Path(__file__).with_name("servers.svg"), metadata={"Date": None})


def draw_box(axis: plt.Axes, left: float, middle: float, name: str, inside: str, colour: str) -> None:
    axis.add_patch(Rectangle((left, middle - HEIGHT / 2), WIDTH, HEIGHT, fc=colour, ec="none"))
    axis.text(left + WIDTH / 2, middle - 0.1, name, ha="center", va="center", fontweight="bold")
    axis.text(left + WIDTH / 2, middle + 0.14, inside, ha="center", va="center", fontsize=8, color="#555555")


def connect(axis: plt.Axes, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    arrow = FancyArrowPatch(
        start, end, arrowstyle="<->", mutation_scale=9, color=INK[kind], lw=1.1, shrinkA=2, shrinkB=2
    )
    axis.add_patch(arrow)


if __name__ == "__main__":
    main()
