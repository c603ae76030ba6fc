"""The tests that need a GPU, and loaders that feed one."""

from __future__ import annotations

import datetime
import json
import sys
import time
from typing import Any

import torch
from rich.console import Console

from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader.errors import ConfigError
from penstock.storage import PenstockError

from ..arguments import parse_config
from .parts import LIMIT, GpuConfig, Part, run_part
from .plot import plot_feeding
from .show import print_part

_NO_GPU = 3
_ON_GPU_ALONE: tuple[Part, ...] = ("tests", "copies", "decoding")
_TRAINING: tuple[Part, ...] = ("images", "tokens")


def main(config: GpuConfig, screen: Console) -> int:
    """Run the parts; return 1 if a test failed or a part could not be run. The others run all the same."""
    on_gpu = config.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        screen.print(
            f"no GPU: torch {torch.__version__} sees no CUDA device here. The tests marked gpu were not run, and "
            "nothing was measured. Run this on a machine with one, with a torch built for CUDA.",
            highlight=False,
        )
        return _NO_GPU
    if not on_gpu and not config.small:
        raise ConfigError("--device cpu trains a ResNet-50 for hours; it is for trying this command: add --small")
    config.results.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in config.parts:
        if not on_gpu and part in _ON_GPU_ALONE:
            screen.print(f"{part}: needs a GPU", highlight=False)
            continue
        try:
            failed += _run(part, config, screen)
        except PenstockError as exc:
            screen.print(f"{part} could not be run: {exc}", highlight=False, markup=False)
            failed += 1
    _plot(config)
    return 1 if failed else 0


def _run(part: Part, config: GpuConfig, screen: Console) -> int:
    """Run a part, show its results, and write them; return 1 for a failed test."""
    result: dict[str, Any] = {
        "command": " ".join(["python -m devtools gpu", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name() if config.device == "cuda" else None},
        "versions": list_versions(),
    }
    started = time.perf_counter()
    found = run_part(part, config, screen)
    result |= {"seconds": round(time.perf_counter() - started, 1), part: found}
    path = config.results / f"gpu-{part}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print_part(part, found, screen)
    screen.print(f"written after {result['seconds']:.0f} s: {path}", highlight=False, style="dim")
    return 1 if found.get("exit_code") else 0


def _plot(config: GpuConfig) -> None:
    """Draw the results of the parts that train, from this run or an earlier one."""
    files = {part: config.results / f"gpu-{part}.json" for part in _TRAINING}
    results: dict[str, Any] = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
    if set(results) & set(config.parts):
        plot_feeding(results, config.results / "gpu.png", limit=LIMIT)


if __name__ == "__main__":
    console = Console()
    try:
        sys.exit(main(parse_config(GpuConfig), console))
    except PenstockError as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        sys.exit(2)
