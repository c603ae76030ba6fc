"""Status of a rank while it trains: one small file a rank in ``output_dir/ranks``. Needs no torch."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

FOLDER = "ranks"
VERSION = 1
_NAME = re.compile(r"rank-(\d+)\.json")
_MOST_BYTES = 16 << 20  # a mixture of thousands of sources has some hundred bytes for each
_MOST_RANKS = 1 << 20
OF_OTHERS = "StallError: "  # an error that names the rank that caused it

State = Literal["starting", "training", "idle", "ended", "stopped", "failed"]
FINAL: tuple[State, ...] = ("ended", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank at ``time``; rates and seconds are those of the last ``window_s`` seconds.

    Attributes:
        place, replica_ranks: its place in a mesh where each replica lies on several ranks, and how many these are.
        state: "idle" is between two calls of ``train``; "ended", "stopped" (by a signal) and "failed" are final.
        error: why it failed.
        stopped_by, resumes_at: the signal, and the step at which a new start resumes; None where nothing was saved.
        every_s: how often it writes.
        phase, phase_s: what its training loop does, and for how long already.
        doing: what its loader waits for, where it does.
        steps, seconds: steps that ended in the window, and seconds by phase in it.
        step_s: seconds of a step, from end to end of steps; None before there are two.
        samples_per_s: of this rank alone; None where the loader does not count.
        memory, gpu, traffic: bytes; shares, watts; bytes per second.
        loader, recent: the loader's metrics since it was made, and of the window.
        loader_levels: the names of those that go up and down.
        advice: what the loader would have changed.
    """

    rank: int
    world_size: int
    place: str = ""
    replica_ranks: int = 1
    host: str
    pid: int
    device: str
    time: float
    every_s: float
    began_s: float
    sequence: int = 0
    state: State = "starting"
    error: str = ""
    stopped_by: str = ""
    resumes_at: int | None = None
    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    phase: str = ""
    phase_s: float = 0.0
    doing: str = ""
    window_s: float = 0.0
    steps: int = 0
    step_s: float | None = None
    samples_per_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    gpu: Mapping[str, float] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    recent: Mapping[str, Any] = field(default_factory=dict)
    loader_levels: Sequence[str] = field(default_factory=list)
    advice: str = ""

    @property
    def steps_per_s(self) -> float:
        if self.step_s:
            return 1 / self.step_s
        return self.steps / self.window_s if self.window_s > 0 else 0.0

    @property
    def data_wait_share(self) -> float | None:
        """The share of the window in which training waited for batches."""
        return self.share("fetch") if self.window_s > 0 else None

    @property
    def sources(self) -> Mapping[str, Mapping[str, float]]:
        """Of a loader of a mixture: numbers by source and name."""
        found = self.loader.get("sources")
        return {
            source: {name: value for name, value in progress.items() if isinstance(value, (int, float))}
            for source, progress in (found.items() if isinstance(found, dict) else ())
            if isinstance(progress, dict)
        }

    @property
    def bottleneck(self) -> str:
        return str(self.recent.get("bottleneck", ""))

    def share(self, *phases: str) -> float:
        """The share of the window that these phases took."""
        return sum(self.seconds.get(name, 0.0) for name in phases) / self.window_s if self.window_s > 0 else 0.0

    def describe_error(self) -> str:
        """Describe a failed rank: where it failed, and why; empty for one that did not."""
        return f"rank {self.rank} on {self.host}: {self.error}" if self.state == "failed" else ""

    def to_text(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, default=str)


def parse_status(text: str | bytes) -> RankStatus | None:
    """A status from its file's text; None for what is none, such as one of a later version."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.pop("version", None) != VERSION:
        return None
    known = {one.name: one for one in fields(RankStatus)}
    try:
        status = RankStatus(**{name: value for name, value in found.items() if name in known})
    except TypeError:
        return None
    maps = (status.seconds, status.memory, status.gpu, status.traffic)
    are_maps = all(isinstance(one, dict) for one in (*maps, status.loader, status.recent))
    if not are_maps or not isinstance(status.loader_levels, list):
        return None
    counts = (status.rank, status.world_size, status.sequence, status.step, status.epoch, status.steps)
    counts = (*counts, status.replica_ranks)
    numbers = [status.time, status.every_s, status.began_s, status.window_s, status.phase_s]
    numbers += [number for one in maps for number in one.values()]
    may_lack = (status.total_steps, status.resumes_at, status.step_s, status.samples_per_s)
    numbers += [one for one in may_lack if one is not None]
    texts = (status.host, status.device, status.phase, status.state, status.error, status.stopped_by, status.doing)
    is_sound = (
        all(isinstance(one, int) and 0 <= one < 1 << 63 for one in counts)
        and all(isinstance(one, (int, float)) and abs(one) < math.inf for one in numbers)
        and all(isinstance(one, str) for one in (*texts, status.place, status.advice, *status.loader_levels))
    )
    return status if is_sound and status.rank < status.world_size <= _MOST_RANKS else None


def find_failed(ranks: Iterable[RankStatus]) -> RankStatus | None:
    """The rank that failed first, of itself rather than because another one did; None where none failed."""
    failed = [one for one in ranks if one.state == "failed"]
    return min(failed, key=lambda one: (one.error.startswith(OF_OTHERS), one.time), default=None)


def status_path(output_dir: Path, rank: int) -> Path:
    return output_dir / FOLDER / f"rank-{rank:05d}.json"


def read_ranks(output_dir: Path) -> list[RankStatus]:
    """The ranks of the newest start that are known in this folder, in order; what cannot be read is left out."""
    folder = output_dir / FOLDER
    try:
        paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []
    found = []
    for path in paths:
        try:
            with path.open("rb") as file:
                status = parse_status(file.read(_MOST_BYTES))
        except OSError:
            continue
        if status is not None:
            found.append(status)
    if not found:
        return []
    newest = max(found, key=lambda one: one.began_s)
    return [one for one in found if one.rank < newest.world_size and one.world_size == newest.world_size]


class Silence:
    """For how long each rank has written nothing new: by this process's own clock, once it has seen a rank before.

    Of a rank that is seen for the first time, only the hosts' clocks tell how old its file is.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[float, int], float, float]] = {}  # which file, since when, and its age then

    def note(self, ranks: Sequence[RankStatus]) -> dict[int, float]:
        """Seconds by rank, given what was read a moment ago."""
        now_s = time.monotonic()
        for one in ranks:
            known, this = self._seen.get(one.rank), (one.began_s, one.sequence)
            if known is None or known[0] != this:
                self._seen[one.rank] = (this, now_s, max(0.0, time.time() - one.time) if known is None else 0.0)
        return {one.rank: now_s - self._seen[one.rank][1] + self._seen[one.rank][2] for one in ranks}
