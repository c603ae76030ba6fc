"""Status of a run over a parameter server: its shards and workers, in one small file. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from ....storage.files import write_whole
from .rank_status import FOLDER

NAME = "servers.json"
VERSION = 1

State = Literal["starting", "training", "ended", "stopped", "failed"]
FINAL: tuple[State, ...] = ("ended", "stopped", "failed")
Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
    """One shard: what it holds, the newest version of a bucket, requests and bytes since it started, and its starts.

    ``share`` is that of all buckets, which follows from ``weight``; ``mb_per_s`` is how fast calls of workers are.
    """

    name: str
    pid: int = 0
    is_answering: bool = True
    version: int = 0
    values: int = 0
    rows: int = 0
    requests: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    starts: int = 1
    share: float = 0.0
    weight: float = 1.0
    mb_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker: its clock, how many steps the fastest is ahead of it, and whom it waits for.

    ``starts`` are its incarnations; ``leases`` the ranges of batches that it has; ``numbers`` what it told of itself.
    """

    name: str
    pid: int = 0
    clock: int | None = None
    behind: int = 0
    waits_for: Sequence[str] = ()
    starts: int = 1
    leases: int = 0
    silent_s: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServersStatus:
    """A run over a parameter server at ``time``."""

    time: float
    every_s: float
    state: State = "starting"
    error: str = ""
    policy: str = ""
    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    batches: int = 0
    total_batches: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_step: int | None = None
    coordinator_pid: int = 0
    shards: Sequence[ShardStatus] = ()
    workers: Sequence[WorkerStatus] = ()


def write_servers(folder: Path, status: ServersStatus) -> None:
    """Write the status of a run into its output_dir.

    Raises:
        OSError: it cannot be written.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / NAME, json.dumps({"version": VERSION, **asdict(status)}).encode())


def read_servers(folder: Path) -> ServersStatus | None:
    """Read the status of a run from its output_dir; None if it has none that this release reads."""
    try:
        found = json.loads((folder / FOLDER / NAME).read_bytes())
        if found.pop("version", None) != VERSION:
            return None
        shards = [_make(ShardStatus, one) for one in found.pop("shards")]
        workers = [_make(WorkerStatus, one) for one in found.pop("workers")]
        return _make(ServersStatus, {**found, "shards": shards, "workers": workers})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _make(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})
