"""Requests to a run that goes on: other numbers of workers and shards. A small file each way, in its output_dir."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ....storage.files import write_whole
from .rank_status import FOLDER

_REQUEST, _ANSWER = "scale.json", "scaled.json"

Progress = Literal["begun", "done", "refused"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Numbers of workers and shards that are asked for; None: as it is."""

    id: str
    workers: int | None = None
    shards: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a run to the request of this id: the numbers that it has, or is to have, or why it refuses."""

    id: str
    progress: Progress
    workers: int = 0
    shards: int = 0
    reason: str = ""


def ask_to_scale(folder: Path, *, workers: int | None, shards: int | None) -> Wanted:
    """Ask the run in a folder for other numbers; in place of what was asked before.

    Raises:
        OSError: the request cannot be written.
    """
    wanted = Wanted(id=secrets.token_hex(8), workers=workers, shards=shards)
    _write(folder, _REQUEST, asdict(wanted))
    return wanted


def open_to_requests(folder: Path) -> None:
    """Begin to take requests, without those to a run before in this folder. A disk that fails stops nothing."""
    with suppress(OSError):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    withdraw_request(folder)


def read_request(folder: Path) -> Wanted | None:
    """Read what is asked of a run; None if nothing is."""
    found = _read(folder, _REQUEST)
    return None if found is None else Wanted(**found)


def withdraw_request(folder: Path) -> None:
    """Ask for nothing any more."""
    with suppress(OSError):
        (folder / FOLDER / _REQUEST).unlink(missing_ok=True)


def answer_request(folder: Path, answer: Answer) -> None:
    """Answer a request; one that is done or refused is gone. A disk that fails stops nothing."""
    with suppress(OSError):
        _write(folder, _ANSWER, asdict(answer))
    found = read_request(folder)
    if answer.progress != "begun" and found is not None and found.id == answer.id:
        withdraw_request(folder)


def read_answer(folder: Path, wanted: Wanted) -> Answer | None:
    """Read a run's answer to a request; None before there is one."""
    found = _read(folder, _ANSWER)
    return Answer(**found) if found is not None and found.get("id") == wanted.id else None


def choose_names(held: Collection[str], count: int, form: str) -> tuple[list[str], list[str]]:
    """Choose which names to add to those that are held, or to give up, to have ``count``; ``form`` takes an index.

    The lowest free ones come, and the highest go.
    """
    mine = sorted(held, key=lambda name: (len(name), name))
    free = (name for index in range(len(mine) + count) if (name := form.format(index)) not in held)
    added = [next(free) for _ in range(max(0, count - len(mine)))]
    return added, mine[count:]


def _write(folder: Path, name: str, values: dict[str, Any]) -> None:
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / name, json.dumps(values).encode())


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / FOLDER / name).read_bytes())
    except (OSError, ValueError):
        return None
    return found
