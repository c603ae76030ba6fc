"""The slowdown of a training loop by what feeds it: its launches of operations and its waits for batches.

python -m devtools interference --out benchmarks/results/interference.json
"""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from penstock.benchmarks.harness.config import Environments
from penstock.benchmarks.harness.plot import hide_spines, new_figure, note, require_plotting
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader.dataset.cache import cache_home
from penstock.loader.errors import ConfigError
from penstock.loader.limits import usable_cores
from penstock.storage import PenstockError

from .arguments import OptionalPath, parse_config
from .gpu.parts import ALONE, PERIOD_S, GpuConfig, Peer, measure_interference, prepare_jobs
from .gpu.show import launch_ratios, print_interference

_OURS = ("threads", "processes", "process", "device")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Times a loop of 3,000 tiny operations a step that takes some decoded images each 50 ms, fed in several ways.

    By nothing; by nothing, beside a foreign process that decodes as much; by penstock with threads, with worker
    processes, with its pipeline in a process of its own and, on a GPU, decoding there; and by each peer. All rates are
    below what a loader can do, so that what is seen is how it gets in the loop's way. Ways take turns, and ratios are
    those of a round.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """Device that the operations run on."""

    rates: tuple[int, ...] = (80, 240)
    """Images a second for each core but one: a core decodes about 700."""

    against: tuple[Peer, ...] = ("webdataset", "litdata", "spdl", "mosaicml-streaming")
    """Peers; those that are not installed are left out, and named."""

    environments: Environments = "here"
    """own: install each peer into an environment of its own, as `penstock bench --field` does."""

    rounds: int = 3
    """Measurements of each way at each rate, in turns."""

    steps: int = 100
    """Steps of a measurement, after three seconds that do not count."""

    scale: float = 0.1
    """Size of the data set: 1 is 12,000 photos."""

    data: Path = field(default_factory=lambda: cache_home() / "bench-data")
    """Folder for the generated data set, which is kept."""

    out: OptionalPath = None
    """Write the results here as JSON, and the plot beside it as PNG."""

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) < 1:
            raise ConfigError(f"--rates {' '.join(map(str, self.rates))}: must be one or more, each 1 or more")
        if min(self.rounds, self.steps) < 1:
            raise ConfigError(f"--rounds {self.rounds} --steps {self.steps}: must be 1 or more")


def main(config: Config, screen: Console) -> dict[str, Any]:
    """Measure, print a table a rate, and write JSON and a plot; return the result.

    Raises:
        PenstockError: a part could not be measured.
    """
    if config.out is not None:
        require_plotting(config.out.with_suffix(".png"))

    def say(text: str) -> None:
        screen.print(f"  {text}", style="dim", highlight=False)

    settings = GpuConfig(
        device=config.device,
        against=config.against,
        rounds=config.rounds,
        scale=config.scale,
        data=config.data,
        workers=max(1, usable_cores() - 1),
    )
    rows = [max(1, round(rate * PERIOD_S * max(1, usable_cores() - 1))) for rate in config.rates]
    prepared = prepare_jobs("images", max(rows), settings, say, config.environments)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "devtools", "interference", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
        "rates": [measure_interference(prepared, each, config.steps, settings, say) for each in rows],
    }
    for found in result["rates"]:
        print_interference(found, screen)
    if config.out is not None:
        config.out.write_text(json.dumps(result, indent=1) + "\n")
        plot_interference(result, config.out.with_suffix(".png"))
    return result


def plot_interference(result: Mapping[str, Any], path: Path) -> None:
    """Plot a panel a rate: each way's launches to those of a loop that nothing feeds, rounds as points.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    rates: Sequence[Mapping[str, Any]] = result["rates"]
    figure, (panels,) = new_figure(4.2 * len(rates), 3.4, 1, len(rates), sharex=True)
    for axes, found in zip(panels, rates, strict=True):
        ways = [way for way in found["runs"] if way != ALONE]
        labels = []
        for place, way in enumerate(ways):
            ratios = launch_ratios(found, way)
            axes.barh(place, statistics.median(ratios), color="#0b6e8a" if way in _OURS else "#b8b8b8")
            axes.scatter(ratios, [place] * len(ratios), s=10, color="black", zorder=3)
            wait_ms = statistics.median(run["wait_ms"] for run in found["runs"][way])
            labels.append(f"{way}\nwaits {wait_ms:.2f} ms")
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(ways)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("a step's launches, to those of a loop that nothing feeds", fontsize=8)
        axes.set_title(f"{found['batch_size']} images each {1e3 * found['period_s']:.0f} ms", fontsize=9, loc="left")
        hide_spines(axes)
    machine = result["machine"]
    note(figure, f"{machine['cores']} cores of {machine['cpu']}; {result['date'][:10]}")
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    console = Console()
    try:
        main(parse_config(Config), console)
    except PenstockError as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        sys.exit(2)
