"""Draws docs/mixing.png: where in a data set the samples of an epoch's first half come from, for typical settings.

Run: python docs/draw_mixing.py (needs matplotlib, in the extra `bench`).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from penstock.loader.order.forecast import batch_ids, measure_mixing
from penstock.loader.order.plan import EpochPlan, Order

SAMPLES, BATCH, SHOWN = 4000, 64, 30
PANELS = [
    ("one chunk, whole (piece=0)", 1, Order(lanes=16, window=4)),
    ('one chunk, by rows ("auto")', 1, Order(lanes=16, window=4096, piece=1)),
    ("40 chunks, whole (piece=0)", 40, Order(lanes=16, window=4)),
    ("400 chunks, whole", 400, Order(lanes=16, window=4)),
    ("400 chunks, 4 lanes, window=1", 400, Order(lanes=4, window=1)),
    ("no shuffle", 40, Order(lanes=16, window=4, shuffle=False)),
]


def main() -> None:
    mpl.rcParams.update({"font.size": 8, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(2, 3, figsize=(8.6, 5.0), sharex=True, sharey=True, layout="constrained")
    for axis, (title, chunks, order) in zip(axes.flat, PANELS, strict=True):
        plan = EpochPlan(np.full(chunks, SAMPLES // chunks, np.int64), order, 0)
        first_ids = np.cumsum(plan.chunk_samples) - plan.chunk_samples
        for step in range(SHOWN):
            ids = np.sort(batch_ids(plan, first_ids, step * BATCH, BATCH))
            axis.plot(np.full(BATCH, step), ids, color="#4878cf" if step % 2 else "#1f3a68", ls="", marker="_", ms=5)
        mixing = measure_mixing(plan, BATCH)
        assert mixing is not None
        axis.set_title(title, loc="left", fontweight="bold", fontsize=8)
        verdict = f": {mixing.verdict}" if order.shuffle else ""
        axis.text(
            0.0,
            -0.02,
            f"classes × {mixing.classes:.1f}, neighbours × {mixing.neighbours:.1f}{verdict}",
            transform=axis.transAxes,
            va="top",
        )
        axis.set(ylim=(0, SAMPLES), xticks=[])
    figure.supxlabel("global batches of 64, one column each")
    figure.supylabel("sample id")
    figure.savefig(Path(__file__).with_name("mixing.png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
