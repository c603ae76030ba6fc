"""Comparison of contenders, which alternate round by round: their order, and the results to keep."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...loader.dataset.index import open_manifest
from ...loader.dataset.manifest import Manifest
from ...loader.errors import ConfigError
from ...loader.limits import usable_cores
from ..contenders import OURS
from ..machine import describe_machine, list_versions
from .config import BenchConfig
from .job import Job, Measurement
from .layout import Layout, find_layout
from .ratios import summarize
from .subprocesses import MeasurementError, in_short, run_job

Say = Callable[[str], None]


def bench(config: BenchConfig, *, command: Sequence[str] = (), say: Say = lambda text: None) -> dict[str, Any]:
    """Measure as configured. Returns the result as JSON-serialisable data.

    A peer that is not installed, or cannot take the data, or does not deliver every sample exactly once, is not
    measured; the result says why.

    Raises:
        ConfigError, DatasetError, StorageError: the data set or an argument cannot work.
        MeasurementError: our own loader failed.
    """
    options = dict(config.storage_options)
    manifest = open_manifest(config.source, storage_options=options or None, format=config.format)
    if config.epochs == 1 and manifest.num_samples <= config.batch_size:
        raise ConfigError(
            f"the {manifest.num_samples:,} samples of {manifest.url} make one batch of {config.batch_size}, and rates "
            "are measured after the first; give a smaller --batch-size, or more --epochs"
        )
    layout = find_layout(manifest, config.format, options or None)
    ours = Job(
        contender=OURS,
        url=config.source,
        num_samples=manifest.num_samples,
        scratch="",
        storage_options=options,
        format=None if config.format is None else config.format.name,
        format_config={} if config.format is None else dict(config.format.config()),
        batch_size=config.batch_size,
        decode=config.decode,
        peer_decode=config.peer_decode,
        workers=config.workers or usable_cores(),
        epochs=config.epochs,
        seconds=config.seconds,
        step_ms=config.step_ms,
        cache_dir=config.cache_dir,
        fields=layout,
    )
    jobs = {OURS: ours if config.workers else replace(ours, workers=0)}  # which leaves it to the loader
    refused: dict[str, str] = {}
    if config.against:
        from .prepare import prepare_peers

        prepared, refused = prepare_peers(config, manifest, layout, ours, say)
        jobs |= prepared
    limit_s = config.timeout_s + (config.seconds or 0.0)
    runs = _run_rounds(jobs, config.rounds, startup=config.startup, timeout_s=limit_s, say=say, refused=refused)
    contenders = {
        name: {kind: [asdict(run) for run in done] for kind, done in kinds.items()} for name, kinds in runs.items()
    }
    return {
        "command": " ".join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
        "data": _describe_data(manifest, layout),
        "settings": _describe_settings(config),
        "contenders": contenders,
        "refused": refused,
        "summary": summarize(runs),
    }


def _run_rounds(
    jobs: Mapping[str, Job], rounds: int, *, startup: bool, timeout_s: float, say: Say, refused: dict[str, str]
) -> dict[str, dict[str, list[Measurement]]]:
    """A B C A B C ...: each contender's epoch, then its first batch, from fresh and from the middle of an epoch.

    A peer that fails or takes longer than ``timeout_s`` is not measured, and one that cannot go on from its own state
    in another process is not resumed again; ``refused`` says why.
    """
    runs: dict[str, dict[str, list[Measurement]]] = {name: {"epoch": [], "fresh": [], "resumed": []} for name in jobs}
    for number in range(1, rounds + 1):
        for name in list(runs):
            say(f"round {number} of {rounds}: {name}")
            try:
                _run_round(jobs[name], runs[name], startup=startup, timeout_s=timeout_s, refused=refused)
            except MeasurementError as exc:
                if name == OURS:
                    raise
                refused[name] = f"failed in round {number} of {rounds}: {in_short(str(exc))}"
                del runs[name]
    return runs


def _run_round(
    job: Job, done: dict[str, list[Measurement]], *, startup: bool, timeout_s: float, refused: dict[str, str]
) -> None:
    """A contender's turn: its results are added to those that are ``done``. Raises MeasurementError."""
    run = run_job(job, timeout_s=timeout_s)
    done["epoch"].append(replace(run, state=None))
    if not startup:
        return
    done["fresh"].append(run_job(replace(job, mode="first-batch"), timeout_s=timeout_s))
    if run.state is None or (resume := f"{job.contender}, resume") in refused:
        return
    try:
        done["resumed"].append(run_job(replace(job, mode="first-batch", state=run.state), timeout_s=timeout_s))
    except MeasurementError as exc:
        if job.contender == OURS:
            raise
        refused[resume] = str(exc).strip().splitlines()[-1]


def _describe_data(manifest: Manifest, layout: Layout) -> dict[str, Any]:
    return {
        "url": manifest.url,
        "format": manifest.format,
        "samples": manifest.num_samples,
        "bytes": manifest.num_bytes,
        "shards": len(manifest.shards),
        "chunks": manifest.num_chunks,
        "fingerprint": manifest.fingerprint,
        "fields": layout,
    }


def _describe_settings(config: BenchConfig) -> dict[str, Any]:
    names = (
        "batch_size",
        "decode",
        "peer_decode",
        "workers",
        "epochs",
        "seconds",
        "rounds",
        "step_ms",
        "cache_dir",
        "against",
        "peer_layout",
    )
    return {name: getattr(config, name) for name in names}
