"""Draws docs/scale.png and writes docs/scale.json: simulated jobs of 8 to 4,096 ranks over data of three sizes.

Run: python docs/draw_scale.py (needs matplotlib, in the extra `bench`; takes about two minutes). With --redraw it draws
what docs/scale.json holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from penstock.loader.order.plan import Order, auto_lanes, auto_window
from penstock.tools.simulation.chunk_stream import UniformChunks
from penstock.tools.simulation.settings import Machines
from penstock.tools.simulation.simulate import simulate

SAMPLES, BATCH, CHUNK_BYTES = 10**9, 32, 4 << 20
RANKS = (8, 24, 64, 200, 512, 1000, 2048, 4096)
# What a sample takes; so the data sets are of 10 TB, 100 TB and 1 PB.
SIZES = {"10 TB": 10**4, "100 TB": 10**5, "1 PB": 10**6}
MACHINES = Machines(store_requests_per_s=55_000, node_bytes_per_s=10e9)
COLOURS = {"10 TB": "#7fb069", "100 TB": "#4878cf", "1 PB": "#c44e52"}
PANELS = (
    ("data wait, share of a rank's time", "data_wait", 100, "%"),
    ("time that the job loses to data", "lost_to_data", 100, "%"),
    ("requests/s that steps need", "requests_per_s", 1, ""),
    ("read amplification", "read_amplification", 1, ""),
    ("memory of a rank, at most", "rank_bytes", 2**-20, " MiB"),
    ("first batch", "first_batch_s", 1, " s"),
)


def simulate_one(ranks: int, sample_bytes: int) -> dict[str, Any]:
    total = SAMPLES * sample_bytes
    lanes = auto_lanes(shuffle=True, world_size=ranks)
    order = Order(lanes=lanes, window=auto_window(lanes=lanes, mean_chunk_bytes=CHUNK_BYTES))
    stream = UniformChunks(SAMPLES, total // CHUNK_BYTES, total)
    return simulate(stream, order, MACHINES, world_size=ranks, global_batch_size=BATCH * ranks).to_dict()


def main() -> None:
    path = Path(__file__).with_name("scale.json")
    if sys.argv[1:] == ["--redraw"]:
        draw(json.loads(path.read_text()))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for name, size in SIZES.items():
        found[name] = [simulate_one(ranks, size) for ranks in RANKS]
        print(name, *(f"{row['world_size']}: {row['data_wait']:.1%}" for row in found[name]), flush=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    draw(found)


def draw(found: dict[str, list[dict[str, Any]]]) -> None:
    mpl.rcParams.update({"font.size": 8, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(2, 3, figsize=(8.6, 5.1), sharex=True, layout="constrained")
    for axis, (title, field, scale, unit) in zip(axes.flat, PANELS, strict=True):
        for name, rows in found.items():
            axis.plot(RANKS, [row[field] * scale for row in rows], marker="o", ms=3, color=COLOURS[name], label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4,096"])
        axis.minorticks_off()
        if field == "requests_per_s":
            axis.axhline(MACHINES.store_requests_per_s, color="#888888", lw=0.8, ls="--")
            axis.text(8, MACHINES.store_requests_per_s * 1.15, "the store takes", color="#666666")
            axis.set_yscale("log")
            axis.set_ylim(top=3 * MACHINES.store_requests_per_s)
        elif field == "read_amplification":
            axis.set_ylim(0.95, 1.3)
        else:
            axis.set_ylim(0, max(1.0, 1.08 * max(row[field] * scale for rows in found.values() for row in rows)))
        axis.yaxis.set_major_formatter(lambda value, _, unit=unit: f"{value:,.6g}{unit}")
        axis.set_title(title, loc="left", fontweight="bold", fontsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(title="1e9 samples of", frameon=False, loc="upper left")
    figure.suptitle("Simulated jobs, none of which was run: an epoch over 1e9 samples", fontsize=9, fontweight="bold")
    figure.supxlabel("ranks")
    figure.savefig(Path(__file__).with_name("scale.png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
