"""What an assembler is: it plans, gathers and delivers batches in order, with a pipeline's threads and buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from ...storage.threads.interruptible import Event
    from ..columns import Block
    from ..decoding.batch import BatchMaker
    from ..metrics import Counters
    from ..order.cursors import Cursors
    from ..order.plan import Order, Share
    from ..order.spans import Span
    from ..reading.chunk_source import ChunkSource
    from ..reading.leases import Leases
    from .delivery_queue import Delivery
    from .tuning import PipelineOptions

MOST_AT_ONCE = 64  # steps that are gathered together
_NEVER = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Start:
    """From where on a pipeline delivers, and which part of global batches: ``position`` of ``epoch`` in ``order``."""

    order: Order
    share: Share
    epoch: int
    position: int
    cursors: Cursors | None = None  # of a stream, where the position is not an epoch's beginning


class ReadsChunks(Protocol):
    """What assemblers use of a ``ChunkReader``, by its chunks' numbers or by those of one source of a mixture."""

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
    """What a pipeline owns and lends its assembler.

    ``deliver`` waits for room in the queue of batches, and returns False once the pipeline is stopped; ``stopping`` is
    set then. ``is_short``: whether few batches are in the queue. Everything here ends with the pipeline.
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
        """Deliver batches and ends of epochs, from the start on, until ``deliver`` returns False.

        What it raises is raised again where the next batch is waited for.
        """

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        """When each resident chunk is used next, after what is being gathered: smaller is sooner.

        Called by the reader's threads, to evict, while ``run`` waits for chunks.
        """

    def fail(self, error: Exception) -> None:
        """Told what the training loop gets instead of the next batch. Called by the thread that waits for batches."""

    def waiting_for(self) -> dict[str, Any] | None:
        """What else than chunks keeps ``run`` waiting now, as ``Pipeline.activity`` tells it. Called by any thread."""


def steps_at_once(options: PipelineOptions, rows: int, row_bytes: int) -> int:
    """The most steps that are gathered together, of each of which a rank has about so many rows."""
    return int(min(MOST_AT_ONCE, max(1, options.span_bytes // (max(1, rows) * row_bytes))))


def pick_uses(chunks: Sequence[int], uses: Mapping[int, int]) -> dict[int, int]:
    """When each of some chunks is used next; those that are in no window are last."""
    return {chunk: uses.get(chunk, _NEVER) for chunk in chunks}


@contextmanager
def time_assembly(counters: Counters, **amounts: float) -> Iterator[None]:
    """Count what is done meanwhile, but for waits for chunks, as assembling, with ``amounts``; nothing if it raises."""
    waited, started = counters.totals().chunk_wait_s, time.perf_counter()
    yield
    waited = counters.totals().chunk_wait_s - waited
    busy = max(0.0, time.perf_counter() - started - waited)
    counters.add(since=started, assemble_s=busy, **amounts)


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
    """The rows of one step of a span, repeated where the batch is padded; how many make the batch, how many count.

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
