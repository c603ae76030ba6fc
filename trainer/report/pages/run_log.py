"""A run as its ``metrics.jsonl`` tells it: attempts, series, events. Reads files that are being written, or damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from ...errors import TrainerError
from ..status.rank_status import OF_OTHERS, find_failed, read_ranks

Point = tuple[int, float | None]  # step, and None for what was not finite
_PHASE = "seconds_"
_TAIL_BYTES = 64 << 10
_STOPPED = "asked to stop: "
_OF_WATCHDOG = "training stops: "


@dataclass(kw_only=True)
class Attempt:
    """From one start of the ranks, or one rewind, to the next: its records, in order."""

    records: list[Mapping[str, Any]] = field(default_factory=list)
    ranks: Mapping[str, Any] = field(default_factory=dict)
    """What was recorded as the ranks started, where a rewind began this."""
    repeated_from: float = float("inf")
    """Steps after this one were made again by a later attempt, which resumed from an older checkpoint."""

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def start(self) -> Mapping[str, Any]:
        """Record of the start of training; empty in files of older releases."""
        return next(iter(self.of("start")), self.ranks)

    @property
    def rewind(self) -> Mapping[str, Any] | None:
        """The record of the rewind that began this; None where the ranks started."""
        return self.records[0] if self.records[0]["kind"] == "rewind" else None

    @property
    def first_step(self) -> int:
        """The step that it went on from."""
        begun = [self.rewind] if self.rewind is not None else self.of("resume") or self.of("start") or self.records
        return _step_after(begun[0])

    @property
    def last_step(self) -> int:
        return max(_step_after(record) for record in self.records)

    @property
    def world_size(self) -> int | None:
        ranks = self.start.get("world_size")
        return ranks if isinstance(ranks, int) else None

    @property
    def began_s(self) -> float:
        return float(self.records[0]["time"])

    @property
    def ended_s(self) -> float:
        return float(self.records[-1]["time"])

    @property
    def end(self) -> Mapping[str, Any] | None:
        return next(iter(self.of("end")), None)

    @property
    def stopped_by(self) -> str:
        """The signal that ended it before its end; empty where none did."""
        if self.end is None:
            return ""
        before = any(str(one.get("note")).startswith(_STOPPED) for one in self.of("note"))  # in files of older releases
        return str(self.end.get("stopped_by") or ("a signal" if before else ""))

    @property
    def error(self) -> str:
        """Error that ended the attempt; empty if none was recorded."""
        return str(next(iter(self.of("failure")), {}).get("error", ""))

    def series(self, name: str, kind: str = "train") -> list[Point]:
        """The values of one name by step; nothing for records without it."""
        return [(record["step"], _number(record[name])) for record in self.of(kind) if name in record]


@dataclass(kw_only=True)
class RunLog:
    """All attempts of a run in order, and the rest of its folder's records."""

    path: Path
    attempts: Sequence[Attempt]
    damaged_lines: int
    stalls: Sequence[str]
    """The first lines of the watchdogs' reports."""
    error: str = ""
    """What ended the last attempt, by its records, its ranks' statuses or its watchdogs; empty where nothing tells."""

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for attempt in self.attempts for record in attempt.of(kind)]

    def names(self, kind: str = "train") -> list[str]:
        """The names of all numbers in records of one kind, in order of appearance."""
        found: dict[str, None] = {}
        for record in self.of(kind):
            for name, value in record.items():
                if name not in ("kind", "step", "time") and isinstance(value, (int, float)):
                    found[name] = None
        return list(found)

    @property
    def last_step(self) -> int:
        return self.attempts[-1].last_step if self.attempts else 0

    @property
    def epochs_done(self) -> int | None:
        """As the newest record tells; None where that is an end in a file of an older release."""
        telling = [one for attempt in self.attempts for one in attempt.records if one["kind"] in ("train", "end")]
        found = telling[-1].get("epoch") if telling else None
        return found if isinstance(found, int) else None

    def phase_seconds(self) -> dict[str, float]:
        """Rank 0's seconds by phase over all attempts, the longest first; what no phase covers is "other"."""
        totals: dict[str, float] = {}
        whole = 0.0
        for record in self.of("train"):
            whole += _number(record.get("seconds")) or 0.0
            for name, spent in phases_of(record).items():
                totals[name] = totals.get(name, 0.0) + spent
        for record in self._after_the_last_steps():
            spent = _number(record.get("seconds")) or 0.0
            whole += spent
            totals[record["kind"]] = totals.get(record["kind"], 0.0) + spent
        if totals:
            totals["other"] = max(0.0, whole - sum(totals.values()))
        return {name: spent for name, spent in sorted(totals.items(), key=lambda item: -item[1]) if spent > 0}

    def _after_the_last_steps(self) -> Iterator[Mapping[str, Any]]:
        """Saves whose seconds no train record has: the last one, which training waits for as it ends."""
        for attempt in self.attempts:
            if attempt.end is None:
                continue  # training went on, or back, and the next train record has them
            after = takewhile(lambda record: record["kind"] != "train", reversed(attempt.records))
            yield from (record for record in after if record["kind"] == "checkpoint")


def phases_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase of one train record."""
    found = {name: _number(value) for name, value in record.items() if name.startswith(_PHASE)}
    return {name.removeprefix(_PHASE).replace("_", " "): spent for name, spent in found.items() if spent is not None}


def find_log(run: Path) -> Path:
    """The ``metrics.jsonl`` of a run, which is given by its folder or by that file.

    Raises:
        TrainerError: there is none.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        what = "holds no metrics.jsonl" if run.is_dir() else "is no folder or file"
        raise TrainerError(f"{run} {what}; give the output_dir of a run, or its metrics.jsonl")
    if path.name != "metrics.jsonl" and not _has_records(path):
        raise TrainerError(f"{run} holds no records of a run; give the output_dir of a run, or its metrics.jsonl")
    return path


def _has_records(path: Path) -> bool:
    """Return whether a file with another name than a run's has a record among its first lines."""
    try:
        with path.open("rb") as file:
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return True  # whoever reads it says why it cannot be read
    return any(_parse(line) is not None for line in lines)


def read_run(path: Path) -> RunLog:
    """Read a run's records; lines that are no records are counted.

    Raises:
        TrainerError: the file cannot be read.
    """
    damaged = 0
    attempts: list[Attempt] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for record in map(_parse, file):
                if record is None:
                    damaged += 1
                    continue
                if not attempts:
                    attempts.append(Attempt())
                elif record["kind"] == "rewind":
                    attempts.append(Attempt(ranks=attempts[-1].start))
                elif _begins_anew(attempts[-1], record):
                    attempts.append(Attempt(records=_take_first_notes(attempts[-1], record)))
                attempts[-1].records.append(record)
    except OSError as exc:
        raise TrainerError(f"{path} cannot be read ({exc.strerror or exc})") from exc
    again = float("inf")
    for attempt in reversed(attempts):
        attempt.repeated_from = again
        again = min(again, attempt.first_step)
    return RunLog(
        path=path,
        attempts=attempts,
        damaged_lines=damaged,
        stalls=[line for _, line in _read_stalls(path.parent)],
        error=_find_error(attempts, path.parent),
    )


def read_last(path: Path, kind: str) -> Mapping[str, Any] | None:
    """The last record of a kind, if it is among the last 64 KiB of the file; None without one or without the file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    records = map(_parse, reversed(lines))
    return next((record for record in records if record is not None and record["kind"] == kind), None)


def _parse(line: str) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step, at = record.get("step"), record.get("time")
    is_whole = isinstance(step, int) and step >= 0 and _number(at) is not None
    return record if is_whole else None


def _step_after(record: Mapping[str, Any]) -> int:
    """The step that training resumes from."""
    to_step = record.get("to_step") if record["kind"] == "rewind" else None
    return to_step if isinstance(to_step, int) and 0 <= to_step <= record["step"] else int(record["step"])


def _begins_anew(attempt: Attempt, record: Mapping[str, Any]) -> bool:
    if record["kind"] == "resume":
        return True
    if record["kind"] == "start":
        return bool(attempt.of("start") or attempt.of("train"))
    # Files of older releases have neither.
    steps = attempt.of("train")
    return record["kind"] == "train" and bool(steps) and record["step"] <= steps[-1]["step"]


def _take_first_notes(before: Attempt, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The notes that a start of the ranks wrote before ``record``: those after the longest pause are its own."""
    count = len(list(takewhile(lambda one: one["kind"] == "note", reversed(before.records[1:]))))
    times = [one["time"] for one in (*before.records[-count - 1 :], record)]
    pauses = [after - earlier for earlier, after in pairwise(times)]
    first = len(before.records) - count + pauses.index(max(pauses))
    taken = before.records[first:]
    del before.records[first:]
    return taken


def _find_error(attempts: Sequence[Attempt], folder: Path) -> str:
    """Find the error that ended the last attempt. A rank that is killed in a collective records none; others do."""
    began_s = attempts[-1].began_s if attempts else 0.0
    error = attempts[-1].error if attempts else ""
    if not error.startswith(OF_OTHERS) and (error or (attempts and attempts[-1].end is not None)):
        return error
    failed = find_failed(one for one in read_ranks(folder) if one.time >= began_s)
    if failed is not None and not failed.error.startswith(OF_OTHERS):
        return failed.describe_error()
    words = (line.partition(_OF_WATCHDOG)[2] for time_s, line in _read_stalls(folder) if time_s >= began_s)
    return error.removeprefix(OF_OTHERS) or next(filter(None, words), "" if failed is None else failed.error)


def _read_stalls(folder: Path) -> Iterator[tuple[float, str]]:
    """Read the time and the first line of each watchdog's report."""
    for path in sorted((folder / "stalls").glob("stall-rank-*.txt")):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield os.fstat(file.fileno()).st_mtime, file.readline(2000).strip()
        except OSError as exc:
            yield 0.0, f"{path} cannot be read ({exc.strerror or exc})"


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < float("inf") else None
