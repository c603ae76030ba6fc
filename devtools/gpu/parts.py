"""The parts of ``make gpu``: each runs and measures one thing, in at most three minutes on 16 cores."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from penstock.benchmarks.contenders import OURS
from penstock.benchmarks.datasets import CASES, make_case
from penstock.benchmarks.harness.config import BenchConfig, Environments
from penstock.benchmarks.harness.job import Job
from penstock.benchmarks.harness.layout import find_layout
from penstock.benchmarks.harness.prepare import prepare_peers
from penstock.benchmarks.harness.subprocesses import MeasurementError, run_module
from penstock.loader.dataset.cache import cache_home
from penstock.loader.dataset.index import open_manifest
from penstock.loader.limits import usable_cores

from .decoding import Decoding
from .feeding import Asked, Copying, Feeding, message_of
from .interference import Interference
from .models import Model

Part = Literal["tests", "copies", "decoding", "interference", "images", "tokens"]
Peer = Literal["webdataset", "litdata", "spdl", "mosaicml-streaming"]
ROOT = Path(__file__).resolve().parents[2]
LIMIT, ALONE = "no loader", "nothing"
_WAYS = ("threads", "processes", "device")
_CASES: Mapping[str, tuple[Model, int]] = {"images": ("resnet50", 256), "tokens": ("gpt", 16)}
_SMALL_ROWS = {"images": 4, "tokens": 1}
_COPIED_ROWS = 1024
# A third of the images that a core decodes in this time, at about 700 a second.
_FED_IMAGES_A_CORE, PERIOD_S = 12, 0.05
_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the latter warns, where it is installed; here an error
_MARK = "mark.gpu"
_TESTS_S, _TOO_LONG = 175, 124  # the exit code is that of timeout(1)


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """Run the tests marked gpu, then measure how well loaders feed a GPU, part by part; without a GPU exit with 3.

    Each part takes three minutes at most, and writes a file of its own as soon as it is done. "images" and "tokens"
    train ResNet-50 on photos that are decoded to 224 px, and a small GPT, in bf16: the same loop for every loader, in a
    process of its own, in turns; "no loader" trains on one batch that stays on the device. "copies" and "decoding" are
    measured against bare pinned copies and the bare codec; "interference" is how much longer a loop of tiny operations
    takes to start them beside what feeds it.
    """

    parts: tuple[Part, ...] = ("tests", "copies", "decoding", "interference", "images", "tokens")
    """What to run, in this order, which is that of their worth."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: to try this command where no GPU is; with --small."""

    against: tuple[Peer, ...] = ("webdataset", "litdata", "spdl")
    """Which peers to compare with; those that are not installed are left out, and named."""

    workers: int | None = None
    """Worker processes of peers; by default one a core."""

    rounds: int = 2
    """Measurements of each loader in each case, in turns."""

    seconds: float = 4.0
    """Length of each measurement, after three seconds that do not count."""

    scale: float = 0.4
    """Size of the data sets: 1 is 12,000 photos and 160,000 sequences of tokens."""

    small: bool = False
    """Small batches and models, to try this command; the numbers mean nothing."""

    data: Path = field(default_factory=lambda: cache_home() / "bench-data")
    """Folder for the generated data sets, which are kept."""

    results: Path = ROOT / "benchmarks" / "results"
    """Folder for gpu-PART.json, and gpu.png of the parts that train."""


def run_tests(screen: Console) -> dict[str, Any]:
    """Run the tests marked gpu of this checkout; return pytest's summary, and all its output if a test failed."""
    if not (ROOT / "tests").is_dir():
        return {"summary": "there are no tests beside an installed penstock"}
    screen.print("tests marked gpu", style="dim")
    # Their files alone: others may import what is not installed where there is a GPU.
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if _is_marked(path))
    workers = str(min(8, usable_cores()))
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-n", workers, "--durations=8", *_PLUGINS, *files]
    with tempfile.TemporaryFile("w+") as log:
        tests = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            exit_code = tests.wait(_TESTS_S)
        except subprocess.TimeoutExpired:
            exit_code = _TOO_LONG
        finally:
            with suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if exit_code:
        screen.print("\n".join(lines[-60:]), markup=False, highlight=False)
    summary = f"ended after {_TESTS_S} s" if exit_code == _TOO_LONG else lines[-1] if lines else ""
    result = {"command": " ".join(command[1:]), "exit_code": exit_code, "summary": summary}
    return result | ({"output": lines} if exit_code else {})


def _is_marked(path: Path) -> bool:
    return _MARK in path.read_text()


@dataclass(frozen=True)
class Jobs:
    """A case's jobs: its data, this package's job, the peers', and the reasons why some cannot be measured."""

    url: str
    ours: Job
    peers: dict[str, Job]
    refused: dict[str, str]


def prepare_jobs(
    name: Literal["images", "tokens"],
    rows: int,
    config: GpuConfig,
    say: Callable[[str], None],
    environments: Environments = "here",
) -> Jobs:
    """Make a case's data set and each peer's copy of it, which it is checked to deliver."""
    case = CASES[name]
    url = str(make_case(case, config.data, config.scale))
    manifest = open_manifest(url)
    workers = config.workers or usable_cores()
    settings = BenchConfig(
        source=url,
        against=config.against,
        batch_size=rows,
        decode=case.decode,
        environments=environments,
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
    peers, refused = prepare_peers(settings, manifest, layout, ours, say)
    return Jobs(url, ours, dict(peers), dict(refused))


def run_case(name: Literal["images", "tokens"], config: GpuConfig, screen: Console) -> dict[str, Any]:
    """Run every loader in turn, round by round; return medians, with all that was measured."""
    case = CASES[name]
    model, rows = _CASES[name]
    rows = _SMALL_ROWS[name] if config.small else rows

    def say(text: str) -> None:
        screen.print(f"  {text}", style="dim")

    prepared = prepare_jobs(name, rows, config, say)
    refused = prepared.refused
    # Without workers, which leaves their number to the loader.
    ours = replace(prepared.ours, workers=0)
    jobs: dict[str, Job | None] = {OURS: ours}
    ways = {f"{OURS}, {way}": way for way in _WAYS} if name == "images" and config.device == "cuda" else {}
    jobs |= dict.fromkeys(ways, ours) | prepared.peers | {LIMIT: None}
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(config.rounds):
        for loader, job in list(jobs.items()):
            say(f"{case.title}, round {number + 1} of {config.rounds}: {loader}")
            asked = Feeding(
                model=model,
                device=config.device,
                rows=rows,
                seconds=config.seconds,
                is_small=config.small,
                job=_on_device(job, config),
                way=ways.get(loader),
                processes=_processes(),
            )
            try:
                runs.setdefault(loader, []).append(_run(asked, loader))
            except MeasurementError as exc:
                if loader in (OURS, LIMIT):
                    raise
                refused[loader] = str(exc).strip().splitlines()[-1]
                runs.pop(loader, None)
                del jobs[loader]
    return {"case": name, "title": case.title, "model": model, "batch_size": rows, "runs": runs, "refused": refused}


def _processes() -> int:
    """Choose how many processes decode, so that the loop has a core, and a few are left free."""
    cores = usable_cores()
    return max(1, cores - 1 - cores // 8)


def _on_device(job: Job | None, config: GpuConfig) -> dict[str, Any] | None:
    return None if job is None else asdict(replace(job, device="cuda" if config.device == "cuda" else None))


def run_interference(config: GpuConfig, screen: Console) -> dict[str, Any]:
    """Run each way of feeding in turn, round by round; a refused one is not tried again."""

    def say(text: str) -> None:
        screen.print(f"  {text}", style="dim")

    rows = _SMALL_ROWS["images"] if config.small else max(4, _FED_IMAGES_A_CORE * (usable_cores() - 1))
    steps = 3 if config.small else max(10, int(config.seconds / PERIOD_S))
    return measure_interference(prepare_jobs("images", rows, config, say), rows, steps, config, say)


def measure_interference(
    prepared: Jobs, rows: int, steps: int, config: GpuConfig, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run each way of feeding a loop ``rows`` images a step in turn, round by round; a refused one is not tried again.

    Raises:
        MeasurementError: the loop that nothing feeds failed.
    """
    refused = dict(prepared.refused)
    ways: dict[str, Job | None] = dict.fromkeys((ALONE, "foreign", "threads", "processes", "process"))
    ways |= {"device": None} if config.device == "cuda" else {}
    ways |= {name: replace(job, batch_size=rows) for name, job in prepared.peers.items()}
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(config.rounds):
        for way, job in list(ways.items()):
            say(f"{rows} images a step, round {number + 1} of {config.rounds}: {way}")
            asked = Interference(
                way=way if job is None else "peer",
                device=config.device,
                url=prepared.url,
                rows=rows,
                steps=steps,
                period_s=PERIOD_S,
                processes=_processes(),
                job=_on_device(job, config),
            )
            try:
                runs.setdefault(way, []).append(_run(asked, way, None if job is None else job.python))
            except MeasurementError as exc:
                if way == ALONE:
                    raise
                refused[way] = str(exc).strip().splitlines()[-1]
                runs.pop(way, None)
                del ways[way]
    return {"batch_size": rows, "period_s": PERIOD_S, "runs": runs, "refused": refused}


def _run(asked: Asked, what: str, python: str | None = None) -> dict[str, Any]:
    return run_module("devtools.gpu.feeding", message_of(asked), what, timeout_s=600.0, python=python)[0]


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


def run_part(part: Part, config: GpuConfig, screen: Console) -> dict[str, Any]:
    """Run one part; return its results.

    Raises:
        PenstockError: it could not be run.
    """
    if part == "tests":
        return run_tests(screen)
    if part == "copies":
        return run_copies(config, screen)
    if part == "decoding":
        return run_decoding(config, screen)
    if part == "interference":
        return run_interference(config, screen)
    return run_case(part, config, screen)
