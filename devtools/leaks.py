"""Looks for what a loader leaves behind: memory, threads, file descriptors, processes, shared memory, temporary files.

Each case repeats short epochs, or loaders that are made and closed, in a process of its own, and counts after each
tenth of the rounds. What grows after the first three tenths is a leak, and fails the run.

python -m devtools leaks --epochs 1000 --cycles 200 --results benchmarks/results
python -m devtools leaks --s3 s3://bucket/leaks --option endpoint=http://... access_key=... secret_key=...
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.benchmarks.child_arguments import refuse
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader import DistributedDataLoader
from penstock.storage import open_store
from penstock.storage.memory.libc import trim_heap

from .arguments import make_parser

SAMPLES, BATCH = 64, 16
_TENTHS = 10
_WARM = 3  # tenths that caches, pools and allocators may take to fill up
# Allocators keep and return pages as they like; a leak of a few hundred bytes a batch shows in 1,000 epochs.
_MEMORY_SLACK_BYTES = 6 << 20
# Threads that come and go allocate from arenas in turn, each of which keeps pages that no trimming returns: with many,
# starting worker processes makes resident memory swing by 40 MiB while what is allocated stays the same to 0.1 MiB.
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
_SETTLE_S = 10.0
_TRACED = 8


@dataclass(frozen=True, slots=True)
class Count:
    """Resources of this process: bytes of memory, with its children's, and numbers of the rest."""

    memory_bytes: int
    threads: int
    descriptors: int
    processes: int
    shared_memory: int
    temporary_files: int


def count() -> Count:
    """Count after a full garbage collection; unused memory is returned to the system first."""
    gc.collect()
    trim_heap()
    children = _children(os.getpid())
    shared = Path("/dev/shm")
    return Count(
        memory_bytes=sum(map(_resident, (os.getpid(), *children))),
        threads=len(list(Path("/proc/self/task").iterdir())),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        processes=len(children),
        shared_memory=sum(_is_own(path) for path in shared.iterdir()) if shared.is_dir() else 0,
        temporary_files=sum(1 for _ in Path(tempfile.gettempdir()).rglob("*")),
    )


def _children(process: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def _resident(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _is_own(path: Path) -> bool:
    """Return whether an entry of /dev/shm names this process, or is this user's and about as old."""
    with suppress(OSError):
        status = path.stat()
        return status.st_uid == os.geteuid() and str(os.getpid()) in path.name
    return False


def find_leaks(counts: list[Count]) -> list[str]:
    """Describe what grew after the first tenths. Threads and the like may not grow at all, memory by a little."""
    first, last = counts[_WARM], counts[-1]
    grown = []
    for name, before in asdict(first).items():
        after = getattr(last, name)
        if after > before + (_MEMORY_SLACK_BYTES if name == "memory_bytes" else 0):
            grown.append(f"{name} {before:,} -> {after:,}")
    return grown


def settled_count(most: Count | None) -> Count:
    """A count; where it is above ``most``, what ends by itself has some seconds to do so."""
    until = time.monotonic() + _SETTLE_S
    found = count()
    while most is not None and time.monotonic() < until and len(find_leaks([most] * (_WARM + 1) + [found])):
        time.sleep(0.2)
        found = count()
    return found


Options = Mapping[str, Any]
Round = Callable[[], None]


def write_samples(url: str, options: Options) -> None:
    """A few small tar shards below ``url``."""
    store = open_store(url, storage_options=options or None)
    for shard in range(2):
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w") as tar:
            for row in range(SAMPLES // 2):
                for field, value in (("cls", b"%d" % row), ("bin", os.urandom(4096))):
                    info = tarfile.TarInfo(f"{shard}-{row:04d}.{field}")
                    info.size = len(value)
                    tar.addfile(info, io.BytesIO(value))
        store.put(f"shard-{shard}.tar", sink.getvalue())
    store.close()


def double_label(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "cls": 2 * sample["cls"]}


def _loader(url: str, options: Options, **more: Any) -> DistributedDataLoader:
    if options:
        more["storage_options"] = dict(options)
    # Without tuning, which starts threads within its bounds at any time.
    return DistributedDataLoader(url, batch_size=BATCH, rank=0, world_size=1, autotune=False, **more)


def epochs(url: str, options: Options, **more: Any) -> Round:
    """One loader; a round is an epoch."""
    loader = _loader(url, options, **more)

    def run() -> None:
        assert sum(1 for _ in loader) == SAMPLES // BATCH

    return run


def cycles(url: str, options: Options, **more: Any) -> Round:
    """A round is a loader that is made, read in part and closed."""

    def run() -> None:
        with _loader(url, options, **more) as loader:
            batches = iter(loader)
            for _ in range(2):
                next(batches)

    return run


def dropped(url: str, options: Options, **more: Any) -> Round:
    """A round is what cells of a notebook do: loaders and iterators that are overwritten and never closed."""
    held: list[Any] = []

    def run() -> None:
        held.clear()
        loader = _loader(url, options, **more)
        held.extend((loader, iter(loader), loader.peek()))
        next(held[1])
        next(iter(loader))

    return run


def forks(url: str, options: Options, **more: Any) -> Round:
    """A round is a batch, and a forked child that ends while the loader of its parent runs."""
    loader = _loader(url, options, **more)
    batches: list[Any] = []

    def run() -> None:
        if not batches:
            batches.append(iter(loader))
        if next(batches[0], None) is None:
            batches.clear()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

    return run


@dataclass(frozen=True, slots=True)
class Case:
    """Case: how its rounds are made, whether they count as epochs or cycles, its source and its options."""

    start: Callable[..., Round]
    rounds: str
    source: str = "file"
    options: tuple[tuple[str, Any], ...] = ()


_WORKERS = (("processes", 2), ("transform", double_label))
_BESIDE = (("place", "process"), ("transform", double_label))
CASES: dict[str, Case] = {
    "epochs": Case(epochs, "epochs"),
    "epochs-views": Case(epochs, "epochs", options=(("raw", "view"),)),
    "epochs-processes": Case(epochs, "epochs", options=_WORKERS),
    "epochs-place": Case(epochs, "epochs", options=_BESIDE),
    "epochs-cache": Case(epochs, "epochs", "mem", (("cache_dir", "cache"),)),
    "epochs-s3": Case(epochs, "epochs", "s3"),
    "cycles": Case(cycles, "cycles"),
    "cycles-views": Case(cycles, "cycles", options=(("raw", "view"),)),
    "cycles-processes": Case(cycles, "cycles", options=_WORKERS),
    "cycles-place": Case(cycles, "cycles", options=_BESIDE),
    "cycles-cache": Case(cycles, "cycles", "mem", (("cache_dir", "cache"),)),
    "cycles-s3": Case(cycles, "cycles", "s3", (("cache_dir", "cache"),)),
    "dropped": Case(dropped, "cycles"),
    "dropped-views": Case(dropped, "cycles", options=(("raw", "view"),)),
    "forks": Case(forks, "cycles"),
    "forks-place": Case(forks, "cycles", options=_BESIDE),
}


def run_case(name: str, rounds: int, s3: str, options: Options, trace: bool) -> list[Count]:
    """Run a case in this process, whose temporary files lie in a folder of its own."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        url = {"file": folder + "/data", "mem": "mem://leaks/data", "s3": s3}[case.source]
        given = options if case.source == "s3" else {}
        write_samples(url, given)
        more = {key: folder + "/cache" if key == "cache_dir" else value for key, value in case.options}
        tempfile.tempdir = folder + "/temporary"
        Path(tempfile.tempdir).mkdir()
        one_round = case.start(url, given, **more)
        counts: list[Count] = []
        before: tracemalloc.Snapshot | None = None
        for tenth in range(_TENTHS):
            for _ in range(max(1, rounds // _TENTHS)):
                one_round()
            counts.append(settled_count(counts[_WARM] if len(counts) > _WARM else None))
            if trace and tenth == _WARM:
                tracemalloc.start(12)
                before = tracemalloc.take_snapshot()
        if before is not None:
            show_growth(before, tracemalloc.take_snapshot())
        tempfile.tempdir = None
    return counts


def show_growth(before: tracemalloc.Snapshot, after: tracemalloc.Snapshot) -> None:
    """Print to stderr where the memory that Python allocated has grown most."""
    for line in after.compare_to(before, "lineno")[:_TRACED]:
        print(f"  {line}", file=sys.stderr)


def measure(name: str, rounds: int, s3: str, options: Options, trace: bool) -> dict[str, Any]:
    """One case, in a process of its own; the row of the results."""
    command = [sys.executable, "-m", "devtools.leaks", "--case", name, str(rounds)]
    command += ["--s3", s3] if s3 else []
    command += ["--option", *(f"{key}={value}" for key, value in options.items())] if options else []
    command += ["--trace"] if trace else []
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, **_ONE_ARENA})
    counts = [Count(**row) for row in json.loads(done.stdout.splitlines()[-1])]
    leaks = find_leaks(counts)
    row = {"case": name, CASES[name].rounds: rounds, "seconds": round(time.monotonic() - started, 1)}
    return {**row, "warm": asdict(counts[_WARM]), "end": asdict(counts[-1]), "leaks": leaks}


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=1000, help="rounds of the cases that repeat epochs (1000)")
    parser.add_argument("--cycles", type=int, default=200, help="rounds of the cases that make loaders (200)")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--s3", default="", metavar="URL", help="an empty prefix; without one S3's cases are left out")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="storage options of --s3")
    parser.add_argument("--trace", action="store_true", help="print which lines of Python hold what memory grew by")
    parser.add_argument("--results", help="a folder for leaks.json, which the run is added to")
    parser.add_argument("--case", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    options = dict(pair.partition("=")[::2] for pair in given.option)
    if given.case is not None:
        name, rounds = given.case if len(given.case) == 2 else ("", "")
        if name not in CASES or not rounds.isdecimal() or (CASES[name].source == "s3" and not given.s3):
            refuse("python -m devtools leaks")
        counts = run_case(name, int(rounds), given.s3, options, given.trace)
        print(json.dumps([asdict(found) for found in counts]), flush=True)
        return 0
    rows = []
    for name in given.only or [name for name, case in CASES.items() if given.s3 or case.source != "s3"]:
        row = measure(name, getattr(given, CASES[name].rounds), given.s3, options, given.trace)
        rows.append(row)
        memory = [row[when]["memory_bytes"] >> 20 for when in ("warm", "end")]
        held = ", ".join(f"{row['end'][key]} {key.replace('_', ' ')}" for key in list(row["end"])[1:])
        print(f"{name}: {memory[0]} -> {memory[1]} MiB, {held}; leaks: {'; '.join(row['leaks']) or 'none'}", flush=True)
    if given.results:
        write_results(Path(given.results, "leaks.json"), rows, arguments)
    return 1 if any(row["leaks"] for row in rows) else 0


def write_results(path: Path, rows: list[dict[str, Any]], arguments: list[str]) -> None:
    """Add a run to the results."""
    hidden = [word.partition("=")[0] + "=..." if "secret" in word else word for word in arguments]
    run = {
        "command": shlex.join(["python", "-m", "devtools.leaks", *hidden]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
        "rows": rows,
    }
    about = (__doc__ or "").partition("\n\n")[0]
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"about": about, "runs": []}
    known["runs"].append(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
