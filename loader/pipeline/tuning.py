"""The initial parallelism of a pipeline: threads and bytes, from the process's limits and the order's needs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import MemoryLimitError, stacklevel_of_user
from ..limits import usable_memory
from ..order.costs.buckets import count_open_chunks
from ..ranks.detect import local_world_size
from ..reading.chunk_source import ALWAYS_BYTES
from ..reading.fetching import SERVED

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..order.plan import Order

_AUTO_MEMORY_SHARE = 0.4  # of what all of the node's ranks together may use
_AHEAD_BYTES = 512 << 20  # what "auto" reads ahead, beyond twice the open windows
# Of a small data set, tuning begins with a few epochs, which hold more than a training loop asks for between two looks.
_EPOCHS_AHEAD, _LEAST_AHEAD_BYTES = 4, 32 << 20
# A span takes rows from most open chunks: of large rows it holds more bytes, so that it takes several rows from each.
_SPAN_BYTES, _MOST_SPAN_BYTES, _SPAN_ROWS = 8 << 20, 32 << 20, 1024
# Chunks that are fetched at a time at first: of a disk; of a store that answers at once; and of any store at most.
_LOCAL_FETCHES, _REMOTE_FETCHES, _MOST_FETCHES = 4, SERVED, 64
_MOST_LOCAL_FETCHES = 16
_LINK_BYTES_PER_S = 1.25e9  # a link of 10 Gb/s
_FIRST_DECODE_THREADS = 8


class MemoryLimitWarning(UserWarning):
    """The memory limit is below the size of the windows that the order keeps open at once; reads are repeated."""


@dataclass(frozen=True, kw_only=True)
class TuningChoice:
    """The user's choices among the tunable settings; None where nothing was given.

    ``autotune``: "auto" changes settings not given while the pipeline runs, True also given ones, False none.
    ``cores`` are this rank's part of the node's.
    """

    fetch_threads: int | None = None
    decode_threads: int | None = None
    read_ahead_bytes: int | None = None
    autotune: bool | Literal["auto"] = "auto"
    memory_bytes: int | None = None
    cores: int
    cores_of_node: int
    processes: int | Literal["auto"] = 0

    @property
    def first_decode_threads(self) -> int:
        """Choose how many threads decode to begin with. More may only wait for each other's turns of the GIL."""
        most = self.cores if self.autotune is False else min(self.cores, _FIRST_DECODE_THREADS)
        return self.decode_threads or most

    @property
    def asked_processes(self) -> int:
        """The number of worker processes that the user asks for."""
        return 0 if self.processes == "auto" else self.processes

    @property
    def is_free(self) -> bool:
        """Return whether the user left the choice of decoding threads and processes to the loader."""
        return self.processes == "auto" and self.decode_threads is None and self.autotune is not False

    @property
    def kept(self) -> frozenset[str]:
        """The names, in ``autotune.Settings``, of the settings that stay as they are."""
        given = {name: getattr(self, name) for name in ("fetch_threads", "decode_threads", "read_ahead_bytes")}
        kept = {name for name, value in given.items() if not self.autotune or (self.autotune == "auto" and value)}
        return frozenset(kept | ({"decode_threads"} if self.asked_processes else set()))


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Limits of one rank's pipeline. Bytes are those of this process; ``span_bytes`` is gathered at once.

    ``memory_limit_bytes`` is the most that a chunk may take by itself; ``header_budget_bytes`` is the part of
    ``chunk_budget_bytes`` that headers of shards may take. ``fetch_threads``, ``decode_threads`` and
    ``read_ahead_bytes`` are those to begin with. ``holds_windows``: the chunks of all open windows fit at once;
    ``has_spare``: twice as many would.
    """

    fetch_threads: int
    most_fetch_threads: int
    decode_threads: int
    read_ahead_bytes: int
    memory_limit_bytes: int
    chunk_budget_bytes: int
    header_budget_bytes: int
    batch_budget_bytes: int
    span_bytes: int
    holds_windows: bool = True
    has_spare: bool = False
    device: torch.device | None = None


def mean_row_bytes(manifest: Manifest) -> int:
    """Compute the mean bytes of an opened sample, at least 1; the same on every rank."""
    return max(1, int(manifest.memory.sum()) // manifest.num_samples)


def tune(
    manifest: Manifest,
    order: Order,
    *,
    world_size: int,
    memory_limit: int | None,
    threads: int,
    is_local: bool,
    device: torch.device | None,
    others: Sequence[tuple[Manifest, Order]] = (),
    fetch_threads: int | None = None,
    read_ahead: int | None = None,
    response_s: float | None = None,
) -> PipelineOptions:
    """Choose the options of one rank's pipeline. ``memory_limit`` is in bytes; None derives it from machine and cgroup.

    ``others`` are the data sets, each in an order of its own, of which ``manifest`` holds the chunks; () where it is
    one data set. ``fetch_threads`` and ``read_ahead`` (bytes) are the user's, None where there are none. ``response_s``
    is how long the store takes for a response, where that is known.

    Warns if the limit does not hold the windows that the rank keeps open at once.
    """
    own_lanes = -(-order.lanes // world_size) + 1
    open_bytes = sum(_open_bytes(own_lanes, *each) for each in others or [(manifest, order)])
    if memory_limit is None:
        share = int(_AUTO_MEMORY_SHARE * usable_memory() / local_world_size())
        memory_limit = min(share, 2 * open_bytes + _AHEAD_BYTES)
    _refuse_endless(manifest, max(memory_limit, ALWAYS_BYTES))
    held_bytes = int(manifest.memory.sum())
    batch_budget = memory_limit // 4
    chunk_budget = memory_limit - batch_budget
    if open_bytes > chunk_budget:
        warnings.warn(
            f"the {own_lanes} lanes of this rank keep about {open_bytes:,} bytes of chunks open, and "
            f"memory_limit={memory_limit:,} has room for {chunk_budget:,}: chunks will be read several times. "
            "Raise memory_limit, give a cache_dir, or start with fewer lanes or a smaller window",
            MemoryLimitWarning,
            stacklevel=stacklevel_of_user(),  # the loop over the loader
        )
    # Chunks that do not all fit are read again for each span that needs them, so longer spans read less.
    wanted = max(_SPAN_BYTES, min(_MOST_SPAN_BYTES, _SPAN_ROWS * mean_row_bytes(manifest)))
    span_bytes = min(wanted, batch_budget // 2) if open_bytes <= chunk_budget else batch_budget // 2
    return PipelineOptions(
        fetch_threads=fetch_threads or first_fetch_threads(is_local, response_s, int(manifest.lengths.mean())),
        most_fetch_threads=_MOST_LOCAL_FETCHES if is_local else _MOST_FETCHES,
        decode_threads=threads,
        read_ahead_bytes=min(read_ahead or max(_LEAST_AHEAD_BYTES, _EPOCHS_AHEAD * held_bytes), chunk_budget),
        memory_limit_bytes=memory_limit,
        chunk_budget_bytes=chunk_budget,
        header_budget_bytes=memory_limit // 8,
        batch_budget_bytes=batch_budget // 2,
        span_bytes=span_bytes,
        holds_windows=open_bytes <= chunk_budget,
        has_spare=2 * open_bytes <= chunk_budget,
        device=device,
    )


def first_fetch_threads(is_local: bool, response_s: float | None, chunk_bytes: int) -> int:
    """Choose how many chunks to fetch at a time to begin with.

    A remote store adds as many as a link of 10 Gb/s carries in ``response_s``: the bandwidth-delay
    product. Those beside them hide the server's own time for each.
    """
    if is_local:
        return _LOCAL_FETCHES
    on_their_way = math.ceil((response_s or 0.0) * _LINK_BYTES_PER_S / max(1, chunk_bytes))
    return min(_REMOTE_FETCHES + on_their_way, _MOST_FETCHES)


def _open_bytes(own_lanes: int, manifest: Manifest, order: Order) -> int:
    """Estimate the bytes of a data set's chunks that so many lanes keep open at once."""
    whole = int(manifest.memory.sum())
    if order.piece:
        return whole
    open_chunks = count_open_chunks(order, manifest.num_samples / manifest.num_chunks)
    return min(whole, int(own_lanes * open_chunks * manifest.memory.mean()))


def _refuse_endless(manifest: Manifest, most: int) -> None:
    """Raise MemoryLimitError where the order of a chunk's samples alone, 4 bytes each, takes more than the limit."""
    largest = int(manifest.samples.argmax())
    chunk = manifest.chunk(largest)
    if 4 * chunk.samples > most:
        raise MemoryLimitError(
            f"{chunk.shard.key} at byte {chunk.offset}: a chunk of {chunk.samples:,} samples, whose order alone takes "
            f"{4 * chunk.samples:,} bytes, and the limit is {most:,}; raise memory_limit=, or write the data in "
            "smaller row groups or shards"
        )
