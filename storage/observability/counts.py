"""Counts of a store's requests, retries and cache hits, summed over its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StoreCounts:
    """Sums since the store was opened; all are 0 for local files, which get neither retry nor cache.

    Attributes:
        requests: requests sent, with retries and second requests.
        retries: requests sent again because one failed.
        throttled_requests: responses that asked for fewer requests (429, 503).
        hedges: second requests sent because the first was late.
        hedges_won: second requests that were faster.
        cache_hits: reads that the node's disk cache answered.
        cache_misses: reads that it did not have.
        cache_hit_bytes: bytes read from it.
        cache_miss_bytes: bytes fetched because it did not have them.
        cache_uncached: reads that could not be stored in it.
        cache_corrupt: damaged entries found in it, and fetched again.
    """

    requests: int = 0
    retries: int = 0
    throttled_requests: int = 0
    hedges: int = 0
    hedges_won: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_hit_bytes: int = 0
    cache_miss_bytes: int = 0
    cache_uncached: int = 0
    cache_corrupt: int = 0


def count_store(store: object) -> StoreCounts:
    """The counts of a composed store so far; cheap, from any thread, and after it was closed.

    Of what has several (``stores``), as a mixture of data sets has, those of all together.
    """
    return add_counts(*(_count_one(each) for each in _all_of(store)))


def add_counts(*counts: StoreCounts) -> StoreCounts:
    """Add up the counts of several stores."""
    return StoreCounts(
        **{field.name: sum(getattr(each, field.name) for each in counts) for field in fields(StoreCounts)}
    )


def _count_one(store: object) -> StoreCounts:
    found: dict[str, int] = {}
    for layer in _layers(store):
        if hasattr(layer, "add_up"):
            found |= layer.add_up()
    return StoreCounts(**found)


def count_running(store: object) -> tuple[int, int]:
    """Requests of this process that run now at the store's hosts, and how many may; (0, 0) for local files."""
    limiters = {id(limiter): limiter for each in _all_of(store) for limiter in _limiters(each)}.values()
    return sum(limiter.running for limiter in limiters), sum(limiter.limit for limiter in limiters)


def fastest_response_s(store: object) -> float | None:
    """Shortest round trip to the store's host that this process has seen, in seconds; None before any response."""
    return next((limiter.round_trip_s for each in _all_of(store) for limiter in _limiters(each)), None)


def _all_of(store: object) -> Sequence[object]:
    stores: Sequence[object] = getattr(store, "stores", (store,))
    return stores


def _limiters(store: object) -> Iterator[Any]:
    """Those of the layers that retry, the outermost first."""
    return (layer.limiter for layer in _layers(store) if hasattr(layer, "limiter"))


def _layers(store: Any) -> Iterator[Any]:
    while store is not None:
        yield store
        store = getattr(store, "inner", None)
