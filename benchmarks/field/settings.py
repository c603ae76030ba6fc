"""Settings found out for a contender once, before its rounds, and kept beside the data: workers and imports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...loader.limits import usable_cores
from ...storage.files import write_whole
from ..contenders import base_of
from ..harness.job import Job, Measurement
from ..harness.prepare import choose_workers
from ..harness.subprocesses import run_job
from ..peers.catalogue import PEERS
from .cells import Cell, FieldConfig

WORKERS, MODULES = "workers.json", "modules.json"
_GLANCE_S = 0.2


def settle(job: Job, cell: Cell, config: FieldConfig, data: Path, say: Callable[[str], None]) -> Job:
    """The job as it is measured: with its fastest number of workers, and all that it imports imported beforehand.

    Raises:
        MeasurementError: a trial failed.
    """
    job = _with_modules(job, cell, config, data, say)
    return _with_workers(job, cell, config, data, say) if base_of(job.contender) in PEERS else job


def _with_modules(job: Job, cell: Cell, config: FieldConfig, data: Path, say: Callable[[str], None]) -> Job:
    """Modules that a loader imports as it goes would be timed, and those that it imports at once are not."""
    known = _read(data / MODULES)
    key = f"{cell.workload} · {cell.store} · {job.contender} · {job.python or 'here'}"
    if key not in known:
        say(f"{cell.name}: what {job.contender} imports")
        glance = replace(job, workers=0, world_size=1, epochs=1, seconds=_GLANCE_S)
        known[key] = run_job(glance, timeout_s=config.timeout_s).late_modules
        _write(data / MODULES, known)
    return replace(job, modules=known[key])


def with_late_modules(job: Job, run: Measurement) -> Job:
    """The job for the next round: a loader may import more by now than it did when it was examined."""
    return replace(job, modules=[*job.modules, *run.late_modules]) if run.late_modules else job


def _with_workers(job: Job, cell: Cell, config: FieldConfig, data: Path, say: Callable[[str], None]) -> Job:
    if not PEERS[base_of(job.contender)].has_workers:
        return job
    if config.workers is not None:
        return replace(job, workers=config.workers)
    known = _read(data / WORKERS)
    key = f"{cell.name} · {job.contender} · scale {config.scale:g} · {usable_cores()} cores"
    if key not in known:
        trial = choose_workers(job, config.trial_s, partial(_say_of, say, cell), timeout_s=config.timeout_s)
        known[key] = trial.workers
        _write(data / WORKERS, known)
    return replace(job, workers=known[key])


def _say_of(say: Callable[[str], None], cell: Cell, text: str) -> None:
    say(f"{cell.name}: {text}")


def forget(data: Path) -> None:
    """Find the numbers of workers again, which depend on how busy the machine is."""
    data.joinpath(WORKERS).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, known: dict[str, Any]) -> None:
    write_whole(path, json.dumps(known, indent=1).encode())
