"""Timelines on request: a file in output_dir asks for one, and every rank answers with a file of its own."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....storage.files import write_whole
from ....storage.observability.timeline import Event, Timeline
from .rank_status import FOLDER

if TYPE_CHECKING:
    from ...stopwatch import Stopwatch
    from .loader_numbers import LoaderNumbers

LONGEST_S = 60.0
_REQUEST = "timeline-request.json"
_LATEST_S = 120.0  # an older request was asked of processes that are gone; clocks of hosts may differ a little


@dataclass(frozen=True, kw_only=True)
class TimelineRequest:
    """Request to every rank: record what its threads do for ``seconds``, and write it under ``name``."""

    name: str
    seconds: float
    asked_s: float

    def part(self, output_dir: Path, rank: int) -> Path:
        return output_dir / FOLDER / f"timeline-{self.name}-rank-{rank:05d}.json"


def ask_for_timeline(output_dir: Path, seconds: float) -> TimelineRequest:
    """Ask the ranks that write into this folder. Raises OSError."""
    request = TimelineRequest(name=secrets.token_hex(4), seconds=seconds, asked_s=time.time())
    text = json.dumps({"name": request.name, "seconds": seconds, "asked_s": request.asked_s})
    write_whole(output_dir / FOLDER / _REQUEST, text.encode())
    return request


def take_parts(output_dir: Path, request: TimelineRequest) -> dict[int, list[Event]]:
    """The events that the ranks have written so far, by rank."""
    found = {}
    for path in (output_dir / FOLDER).glob(f"timeline-{request.name}-rank-*.json"):
        with suppress(OSError, ValueError, RecursionError):
            found[int(path.stem.rpartition("-")[2])] = json.loads(path.read_bytes())
    return found


def withdraw(output_dir: Path, request: TimelineRequest) -> None:
    """Remove the request and all answers to it."""
    current = _read(output_dir)
    paths = list((output_dir / FOLDER).glob(f"timeline-{request.name}-rank-*.json"))
    if current is not None and current.name == request.name:
        paths.append(output_dir / FOLDER / _REQUEST)
    for path in paths:
        with suppress(OSError):
            path.unlink()


class TimelineRecorder:
    """Answers requests on one rank; used by its status thread."""

    def __init__(self, output_dir: Path, rank: int, stopwatch: Stopwatch, loader: LoaderNumbers) -> None:
        self._output_dir, self._rank = output_dir, rank
        self._stopwatch, self._loader = stopwatch, loader
        self._answered = ""
        self._recording: tuple[TimelineRequest, Timeline, float] | None = None

    def left_s(self) -> float:
        """Seconds until the recording ends; infinite where there is none."""
        return float("inf") if self._recording is None else max(0.0, self._recording[2] - time.monotonic())

    def turn(self) -> None:
        """Begin a recording that is asked for, or end one whose time is over."""
        if self._recording is not None:
            if self.left_s() <= 0:
                self.end()
            return
        request = _read(self._output_dir)
        if request is None or request.name == self._answered or time.time() - request.asked_s > _LATEST_S:
            return
        self._answered = request.name
        timeline = Timeline()
        self._recording = (request, timeline, time.monotonic() + min(request.seconds, LONGEST_S))
        self._stopwatch.timeline = timeline
        self._loader.record_timeline(timeline)

    def end(self) -> None:
        """Write what was recorded, if anything is."""
        if self._recording is None:
            return
        (request, timeline, _), self._recording = self._recording, None
        self._stopwatch.timeline = None
        self._loader.record_timeline(None)
        events = timeline.events(f"rank {self._rank}")
        with suppress(OSError):
            write_whole(request.part(self._output_dir, self._rank), json.dumps(events).encode())


def _read(output_dir: Path) -> TimelineRequest | None:
    try:
        found: Any = json.loads((output_dir / FOLDER / _REQUEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping):
        return None
    name, seconds, asked_s = found.get("name"), found.get("seconds"), found.get("asked_s")
    is_sound = isinstance(name, str) and name.isalnum() and len(name) <= 64
    if (
        not is_sound
        or not isinstance(seconds, (int, float))
        or not isinstance(asked_s, (int, float))
        or not seconds > 0
    ):
        return None
    return TimelineRequest(name=str(name), seconds=float(seconds), asked_s=float(asked_s))
