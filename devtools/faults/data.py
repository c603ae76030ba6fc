"""The data that the bench of faults reads: made up from a seed, so that every sample's content is known beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from penstock.loader.columns import IntArray
from penstock.loader.dataset.manifest import Manifest
from penstock.loader.order.plan import EpochPlan, Order, Share, batch_bounds, count_steps
from penstock.loader.order.spans import EpochSpans
from penstock.tools.pack import pack

SAMPLES = 3000
SAMPLE_BYTES = 8000
SHARD_BYTES = 260_000  # some thirty samples, one chunk and so one request: many requests for a fault to hit
GLOBAL_BATCH = 48
# Chunks move as a whole: single rows, which "auto" would move in so small a data set, need all of it on each rank.
ORDER = Order(seed=11, shuffle=True, lanes=16, window=2, piece=0)


def payload_of(number: int, size: int = SAMPLE_BYTES) -> bytes:
    """The content of sample ``number``."""
    return np.random.default_rng([7, number]).bytes(size)


def digest_of(payload: bytes | memoryview) -> int:
    """Digest to compare a sample's content by: 64 bits of xxh3."""
    return xxhash.xxh3_64_intdigest(payload)


def make_digests(samples: int = SAMPLES, size: int = SAMPLE_BYTES) -> list[int]:
    """The digest of each sample, by sample id."""
    return [digest_of(payload_of(number, size)) for number in range(samples)]


def make_samples(samples: int, size: int) -> Iterator[dict[str, Any]]:
    """Samples whose ids are their numbers."""
    for number in range(samples):
        yield {"__key__": f"{number:08d}", "bin": payload_of(number, size)}


def put_data(
    url: str,
    options: Mapping[str, Any],
    *,
    samples: int = SAMPLES,
    size: int = SAMPLE_BYTES,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the data set as tar shards with an index that has checksums, in place of what exists."""
    pack(
        make_samples(samples, size),
        url,
        shard_bytes=shard_bytes,
        storage_options=dict(options),
        overwrite=True,
        progress=False,
    )


def plan_epoch(
    manifest: Manifest, epoch: int, order: Order = ORDER, global_batch: int = GLOBAL_BATCH
) -> list[IntArray]:
    """The sample ids of each step of an epoch, in no order within the step: the plan's arithmetic alone, no I/O."""
    plan = EpochPlan(manifest.samples, order, epoch)
    spans = EpochSpans(plan, Share(rank=0, world_size=1, global_batch_size=global_batch))
    steps = count_steps(plan.num_samples, 0, global_batch, "partial")
    bounds = batch_bounds(0, steps, global_batch, plan.num_samples)
    planned: list[IntArray] = []
    for step in range(steps):
        span, _ = spans.plan_span(int(bounds[step]), 1)
        ids = np.empty(span.num_rows, np.int64)
        for group in spans.expand(span):
            ids[group.targets] = manifest.first_ids[group.chunk] + group.rows
        planned.append(np.sort(ids))
        for _ in spans.close_windows(int(bounds[step + 1])):
            pass
    return planned


def is_batch_of(planned: Sequence[int], delivered: Sequence[int]) -> bool:
    """Return whether all ranks' parts of a global batch are, together, what was planned."""
    return sorted(planned) == sorted(delivered)
