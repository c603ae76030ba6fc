"""Metrics of where the time goes: what the counters say, the bottleneck that they show, and advice on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import ClassVar, Self

from ..storage.observability.counts import StoreCounts
from .counters import Counters, Levels, Totals

_REPEATED_SHARE = 0.2  # of chunks read again because memory was short
_THROTTLED_SHARE = 0.01  # of requests
_BUSY = 0.8  # of the threads' time
_FEW_FETCHES = 16  # at a time: fewer do not hide a store's own time

_SENTENCES = {
    "consumer": "The loader keeps up; a faster one would change nothing.",
    "open": "Parsing and decompressing chunks is the limit: read fewer columns=, store shards with a lighter "
    "compression, or give the process more cores.",
    "assemble": "One thread gathers rows and is the limit: read fewer columns=, pack narrow columns into wide ones, "
    "or take raw='view'.",
    "copy": "Filling pinned memory is the limit: hand out smaller types (uint8 images, scaled on the device).",
}


@dataclass(frozen=True, kw_only=True)
class LoaderMetrics(Levels, StoreCounts, Totals):
    """Metrics of a loader since it was made: counts, bytes and seconds of this rank; and how full it is now.

    Attributes:
        batches: batches handed out.
        samples: samples handed out, without the repeats of ``last_batch="pad"``; of packed sequences, the samples that
            begin in them.
        packed_sequences: packed sequences in batches, each of them a row, without the repeats of ``last_batch="pad"``.
        packed_documents: documents in these sequences, each in the sequence in which it begins.
        packed_tokens: the tokens of these documents.
        padding_tokens: the tokens of padding in these sequences.
        cut_documents: documents that were cut because they are longer than a sequence, or by "concat".
        truncated_documents: documents that were shortened.
        truncated_tokens: the tokens that this left out.
        dropped_documents: documents without a token in any sequence: too long, or empty.
        dropped_tokens: the tokens of these documents.
        fetched_chunks: chunks read from the store or the cache, each time that they were read.
        fetched_bytes: bytes of these.
        refetched_chunks: chunks read a second time because their bytes were wrong.
        evicted_chunks: chunks dropped before their last use because memory was short.
        evicted_headers: shards' headers (parquet footers, say) dropped because memory was short.
        spans: groups of batches that were gathered at once.
        decoded_rows: samples decoded or transformed; those of raw and numeric columns are not.
        copied_batches: batches copied to the device.
        copied_bytes: bytes of these.
        fetch_s: time spent waiting for the store, summed over the fetch threads.
        check_s: time spent comparing checksums, summed over the fetch threads.
        open_s: time spent parsing and decompressing chunks, summed over the fetch threads.
        chunk_wait_s: time that the assembler thread waited for chunks.
        assemble_s: time that the assembler thread spent gathering rows.
        decode_s: time spent decoding, transforming and copying rows of arrays, summed over threads or worker processes.
        copy_s: time that the copy thread spent filling pinned memory; 0 without a device.
        backpressure_s: time that the assembler thread waited for the training loop to take batches.
        first_batch_s: time that the training loop waited for the first batch of each pass.
        consumer_wait_s: time that the training loop waited for all other batches.
        consumer_busy_s: time that the training loop spent between batches.
        requests: requests sent to the store, with retries and second requests; 0 for local files, as the next four.
        retries: requests sent again because one failed.
        throttled_requests: responses that asked for fewer requests (429, 503).
        hedges: second requests sent because the first was late.
        hedges_won: second requests that were faster.
        cache_hits: reads that the node's disk cache answered; 0 without ``cache_dir``, as the next five.
        cache_misses: reads that it did not have.
        cache_hit_bytes: bytes read from it.
        cache_miss_bytes: bytes fetched because it did not have them.
        cache_uncached: reads that could not be stored in it.
        cache_corrupt: damaged entries found in it, and fetched again.
        waiting_batches: batches that are gathered and wait, now, for decoding or for the training loop.
        ready_batches: those of them that the training loop could have at once, in order.
        queued_chunks: chunks that are planned and not yet asked for, now.
        chunks_in_flight: chunks being fetched or opened, now.
        resident_chunks: opened chunks in memory, now.
        resident_bytes: bytes of chunks in memory or being read, now.
        peak_bytes: the most that they have been since the pipeline was last started.
        fetch_threads: threads that fetch and open chunks.
        decode_threads: threads, or worker processes, that decode and transform.
        decode_processes: how many of these are worker processes.
        loader_process: the number of the process beside this one in which the pipeline runs; 0 where threads do all.
        read_ahead_bytes: how much of chunks, and of batches, may be held ahead of need.
        tuning_changes: how often the last three were changed while the loader ran.
        tuning: the last decision on them and its reason, for people to read.
        running_requests: requests of this process that run now at the store's host.
        request_limit: how many may; throttling lowers it.
        process_bytes: resident memory of this process now, without worker processes; 0 where there is no /proc.
        elapsed_s: seconds since the loader was made.
        bottleneck: the stage that bounds the throughput, see ``find_bottleneck``.
    """

    levels: ClassVar[frozenset[str]] = frozenset(field.name for field in fields(Levels))
    """The names of what goes up and down; all other numbers only grow."""

    elapsed_s: float
    bottleneck: str

    @staticmethod
    def read(counters: Counters, levels: Levels, store: StoreCounts) -> LoaderMetrics:
        """The sums so far and the bottleneck that they show, with how full everything is and what the store did."""
        totals = counters.totals()
        return LoaderMetrics(
            **totals.to_dict(),
            **asdict(store),
            **asdict(levels),
            elapsed_s=counters.elapsed_s,
            bottleneck=find_bottleneck(totals),
        )

    @property
    def packing_efficiency(self) -> float:
        """The share of packed sequences' tokens that is not padding; NaN before the first."""
        total = self.packed_tokens + self.padding_tokens
        return self.packed_tokens / total if total else float("nan")

    def since(self, before: Self) -> Self:
        """Return what was done since ``before``, an earlier one of the same loader; levels are those of now."""
        now, earlier = vars(self), vars(before)
        sums = {name for name in now if name not in self.levels and name != "bottleneck"}
        change = {name: now[name] - earlier[name] for name in sums}
        totals = Totals(**{field.name: change[field.name] for field in fields(Totals)})
        stage = find_bottleneck(totals) if totals.batches or not self.batches else "no batch was taken"
        return replace(self, **change, bottleneck=stage)

    def advice(self) -> str:
        """Advice on what to change, in a sentence; empty before the first batch."""
        return advise(self)


@dataclass(frozen=True, kw_only=True)
class SourceProgress:
    """Progress of a run in one source of a mixture, all ranks together, since the run began.

    Attributes:
        samples: samples handed out, each as often as it came; of a source that is packed, its sequences.
        epochs: how often the whole source has come, such as 2.25; where samples are dropped or packed, about.
        tokens: tokens of these samples, where all samples have as many; None elsewhere.
        packed_documents: of a source that is packed, documents in the sequences that this rank got since the loader was
            made, as the next two.
        packed_tokens: the tokens of these documents.
        padding_tokens: the tokens of padding in these sequences.
    """

    samples: int
    epochs: float
    tokens: int | None
    packed_documents: int = 0
    packed_tokens: int = 0
    padding_tokens: int = 0

    @property
    def packing_efficiency(self) -> float:
        """The share of the sequences' tokens that is not padding; NaN where nothing is packed."""
        total = self.packed_tokens + self.padding_tokens
        return self.packed_tokens / total if total else float("nan")


@dataclass(frozen=True, kw_only=True)
class MixtureMetrics(LoaderMetrics):
    """Metrics of a loader of a mixture: ``LoaderMetrics``, and where its run is.

    Attributes:
        run_samples: samples handed out on all ranks together since the run began.
        sources: how far the run is in each source, by name.
    """

    levels: ClassVar[frozenset[str]] = LoaderMetrics.levels | {"run_samples", "sources"}

    run_samples: int
    sources: Mapping[str, SourceProgress]


def find_bottleneck(totals: Totals) -> str:
    """The stage that bounds the throughput: 'consumer', 'storage', 'open', 'assemble', 'decode' or 'copy'.

    It is the consumer if that hardly waits. Otherwise, if the assembler mostly waits for chunks, it is storage or
    opening, whichever the fetch threads spend longer on; if not, it is assembling, decoding or copying, whichever takes
    longest. Before the first batch it is "nothing read yet". The first batch of a pass counts where no other was taken.
    """
    waited, busy = totals.consumer_wait_s, totals.consumer_busy_s
    if totals.batches == 0:
        return "nothing read yet"
    if waited + busy == 0:
        waited = totals.first_batch_s
    if waited <= 0.05 * (waited + busy):
        return "consumer"
    if totals.chunk_wait_s > max(totals.assemble_s, 0.5 * totals.decode_s):
        return "storage" if totals.fetch_s >= totals.open_s else "open"
    stages = {"assemble": totals.assemble_s, "decode": totals.decode_s, "copy": totals.copy_s}
    return max(stages, key=lambda stage: stages[stage])


def advise(metrics: LoaderMetrics) -> str:
    """A sentence of advice on the ``bottleneck``; empty before there is one."""
    if metrics.bottleneck == "storage":
        return _advise_on_storage(metrics)
    if metrics.bottleneck == "decode":
        return _advise_on_decoding(metrics)
    return _SENTENCES.get(metrics.bottleneck, "")


def _advise_on_storage(metrics: LoaderMetrics) -> str:
    if metrics.evicted_chunks > _REPEATED_SHARE * metrics.fetched_chunks:
        return (
            f"{metrics.evicted_chunks:,} of {metrics.fetched_chunks:,} chunks were dropped before their last use and "
            "are read again: raise memory_limit=, or give a cache_dir=."
        )
    if metrics.throttled_requests > _THROTTLED_SHARE * metrics.requests:
        return (
            f"The store asks for fewer requests ({metrics.throttled_requests:,} of {metrics.requests:,} were "
            "throttled): spread the shards over prefixes or buckets, make chunks larger, or give a cache_dir=."
        )
    rate = metrics.fetched_bytes / max(metrics.elapsed_s, 1e-9) / 1e6
    if not metrics.requests and not metrics.cache_hits:
        return f"The disk is the limit, at {rate:,.0f} MB/s: use a faster one, or read fewer columns=."
    at_a_time = metrics.fetch_s / max(metrics.elapsed_s, 1e-9)
    more = f", {at_a_time:.1f} chunks at a time: raise memory_limit= or fetch_threads=,"
    return (
        f"The store is the limit, at {rate:,.0f} MB/s{more if at_a_time < _FEW_FETCHES else ':'} read from one that is "
        "nearer or faster, read fewer columns=, or give a cache_dir= where epochs repeat."
    )


def _advise_on_decoding(metrics: LoaderMetrics) -> str:
    if metrics.decode_processes:
        return (
            f"Decoding is the limit, with {metrics.decode_processes} worker processes: give more processes= if there "
            "are cores, decode to a smaller size, or store samples smaller."
        )
    share = metrics.decode_s / max(metrics.elapsed_s * max(metrics.decode_threads, 1), 1e-9)
    if share < _BUSY:
        return (
            f"Decoding and transform= are the limit, yet their {metrics.decode_threads} threads work {share:.0%} of "
            "the time: a transform in pure Python holds the GIL, so give processes=."
        )
    return (
        f"Decoding and transform= are the limit, and their {metrics.decode_threads} threads are busy: leave threads= "
        "out or raise it if there are cores, give processes= if it is pure Python, decode to a smaller size, or store "
        "samples smaller."
    )
