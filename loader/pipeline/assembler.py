"""The interface of assemblers, which plan, gather and deliver batches in order, and the steps that all of them take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from ...storage.threads.interruptible import Event
    from ..columns import Block
    from ..counters import Counters
    from ..decoding.batch import BatchMaker
    from ..order.outputs import Cursors
    from ..order.plan import Order, Share
    from ..order.spans import Span
    from ..reading.chunk_memory import Leases
    from ..reading.chunk_source import ChunkSource
    from .delivery_queue import Delivery
    from .tuning import PipelineOptions

MOST_AT_ONCE = 64  # steps that are gathered together
_NEVER = 1 << 62

W = TypeVar("W")
G = TypeVar("G")


@dataclass(frozen=True, kw_only=True)
class Start:
    """The point to deliver from, ``position`` of ``epoch`` in ``order``, and the share of global batches."""

    order: Order
    share: Share
    epoch: int
    position: int
    cursors: Cursors | None = None  # of a stream, where the position is not an epoch's beginning


class ReadsChunks(Protocol):
    """The part of a ``ChunkReader`` that assemblers use, by joint chunk numbers or by one source's own."""

    @property
    def has_room(self) -> bool: ...

    @property
    def needs_requests(self) -> bool: ...

    @property
    def keeps_unused(self) -> bool: ...

    def request(self, chunks: Sequence[int], *, at_once: bool = False) -> None: ...

    def release(self, chunks: Sequence[int]) -> None: ...

    def take(self, chunks: Sequence[int]) -> Iterator[tuple[int, Block | BaseException]]: ...


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """A pipeline's threads and buffers, lent to its assembler.

    ``deliver`` waits for room in the queue of batches, and returns False once the pipeline is stopped; ``stopping`` is
    set then. ``is_short``: few batches are in the queue. Everything here ends with the pipeline.
    """

    source: ChunkSource
    reader: ReadsChunks
    maker: BatchMaker
    leases: Leases | None
    options: PipelineOptions
    counters: Counters
    stopping: Event
    deliver: Callable[[Delivery], bool]
    is_short: Callable[[], bool]


class Assembler(Protocol):
    """Decides what each batch consists of. One thread of the pipeline runs it."""

    def run(self) -> None:
        """Deliver batches and ends of epochs from the start on, until ``deliver`` returns False.

        An error that it raises is raised again where the next batch is waited for.
        """

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        """Map each resident chunk to its next use, after the rows being gathered: smaller is sooner.

        Called by the reader's threads, to evict, while ``run`` waits for chunks.
        """

    def fail(self, error: Exception) -> None:
        """Receive the error that replaces the next batch. Called by the thread that waits for batches."""

    def waiting_for(self) -> dict[str, Any] | None:
        """Describe what ``run`` waits for now, other than chunks, as in ``Pipeline.activity``. Called by any thread."""


def steps_at_once(options: PipelineOptions, rows: int, row_bytes: int) -> int:
    """Choose the most steps that are gathered together, each of about ``rows`` rows on a rank."""
    return int(min(MOST_AT_ONCE, max(1, options.span_bytes // (max(1, rows) * row_bytes))))


def pick_uses(chunks: Sequence[int], uses: Mapping[int, int]) -> dict[int, int]:
    """Pick the next use of each chunk; those that are in no window come last."""
    return {chunk: uses.get(chunk, _NEVER) for chunk in chunks}


@contextmanager
def time_assembly(counters: Counters, **amounts: float) -> Iterator[None]:
    """Count the block's time as assembling, with ``amounts``, but not waits for chunks; nothing if it raises."""
    waited, started = counters.totals().chunk_wait_s, time.perf_counter()
    yield
    waited = counters.totals().chunk_wait_s - waited
    busy = max(0.0, time.perf_counter() - started - waited)
    counters.add(since=started, assemble_s=busy, **amounts)


def gather_apart(
    work: W, gather: Callable[[W], G], split: Callable[[W], Sequence[W]], stopping: Event
) -> Iterator[tuple[W, G]]:
    """Yield some work with what is gathered for it; where that fails, its parts one after another.

    So the batches before the one that needs what failed are delivered.
    """
    parts: Sequence[W] = ()
    try:
        gathered = gather(work)
    except Exception:
        parts = split(work)
        if len(parts) == 1 or stopping.is_set():
            raise
    if not parts:
        yield work, gathered
    for part in parts:
        yield from gather_apart(part, gather, split, stopping)


def hand_over(equipment: Equipment, item: Delivery, since: float) -> bool:
    """Deliver a batch that was begun at ``since`` (``time.perf_counter()``); False where the pipeline is stopped."""
    delivered = equipment.deliver(item)
    if not delivered:
        item.batch.cancel()
    equipment.counters.add(backpressure_s=time.perf_counter() - since)
    return delivered


class CanCut(Protocol):
    """Rows of a span."""

    def cut(self, start: int, stop: int) -> Self: ...

    def pick(self, indices: Sequence[int]) -> Self: ...


R = TypeVar("R", bound=CanCut)


def cut_step(rows: R, span: Span, step: int, share: Share) -> tuple[R, int, int]:
    """Cut one step's rows out of a span, repeated where the batch is padded; count the batch's, and the valid ones.

    A step without rows gets a copy of one of another's, of which none makes the batch: a transform shows its fields by
    it.
    """
    low, high = int(span.row_starts[step]), int(span.row_starts[step + 1])
    num_valid = int(span.num_valid[step])
    batch_rows = rows.cut(low, high) if high > low else rows.pick([0])
    num_rows = max(num_valid, share.batch_size) if share.pad else num_valid
    if num_rows > high - low:
        batch_rows = batch_rows.pick([i % (high - low) for i in range(num_rows)])
    return batch_rows, num_rows, num_valid
