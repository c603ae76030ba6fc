"""Where the time goes: counters that the stages add to, and what they say about the bottleneck."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums since the loader was made; ``LoaderMetrics`` explains each."""

    batches: int = 0
    samples: int = 0
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

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LoaderMetrics(Totals):
    """What a loader has done since it was made: counts, bytes and seconds of this rank.

    Attributes:
        batches: batches handed out.
        samples: samples handed out, without the repeats of ``last_batch="pad"``; of packed sequences, the samples that
            begin in them.
        packed_documents: documents in the packed sequences of batches, each in the sequence in which it begins.
        packed_tokens: their tokens.
        padding_tokens: the tokens of padding in these sequences.
        cut_documents: documents that were cut because they are longer than a sequence, or by "concat".
        truncated_documents: documents that were shortened.
        truncated_tokens: the tokens that this left out.
        dropped_documents: documents without a token in any sequence: too long, or empty.
        dropped_tokens: their tokens.
        fetched_chunks: chunks read from the store or the cache, each time that they were read.
        fetched_bytes: bytes of these.
        refetched_chunks: chunks read a second time because their bytes were wrong.
        evicted_chunks: chunks dropped before their last use because memory was short.
        evicted_headers: shards' headers (parquet footers, say) dropped because memory was short.
        fetch_s: time spent waiting for the store, summed over the fetch threads.
        open_s: time spent parsing and decompressing chunks, summed over the fetch threads.
        chunk_wait_s: time that the assembler thread waited for chunks.
        assemble_s: time that the assembler thread spent gathering rows.
        decode_s: time spent decoding and transforming, summed over threads or worker processes.
        copy_s: time that the copy thread spent filling pinned memory; 0 without a device.
        backpressure_s: time that the assembler thread waited for the training loop to take batches.
        first_batch_s: time that the training loop waited for the first batch of each pass.
        consumer_wait_s: time that the training loop waited for all other batches.
        consumer_busy_s: time that the training loop spent between batches.
        resident_bytes: bytes of chunks in memory or being read, now.
        peak_bytes: the most that they have been since the pipeline was last started.
        bottleneck: the stage that bounds the throughput, see ``find_bottleneck``.
    """

    resident_bytes: int
    peak_bytes: int
    bottleneck: str

    @property
    def packing_efficiency(self) -> float:
        """The share of packed sequences' tokens that is not padding; NaN before the first."""
        total = self.packed_tokens + self.padding_tokens
        return self.packed_tokens / total if total else float("nan")


@dataclass(frozen=True, kw_only=True)
class SourceProgress:
    """How far a run is in one source of a mixture, all ranks together, since the run began.

    Attributes:
        samples: samples handed out, each as often as it came.
        epochs: how often the whole source has come, such as 2.25.
        tokens: tokens of these samples, where all samples have as many; None elsewhere.
    """

    samples: int
    epochs: float
    tokens: int | None


@dataclass(frozen=True, kw_only=True)
class MixtureMetrics(LoaderMetrics):
    """What a loader of a mixture has done: ``LoaderMetrics``, and where its run is.

    Attributes:
        run_samples: samples handed out on all ranks together since the run began.
        sources: how far the run is in each source, by name.
    """

    run_samples: int
    sources: Mapping[str, SourceProgress]


class Counters:
    """Totals that several threads add to, under a lock."""

    def __init__(self) -> None:
        self._amounts: dict[str, Any] = Totals().to_dict()
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to the totals of these names."""
        with self._lock:
            for name, amount in amounts.items():
                self._amounts[name] += amount

    def totals(self) -> Totals:
        """The sums so far, all of one moment."""
        with self._lock:
            return Totals(**self._amounts)

    def metrics(self, *, resident_bytes: int, peak_bytes: int) -> LoaderMetrics:
        """The sums so far, with the memory that chunks take and the bottleneck that the sums tell of."""
        totals = self.totals()
        return LoaderMetrics(
            **totals.to_dict(),
            resident_bytes=resident_bytes,
            peak_bytes=peak_bytes,
            bottleneck=find_bottleneck(totals),
        )


def find_bottleneck(totals: Totals) -> str:
    """The stage that bounds the throughput: 'consumer', 'storage', 'open', 'assemble', 'decode' or 'copy'.

    It is the consumer if that hardly waits. Otherwise, if the assembler mostly waits for chunks, it is storage or
    opening, whichever the fetch threads spend longer on; if not, it is assembling, decoding or copying, whichever takes
    longest. Before the first batch it is "nothing read yet".
    """
    waited, busy = totals.consumer_wait_s, totals.consumer_busy_s
    if totals.batches == 0:
        return "nothing read yet"
    if waited <= 0.05 * (waited + busy):
        return "consumer"
    if totals.chunk_wait_s > max(totals.assemble_s, 0.5 * totals.decode_s):
        return "storage" if totals.fetch_s >= totals.open_s else "open"
    stages = {"assemble": totals.assemble_s, "decode": totals.decode_s, "copy": totals.copy_s}
    return max(stages, key=lambda stage: stages[stage])
