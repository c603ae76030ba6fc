"""Samples/s of four workers under each policy: all alike, one of them always slow, and each slow now and then.

Workers and two shards are threads of one process, and to compute is to sleep, so that what is measured is who waits for
whom and not the cores. Policies take turns, round by round; quoted are medians, and ratios to ``bsp`` of the same kind.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from penstock.benchmarks.harness.plot import hide_spines, new_figure, note, require_plotting
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.member import WorkerOptions
from penstock.trainer.asynchronous.setup import prepare_run
from penstock.trainer.asynchronous.worker import run_worker
from penstock.trainer.recipes.recipe import Recipe, build_recipe

from . import paced_steps
from .arguments import OptionalPath, parse_config

WORKERS = 4
POLICIES = ("bsp", "ssp(4)", "asp", "quorum(3, 0.01)")
KINDS = {
    "all alike": "no worker is slow",
    "one slow": "one of the four takes 4 times as long",
    "slow in turn": "a quarter of all steps take 4 times as long",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Samples/s with one slow worker in four, asynchronous against synchronous."""

    compute_ms: float = 40.0
    """What a step of a worker takes that is not slow."""

    seconds: float = 5.0
    """For each measurement."""

    rounds: int = 3
    """Measurements of each policy and kind, in turns."""

    out: OptionalPath = None
    """Write the results here as JSON, and the plot beside it as PNG."""


def make_recipe(folder: str, policy: str) -> Recipe:
    """A small model with a loss that sleeps."""
    name = paced_steps.__name__
    return build_recipe(
        {
            "model": {"use": f"{name}:make_model"},
            "optimizer": {"use": "torch.optim:SGD", "args": {"lr": 1e-6}},
            "loss": {"use": f"{name}:compute_loss"},
            "data": {"use": f"{name}:make_batches", "args": {"count": 100_000}},
            "trainer": {
                "epochs": 1,
                "output_dir": folder,
                "device": "cpu",
                "parallel": {"mode": "parameter_server"},
                "precision": {"dtype": "fp32"},
                "server": {"policy": policy},
            },
        }
    )


def measure(kind: str, policy: str, config: Config) -> float:
    """Samples/s of four workers, once they are at their pace."""
    pace = paced_steps.Pace(kind, config.compute_ms / 1e3)
    paced_steps.NOW.append(pace)
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(folder, policy)
        cluster = LocalCluster(prepare_run(recipe, WORKERS), shards=2, silence_s=60.0)
        options = WorkerOptions(pause_s=0.002, seeds_steps=False)
        threads = [
            threading.Thread(
                target=run_worker, args=(recipe, f"worker-{index}", cluster, options), name=f"worker-{index}"
            )
            for index in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: pace.steps >= 10 * WORKERS, cluster)
        began, before = time.perf_counter(), pace.steps
        wait_until(lambda: time.perf_counter() - began >= config.seconds, cluster)
        rate = (pace.steps - before) * paced_steps.ROWS / (time.perf_counter() - began)
        cluster.ask(lambda one, now: one.stop())
        for thread in threads:
            thread.join()
    return rate


def wait_until(is_over: Callable[[], bool], cluster: LocalCluster) -> None:
    """Wait, and have rounds close meanwhile."""
    while not is_over():
        cluster.tick()
        time.sleep(0.005)


def main(config: Config) -> None:
    if config.out is not None:
        require_plotting(config.out.with_suffix(".png"))
    torch.set_num_threads(1)
    rates: dict[str, dict[str, list[float]]] = {kind: {policy: [] for policy in POLICIES} for kind in KINDS}
    for _ in range(config.rounds):
        for kind, by_policy in rates.items():
            for policy, found in by_policy.items():
                found.append(measure(kind, policy, config))
    for kind, by_policy in rates.items():
        synchronous = statistics.median(by_policy["bsp"])
        for policy, found in by_policy.items():
            one = statistics.median(found)
            print(f"{kind:14} {policy:16} {one:8.0f} samples/s  {one / synchronous:.2f} of bsp")
    if config.out is None:
        return
    result = {
        "command": f"python -m devtools slow_worker --compute-ms {config.compute_ms:g} --seconds {config.seconds:g} "
        f"--rounds {config.rounds}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
        "workers": WORKERS,
        "rows_of_a_batch": paced_steps.ROWS,
        "compute_ms": config.compute_ms,
        "slow_factor": paced_steps.SLOW,
        "samples_per_s": rates,
    }
    config.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, config.out.with_suffix(".png"))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw a panel a kind: medians as bars, rounds as points, and a line for workers that never wait."""
    figure, (panels,) = new_figure(9.6, 3.4, 1, len(KINDS), sharey=True)
    step_s, slow = result["compute_ms"] / 1e3, result["slow_factor"]
    alone = result["rows_of_a_batch"] / step_s
    ideal = {
        "all alike": alone * 4,
        "one slow": alone * (3 + 1 / slow),
        "slow in turn": alone * 4 / (0.75 + 0.25 * slow),
    }
    for axes, (kind, words) in zip(panels, KINDS.items(), strict=True):
        by_policy = result["samples_per_s"][kind]
        medians = {policy: statistics.median(found) for policy, found in by_policy.items()}
        for place, (policy, one) in enumerate(medians.items()):
            axes.bar(place, one, color="#8a8a8a" if policy == "bsp" else "#0b6e8a", width=0.7)
            axes.plot([place] * len(by_policy[policy]), by_policy[policy], "o", color="black", ms=3, alpha=0.6)
            axes.text(place, one * 0.5, f"{one / medians['bsp']:.2f}x", ha="center", color="white", fontsize=9)
        axes.axhline(ideal[kind], color="#c44e52", lw=1, ls="--", label="nobody ever waits")
        axes.set_xticks(range(len(medians)), [policy.replace("(3", "\n(3") for policy in medians], fontsize=8)
        axes.set_title(f"{kind}\n{words}", fontsize=8.5)
        hide_spines(axes)
    panels[0].set_ylabel("samples/s of all four")
    panels[1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.9))
    cores = result["machine"]["cores"]
    note(
        figure, f"4 workers, 2 shards, threads of one process; computing is sleeping {step_s * 1e3:g} ms; {cores} cores"
    )
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
