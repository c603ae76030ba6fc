"""The tests that need a GPU, and loaders that feed one."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from penstock.benchmarks.contenders import OURS
from penstock.benchmarks.datasets import CASES, make_case
from penstock.benchmarks.harness.config import BenchConfig
from penstock.benchmarks.harness.job import Job
from penstock.benchmarks.harness.layout import find_layout
from penstock.benchmarks.harness.prepare import prepare_peers
from penstock.benchmarks.harness.subprocesses import MeasurementError, run_module
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader.dataset.index import open_manifest
from penstock.loader.dataset.sealed_folder import cache_home
from penstock.loader.errors import ConfigError
from penstock.loader.limits import usable_cores
from penstock.storage import PenstockError

from ..arguments import parse_config
from .decoding import Decoding
from .feeding import Copying, Feeding, message_of
from .models import Model
from .plot import plot_feeding

LIMIT = "no loader"
_ROOT = Path(__file__).resolve().parents[2]
_CASES: Mapping[str, tuple[Model, int]] = {"images": ("resnet50", 256), "tokens": ("gpt", 16)}
_SMALL_ROWS = {"images": 4, "tokens": 1}
_COPIED_ROWS = 1024
_NO_GPU = 3
_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the latter warns, where it is installed; here an error


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """Run the tests marked gpu, then measure how well loaders feed a GPU; in about eight minutes on 16 cores.

    ResNet-50 on photos that are decoded to 224 px, and a small GPT on tokens, in bf16: the same loop for every loader,
    in a process of its own, in turns. "no loader" trains on one batch that stays on the device. Also how fast images
    are decoded on the CPU and on the device, and copied to it, against the bare codec and bare pinned copies. Without
    a GPU it says so and ends with exit code 3.
    """

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: to try this command where no GPU is; with --small."""

    against: tuple[Literal["webdataset", "litdata", "mosaicml-streaming"], ...] = ("webdataset", "litdata")
    """Which peers to compare with; those that are not installed are left out, and named."""

    workers: int | None = None
    """Worker processes of peers; by default one a core."""

    cases: tuple[Literal["images", "tokens"], ...] = ("images", "tokens")
    """What to train on."""

    rounds: int = 2
    """Measurements of each loader in each case, in turns."""

    seconds: float = 4.0
    """Length of each measurement, after three seconds that do not count."""

    scale: float = 0.4
    """Size of the data sets: 1 is 12,000 photos and 160,000 sequences of tokens."""

    small: bool = False
    """Small batches and models, to try this command; the numbers mean nothing."""

    tests: bool = True
    """Run the tests first."""

    data: Path = field(default_factory=lambda: cache_home() / "bench-data")
    """Folder for the generated data sets, which are kept."""

    results: Path = _ROOT / "benchmarks" / "results"
    """Folder for gpu.json and gpu.png."""


def run_tests(screen: Console) -> dict[str, Any]:
    """Run the tests marked gpu of this checkout; what pytest says at the end."""
    if not (_ROOT / "tests").is_dir():
        return {"summary": "there are no tests beside an installed penstock"}
    screen.print("tests marked gpu", style="dim")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", str(min(6, usable_cores())), *_PLUGINS, "tests"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        screen.print("\n".join(lines[-30:]), markup=False, highlight=False)
    return {"command": " ".join(command[1:]), "exit_code": done.returncode, "summary": lines[-1] if lines else ""}


def run_case(name: str, config: GpuConfig, screen: Console) -> dict[str, Any]:
    """Every loader in turn, round by round: medians, with all that was measured."""
    case = CASES[name]
    model, rows = _CASES[name]
    rows = _SMALL_ROWS[name] if config.small else rows
    url = str(make_case(case, config.data, config.scale))
    manifest = open_manifest(url)
    workers = config.workers or usable_cores()
    settings = BenchConfig(
        source=url,
        against=config.against,
        batch_size=rows,
        decode=case.decode,
        environments="here",
        workers=workers,
    )
    layout = find_layout(manifest, None, None)
    ours = Job(
        contender=OURS,
        url=url,
        num_samples=manifest.num_samples,
        scratch="",
        batch_size=rows,
        decode=case.decode,
        workers=workers,
        fields=layout,
    )

    def say(text: str) -> None:
        screen.print(f"  {text}", style="dim")

    peers, refused = prepare_peers(settings, manifest, layout, ours, say)
    on_gpu = config.device == "cuda"
    # Without workers, which leaves their number to the loader.
    jobs: dict[str, Job | None] = {OURS: replace(ours, workers=0), **peers, LIMIT: None}
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(config.rounds):
        for loader, job in jobs.items():
            say(f"{case.title}, round {number + 1} of {config.rounds}: {loader}")
            given = None if job is None else asdict(replace(job, device="cuda" if on_gpu else None))
            asked = Feeding(
                model=model, device=config.device, rows=rows, seconds=config.seconds, is_small=config.small, job=given
            )
            try:
                runs.setdefault(loader, []).append(_run(asked, loader))
            except MeasurementError as exc:
                if loader in (OURS, LIMIT):
                    raise
                refused[loader] = str(exc).strip().splitlines()[-1]
                runs.pop(loader, None)
                jobs = {one: its for one, its in jobs.items() if one != loader}
    return {"case": name, "title": case.title, "model": model, "batch_size": rows, "runs": runs, "refused": refused}


def _run(asked: Feeding | Copying | Decoding, what: str) -> dict[str, Any]:
    return run_module("devtools.gpu.feeding", message_of(asked), what, timeout_s=600.0)[0]


def median_of(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def run_copies(config: GpuConfig, screen: Console) -> dict[str, Any]:
    screen.print("  copies to the device", style="dim")
    case = CASES["tokens"]
    url = str(make_case(case, config.data, config.scale))
    job = Job(contender=OURS, url=url, num_samples=1, scratch="")
    asked = Copying(device="cuda", url=url, rows=_COPIED_ROWS, seconds=config.seconds / 2, job=asdict(job))
    return _run(asked, "copies to the device")


def run_decoding(config: GpuConfig, screen: Console) -> dict[str, Any]:
    screen.print("  decoding images on the CPU and on the device", style="dim")
    url = str(make_case(CASES["images"], config.data, config.scale))
    asked = Decoding(device="cuda", url=url, rows=_CASES["images"][1], seconds=config.seconds)
    return _run(asked, "decoding on the device")


def print_result(result: Mapping[str, Any], screen: Console) -> None:
    if "tests" in result:
        screen.print(f"tests: {result['tests']['summary']}", highlight=False)
    for case in result["cases"]:
        table = Table(title=f"{case['model']} on {case['title']}, batch {case['batch_size']}", title_justify="left")
        for head in ("loader", "samples/s", "of no loader", "waits", "step", "first batch"):
            table.add_column(head, justify="left" if head == "loader" else "right")
        limit = median_of(case["runs"][LIMIT], "samples_per_s")
        for loader, runs in case["runs"].items():
            rate = median_of(runs, "samples_per_s")
            waits, step_ms = median_of(runs, "wait_share"), median_of(runs, "step_ms")
            first = f"{median_of(runs, 'first_batch_s'):.2f} s"
            table.add_row(loader, f"{rate:,.0f}", f"{rate / limit:.2f}", f"{waits:.1%}", f"{step_ms:,.1f} ms", first)
        screen.print(table)
        for loader, why in case["refused"].items():
            screen.print(f"not measured: {loader}: {why}", highlight=False, markup=False)
    if "decoding" in result:
        print_decoding(result["decoding"], screen)
    if "copies" in result:
        rates = {name.removesuffix("_bytes_per_s"): value / 1e9 for name, value in result["copies"].items()}
        told = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items())
        screen.print(f"to the device: {told}", highlight=False)


def print_decoding(result: Mapping[str, Any], screen: Console) -> None:
    names = {
        "cpu": "on the CPU",
        "threads": "on the CPU by threads alone",
        "device": "on the device",
        "bare": "by the device's bare codec, whole images",
    }
    for way, name in names.items():
        if way in result:
            rate, cpu = result[way]["images_per_s"], result[way]["cpu_us_per_image"]
            screen.print(f"images decoded {name}: {rate:,.0f}/s, {cpu:,.0f} us of CPU an image", highlight=False)
    if "refused" in result:
        screen.print(f"not decoded on the device: {result['refused']}", highlight=False, markup=False)


def run_parts(config: GpuConfig, screen: Console, *, on_gpu: bool) -> Iterator[tuple[str, Any]]:
    """What is measured, part by part, by its name in the results."""
    if config.tests and on_gpu:
        yield "tests", run_tests(screen)
    if on_gpu:
        yield "decoding", run_decoding(config, screen)
        yield "copies", run_copies(config, screen)
    cases: list[dict[str, Any]] = []
    for name in config.cases:
        cases = [*cases, run_case(name, config, screen)]
        yield "cases", cases


def main(config: GpuConfig, screen: Console) -> int:
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
    result: dict[str, Any] = {
        "command": " ".join(["python -m devtools gpu", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name() if on_gpu else None},
        "versions": list_versions(),
    }
    config.results.mkdir(parents=True, exist_ok=True)
    for name, value in run_parts(config, screen, on_gpu=on_gpu):
        result[name] = value
        # After each part, so that who interrupts this keeps what was measured.
        (config.results / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    print_result(result, screen)
    plot_feeding(result, config.results / "gpu.png", limit=LIMIT)
    screen.print(f"written: {config.results / 'gpu.json'} and gpu.png", highlight=False)
    return 1 if result.get("tests", {}).get("exit_code") else 0


if __name__ == "__main__":
    console = Console()
    try:
        sys.exit(main(parse_config(GpuConfig), console))
    except PenstockError as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        sys.exit(2)
