"""Where the time goes: counters that the stages add to, and what they say about the bottleneck."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(kw_only=True)
class _Totals:
    """Sums since the loader was made. Seconds of stages with several threads are summed over the threads."""

    batches: int = 0
    samples: int = 0
    fetched_chunks: int = 0
    fetched_bytes: int = 0
    refetched_chunks: int = 0
    evicted_chunks: int = 0
    fetch_s: float = 0.0
    open_s: float = 0.0
    chunk_wait_s: float = 0.0
    assemble_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    backpressure_s: float = 0.0
    first_batch_s: float = 0.0
    consumer_wait_s: float = 0.0
    consumer_busy_s: float = 0.0


class Counters(_Totals):
    """Totals that several threads add to."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {spec.name: getattr(self, spec.name) for spec in fields(_Totals)}


@dataclass(frozen=True, kw_only=True)
class LoaderMetrics:
    """What a loader has done so far.

    ``fetch_s``, ``open_s`` and ``decode_s`` are summed over threads; ``chunk_wait_s`` (the assembler waited for
    chunks), ``assemble_s``, ``copy_s`` (to pinned memory), ``backpressure_s`` (the assembler waited for the consumer)
    are one thread's. ``first_batch_s`` is the time the training loop waited for the first batch of each pass,
    ``consumer_wait_s`` for all others, ``consumer_busy_s`` the time it took between batches. ``bottleneck`` names the
    stage that bounds the throughput.
    """

    batches: int
    samples: int
    fetched_chunks: int
    fetched_bytes: int
    refetched_chunks: int
    evicted_chunks: int
    fetch_s: float
    open_s: float
    chunk_wait_s: float
    assemble_s: float
    decode_s: float
    copy_s: float
    backpressure_s: float
    first_batch_s: float
    consumer_wait_s: float
    consumer_busy_s: float
    resident_bytes: int
    peak_bytes: int
    bottleneck: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_bottleneck(totals: dict[str, Any]) -> str:
    """The stage that bounds the throughput: 'consumer', 'storage', 'open', 'assemble', 'decode' or 'copy'.

    The consumer bounds it if it hardly waits. Else, if the assembler mostly waits for chunks, it is storage or opening,
    whichever the fetch threads spend longer on; else it is assembling, decoding or copying, whichever takes longest.
    """
    waited, busy = totals["consumer_wait_s"], totals["consumer_busy_s"]
    if totals["batches"] == 0:
        return "nothing read yet"
    if waited <= 0.05 * (waited + busy):
        return "consumer"
    if totals["chunk_wait_s"] > max(totals["assemble_s"], 0.5 * totals["decode_s"]):
        return "storage" if totals["fetch_s"] >= totals["open_s"] else "open"
    return max(("assemble", "decode", "copy"), key=lambda stage: float(totals[f"{stage}_s"]))
