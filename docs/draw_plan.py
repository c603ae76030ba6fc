"""Draws docs/plan.svg from a real plan: shards, the epoch's stream, lanes, global batches, ranks.

Run: python docs/draw_plan.py (needs matplotlib, in the extra `bench`).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from penstock.loader.order.plan import EpochPlan, Order, batch_bounds, lane_offsets, rank_segments

SHARD_CHUNKS = [[12, 12, 6], [12, 12], [9], [12, 12, 12, 5], [12, 4], [12, 12, 12]]
LANES, WORLD_SIZE, GLOBAL_BATCH, STEPS = 8, 2, 20, 3
COLOURS = ["#4878cf", "#ee854a", "#6acc64", "#d65f5f", "#956cb4", "#8c613c"]
STEP_COLOURS = ["#111111", "#777777", "#bbbbbb"]


def main() -> None:
    sizes = np.array([size for chunks in SHARD_CHUNKS for size in chunks], np.int64)
    shard_of = np.repeat(np.arange(len(SHARD_CHUNKS)), [len(chunks) for chunks in SHARD_CHUNKS])
    plan = EpochPlan(sizes, Order(seed=3, lanes=LANES, window=2), 0)
    mpl.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "svg.hashsalt": "penstock"})
    figure, axes = plt.subplots(3, 1, figsize=(8.6, 6.0), height_ratios=[1, 1, 5.2], layout="constrained")
    draw_strip(axes[0], sizes, shard_of, "The data set: shards of uneven size, a colour each, cut into chunks")
    chunks = plan.pieces.chunks
    title = f"The epoch's stream: its chunks in a seeded order, cut (black) into {LANES} lanes of equal length"
    draw_strip(axes[1], sizes[chunks], shard_of[chunks], title)
    for cut in plan.lane_starts[1:-1]:
        axes[1].axvline(cut, color="black", lw=1.1, ymin=-0.05, ymax=1.05, clip_on=False)
    draw_lanes(axes[2], plan, shard_of)
    figure.savefig(Path(__file__).with_name("plan.svg"), metadata={"Date": None})


def draw_strip(axis: plt.Axes, sizes: np.ndarray, shards: np.ndarray, title: str) -> None:
    start = 0
    for size, shard in zip(sizes, shards, strict=True):
        axis.add_patch(Rectangle((start, 0), size, 1, fc=COLOURS[shard], ec="white", lw=1.2))
        start += size
    axis.set(xlim=(0, start), ylim=(0, 1))
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.axis("off")


def draw_lanes(axis: plt.Axes, plan: EpochPlan, shard_of: np.ndarray) -> None:
    for lane in range(LANES):
        offset, stop = 0, int(plan.lane_starts[lane + 1] - plan.lane_starts[lane])
        while offset < stop:
            window = plan.open_window(lane, plan.window_at(lane, offset))
            pieces, _ = window.locate(np.arange(window.start, window.stop))
            for at, piece in enumerate(pieces, start=window.start):
                colour = COLOURS[shard_of[window.chunks[piece]]]
                axis.add_patch(Rectangle((at + 0.04, lane + 0.1), 0.92, 0.8, fc=colour, ec="none"))
            axis.plot([window.stop] * 2, [lane, lane + 1], color="black", lw=0.8, ls=":")
            offset = window.stop
    bounds = batch_bounds(0, STEPS, GLOBAL_BATCH, plan.num_samples)
    edges = lane_offsets(bounds, plan.turns)
    for step in range(STEPS):
        for lane in range(LANES):
            start, stop = edges[step, lane], edges[step + 1, lane]
            box = Rectangle(
                (start + 0.06, lane + 0.1), stop - start - 0.12, 0.8, fc="none", ec=STEP_COLOURS[step], lw=2
            )
            axis.add_patch(box)
    for rank in range(WORLD_SIZE):
        own = np.unique(rank_segments(bounds, plan.turns, rank, WORLD_SIZE).lane)
        middle = (own.min() + own.max() + 1) / 2
        axis.text(-0.6, middle, f"rank {rank}", rotation=90, ha="right", va="center", fontweight="bold")
    axis.axhline(LANES / 2, color="black", lw=1.5)
    longest = int(np.diff(plan.lane_starts).max())
    axis.set(xlim=(0, longest), ylim=(LANES, 0), yticks=np.arange(LANES) + 0.5, yticklabels=range(LANES))
    axis.set_xticks(np.arange(0, longest, 5) + 0.5, [str(tick) for tick in range(0, longest, 5)])
    axis.set(xlabel="offset in the lane", ylabel="lane\n\n")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title(
        "The lanes' samples, mixed in windows of a few chunks (to a dotted line).\n"
        f"Boxes: the first {STEPS} global batches of {GLOBAL_BATCH} samples (black, grey, light), shared by "
        f"{WORLD_SIZE} ranks",
        loc="left",
        fontsize=9,
        fontweight="bold",
    )


if __name__ == "__main__":
    main()
