"""Counters of a loader's work and time, to which all stages add, and levels of its queues and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..storage.observability.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums since the loader was made; ``LoaderMetrics`` explains each."""

    batches: int = 0
    samples: int = 0
    packed_sequences: int = 0
    packed_documents: int = 0
    packed_tokens: int = 0
    padding_tokens: int = 0
    cut_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    fetched_chunks: int = 0
    fetched_bytes: int = 0
    refetched_chunks: int = 0
    evicted_chunks: int = 0
    evicted_headers: int = 0
    spans: int = 0
    decoded_rows: int = 0
    copied_batches: int = 0
    copied_bytes: int = 0
    fetch_s: float = 0.0
    check_s: float = 0.0
    open_s: float = 0.0
    chunk_wait_s: float = 0.0
    assemble_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    backpressure_s: float = 0.0
    first_batch_s: float = 0.0
    consumer_wait_s: float = 0.0
    consumer_busy_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return asdict(self)


# What batches count when they are handed out.
PACKED = (
    "packed_sequences",
    "packed_documents",
    "packed_tokens",
    "padding_tokens",
    "cut_documents",
    "truncated_documents",
    "truncated_tokens",
    "dropped_documents",
    "dropped_tokens",
)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Levels of queues and memory at this moment; ``LoaderMetrics`` explains each."""

    waiting_batches: int = 0
    ready_batches: int = 0
    queued_chunks: int = 0
    chunks_in_flight: int = 0
    resident_chunks: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0
    fetch_threads: int = 0
    decode_threads: int = 0
    decode_processes: int = 0
    loader_process: int = 0
    read_ahead_bytes: int = 0
    tuning_changes: int = 0
    tuning: str = ""
    running_requests: int = 0
    request_limit: int = 0
    process_bytes: int = 0


class Counters:
    """Totals that several threads add to, under a lock; while somebody records, their spans go into a timeline, too."""

    def __init__(self) -> None:
        self._amounts: dict[str, Any] = Totals().to_dict()
        self._lock = threading.Lock()
        self._made_s = time.perf_counter()
        self.timeline: Timeline | None = None

    def add(self, *, since: float | None = None, **amounts: float) -> None:
        """Add to the totals of these names.

        Seconds given together are those of this thread's work one after another, the last of it until now; with
        ``since``, a ``time.perf_counter()``, the work began then and was interrupted.
        """
        with self._lock:
            for name, amount in amounts.items():
                self._amounts[name] += amount
        timeline = self.timeline
        if timeline is not None:
            _draw(timeline, amounts, since)

    def absorb(self, amounts: Mapping[str, float]) -> None:
        """Add what another process has done, which is drawn there."""
        with self._lock:
            for name, amount in amounts.items():
                self._amounts[name] += amount

    def totals(self) -> Totals:
        """The sums so far, all of one moment."""
        with self._lock:
            return Totals(**self._amounts)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this was made."""
        return time.perf_counter() - self._made_s


def _draw(timeline: Timeline, amounts: Mapping[str, float], since: float | None) -> None:
    stop = time.perf_counter()
    for name, amount in reversed(list(amounts.items())):
        if name == "consumer_busy_s":  # what is drawn on that thread is the user's own
            stop -= amount
        elif name.endswith("_s"):
            start = stop - amount if since is None else since
            timeline.add(name.removesuffix("_s").replace("_", " "), start, stop)
            stop = start
