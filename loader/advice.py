"""What to change, in one sentence, given where a loader's time went."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .metrics import LoaderMetrics

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
