"""Draws docs/mesh.svg from a real mesh: which ranks share samples, and which hold the same weights.

Run: python docs/draw_mesh.py (needs matplotlib, in the extra `bench`).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from penstock.trainer.ranks.mesh import MeshSizes

SIZES = MeshSizes(pp=2, dp=2, tp=2)
DATA = ["#4878cf", "#ee854a"]
WEIGHTS = [["#d8ecd0", "#8fc97f"], ["#e3d8ee", "#a98bc4"]]


def main() -> None:
    mpl.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "svg.hashsalt": "penstock"})
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
    draw(axes[0], "Samples: a replica's ranks see the same batch", by_data=True)
    draw(axes[1], "Weights: each stage's layers, cut in two", by_data=False)
    figure.savefig(Path(__file__).with_name("mesh.svg"), metadata={"Date": None})


def draw(axis: plt.Axes, title: str, *, by_data: bool) -> None:
    """The ranks as cells: replicas (dp) from top to bottom, stages (pp) and cuts (tp) from left to right."""
    for rank in range(SIZES.world_size):
        place = SIZES.place(rank)
        x, y = place["pp"] * (SIZES.tp + 0.35) + place["tp"], place["dp"] * 1.25
        colour = DATA[place["dp"]] if by_data else WEIGHTS[place["pp"]][place["tp"]]
        axis.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, fc=colour, ec="none"))
        share = f"samples {place['dp']}" if by_data else f"stage {place['pp']}, part {place['tp']}"
        ink = "white" if by_data else "black"
        axis.text(x + 0.5, y + 0.4, f"rank {rank}", ha="center", va="center", color=ink, fontweight="bold")
        axis.text(x + 0.5, y + 0.68, share, ha="center", va="center", color=ink, fontsize=8)
    for stage in range(SIZES.pp):
        middle = stage * (SIZES.tp + 0.35) + SIZES.tp / 2
        axis.text(middle, -0.12, f"pp {stage}", ha="center", va="bottom")
        for cut in range(SIZES.tp):
            axis.text(middle - SIZES.tp / 2 + cut + 0.5, 2.36, f"tp {cut}", ha="center", va="top", color="#555555")
    for replica in range(SIZES.dp):
        axis.text(-0.1, replica * 1.25 + 0.5, f"dp {replica}", ha="right", va="center", rotation=90)
    axis.set(xlim=(-0.3, SIZES.pp * (SIZES.tp + 0.35) - 0.3), ylim=(2.55, -0.4))
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.axis("off")


if __name__ == "__main__":
    main()
