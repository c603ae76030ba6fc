"""Run the cells one after another and keep each result at once, so that a run can be interrupted and resumed."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...loader.errors import ConfigError
from ...loader.limits import usable_cores
from ...storage.errors import PenstockError
from ...storage.files import write_whole
from ..contenders import LIMIT, base_of
from ..datasets import CASES
from ..harness.job import Job, Measurement
from ..harness.subprocesses import in_short, run_job
from ..machine import describe_machine, list_versions
from ..peers.catalogue import PEERS
from ..peers.environments import clean
from .cells import FREE_SETTINGS, Cell, FieldConfig, cells_of, other_settings
from .places import Places
from .settings import forget, settle, with_late_modules
from .summary import describe, figures_of, is_ours, summarise, too_slow
from .workload import Workload, prepare_workload

VERSION = 2
_ELSEWHERE = "give another folder as --results, or --again to measure all anew in its place"


class FieldProgress(Protocol):
    """Listener for the progress of the field."""

    def say(self, text: str) -> None: ...

    def done(self, cell: Cell, result: Mapping[str, Any]) -> None: ...


def run_field(
    config: FieldConfig, *, data: Path, report: Path, command: str, progress: FieldProgress, calibrate: bool = False
) -> dict[str, Any]:
    """Measure all cells that ``report`` does not have yet, and write each to it. Returns the whole report.

    ``calibrate`` forgets what was found out about contenders' best settings before. A peer that cannot be measured is
    in its cell's ``refused`` with the reason, and so are all of a store that does not answer; the others are measured.

    Raises:
        ConfigError, StorageError: the data sets cannot be made here, or ``report`` was measured in another way.
        OSError: the report cannot be written.
    """
    found = load_report(report, config) or new_report(config, command)
    found["cells"] = [cell for cell in found["cells"] if cell["contenders"]]  # of a store that did not answer: again
    have = {(cell["workload"], cell["store"], cell["ranks"]) for cell in found["cells"]}
    missing = [cell for cell in cells_of(config) if (cell.workload, cell.store, cell.ranks) not in have]
    report.parent.mkdir(parents=True, exist_ok=True)
    if missing:
        _note_run(found, config, command)
    if calibrate:
        forget(data)
    with Places(config.delay_ms, progress.say) as places:
        for name in dict.fromkeys(cell.workload for cell in missing):
            work = prepare_workload(CASES[name], config, data, progress.say)
            cells = [cell for cell in missing if cell.workload == name]
            for cell, result in _run_workload(work, cells, config, data, places, progress):
                found["cells"].append(result)
                _save(found, report)
                progress.done(cell, result)
    return found


def new_report(config: FieldConfig, command: str) -> dict[str, Any]:
    advice = {
        name: {"advice": peer.advice, "source": peer.source, "setup": peer.setup, "order": peer.order}
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


def _note_run(found: dict[str, Any], config: FieldConfig, command: str) -> None:
    """Have a report tell all commands that its cells were measured by, and all that they were measured of."""
    commands = dict.fromkeys([*found["command"].split("; "), command])
    found["command"] = "; ".join(commands)
    settings, now = found["settings"], config.to_dict()
    for name in FREE_SETTINGS:
        settings[name] = list(dict.fromkeys([*settings[name], *now[name]]))


def load_report(report: Path, config: FieldConfig) -> dict[str, Any] | None:
    """Earlier report that this run continues; None if there is none.

    Raises:
        ConfigError: what lies there is of other settings, another machine or another version, and is not overwritten.
    """
    try:
        found = json.loads(report.read_text())
        before, machine = found["settings"], found["machine"]
        same_version = found["version"] == VERSION
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{report.name} is no report of penstock bench: {_ELSEWHERE}") from exc
    now = describe_machine()
    if not same_version:
        raise ConfigError(f"{report.name} is of another version of penstock bench: {_ELSEWHERE}")
    if any(machine.get(name) != now[name] for name in ("cpu", "cores")):
        raise ConfigError(
            f"{report.name} was measured on {machine.get('cores')} cores of {machine.get('cpu')}, and this is "
            f"{now['cores']} of {now['cpu']}: {_ELSEWHERE}"
        )
    if other := other_settings(before, config):
        raise ConfigError(f"{report.name} was measured with other settings ({', '.join(other)}): {_ELSEWHERE}")
    return dict(found)


def _save(found: dict[str, Any], report: Path) -> None:
    write_whole(report, (json.dumps(found, indent=1) + "\n").encode())


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _run_workload(
    work: Workload, cells: Sequence[Cell], config: FieldConfig, data: Path, places: Places, progress: FieldProgress
) -> Any:
    """Yields (cell, its result). Data is in S3 only while cells read from there: the server may keep it in memory."""
    for cell in (each for each in cells if each.store == "local"):
        yield cell, _run_cell(cell, work, work.jobs, work.refused, config, data, progress)
    remote = [each for each in cells if each.store != "local"]
    if not remote:
        return
    try:
        with places.uploaded(work.folder, work.jobs) as jobs:
            lacking = {name: PEERS[base_of(name)].lacks["s3"] for name in work.jobs if name not in jobs}
            for cell in remote:
                options = places.options_of(cell.store)
                at = {name: replace(job, storage_options=options, epochs=1) for name, job in jobs.items()}
                yield cell, _run_cell(cell, work, at, work.refused | lacking, config, data, progress)
                cells = [each for each in cells if each != cell]
    except PenstockError as exc:
        reason = clean(in_short(str(exc)))
        for cell in (each for each in cells if each.store != "local"):
            yield cell, _result(cell, work, config, {}, dict.fromkeys([*work.jobs, *work.refused], reason), {}, [])


def _run_cell(
    cell: Cell,
    work: Workload,
    jobs: Mapping[str, Job],
    refused: Mapping[str, str],
    config: FieldConfig,
    data: Path,
    progress: FieldProgress,
) -> dict[str, Any]:
    """Rounds in which the contenders take turns, each round beginning with another."""
    refused, notes, loads = dict(refused), dict[str, str](), list[float]()
    each_has = max(1, usable_cores() // cell.ranks)
    ready: dict[str, Job] = {}
    for name, job in jobs.items():
        # Ours chooses its threads by itself, as it does for its users.
        job = replace(job, world_size=cell.ranks, workers=0 if is_ours(name) else each_has)
        try:
            ready[name] = settle(job, cell, config, data, progress.say)
        except PenstockError as exc:
            refused[name] = clean(in_short(str(exc))).removeprefix(f"{name}: ")
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
    described: dict[str, dict[str, Any]] = {}
    left_out: set[str] = set()
    for number in range(config.rounds):
        loads.append(os.getloadavg()[0])
        if number and config.drop_slower is not None:
            left_out |= _leave_out(figures, number, config.drop_slower, notes)
        names = [name for name in ready if name not in refused and name not in left_out]
        start = number % max(1, len(names))
        for name in names[start:] + names[:start]:
            progress.say(f"{cell.name}: round {number + 1} of {config.rounds}, {name}")
            try:
                run = run_job(ready[name], timeout_s=config.timeout_s)
                again = _resume(ready[name], run, cell, config, notes)
                figures[name].append(figures_of(run, ready[name].num_samples) | again)
            except PenstockError as exc:
                refused[name] = clean(in_short(str(exc))).removeprefix(f"{name}: ")
                continue
            described[name] = describe(run)
            ready[name] = with_late_modules(ready[name], run)
            _note_samples(name, run, ready[name], notes)
    contenders = {
        name: {"summary": summarise(rounds), "rounds": rounds, **described[name]}
        for name, rounds in figures.items()
        if rounds and name not in refused
    }
    return _result(cell, work, config, contenders, refused, notes, loads)


def _result(
    cell: Cell,
    work: Workload,
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
    if not config.resume or cell.ranks != 1 or cell.store in ("s3-delay", "s3-tls") or job.contender == LIMIT:
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


def _leave_out(
    figures: Mapping[str, Sequence[Mapping[str, float]]], number: int, times: float, notes: dict[str, str]
) -> set[str]:
    """Peers that are too slow to be measured again; notes it of those that this is new of."""
    behind = too_slow({name: rounds for name, rounds in figures.items() if len(rounds) == number}, times)
    for name, by in behind.items():
        dropped = (
            f"left out after {number} {'round' if number == 1 else 'rounds'}, {by:.3g}x slower than the fastest peer"
        )
        notes[name] = f"{notes[name]}; {dropped}" if name in notes else dropped
    return set(behind)


def _note_samples(name: str, run: Measurement, job: Job, notes: dict[str, str]) -> None:
    """Note a whole pass that did not deliver the data set exactly once: ranks may drop or repeat samples."""
    first = run.passes[0] if run.passes else None
    if first is None:
        return
    if not first.complete:
        share = first.samples / job.num_samples
        notes[name] = f"{share:.0%} of a pass was read, and a whole one reckoned from its start and its rate"
    elif first.samples != job.num_samples:
        notes[name] = f"a pass delivered {first.samples:,} samples of {job.num_samples:,}"
