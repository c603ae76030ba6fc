"""The pipeline of one rank: plan ahead, fetch ahead, gather, decode ahead, hand over in order.

One assembler thread plans and gathers; the reader's threads fetch; the pool's threads or worker processes decode; with
a device, one more thread copies. Batches wait in a bounded delivery queue for the training loop's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...storage.daemon_pool import DaemonPool
from ..columns import Block, IntArray
from ..decoding.batch import BatchMaker, BatchOptions, PendingBatch
from ..decoding.decode import FieldDecoders
from ..decoding.gather import Rows, gather
from ..decoding.worker_pool import WorkerPool
from ..metrics import Counters
from ..order.plan import EpochPlan, Order, Share, count_steps
from ..order.selection import Selection
from ..order.spans import EpochSpans, Span, chunks_by_first_use
from ..reading.chunk_reader import ChunkReader
from ..reading.chunk_source import ChunkSource
from ..reading.leases import Leases
from ..reading.quarantine import Quarantine
from .delivery_queue import Delivery, DeliveryQueue
from .device import DeviceFeeder
from .tuning import PipelineOptions

_CLOSING_S = 1.0  # how long close() waits for requests in flight
_SHOWN_IDS = 8
_NO_IDS: IntArray = np.empty(0, np.int64)


class Pipeline:
    """Runs from (epoch, position) on, epoch after epoch, until it is closed or fails. Owns all threads of the rank."""

    def __init__(
        self,
        *,
        source: ChunkSource,
        order: Order,
        share: Share,
        last_batch: str,
        batch_options: BatchOptions,
        decoders: FieldDecoders,
        options: PipelineOptions,
        quarantine: Quarantine,
        epoch: int,
        position: int,
        counters: Counters,
        workers: WorkerPool | None = None,
        selection: Selection | None = None,
    ) -> None:
        self._source = source
        self._selection = selection
        self._order = order
        self._share = share
        self._last_batch = last_batch
        self._options = options
        self._quarantine = quarantine
        self._epoch = epoch
        self._position = position
        self._counters = counters
        self._stopping = threading.Event()
        # On a device two batches wait, the fewest that keep it fed: its memory belongs to the model.
        self._out = DeliveryQueue(options.batch_budget_bytes if options.device is None else 0)
        self._pool = DaemonPool("penstock-decode", options.decode_threads)
        self._maker = BatchMaker(
            options=batch_options,
            decoders=decoders,
            manifest=source.manifest,
            pool=self._pool,
            workers=workers,
            parts=options.decode_threads if workers is None else workers.processes,
            counters=counters,
            stopping=self._stopping,
        )
        self._next_uses: dict[int, int] | None = None
        self._next_uses_from = 0
        self._assembling: EpochSpans | None = None
        self._finishing: tuple[Delivery, float] | None = None  # the batch being finished, and since when
        source.limit_headers(options.header_budget_bytes)
        source.limit_memory(options.memory_limit_bytes)
        # Half: a user who keeps every batch leaves the other half to reading.
        self._leases = Leases(options.chunk_budget_bytes // 2) if decoders.raw == "view" else None
        self._reader = ChunkReader(
            source,
            budget_bytes=options.chunk_budget_bytes,
            threads=options.fetch_threads,
            next_use=self._next_use,
            counters=counters,
            leases=self._leases,
        )
        self._feeder = None if options.device is None else DeviceFeeder(options.device)
        self._host_out = self._out if self._feeder is None else DeliveryQueue(options.batch_budget_bytes)
        self._threads = [threading.Thread(target=self._assemble, name="penstock-assemble", daemon=True)]
        if self._feeder is not None:
            self._threads.append(threading.Thread(target=self._feed, name="penstock-copy", daemon=True))

    def start(self) -> None:
        """Start the threads; called once. Whoever holds the pipeline can close it, however far this came."""
        self._reader.start()
        for thread in self._threads:
            thread.start()

    # -- the training loop's thread -------------------------------------------------------------------------------

    def get(self) -> Delivery:
        """The next batch, ready for use, or an epoch's end. Raises what went wrong at this point of the order."""
        item = self._out.get()
        if item.batch is None:
            return item
        if isinstance(item.batch, PendingBatch):
            return _with_batch(item, self._finish(item, item.batch))
        return _with_batch(item, item.batch.take())

    def activity(self) -> dict[str, Any]:
        """What the next batch is waiting for, and for how long; empty if one is ready. Called by any thread."""
        finishing = self._finishing
        if finishing is not None:
            item, since = finishing
            shown = ", ".join(map(str, item.ids[:_SHOWN_IDS])) + (", ..." if len(item.ids) > _SHOWN_IDS else "")
            what = f"decoding and transforming samples {shown} of epoch {item.epoch}"
            stopped = [] if self._maker.workers is None else self._maker.workers.stopped
            if stopped:
                pids = " ".join(map(str, stopped))
                what += f"; stopped worker processes, which `kill -CONT {pids}` continues: {pids}"
            return {"waiting_for": what, "since_s": round(time.perf_counter() - since, 1)}
        missing, waited_s = self._reader.list_missing()
        if len(self._out) or not missing:
            return {}
        chunk = self._source.manifest.chunk(missing[0])
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"chunk at byte {chunk.offset} of {chunk.shard.key}{more}"
        return {"waiting_for": what, "since_s": round(waited_s, 1)}

    def _finish(self, item: Delivery, pending: PendingBatch) -> Any:
        self._finishing = item, time.perf_counter()
        try:
            return pending.result()
        finally:
            self._finishing = None

    @property
    def resident_bytes(self) -> int:
        return self._reader.resident_bytes

    @property
    def peak_bytes(self) -> int:
        return self._reader.peak_bytes

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Tell every thread to end, and wake whoever waits for a batch; does not wait."""
        self._stopping.set()
        self._out.close()
        self._host_out.close()
        self._reader.stop()

    def close(self) -> None:
        """Stop every thread and free every buffer; safe at any time, and more than once.

        Waits one second for requests in flight, not as long as a slow store may take.
        """
        self.stop()
        until = time.monotonic() + _CLOSING_S
        self._reader.close(until)
        assembler, *others = self._threads
        if assembler.is_alive():
            assembler.join(max(0.1, until - time.monotonic()))  # it may be reading a replacement for a bad chunk
        for thread in others:
            if thread.is_alive():
                thread.join()
        self._pool.close()
        if self._feeder is not None:
            self._feeder.close()

    # -- the assembler thread -------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        try:
            ahead = _LookAhead(self._spans(), self._reader)
            for spans, span in ahead:
                if self._stopping.is_set() or not self._assemble_span(spans, span):
                    return
        except BaseException as exc:  # noqa: BLE001 - raised where the batch is waited for
            self._host_out.fail(exc)

    def _spans(self) -> Iterator[tuple[EpochSpans, Span | None, list[int]]]:
        """Every span from here on, with the chunks that it is the first to need; span None marks an epoch's end."""
        manifest = self._source.manifest
        global_batch = self._share.global_batch_size
        steps_at_once = 1
        row_bytes = max(1, int(manifest.memory.sum()) // manifest.num_samples)
        step_bytes = max(1, global_batch // self._share.world_size) * row_bytes
        most = int(min(64, max(1, self._options.span_bytes // step_bytes)))
        while True:
            plan = EpochPlan(manifest.samples, self._order, self._epoch, self._selection)
            spans = EpochSpans(plan, self._share)
            left = count_steps(plan.num_samples, self._position, global_batch, self._last_batch)
            while left:
                steps = min(steps_at_once, left)
                span, entered = spans.plan_span(self._position, steps)
                yield spans, span, chunks_by_first_use(entered)
                self._position = int(span.bounds[-1])
                left -= steps
                steps_at_once = min(most, 2 * steps_at_once)  # so that the first batch does not wait for others
            yield spans, None, []
            self._epoch, self._position = self._epoch + 1, 0

    def _assemble_span(self, spans: EpochSpans, span: Span | None) -> bool:
        if span is None:
            self._release(spans, spans.plan.num_samples)
            end = Delivery(spans.plan.epoch, spans.plan.num_samples, spans.plan.num_samples, _NO_IDS, 0, None)
            return self._host_out.put(end)
        waited = self._counters.totals().chunk_wait_s
        started = time.perf_counter()
        rows: Rows | None = None
        try:
            rows = self._gather(spans, span)
        except Exception:
            if span.steps == 1 or self._stopping.is_set():
                raise
        if rows is None:  # the batches before the one that needs what failed are delivered
            return all(self._assemble_span(spans, span.cut(step)) for step in range(span.steps))
        busy = time.perf_counter() - started - (self._counters.totals().chunk_wait_s - waited)
        self._counters.add(assemble_s=busy)
        self._release(spans, int(span.bounds[-1]))
        return all(self._emit(span, step, rows) for step in range(span.steps))

    def _gather(self, spans: EpochSpans, span: Span) -> Rows:
        groups = spans.expand(span)
        self._assembling, self._next_uses, self._next_uses_from = spans, None, int(span.bounds[-1])
        by_chunk = {group.chunk: group for group in groups}
        blocks = self._reader.take([group.chunk for group in groups])
        return gather(
            (
                (by_chunk[chunk], loaded)
                if isinstance(loaded, Block)
                else self._quarantine.replace(by_chunk[chunk], loaded)
                for chunk, loaded in blocks
            ),
            span.num_rows,
            self._source.manifest.first_ids,
            self._maker.decoders,
            None if self._leases is None else self._leases.lend,
        )

    def _release(self, spans: EpochSpans, position: int) -> None:
        done: list[int] = []
        for entered in spans.close_windows(position):
            done += entered.chunks.tolist()
        if done:
            self._reader.release(done)

    def _emit(self, span: Span, step: int, rows: Rows) -> bool:
        started = time.perf_counter()
        batch_rows, num_rows, num_valid = cut_step(rows, span, step, self._share)
        pending = self._maker.start(batch_rows, span.epoch, num_rows, num_valid)
        item = Delivery(
            epoch=span.epoch,
            start=int(span.bounds[step]),
            stop=int(span.bounds[step + 1]),
            ids=batch_rows.ids[:num_valid],
            nbytes=batch_rows.count_bytes(self._maker.decoders.settled),
            batch=pending,
        )
        delivered = self._host_out.put(item)
        if not delivered:
            pending.cancel()
        self._counters.add(backpressure_s=time.perf_counter() - started)
        return delivered

    def _next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        """Positions at which resident chunks are next used, after the current span. Called by the reader to evict."""
        if self._next_uses is None:
            assert self._assembling is not None
            self._next_uses = self._assembling.next_uses(self._next_uses_from)
        never = self._source.manifest.num_samples
        return {chunk: self._next_uses.get(chunk, never) for chunk in chunks}

    # -- the copying thread ---------------------------------------------------------------------------------------

    def _feed(self) -> None:
        assert self._feeder is not None
        try:
            while True:
                item = self._host_out.get()
                if item.batch is not None:
                    batch = self._finish(item, item.batch)
                    started = time.perf_counter()
                    item = _with_batch(item, self._feeder.stage(batch))
                    self._counters.add(copy_s=time.perf_counter() - started)
                if not self._out.put(item):
                    return
        except BaseException as exc:  # noqa: BLE001 - raised where the batch is waited for
            self._out.fail(exc)


def cut_step(rows: Rows, span: Span, step: int, share: Share) -> tuple[Rows, int, int]:
    """The rows of one step of a span, repeated where the batch is padded; how many make the batch, how many count."""
    low, high = int(span.row_starts[step]), int(span.row_starts[step + 1])
    num_valid = int(span.num_valid[step])
    batch_rows = rows.cut(low, high)
    num_rows = max(num_valid, share.batch_size) if share.pad else num_valid
    if num_rows > high - low:
        batch_rows = batch_rows.pick([i % (high - low) for i in range(num_rows)])
    return batch_rows, num_rows, num_valid


class _LookAhead:
    """Plans spans ahead and requests their chunks as long as the reader has room; yields the spans one by one.

    A few spans are planned for each one yielded, so that the first does not wait for the planning of many others.
    """

    _PER_SPAN = 8
    _MOST = 1024

    def __init__(self, planned: Iterator[tuple[EpochSpans, Span | None, list[int]]], reader: ChunkReader) -> None:
        self._source = planned
        self._reader = reader
        self._planned: deque[tuple[EpochSpans, Span | None]] = deque()

    def __iter__(self) -> Iterator[tuple[EpochSpans, Span | None]]:
        while True:
            for _ in range(self._PER_SPAN):
                if self._planned and (len(self._planned) >= self._MOST or not self._reader.has_room):
                    break
                spans, span, chunks = next(self._source)
                self._reader.request(chunks)
                self._planned.append((spans, span))
            yield self._planned.popleft()


def _with_batch(item: Delivery, batch: Any) -> Delivery:
    return replace(item, batch=batch)
