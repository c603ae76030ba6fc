"""Look at this machine: everything that ``MachineFacts`` holds, each by one function that raises nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from email.utils import parsedate_to_datetime
from pathlib import Path

from ...loader.dataset.cache import cache_home
from ...loader.limits import usable_cores, usable_memory
from ...storage.errors import PenstockError
from ...storage.memory.mapped import kind_of_disk
from ...storage.options import configure, is_s3
from ...storage.resolve import open_client
from ...storage.urls import CLOUD_SCHEMES, WEB_SCHEMES, split_root, without_password
from .facts import GpuFacts, Library, MachineFacts, SpaceFacts, StoreFacts

_REQUIREMENT = re.compile(r"([\w.-]+)\s*>=\s*([\d.]+)(?:.*extra == ['\"]([\w-]+)['\"])?")
_PYTHON = "Programming Language :: Python :: "
_IN_MEMORY = ("tmpfs", "ramfs")
_WRITTEN_BYTES = 1 << 20
_OWN_EXTRAS = ("test", "lint", "fuzz")
_CLOCK_PATIENCE_S = 5.0


def examine(
    *,
    url: str | None,
    storage_options: Mapping[str, str] | None,
    timeout_s: float,
    cache_dir: str | None = None,
    ranks_here: int = 1,
) -> MachineFacts:
    """Gather the facts of this machine; with a ``url``, ask that store, for ``timeout_s`` a request at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    address, _ = resource.getrlimit(resource.RLIMIT_AS)
    total, free = read_memory()
    return MachineFacts(
        python=platform.python_version(),
        tested_pythons=read_tested_pythons(),
        libraries=read_libraries(),
        gpus=find_gpus(),
        open_files=_without_infinity(soft),
        open_files_most=_without_infinity(hard),
        address_bytes=None if address == resource.RLIM_INFINITY else address,
        memory_bytes=usable_memory(),
        memory_free=free,
        machine_memory=total,
        cores=usable_cores(),
        machine_cores=os.cpu_count() or 1,
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        shm=measure_space(Path("/dev/shm")),
        tmp=_measure_temporary(),
        cache=_measure_cache(cache_dir),
        ranks_here=ranks_here,
        store=None if url is None else ask_store(url, storage_options or {}, timeout_s=timeout_s),
    )


def read_tested_pythons() -> tuple[str, ...]:
    """The versions of Python, oldest first, that the installed package names as tested."""
    named = importlib.metadata.metadata("penstock").get_all("Classifier") or []
    versions = [line.removeprefix(_PYTHON) for line in named if line.startswith(_PYTHON) and "." in line]
    return tuple(sorted(versions, key=lambda version: tuple(map(int, version.split(".")))))


def read_libraries() -> tuple[Library, ...]:
    """List what the installed package requires and what is there of it; extras of its developers are left out."""
    libraries = []
    for text in importlib.metadata.requires("penstock") or []:
        found = _REQUIREMENT.match(text)
        if found and found[3] not in _OWN_EXTRAS:
            libraries.append(Library(name=found[1], found=_installed(found[1]), least=found[2], extra=found[3] or ""))
    return tuple(libraries)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_gpus() -> GpuFacts:
    """Count NVIDIA's device files, and ask torch; imports torch."""
    present = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))
    try:
        import torch

        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
        return GpuFacts(
            present=present, usable=torch.cuda.device_count(), torch_cuda=torch.version.cuda, is_hidden=hidden
        )
    except Exception as exc:  # noqa: BLE001 - a broken installation fails in many ways
        return GpuFacts(present=present, problem=f"torch cannot be imported: {exc}")


def read_memory() -> tuple[int, int]:
    """The bytes of memory of the machine, and those that are free or can be freed."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE))
    return 1024 * int(fields.get("MemTotal", 0)), 1024 * int(fields.get("MemAvailable", 0))


def measure_space(folder: Path) -> SpaceFacts:
    """The space of a folder, or of the nearest one above it that exists, where a file of 1 MiB is tried."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        space = os.statvfs(there)
        kind = kind_of_disk(there.stat().st_dev)
        problem = _try_to_write(there)
    except OSError as exc:
        return SpaceFacts(path=str(folder), free_bytes=0, total_bytes=0, problem=exc.strerror or str(exc))
    free = space.f_bavail * space.f_frsize
    return SpaceFacts(
        path=str(folder),
        free_bytes=free,
        total_bytes=space.f_blocks * space.f_frsize,
        free_files=space.f_favail if space.f_files else None,
        is_memory=kind in _IN_MEMORY,
        problem=problem if free >= _WRITTEN_BYTES else "",
    )


def _try_to_write(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_WRITTEN_BYTES))
            file.flush()
    except OSError as exc:
        return f"a file of 1 MiB cannot be written ({exc.strerror or exc})"
    return ""


def _measure_temporary() -> SpaceFacts:
    # ``tempfile`` passes over a folder that is full or missing in silence, and takes the next.
    named = next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")
    if not Path(named).is_dir():
        return SpaceFacts(path=named, free_bytes=0, total_bytes=0, problem="there is no such folder")
    return measure_space(Path(named))


def _measure_cache(cache_dir: str | None) -> SpaceFacts:
    try:
        return measure_space(cache_home(cache_dir))
    except FileNotFoundError as exc:
        return SpaceFacts(path="~/.cache/penstock", free_bytes=0, total_bytes=0, problem=str(exc))


def ask_store(url: str, storage_options: Mapping[str, str], *, timeout_s: float) -> StoreFacts:
    """List the first object below a URL, without retries, and compare the clocks."""
    shown = without_password(url)
    scheme = split_root(url)[0] if "://" in url else "file"
    options: dict[str, float | str] = dict(storage_options)
    if scheme in CLOUD_SCHEMES | WEB_SCHEMES:
        options = {"timeout_s": timeout_s, "connect_timeout_s": timeout_s, **storage_options}
    started = time.monotonic()
    try:
        with closing(open_client(url, options or None)) as store:
            next(iter(store.list()), None)
        problem = ""
    except PenstockError as exc:
        problem = str(exc)
    seconds = time.monotonic() - started
    skew_s = compare_clocks(scheme, url, storage_options) if scheme in CLOUD_SCHEMES | WEB_SCHEMES else None
    return StoreFacts(url=shown, seconds=seconds, problem=problem, skew_s=skew_s)


def compare_clocks(scheme: str, url: str, storage_options: Mapping[str, str]) -> float | None:
    """Seconds that a store's clock is ahead of this one, by the Date of its answer, to a second.

    The request is anonymous: an answer that refuses it has a Date, too. None where no server answers, or none is known.
    """
    import urllib3

    server = _server_of(scheme, url, storage_options)
    if server is None:
        return None
    started = time.time()
    try:
        with urllib3.PoolManager(retries=False, timeout=_CLOCK_PATIENCE_S) as pool:
            date = pool.request("HEAD", server).headers.get("date")
        server_s = None if date is None else parsedate_to_datetime(date).timestamp()
    except (urllib3.exceptions.HTTPError, ValueError):
        return None
    return None if server_s is None else server_s + 0.5 - (started + time.time()) / 2


def _server_of(scheme: str, url: str, storage_options: Mapping[str, str]) -> str | None:
    if scheme in WEB_SCHEMES:
        return f"{scheme}://{split_root(url)[1]}"
    try:
        config, _ = configure(scheme, storage_options)
    except PenstockError:
        return None
    if config.get("endpoint"):
        return str(config["endpoint"])
    if is_s3(scheme):
        return f"https://s3.{config.get('region') or 'us-east-1'}.amazonaws.com"
    return "https://storage.googleapis.com" if scheme in ("gs", "gcs") else None


def _without_infinity(limit: int) -> int:
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
