"""The pipeline of one rank: plan ahead, fetch ahead, gather, decode ahead, hand over in order.

One thread runs the assembler, which plans and gathers; the reader's threads fetch; the pool's threads or worker
processes decode; with a device, one more thread copies. Batches wait in a bounded delivery queue for the training
loop's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...storage.memory.libc import keep_freed_memory
from ...storage.threads.daemon_pool import DaemonPool
from ...storage.threads.interruptible import Event, Thread
from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..decoding.batch_memory import BatchMemory
from ..reading.chunk_memory import Leases
from ..reading.chunk_reader import ChunkReader
from .assembler import Assembler, Equipment, Start
from .autotune import Sums, Tuner
from .delivery_log import pair_replaced
from .delivery_queue import Delivery, DeliveryQueue
from .device import DeviceFeeder

if TYPE_CHECKING:
    from ..counters import Counters, Levels
    from ..decoding.decode import FieldDecoders
    from ..decoding.replace import Replacer
    from ..decoding.row_work import BatchOptions
    from ..decoding.workers.images import ImageProcesses
    from ..decoding.workers.pool import WorkerPool
    from ..reading.chunk_source import ChunkSource
    from .autotune import Settings
    from .tuning import PipelineOptions

_CLOSING_S = 1.0  # how long close() waits for requests in flight
_SHOWN_IDS = 8
# A loop that comes back later than this has the next batches made meanwhile, where they wait for it to be made.
_AWAY_S, _BEGUN_AHEAD = 0.002, 2
# After a batch is handed over the device is empty, and the loop starts its first kernels: for this part of a step, and
# so long at most, nothing else is begun where another batch is ready.
_QUIET_SHARE, _MOST_QUIET_S = 0.15, 0.01


class Pipeline:
    """Delivers from ``start`` on, epoch after epoch, until it is closed or fails. Owns all threads of the rank."""

    def __init__(
        self,
        *,
        source: ChunkSource,
        batch_options: BatchOptions,
        decoders: FieldDecoders,
        options: PipelineOptions,
        counters: Counters,
        make_assembler: Callable[[Equipment, Start], Assembler],
        start: Start,
        read_waits: Callable[[float], float] | None,
        workers: WorkerPool | None,
        images: ImageProcesses | None,
        replacer: Replacer | None,
        tuner: Tuner,
    ) -> None:
        """Make its parts; ``read_waits`` says how long a loop in another process has waited, until a given time."""
        self._source = source
        self._tuner = tuner
        self._read_waits = self._sum_waits if read_waits is None else read_waits
        options = tuner.begin(options, source.mean_reserve)
        self._counters = counters
        self._stopping = Event()
        # On a device two batches wait, the fewest that keep it fed: its memory belongs to the model.
        self._out = DeliveryQueue(options.batch_budget_bytes if options.device is None else 0)
        self.interrupt = self._out.interrupt  # by any thread: an error that the next ``get`` raises
        self._pool = DaemonPool("penstock-decode", options.decode_threads)
        self._feeder = None if options.device is None else DeviceFeeder(options.device)
        # Copies start from the batches' own memory, unless a user's function made them, which may change them later.
        self._is_direct = self._feeder is not None and batch_options.transform is batch_options.collate is None
        allocate = self._feeder.allocate if self._feeder is not None and self._is_direct else None
        self._memory = BatchMemory(options.batch_budget_bytes, allocate)
        decoders.widens_on_device = self._is_direct and batch_options.finish is None
        self._maker = BatchMaker(
            options=batch_options,
            decoders=decoders,
            manifest=source.manifest,
            pool=self._pool,
            workers=workers,
            counters=counters,
            stopping=self._stopping,
            replacer=replacer,
            memory=self._memory,
            images=images,
        )
        self._finishing: tuple[Delivery, float] | None = None  # the batch being finished, and since when
        source.limit_headers(options.header_budget_bytes)
        source.limit_memory(options.memory_limit_bytes)
        source.limit_pages(options.memory_limit_bytes)
        # Half: a user who keeps every batch leaves the other half to reading.
        self._leases = Leases(options.chunk_budget_bytes // 2) if decoders.raw == "view" else None
        self._reader = ChunkReader(
            source,
            budget_bytes=options.chunk_budget_bytes,
            threads=options.fetch_threads,
            next_use=self._next_use,
            counters=counters,
            leases=self._leases,
            keeps_unused=source.fit_into(options.chunk_budget_bytes),
        )
        self._host_out = self._out if self._feeder is None else DeliveryQueue(options.batch_budget_bytes)
        self._batch_budget_bytes = options.batch_budget_bytes
        self._waits_since: float | None = None  # the training loop, by perf_counter()
        self._waited_s = 0.0
        self._left_at = math.inf  # when the training loop got its last batch
        self._step_s = 0.0  # how long it was away before it came for that
        equipment = Equipment(
            source=source,
            reader=self._reader,
            maker=self._maker,
            leases=self._leases,
            options=options,
            counters=counters,
            stopping=self._stopping,
            deliver=self._host_out.put,
            is_short=self._host_out.is_short,
        )
        self._assembler = make_assembler(equipment, start)
        self._threads = [Thread(target=self._assemble, name="penstock-assemble")]
        if self._feeder is not None:
            self._threads.append(Thread(target=self._feed, name="penstock-copy"))
        self._set_read_ahead(options.read_ahead_bytes)
        if tuner.is_on:
            tune = partial(tuner.run, self, self._stopping)
            self._threads.append(Thread(target=tune, name="penstock-tune"))

    def start(self) -> None:
        """Start the threads; called once. The pipeline can be closed even if this fails midway."""
        keep_freed_memory()  # batches come from these threads, and end in the training loop's
        for thread in self._threads:
            thread.start()
        self._reader.start()  # many threads, while the assembler plans

    # -- the training loop's thread -------------------------------------------------------------------------------

    def get(self) -> Delivery:
        """Get the next batch, ready for use, or an epoch's end. Raises the error at this point of the order."""
        self._waits_since = now = time.perf_counter()
        try:
            delivery = self._get()
            self._step_s = now - self._left_at
            if now - self._left_at > _AWAY_S:
                self._out.begin(_BEGUN_AHEAD)
            self._left_at = time.perf_counter()
            return delivery
        except Exception as exc:
            if not self.is_stopped:
                self._assembler.fail(exc)
            raise
        finally:
            since, self._waits_since = self._waits_since, None
            self._waited_s += time.perf_counter() - since

    def _get(self) -> Delivery:
        item = self._out.get()
        if item.is_end:
            return item
        if isinstance(item.batch, UnfinishedBatch):
            return self._finish(item, item.batch)
        return item.with_batch(item.batch.take(), item.replaced)

    def activity(self) -> dict[str, Any]:
        """Describe what the next batch waits for, and for how long; empty if one is ready. Called by any thread."""
        finishing = self._finishing
        if finishing is not None:
            item, since = finishing
            shown = ", ".join(map(str, item.ids[:_SHOWN_IDS])) + (", ..." if len(item.ids) > _SHOWN_IDS else "")
            what = f"decoding and transforming samples {shown} of epoch {item.epoch}"
            if stopped := self._maker.stopped:
                pids = " ".join(map(str, stopped))
                what += f"; stopped worker processes, which `kill -CONT {pids}` continues: {pids}"
            return {"waiting_for": what, "since_s": round(time.perf_counter() - since, 1)}
        waiting_for = self._assembler.waiting_for()
        if waiting_for is not None and not len(self._out):
            return waiting_for
        missing, waited_s = self._reader.list_missing()
        if len(self._out) or not missing:
            return {}
        chunk = self._source.manifest.chunk(missing[0])
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"chunk at byte {chunk.offset} of {chunk.shard.key}{more}"
        return {"waiting_for": what, "since_s": round(waited_s, 1)}

    def _next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        return self._assembler.next_use(chunks)  # which is made after the reader that asks

    def _finish(self, item: Delivery, pending: UnfinishedBatch) -> Delivery:
        self._finishing = item, time.perf_counter()
        try:
            batch = pending.result()
            return item.with_batch(batch, pair_replaced(item, pending.delivered))
        finally:
            self._finishing = None

    def levels(self) -> Levels:
        """Measure how full each buffer is now; any thread may ask."""
        waiting, ready = self._out.count()
        if self._feeder is not None:
            waiting += self._host_out.count()[0]
        processes = self._maker.processes
        return replace(
            self._reader.levels(),
            waiting_batches=waiting,
            ready_batches=ready,
            decode_threads=processes or self._maker.parts,
            decode_processes=processes,
            tuning_changes=self._tuner.changes,
            tuning=self._tuner.reason,
        )

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Tell every thread to end, and wake those that wait for a batch; does not wait."""
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
        self._memory.close()
        if self._feeder is not None:
            self._feeder.close()

    # -- the tuning thread ----------------------------------------------------------------------------------------

    def sums(self) -> Sums:
        """Sum up the work so far, for the tuner."""
        totals = self._counters.totals()
        chunk_waited_s, fetching_s = self._reader.spent()
        now = time.perf_counter()
        return Sums(
            at_s=now,
            process_s=time.process_time(),
            waited_s=self._read_waits(now),
            chunk_waited_s=chunk_waited_s,
            fetching_s=fetching_s,
            # The work of processes says nothing of the threads, which are tuned.
            decoding_s=totals.decode_s - (0.0 if self._maker.images is None else self._maker.images.busy_s),
            fetched_bytes=totals.fetched_bytes,
            decoded_rows=totals.decoded_rows,
            batches=totals.batches,
            evicted_chunks=totals.evicted_chunks,
        )

    def _sum_waits(self, now: float) -> float:
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else now - since)

    def apply(self, settings: Settings) -> None:
        """Apply settings from now on. Raises RuntimeError where no more threads can be started."""
        self._set_read_ahead(settings.read_ahead_bytes)
        self._pool.limit(settings.decode_threads)
        self._reader.set_threads(settings.fetch_threads)

    def _set_read_ahead(self, nbytes: int) -> None:
        self._reader.set_read_ahead(nbytes)
        self._host_out.limit(min(self._batch_budget_bytes, nbytes))

    # -- the assembler thread -------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        try:
            self._assembler.run()
        except BaseException as exc:  # noqa: BLE001 - raised where the batch is waited for
            self._host_out.fail(exc)

    # -- the copying thread ---------------------------------------------------------------------------------------

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._is_direct and self._memory.is_pinned(tensor.data_ptr(), tensor.nbytes)

    def _feed(self) -> None:
        assert self._feeder is not None
        try:
            while True:
                item = self._host_out.get()
                self._host_out.begin(_BEGUN_AHEAD)
                if not item.is_end:
                    item = self._finish(item, item.batch)
                    started = time.perf_counter()
                    item = item.with_batch(self._feeder.stage(item.batch, self._is_pinned), item.replaced)
                    copied = {"copied_batches": 1, "copied_bytes": item.nbytes}
                    self._counters.add(copy_s=time.perf_counter() - started, **copied)
                if not self._out.put(item):
                    return
                self._keep_quiet()
        except BaseException as exc:  # noqa: BLE001 - raised where the batch is waited for
            self._out.fail(exc)

    def _keep_quiet(self) -> None:
        """Let the loop launch its first kernels, if it has just come back and its next batch waits already."""
        quiet_s = min(_QUIET_SHARE * self._step_s, _MOST_QUIET_S)
        since_s = time.perf_counter() - self._left_at
        if 0 <= since_s < quiet_s and len(self._out):
            self._stopping.wait(quiet_s - since_s)
