"""Runs the cells one after another and keeps each result at once, so that a run that was ended can go on."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...loader.dataset.index import open_manifest
from ...loader.dataset.manifest import Manifest
from ...loader.limits import usable_cores
from ...storage.errors import PenstockError
from ...storage.files import write_whole
from ..config import BenchConfig
from ..contenders import LIMIT, OURS
from ..datasets import CASES, Case, make_case
from ..job import Job, Measurement
from ..layout import find_layout
from ..machine import describe_machine, list_versions
from ..peers.catalogue import PEERS
from ..peers.environments import clean
from ..prepare import check_ours, choose_workers, in_short, prepare_peer, settle_decoder
from ..subprocesses import run_job
from .cells import Cell, FieldConfig, StoreName, cells_of, same_measurement
from .places import Places
from .summary import describe, figures_of, summarise

VERSION = 1
_PREPARED_AT_ONCE = 3


class Told(Protocol):
    """Who hears how far it is."""

    def say(self, text: str) -> None: ...

    def done(self, cell: Cell, result: Mapping[str, Any]) -> None: ...


@dataclass
class _Workload:
    """A workload that is ready to be measured: jobs on the local disk, and why some contenders have none."""

    case: Case
    folder: Path
    manifest: Manifest
    jobs: dict[str, Job] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def run_field(config: FieldConfig, *, data: Path, report: Path, command: str, told: Told) -> dict[str, Any]:
    """Measure all cells that ``report`` does not have yet, and write each to it. Returns the whole report.

    A peer that cannot be measured is in its cell's ``refused`` with the reason, and so are all of a store that does not
    answer; the others go on.

    Raises:
        ConfigError, StorageError: the data sets cannot be made here.
        OSError: the report cannot be written.
    """
    found = load_report(report, config) or new_report(config, command)
    have = {(cell["workload"], cell["store"], cell["ranks"]) for cell in found["cells"]}
    missing = [cell for cell in cells_of(config) if (cell.workload, cell.store, cell.ranks) not in have]
    report.parent.mkdir(parents=True, exist_ok=True)
    with Places(config.delay_ms, told.say) as places:
        for name in dict.fromkeys(cell.workload for cell in missing):
            work = _prepare(CASES[name], config, data, told)
            cells = [cell for cell in missing if cell.workload == name]
            for cell, result in _run_workload(work, cells, config, data, places, told):
                found["cells"].append(result)
                _save(found, report)
                told.done(cell, result)
    return found


def new_report(config: FieldConfig, command: str) -> dict[str, Any]:
    advice = {
        name: {"advice": peer.advice, "source": peer.source, "setup": peer.setup}
        for name, peer in PEERS.items()
        if name in config.against
    }
    return {
        "version": VERSION,
        "command": command,
        "date": _now(),
        "machine": describe_machine(),
        "versions": list_versions(),
        "settings": config.to_dict(),
        "peers": advice,
        "cells": [],
    }


def load_report(report: Path, config: FieldConfig) -> dict[str, Any] | None:
    """An earlier report that this run can go on with: of the same settings, machine and version; else None."""
    try:
        found = json.loads(report.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return None
    same = same_measurement(found.get("settings", {}), config)
    machine = describe_machine()
    return found if same and all(found["machine"].get(name) == machine[name] for name in ("cpu", "cores")) else None


def _save(found: dict[str, Any], report: Path) -> None:
    write_whole(report, (json.dumps(found, indent=1) + "\n").encode())


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _prepare(case: Case, config: FieldConfig, data: Path, told: Told) -> _Workload:
    """Make the data set, and each peer's environment and copy of it; a few peers at a time, as nothing is timed."""
    told.say(f"{case.title}: generating the data set")
    folder = make_case(case, data, config.scale)
    manifest = open_manifest(str(folder))
    layout = find_layout(manifest, None, None)
    settings = BenchConfig(
        source=str(folder),
        against=config.against,
        batch_size=case.batch_size,
        decode=case.decode,
        peer_layout=case.peer_layout,
        conversions=str(data / "conversions"),
        environments=config.environments,
        timeout_s=config.timeout_s,
    )
    ours = Job(
        contender=OURS,
        url=str(folder),
        num_samples=manifest.num_samples,
        scratch="",
        batch_size=case.batch_size,
        decode=case.decode,
        workers=usable_cores(),
        epochs=None,
        seconds=config.seconds,
        fields=layout,
        source_format=manifest.format,
    )
    ours = settle_decoder(settings, manifest, layout, ours)
    work = _Workload(case, folder, manifest, {OURS: ours, LIMIT: replace(ours, contender=LIMIT)})
    told.say(f"{case.title}: checking that every sample is delivered")
    truth = check_ours(ours)

    def prepare(name: str) -> Job | str:
        try:
            say = partial(_say_of, told, case)
            job = ours if config.workers is None else replace(ours, workers=config.workers)
            return prepare_peer(name, settings, manifest, job, truth, say, checked=data / "checked.json")
        except (PenstockError, OSError) as exc:
            return clean(in_short(str(exc)))

    with ThreadPoolExecutor(_PREPARED_AT_ONCE) as pool:
        for name, job in zip(config.against, pool.map(prepare, config.against), strict=True):
            if isinstance(job, Job):
                work.jobs[name] = job
            else:
                work.refused[name] = job
    return work


def _say_of(told: Told, case: Case, text: str) -> None:
    told.say(f"{case.title}: {text}")


def _run_workload(
    work: _Workload, cells: Sequence[Cell], config: FieldConfig, data: Path, places: Places, told: Told
) -> Any:
    """Yields (cell, its result). Data is in S3 only while cells read from there: the server may keep it in memory."""
    for cell in (each for each in cells if each.store == "local"):
        yield cell, _run_cell(cell, work, work.jobs, work.refused, config, data, told)
    remote = [each for each in cells if each.store != "local"]
    if not remote:
        return
    try:
        with places.uploaded(work.folder, work.jobs) as jobs:
            lacking = {name: PEERS[name].lacks["s3"] for name in work.jobs if name not in jobs}
            for cell in remote:
                options = places.options_of(cell.store)
                at = {name: replace(job, storage_options=options, epochs=1) for name, job in jobs.items()}
                yield cell, _run_cell(cell, work, at, work.refused | lacking, config, data, told)
                cells = [each for each in cells if each != cell]
    except PenstockError as exc:
        reason = clean(in_short(str(exc)))
        for cell in (each for each in cells if each.store != "local"):
            yield cell, _result(cell, work, config, {}, dict.fromkeys([*work.jobs, *work.refused], reason), {}, [])


def _run_cell(
    cell: Cell,
    work: _Workload,
    jobs: Mapping[str, Job],
    refused: Mapping[str, str],
    config: FieldConfig,
    data: Path,
    told: Told,
) -> dict[str, Any]:
    """Rounds in which the contenders take turns, each round beginning with another."""
    refused, notes, loads = dict(refused), dict[str, str](), list[float]()
    each_has = max(1, usable_cores() // cell.ranks)
    ready: dict[str, Job] = {}
    for name, job in jobs.items():
        job = replace(job, world_size=cell.ranks, workers=each_has)
        try:
            ready[name] = _with_workers(job, cell, config, data, told) if name in PEERS else job
        except PenstockError as exc:
            refused[name] = clean(in_short(str(exc)))
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
    told_of: dict[str, dict[str, Any]] = {}
    for number in range(config.rounds):
        loads.append(os.getloadavg()[0])
        names = [name for name in ready if name not in refused]
        start = number % max(1, len(names))
        for name in names[start:] + names[:start]:
            told.say(f"{cell.name}: round {number + 1} of {config.rounds}, {name}")
            try:
                run = run_job(ready[name], timeout_s=config.timeout_s)
                figures[name].append(figures_of(run) | _resume(ready[name], run, cell, config, notes))
            except PenstockError as exc:
                refused[name] = clean(in_short(str(exc)))
                continue
            told_of[name] = describe(run)
            _note_samples(name, run, ready[name], notes)
    contenders = {
        name: {"summary": summarise(rounds), "rounds": rounds, **told_of[name]}
        for name, rounds in figures.items()
        if rounds and name not in refused
    }
    return _result(cell, work, config, contenders, refused, notes, loads)


def _result(
    cell: Cell,
    work: _Workload,
    config: FieldConfig,
    contenders: Mapping[str, Any],
    refused: Mapping[str, str],
    notes: Mapping[str, str],
    loads: Sequence[float],
) -> dict[str, Any]:
    manifest = work.manifest
    return {
        "workload": cell.workload,
        "title": work.case.title,
        "store": cell.store,
        "ranks": cell.ranks,
        "delay_ms": config.delay_ms if cell.store == "s3-delay" else None,
        "batch_size": work.case.batch_size,
        "date": _now(),
        "data": {
            "samples": manifest.num_samples,
            "bytes": manifest.num_bytes,
            "shards": len(manifest.shards),
            "format": manifest.format,
        },
        "contenders": dict(contenders),
        "refused": dict(refused),
        "notes": dict(notes),
        "loads": list(loads),
    }


def _resume(job: Job, run: Measurement, cell: Cell, config: FieldConfig, notes: dict[str, str]) -> dict[str, float]:
    """Seconds to the first batch, fresh and from the middle of an epoch; nothing where that is not measured."""
    if not config.resume or cell.ranks != 1 or cell.store == "s3-delay" or job.contender == LIMIT:
        return {}
    if run.state is None:
        notes.setdefault(job.contender, "it cannot be resumed inside an epoch")
        return {}
    try:
        fresh = run_job(replace(job, mode="first-batch"), timeout_s=config.timeout_s)
        resumed = run_job(replace(job, mode="first-batch", state=run.state), timeout_s=config.timeout_s)
    except PenstockError as exc:
        notes[job.contender] = f"resume failed: {clean(in_short(str(exc)))}"
        return {}
    return {"fresh_s": fresh.first_batch_s, "resumed_s": resumed.first_batch_s}


def _note_samples(name: str, run: Measurement, job: Job, notes: dict[str, str]) -> None:
    """A whole pass that did not deliver the data set once is told: ranks may drop or repeat samples."""
    first = run.passes[0] if run.passes else None
    if first is not None and first.complete and first.samples != job.num_samples:
        notes[name] = f"a pass delivered {first.samples:,} samples of {job.num_samples:,}"


def _with_workers(job: Job, cell: Cell, config: FieldConfig, data: Path, told: Told) -> Job:
    """The job with its fastest number of workers; what was found once is kept beside the data."""
    if not PEERS[job.contender].has_workers:
        return job
    if config.workers is not None:
        return replace(job, workers=config.workers)
    place = data / "workers.json"
    try:
        known = json.loads(place.read_text())
    except (OSError, ValueError):
        known = {}
    key = f"{cell.name} · {job.contender} · scale {config.scale:g} · {usable_cores()} cores"
    if key not in known:
        trial = choose_workers(
            job, config.trial_s, lambda text: told.say(f"{cell.name}: {text}"), timeout_s=config.timeout_s
        )
        known[key] = trial.workers
        write_whole(place, json.dumps(known, indent=1).encode())
    return replace(job, workers=known[key])


def is_complete(found: Mapping[str, Any], stores: Sequence[StoreName]) -> bool:
    """Whether every cell of these stores measured our own loader."""
    return all(OURS in cell["contenders"] for cell in found["cells"] if cell["store"] in stores)
