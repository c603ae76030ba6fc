"""Profile where the time of a first pass goes, in two checkouts.

py-spy samples first passes, each in a process of its own, the checkouts in turn. A sample of a thread that runs is
charged to the stage of its innermost frame in penstock, and the samples are scaled to the CPU time that the same passes
take unobserved: the table shows CPU time, split by samples.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.benchmarks.harness.plot import hide_spines, new_figure, require_plotting
from penstock.benchmarks.machine import describe_machine
from penstock.loader.errors import ConfigError

from .arguments import OptionalPath, parse_config
from .first_pass import Config as Data
from .first_pass import measure_pass, pass_command, pass_environment, write_data

Case = Literal["raw", "tokens", "rows"]
Stacks = Counter[tuple[str, ...]]

_TITLES: dict[Case, str] = {
    "raw": "raw bytes, 38 KB in tar",
    "tokens": "2,048 tokens as int64",
    "rows": "rows of 40 columns, Parquet",
}
_RATE = 400  # samples a second
_WAITING = ("wait", "_work")  # frames in which a thread waits, which py-spy may take for running
_CONSUMER, _SCRIPT = "consumer", "single_pass.py"
# The first that a file's path and function begin with is its stage.
_STAGES = {
    "storage/hashing": "checksums",
    "loader/reading/checksum": "checksums",
    "loader/reading/chunk_source.py ChunkSource._check": "checksums",
    "storage/": "reading",
    "loader/reading/on_disk": "reading",
    "loader/formats/": "opening chunks",
    "loader/reading/": "opening chunks",
    "loader/order/": "order",
    "loader/decoding/": "making batches",
    "loader/pipeline/": "making batches",
    _SCRIPT: _CONSUMER,
    "": "start, and all else",
}
STAGES = tuple(dict.fromkeys(_STAGES.values()))
_COLOURS = dict(zip(STAGES, ("#e0a458", "#0b6e8a", "#5aa9a3", "#b56576", "#6d6875", "#c9c9c9", "#8d99ae"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Config:
    """First passes of raw bytes, tokens and rows from the local disk, sampled, this checkout against another."""

    before: Path
    """The other checkout: a folder named penstock."""

    cases: tuple[Case, ...] = ("raw", "tokens", "rows")
    """What is read."""

    passes: int = 10
    """Passes of each checkout and case that are sampled, and as many that are only timed."""

    scale: float = 1.0
    """Size of the data; 1 is about 300 MB each."""

    out: OptionalPath = None
    """Write the results here as JSON, and the chart beside it as SVG."""


def stage_of(stack: Iterable[str]) -> str | None:
    """The stage of a stack, outermost frame first, each "function (file)"; None of what does not work on a pass."""
    parts = [frame.rpartition(" (") for frame in stack]
    files = [file.partition(":")[0].rstrip(")") for _, _, file in parts]
    if any(file.endswith(_SCRIPT) for file in files) and all(function != "read_once" for function, _, _ in parts):
        return None  # the main thread imports
    if parts[-1][0].rpartition(".")[2] in _WAITING:
        return None
    ours = [f"{name} {function}" for (function, _, _), file in zip(parts, files, strict=True) if (name := _own(file))]
    if not ours:
        return None
    return next(stage for prefix, stage in _STAGES.items() if ours[-1].startswith(prefix))


def _own(file: str) -> str:
    """The path in its checkout of a file of penstock; "" for others."""
    if file.endswith(_SCRIPT):
        return _SCRIPT
    return file.rpartition("penstock/")[2] if "penstock/" in file else ""


def read_stacks(text: str) -> Stacks:
    """Stacks and how often each was seen, of py-spy's raw format: frames with semicolons between them, and a count."""
    found: Stacks = Counter()
    for line in text.splitlines():
        frames, _, count = line.rpartition(" ")
        found[tuple(frames.split(";"))] += int(count)
    return found


def by_stage(stacks: Stacks) -> dict[str, float]:
    """The share of each stage in the samples of passes.

    Raises:
        ConfigError: there is no sample of a pass.
    """
    counted: Counter[str] = Counter()
    for stack, count in stacks.items():
        stage = stage_of(stack)
        if stage is not None:
            counted[stage] += count
    if not counted:
        raise ConfigError("py-spy saw no pass: give more of them by --passes, or a larger --scale")
    return {stage: counted[stage] / counted.total() for stage in STAGES}


def by_function(stacks: Stacks, count: int = 12) -> dict[str, float]:
    """The shares of the functions in which most samples of passes ended, as "function file"."""
    ends: Counter[str] = Counter()
    for stack, seen in stacks.items():
        if stage_of(stack) is not None:
            function, _, file = stack[-1].rpartition(" (")
            ends[f"{function} {file.rstrip(')')}"] += seen
    return {name: seen / ends.total() for name, seen in ends.most_common(count)}


def _sample(checkout: Path, case: str, url: str, folder: Path) -> Stacks:
    out = folder / "stacks.txt"
    spy = ["py-spy", "record", "--rate", str(_RATE), "--format", "raw", "--function", "--output", str(out), "--"]
    environment = pass_environment(checkout, folder)
    done = subprocess.run(
        [*spy, *pass_command(case, url, {})], check=False, env=environment, cwd=folder, capture_output=True, text=True
    )
    if done.returncode != 0 or not out.exists():
        raise ConfigError(f"py-spy failed with {done.returncode}: {done.stderr.strip()[-500:]}")
    stacks = read_stacks(out.read_text())
    out.unlink()
    return stacks


def _measure(config: Config, sides: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    stacks: dict[tuple[str, str], Stacks] = {}
    timed: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        standard, scale = Data(before=config.before), config.scale
        data = Data(
            before=config.before,
            blobs=int(standard.blobs * scale),
            sequences=int(standard.sequences * scale),
            rows=int(standard.rows * scale),
        )
        write_data(folder, data)
        for number in range(-1, config.passes):  # the first is not counted: it writes the index and warms the cache
            for case in config.cases:
                for side in sides if number % 2 else reversed(list(sides)):
                    url = str(folder / case)
                    pass_ = measure_pass(sides[side], case, url, {}, folder)
                    if number >= 0:
                        timed.setdefault((case, side), []).append(pass_)
                        seen = _sample(sides[side], case, url, folder)
                        stacks.setdefault((case, side), Counter()).update(seen)
    return {case: {side: _summarise(stacks[case, side], timed[case, side]) for side in sides} for case in config.cases}


def _summarise(stacks: Stacks, timed: list[dict[str, float]]) -> dict[str, Any]:
    cpu_us = statistics.median(each["cpu_us_per_sample"] for each in timed)
    return {
        "samples_per_s": statistics.median(each["samples_per_s"] for each in timed),
        "cpu_us_per_sample": cpu_us,
        "stages_us": {stage: share * cpu_us for stage, share in by_stage(stacks).items()},
        "functions": by_function(stacks),
        "seen": sum(count for stack, count in stacks.items() if stage_of(stack) is not None),
    }


def plot_profiles(profiles: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """A panel for each case: CPU microseconds a sample before and after, split into stages.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, rows = new_figure(7.2, 1.25 * len(profiles) + 0.9, len(profiles), 1)
    panels = list(rows[:, 0])
    for axes, (case, sides) in zip(panels, profiles.items(), strict=True):
        names = list(sides)
        left = [0.0] * len(names)
        for stage in STAGES:
            widths = [sides[name]["stages_us"][stage] for name in names]
            axes.barh(names, widths, left=left, height=0.66, color=_COLOURS[stage], label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, (name, end) in enumerate(zip(names, left, strict=True)):
            rate = sides[name]["samples_per_s"]
            axes.text(end, place, f"  {end:,.1f} us; {rate:,.0f}/s", va="center", fontsize=8)
        axes.set_title(_TITLES.get(case, case), fontsize=9, loc="left")  # type: ignore[call-overload]
        axes.set_xlim(0, 1.28 * max(left))
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        hide_spines(axes)
    panels[-1].set_xlabel("CPU microseconds a sample in a first pass", fontsize=8)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(STAGES), fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _print(profiles: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    for case, sides in profiles.items():
        print(f"\n{_TITLES.get(case, case)}: CPU microseconds a sample")  # type: ignore[call-overload]
        print(f"  {'':22}" + "".join(f"{side:>10}" for side in sides))
        for stage in STAGES:
            print(f"  {stage:22}" + "".join(f"{each['stages_us'][stage]:10.2f}" for each in sides.values()))
        print(f"  {'all':22}" + "".join(f"{each['cpu_us_per_sample']:10.2f}" for each in sides.values()))
        print(f"  {'samples/s':22}" + "".join(f"{each['samples_per_s']:10,.0f}" for each in sides.values()))


def main(config: Config) -> None:
    if shutil.which("py-spy") is None:
        raise SystemExit("py-spy is not on the path; pip install py-spy")
    if config.out is not None:
        require_plotting()
    sides = {"before": config.before, "after": Path(__file__).resolve().parents[1]}
    profiles = _measure(config, sides)
    _print(profiles)
    if config.out is not None:
        command = f"python -m devtools profiles --before BEFORE/penstock --passes {config.passes}"
        result = {"command": command, "machine": describe_machine(), "load": os.getloadavg(), "profiles": profiles}
        config.out.write_text(json.dumps(result, indent=1) + "\n")
        plot_profiles(profiles, config.out.with_suffix(".svg"))


if __name__ == "__main__":
    main(parse_config(Config))
