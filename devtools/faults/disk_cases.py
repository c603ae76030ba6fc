"""Faults of the node: a full or read-only disk, a cache that is damaged under way, too little memory, another clock."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .case import Case
from .data import put_data
from .network_cases import nothing
from .stage import Stage, StageError

MEMORY_BYTES = 700 << 20
LARGE_SAMPLE_BYTES = 130_000  # a data set of 390 MB
_MEMCG = Path("/sys/fs/cgroup/memory")
_NOBODY = 65534
_DAMAGED = "a warning"
_CACHED = {"until_epoch": 4}


def cached(stage: Stage) -> Mapping[str, Any]:
    """A cache of the case's own."""
    folder = stage.folder / "cache"
    folder.mkdir()
    return {"loader": {"cache_dir": str(folder)}}


def on_own_disk(size: str) -> Callable[[Stage], Mapping[str, Any]]:
    """A cache on a disk of its own; the data set takes 26 MB."""

    def prepare(stage: Stage) -> Mapping[str, Any]:
        given = cached(stage)
        mount(stage.folder / "cache", f"size={size}")
        stage.at_end(lambda: unmount(stage.folder / "cache"))
        return given

    return prepare


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True, capture_output=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def make_read_only(stage: Stage) -> None:
    stage.run.wait_for(30)
    stage.mark()
    until = time.monotonic() + 20
    # It cannot become read-only while a file is open for writing, which files are for a moment each.
    while subprocess.run(
        ["mount", "-o", "remount,bind,ro", str(stage.folder / "cache")], check=False, capture_output=True
    ).returncode:
        if time.monotonic() > until:
            raise StageError("the disk could not be made read-only")


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("**/entries/*/*") if path.is_file())


def flip(path: Path, draw: random.Random) -> None:
    """Damage a few bytes in the middle."""
    with path.open("r+b") as file:
        file.seek(draw.randrange(max(1, path.stat().st_size - 8)))
        file.write(draw.randbytes(8))


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(max(1, path.stat().st_size)))


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def swap(path: Path, draw: random.Random) -> None:
    """Put another entry in its place."""
    other = draw.choice(sorted(path.parent.parent.glob("*/*")))
    if other != path:
        shutil.copyfile(other, path)


def harm_entries(*harms: Callable[[Path, random.Random], None]) -> Callable[[Stage], None]:
    """Damage entries of the cache, some every 20 ms, for as long as the job runs."""

    def inject(stage: Stage) -> None:
        stage.run.wait_for(10)
        stage.mark()
        draw = random.Random(stage.seed)
        pause = threading.Event()
        while stage.run.process.poll() is None:
            harm_some(stage.folder / "cache", draw, harms)
            pause.wait(0.02)

    return inject


def harm_some(folder: Path, draw: random.Random, harms: Sequence[Callable[[Path, random.Random], None]]) -> None:
    found = entries(folder)
    for path in draw.sample(found, min(2, len(found))):
        with suppress(OSError, IndexError):  # the job may have replaced it
            draw.choice(harms)(path, draw)


def delete_folder(stage: Stage) -> None:
    stage.run.wait_for(60)
    stage.mark()
    shutil.rmtree(stage.folder / "cache", ignore_errors=True)


def start_second(stage: Stage) -> None:
    """A second job on the same cache, and a third one's entries deleted under both."""
    stage.start_beside("second", loader={"cache_dir": str(stage.folder / "cache")})
    harm_entries(delete)(stage)


def start_other_user(stage: Stage) -> None:
    """A job of another user on the same cache folder."""
    (stage.folder / "cache").chmod(0o777)
    for folder in (stage.folder, stage.folder.parent):
        folder.chmod(0o755)
    stage.start_beside("other-user", user=_NOBODY, loader={"cache_dir": str(stage.folder / "cache")})


def jump(seconds: float) -> Callable[[Stage], Mapping[str, Any]]:
    return lambda stage: {**cached(stage), "clock_jump_s": seconds}


def in_small_cgroup(stage: Stage) -> Mapping[str, Any]:
    """A cgroup of version 1 with a memory limit, which the loader has to find by itself, and more data than fit."""
    stage.url = f"{stage.url}-large"
    put_data(stage.url, stage.direct, size=LARGE_SAMPLE_BYTES, shard_bytes=4_000_000)
    group = _MEMCG / f"penstock-faults-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
    stage.at_end(group.rmdir)
    return {
        "prefix": ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"],
        "loader": {"memory_limit": "auto"},
        "sample_bytes": LARGE_SAMPLE_BYTES,
    }


def needs_root() -> str:
    return "" if os.geteuid() == 0 and shutil.which("mount") else "needs root, to mount a small disk"


def needs_cgroup() -> str:
    if not (_MEMCG / "memory.limit_in_bytes").exists() or not os.access(_MEMCG, os.W_OK):
        return "needs root and cgroups of version 1, to limit memory"
    return ""


def _cache_case(name: str, fault: str, inject: Callable[[Stage], None], **more: Any) -> Case:
    given: dict[str, Any] = {
        "prepare": cached,
        "job": _CACHED,
        "usual": "none-cached",
    }
    return Case(**({"group": "node"} | given | more | {"name": name, "fault": fault, "inject": inject}))


DISK_CASES: list[Case] = [
    _cache_case("none-cached", "none, with a cache", nothing, group="none"),
    _cache_case("disk-full", "the cache's disk has 6 MB for 26 MB of data", nothing, prepare=on_own_disk("6m"),
                sees="a warning; the rest is not cached", skip=needs_root),
    _cache_case("cache-read-only", "the cache's disk becomes read-only", make_read_only,
                prepare=on_own_disk("64m"), skip=needs_root,
                sees="a warning; the cache is only read"),
    _cache_case("cache-corrupted", "bytes of cache entries change", harm_entries(flip),
                sees=_DAMAGED),
    _cache_case("cache-truncated", "cache entries are cut", harm_entries(truncate),
                sees=_DAMAGED),
    _cache_case("cache-deleted", "cache entries are deleted", harm_entries(delete)),
    _cache_case("cache-swapped", "cache entries are swapped", harm_entries(swap),
                sees=_DAMAGED),
    _cache_case("cache-gone", "the whole cache folder is deleted", delete_folder,
                sees="a warning"),
    _cache_case("two-jobs", "two jobs on one cache whose entries are deleted", start_second),
    _cache_case("two-users", "another user's job on the same cache folder", start_other_user,
                sees="each has its own part", skip=needs_root),
    _cache_case("clock-forth", "Python's clock jumps an hour forward", nothing, prepare=jump(3600.0)),
    _cache_case("clock-back", "Python's clock jumps an hour back", nothing, prepare=jump(-3600.0)),
    Case(name="small-cgroup", group="node", fault=f"a cgroup of {MEMORY_BYTES >> 20} MiB for 390 MB of data, Python "
         "and torch; `memory_limit=\"auto\"`", sees="it reads less ahead", prepare=in_small_cgroup,
         inject=nothing, skip=needs_cgroup),
]  # fmt: skip
