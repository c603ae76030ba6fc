"""Preparing peers: convert the data set to their format, check what they deliver, and find their best settings."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...loader import DistributedDataLoader
from ...loader.dataset.cache import cache_home
from ...loader.dataset.manifest import Manifest
from ...loader.errors import ConfigError
from ...storage import NotFoundError, Store, open_store
from ...storage.files import write_whole
from ..peers.catalogue import find_peer
from ..peers.environments import PeerUnavailableError, python_here, python_of
from ..stores.s3 import is_s3
from .config import BenchConfig
from .job import Job, Measurement
from .layout import Layout, image_fields
from .subprocesses import MeasurementError, in_short, run_job, run_module

_MARKER = "penstock-conversion.json"
_VERSION = 3
_CONVERSION_TIMEOUT_S = 4 * 3600.0
_CHECK_TIMEOUT_S = 3600.0  # a whole pass, once a copy; of a slow peer on a busy machine, too
_MOST_SHARD_BYTES, _LEAST_SHARD_BYTES = 64 << 20, 1 << 18
_checking_one = threading.Lock()  # peers are prepared at the same time
_SHARDS = 16  # at least, if they are not too small: workers read whole shards


def prepare_peers(
    config: BenchConfig, manifest: Manifest, layout: Layout, ours: Job, say: Callable[[str], None]
) -> tuple[dict[str, Job], dict[str, str]]:
    """The jobs of the peers that can be measured, and why the others cannot."""
    ours = settle_decoder(config, manifest, layout, ours)
    say("penstock: checking that every sample is delivered")
    truth = check_ours(ours)
    jobs: dict[str, Job] = {}
    refused: dict[str, str] = {}
    for name in config.against:
        try:
            job = prepare_peer(name, config, manifest, ours, truth, say)
            jobs[name] = job if config.workers is not None else choose_workers(job, config.trial_s, say)
        except (ConfigError, MeasurementError, PeerUnavailableError) as exc:
            refused[name] = in_short(str(exc))
    return jobs, refused


def prepare_peer(
    name: str,
    config: BenchConfig,
    manifest: Manifest,
    ours: Job,
    truth: Measurement,
    say: Callable[[str], None],
    *,
    checked: Path | None = None,
) -> Job:
    """A peer's job, in its environment and on its own copy of the data, which it delivers as ``truth`` says.

    ``checked`` is a file that remembers which copies were found to be right.

    Raises:
        PeerUnavailableError: its environment cannot be made.
        ConfigError, MeasurementError: it cannot take the data, or does not deliver each sample exactly once.
    """
    peer = find_peer(name)
    python = python_of(peer, say=say) if config.environments == "own" else python_here(peer)
    say(f"{name}: converting the data set")
    job = _convert(replace(ours, contender=name, python=python), config, manifest)
    say(f"{name}: checking that every sample is delivered")
    check_delivery(job, truth, checked=checked)
    return job


def check_delivery(job: Job, truth: Measurement, *, checked: Path | None = None) -> None:
    """One pass of a contender has to deliver what ``truth`` says; not done again for what ``checked`` remembers.

    Raises:
        MeasurementError: it fails, or delivers something else.
    """
    key = f"{job.contender} {job.url} {truth.checksum} {job.python}"
    if checked is not None and key in _read_list(checked):
        return
    check = run_job(_checking(job), timeout_s=_CHECK_TIMEOUT_S)
    if (check.samples, check.checksum) != (truth.samples, truth.checksum):
        raise MeasurementError(
            f"one epoch delivered {check.samples} samples of {truth.samples}, with checksum "
            f"{check.checksum} instead of {truth.checksum}"
        )
    if checked is not None:
        with _checking_one:
            write_whole(checked, json.dumps([*_read_list(checked), key], indent=1).encode())


def _read_list(path: Path) -> list[str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def check_ours(ours: Job) -> Measurement:
    """Read one pass with our loader for the samples and the checksum that every contender must deliver."""
    return run_job(_checking(ours))


def _checking(job: Job) -> Job:
    return replace(job, mode="check", decode="none", epochs=1, seconds=None, step_ms=0.0)


def settle_decoder(config: BenchConfig, manifest: Manifest, layout: Layout, ours: Job) -> Job:
    """The job with the image decoder of the peers chosen, where there are images to decode."""
    if config.decode == "none" or not any(field.get("image") for field in layout.values()):
        return ours
    if config.peer_decode != "auto":
        return replace(ours, peer_decode=config.peer_decode)
    from .peer_decode import fastest_image_function

    with DistributedDataLoader(
        manifest,
        batch_size=min(48, manifest.num_samples),
        decode=None,
        storage_options=dict(config.storage_options) or None,
        rank=0,
        world_size=1,
    ) as loader:
        images = [image for image in next(iter(loader))[image_fields(layout)[0]] if image is not None]
    what = "random-224" if config.decode == "224" else "full"
    return replace(ours, peer_decode=fastest_image_function(images, what))


def choose_workers(job: Job, trial_s: float, say: Callable[[str], None], *, timeout_s: float = 3600.0) -> Job:
    """The job with the number of worker processes that makes a pass shortest: none, one per core, or two per core.

    Two per core are tried where one per core is better than none. A number that fails, or takes too long, is not it.

    Raises:
        MeasurementError: they all did.
    """
    if not find_peer(job.contender).has_workers:
        return job
    took: dict[int, float] = {}
    failed: MeasurementError | None = None
    for workers in (0, job.workers, 2 * job.workers):
        if workers > job.workers and took.get(0, math.inf) < took.get(job.workers, math.inf):
            break
        say(f"{job.contender}: trying {workers} workers")
        trial = replace(job, workers=workers, epochs=None, seconds=trial_s, step_ms=0.0)
        try:
            took[workers] = whole_pass_s(run_job(trial, timeout_s=timeout_s), job.num_samples)
        except MeasurementError as exc:
            failed = failed or exc
    if failed is not None and not took:
        raise failed
    return replace(job, workers=min(took, key=lambda workers: took[workers]))


def whole_pass_s(run: Measurement, num_samples: int) -> float:
    """Seconds of a pass over all data, extrapolated from the start and the rate of a run over some of it."""
    if run.passes and run.passes[0].complete:
        return run.passes[0].stop_s
    return run.first_batch_s + (num_samples / run.samples_per_s if run.samples_per_s else float("inf"))


def _convert(job: Job, config: BenchConfig, manifest: Manifest) -> Job:
    """The job on the peer's own copy of the data, which is made if it does not exist."""
    if job.contender == "webdataset" and manifest.format == "tar" and _is_plain_tar(manifest):
        shape = {"keys": [info.key for info in manifest.shards], "rows": None}
        return replace(job, url=_local(manifest.url), shape=shape, format=None)
    place = _conversions(config.conversions, manifest).rstrip("/")
    root = f"{place}/{manifest.fingerprint[:16]}/{job.contender}-{config.peer_layout}/"
    options = job.storage_options if is_s3(root) else {}
    store = open_store(root, storage_options=options or None)
    try:
        made = _read_marker(store)
        if made is None:
            made = _make(job, config, store, root, manifest)
    finally:
        store.close()
    return replace(job, url=root.rstrip("/"), shape=made["shape"], fields=made["fields"], storage_options=options)


def _is_plain_tar(manifest: Manifest) -> bool:
    return all(info.key.endswith(".tar") for info in manifest.shards)


def _local(url: str) -> str:
    return url.removeprefix("file://").rstrip("/")


def _conversions(given: str | None, manifest: Manifest) -> str:
    if given is not None:
        return given if "://" in given else str(Path(given).absolute())
    if is_s3(manifest.url):
        parts = urlsplit(manifest.url)
        if not parts.path.strip("/"):
            raise ConfigError(
                f"{manifest.url} is a whole bucket; choose a place for the peers' copies with --conversions"
            )
        return manifest.url.rstrip("/") + ".bench"
    return str(cache_home() / "bench")


def _read_marker(store: Store) -> dict[str, Any] | None:
    try:
        made = json.loads(bytes(store.get(_MARKER)))
    except NotFoundError:
        return None
    return made if made.get("version") == _VERSION else None


def _make(job: Job, config: BenchConfig, store: Store, root: str, manifest: Manifest) -> dict[str, Any]:
    """Convert in a folder on the local disk, put the result in its place, and write the marker last."""
    shard_bytes = max(_LEAST_SHARD_BYTES, min(_MOST_SHARD_BYTES, int(manifest.memory.sum()) // _SHARDS))
    remote = "://" in root
    if not remote:
        shutil.rmtree(root, ignore_errors=True)
        Path(root).mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        folder = Path(scratch) if remote else Path(root)
        message = {
            "job": asdict(job),
            "folder": str(folder),
            "shard_bytes": shard_bytes,
            "layout": config.peer_layout,
        }
        what = f"converting for {job.contender}"
        made, _ = run_module(
            "penstock.benchmarks.harness.convert",
            json.dumps(message),
            what,
            timeout_s=_CONVERSION_TIMEOUT_S,
            python=job.python,
        )
        if remote:
            files = [path for path in folder.rglob("*") if path.is_file()]
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda path: store.put(str(path.relative_to(folder)), path.read_bytes()), files))
    made["version"] = _VERSION
    store.put(_MARKER, json.dumps(made).encode())
    return made
