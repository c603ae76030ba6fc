"""Cut shards into chunks of about ``chunk_bytes``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from .shard import ChunkSpan

if TYPE_CHECKING:
    from ..columns import IntArray


def cut_samples(starts: IntArray, stops: IntArray, chunk_bytes: int, counts: IntArray | None = None) -> list[ChunkSpan]:
    """Runs of whole samples of at most ``chunk_bytes``, or of one sample that is longer.

    ``starts`` and ``stops``: (samples,) int64 byte offsets, rising. With ``counts`` each is a unit of several samples.
    """
    chunks: list[ChunkSpan] = []
    first, count = 0, len(starts)
    while first < count:
        offset = int(starts[first])
        after = max(int(np.searchsorted(stops, offset + chunk_bytes, side="right")), first + 1)
        length = int(stops[after - 1]) - offset
        samples = after - first if counts is None else int(counts[first:after].sum())
        chunks.append(ChunkSpan(offset, length, samples, length))
        first = after
    return chunks


def join_spans(spans: Iterable[ChunkSpan], chunk_bytes: int, gap_bytes: int = 0) -> list[ChunkSpan]:
    """Neighbours joined into chunks of at most ``chunk_bytes``, where at most ``gap_bytes`` lie between them."""
    chunks: list[ChunkSpan] = []
    for span in spans:
        last = chunks[-1] if chunks else None
        if last is not None and 0 <= span.offset - last.offset - last.length <= gap_bytes:
            length = span.offset + span.length - last.offset
            if length <= chunk_bytes:
                chunks[-1] = ChunkSpan(last.offset, length, last.samples + span.samples, last.memory + span.memory)
                continue
        chunks.append(span)
    return chunks
