"""The loader as its users see it: an iterable of batches with a position that can be saved and loaded."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import torch

from ..storage import LocalStore, open_store
from .arguments import check_at_least, check_names, make_share
from .dataset.index import open_manifest
from .dataset.manifest import Manifest
from .decoding.batch import Batch, BatchOptions
from .decoding.decode import DecodeChoice, FieldDecoders
from .decoding.row_work import RowWork, Sample
from .decoding.worker_pool import WorkerPool
from .errors import ConfigError, LoaderClosedError, PartitionError
from .formats.detect import make_format
from .formats.shard import ShardFormat
from .limits import parse_bytes, usable_cores
from .metrics import Counters, LoaderMetrics, find_bottleneck
from .order.plan import Order, auto_lanes, auto_window, count_steps
from .order.state import LoaderState
from .pipeline.delivery_log import DeliveryLog
from .pipeline.device import resolve_cuda
from .pipeline.pipeline import Pipeline
from .pipeline.tuning import tune
from .ranks import local_world_size
from .reading.chunk_source import ChunkSource
from .reading.quarantine import BadChunk, Quarantine

LastBatch = Literal["drop", "pad", "partial"]


class DistributedDataLoader:
    """Batches of a sharded data set, streamed from where it lies, balanced over the ranks, resumable anywhere.

    One pass of ``for batch in loader`` is one epoch; the next pass is the next epoch. Leaving the loop early keeps the
    position, and the next pass goes on with the batch after it. There is one position, so a pass that is asked for more
    after a newer one has begun is refused; going to another epoch within a pass ends it. A batch is a dict of field
    name to tensor, or to a list where values have no common shape. Every rank gets the same number of batches.

    Args:
        source: URL or path of a prefix, of one shard, a brace pattern (``s3://b/x-{000..099}.tar``), a list of these,
            or a ``Manifest``. A data set without an index is indexed at first use.
        batch_size: samples per rank and batch. Or:
        global_batch_size: samples of all ranks together per batch; must be a multiple of the world size.
        shuffle, seed: whether, and from which seed, every epoch has an order of its own.
        lanes, window: how finely the order is spread and how far samples are mixed; "auto" fits the data set and the
            world size at the start of a run, and takes over a loaded state's.
        columns: the fields to read; None reads all. Of parquet only the bytes of these are fetched.
        decode: "auto" decodes by extension and type, None gives raw bytes, a mapping sets decoders by field.
        transform: a function of a sample (dict of field to value; images are (h, w, 3) arrays) that gives a sample. One
            with a parameter ``rng`` gets a generator that depends on seed, epoch and sample id alone.
        collate: a function of a list of samples that gives a batch.
        last_batch: what becomes of the samples that do not fill a global batch: "drop" leaves them out; "pad" fills up
            with repeated samples that ``batch["__valid__"]`` marks False; "partial" gives smaller batches, on some
            ranks possibly of 0 samples.
        device: None leaves batches in host memory; "cuda" copies them ahead of need, through pinned buffers, on a
            stream of the loader's own.
        workers: threads that decode and transform; "auto" is the node's cores over its ranks.
        processes: worker processes that decode and transform in the threads' stead, with the same results: for a
            transform in pure Python, which holds the GIL. It must be defined at the top level of a module. Samples
            are sent to and fro, and the processes' own memory is not under ``memory_limit``.
        memory_limit: bytes (or '2GiB') for everything that the loader holds; "auto" goes by the machine and cgroup.
        cache_dir, cache_limit: a folder, shared by the node's processes, to keep fetched chunks in, and its size.
        rank, world_size: default to torch.distributed's, then torchrun's environment's, then 0 of 1.
        storage_options: credentials, endpoint and the like for the store.
        with_ids: add ``batch["__id__"]``, (B,) int64 sample ids.
        format: a format with settings of its own, such as ``TokensFormat(seq_len=2048)``; None detects it.
        audit_dir: a folder to log every delivery in, for ``penstock audit``.
        max_bad_chunks: how many chunks that cannot be read are replaced by others before that is an error; they are
            told by a warning, and in ``bad_chunks``.

    Raises:
        ConfigError, PartitionError: an argument, or how arguments go together, cannot work; says what would.
        DatasetError, FormatError, StorageError: the data set cannot be found, listed or indexed.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Sequence[str | PathLike[str]] | Manifest,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        lanes: int | Literal["auto"] = "auto",
        window: int | Literal["auto"] = "auto",
        columns: Sequence[str] | None = None,
        decode: DecodeChoice = "auto",
        transform: Callable[..., Sample] | None = None,
        collate: Callable[[list[Sample]], Batch] | None = None,
        last_batch: LastBatch = "drop",
        device: str | torch.device | None = None,
        workers: int | Literal["auto"] = "auto",
        processes: int = 0,
        memory_limit: int | str = "auto",
        cache_dir: str | PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        with_ids: bool = False,
        format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
        audit_dir: str | PathLike[str] | None = None,
        max_bad_chunks: int = 0,
    ) -> None:
        self._running = _Running()
        self._finalizer = weakref.finalize(self, self._running.close)
        if last_batch not in ("drop", "pad", "partial"):
            raise ConfigError(f"last_batch={last_batch!r}: must be 'drop', 'pad' or 'partial'")
        if cache_limit is not None and cache_dir is None:
            raise ConfigError(f"cache_limit={cache_limit!r} without a cache; give cache_dir= too")
        self._last_batch = last_batch
        self._share = make_share(rank, world_size, batch_size, global_batch_size, pad=last_batch == "pad")
        self._batch_options = BatchOptions(
            decode=decode,
            transform=transform,
            collate=collate,
            with_ids=with_ids,
            pad=last_batch == "pad",
            seed=seed,
        )
        self._device = None if device is None or str(device) == "cpu" else resolve_cuda(device)
        self._workers = max(1, usable_cores() // local_world_size()) if workers == "auto" else workers
        check_at_least("workers", self._workers, 1)
        check_at_least("processes", processes, 0)
        if processes:
            work = RowWork(transform=transform, seed=seed)
            self._running.workers = WorkerPool(work, decode, processes)
        check_at_least("max_bad_chunks", max_bad_chunks, 0)
        self._fixed_lanes = None if lanes == "auto" else lanes
        self._fixed_window = None if window == "auto" else window
        self._memory_limit = None if memory_limit == "auto" else parse_bytes(memory_limit, "memory_limit")

        self._manifest = open_manifest(source, storage_options=storage_options, format=format, cache_dir=cache_dir)
        self._order = self._choose_order(seed=seed, shuffle=shuffle)
        if not len(self):
            raise PartitionError(
                f"a global batch of {self._share.global_batch_size} samples ({self._share.world_size} ranks) is above "
                f"the data set's {self._manifest.num_samples}, and last_batch='drop' leaves nothing; "
                "use a smaller batch, or last_batch='pad' or 'partial'"
            )
        names = None if columns is None else list(columns)
        check_names(self._manifest, names, decode)
        self._decoders = FieldDecoders(decode)
        self._counters = Counters()
        store = open_store(
            self._manifest.url,
            storage_options=storage_options,
            cache_dir=cache_dir,
            cache_limit=None if cache_limit is None else parse_bytes(cache_limit, "cache_limit"),
        )
        self._running.store = store
        self._is_local = isinstance(store, LocalStore)
        shard_format = make_format(self._manifest.format, self._manifest.config)
        self._source = ChunkSource(self._manifest, shard_format, store, names, self._counters)
        self._quarantine = Quarantine(self._source, max_bad_chunks)
        self._epoch, self._consumed = 0, 0
        self._passes = 0
        if audit_dir is not None:
            self._running.log = DeliveryLog(
                audit_dir, manifest=self._manifest, rank=self._share.rank, world_size=self._share.world_size
            )

    def _choose_order(self, *, seed: int, shuffle: bool) -> Order:
        lanes, window = self._fixed_lanes, self._fixed_window
        if lanes is None:
            lanes = auto_lanes(shuffle=shuffle, world_size=self._share.world_size)
        if window is None:
            window = auto_window(lanes=lanes, mean_chunk_bytes=float(self._manifest.memory.mean()))
        return Order(seed=seed, shuffle=shuffle, lanes=lanes, window=window)

    # -- iteration ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the current position to the epoch's end, or until another epoch is gone to."""
        self._passes += 1
        this_pass, epoch = self._passes, self._epoch
        is_first = True
        left_s = time.perf_counter()
        while is_first or self._epoch == epoch:
            if self._passes != this_pass:
                raise ConfigError(
                    "another pass over this loader has begun, and a loader has one position; make a loader for each"
                )
            pipeline = self._pipeline()
            asked_s = time.perf_counter()
            try:
                item = pipeline.get()
            except BaseException:  # an interrupt, too: a batch taken out of the queue is not lost
                self._running.stop_pipeline()  # the position stands: another pass tries again from it
                raise
            got_s = time.perf_counter()
            if item.batch is None:
                self._epoch, self._consumed = item.epoch + 1, 0
                if is_first:  # the last pass was left after the epoch's last batch: this pass is the next epoch's
                    continue
                return
            self._counters.add(batches=1, samples=len(item.ids))
            if is_first:
                self._counters.add(first_batch_s=got_s - asked_s)
            else:
                self._counters.add(consumer_wait_s=got_s - asked_s, consumer_busy_s=asked_s - left_s)
            is_first = False
            epoch = self._epoch = item.epoch
            self._consumed = item.stop
            if self._running.log is not None:
                self._running.log.record(item.epoch, item.start, item.stop, item.ids)
            left_s = time.perf_counter()
            yield item.batch

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank."""
        return count_steps(self._manifest.num_samples, 0, self._share.global_batch_size, self._last_batch)

    @property
    def steps_left(self) -> int:
        """Batches from the current position to the epoch's end: after a resume in mid-epoch, less than ``len``."""
        return count_steps(self._manifest.num_samples, self._consumed, self._share.global_batch_size, self._last_batch)

    @property
    def epoch(self) -> int:
        """The epoch of the last batch handed out; after a pass has ended, the next pass's."""
        return self._epoch

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def order(self) -> Order:
        return self._order

    @property
    def bad_chunks(self) -> list[BadChunk]:
        """The chunks that could not be read and were replaced, up to ``max_bad_chunks`` of them."""
        return self._quarantine.records

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the position is inside that epoch already."""
        check_at_least("epoch", epoch, 0)
        self._check_open()
        if epoch != self._resume_position()[0]:
            self._move(epoch, 0)

    def set_shares(self, weights: Sequence[float] | None) -> None:
        """From the next batch on, cut global batches in proportion to ``weights``, a positive number a rank.

        None makes the shares equal again. Every rank must call this with the same weights after the same batch. Global
        batches keep their samples. What was read ahead is dropped.

        Raises:
            PartitionError: not one positive number a rank.
        """
        share = replace(self._share, weights=None if weights is None else tuple(weights))
        share.batch_size  # noqa: B018 - raises where the weights do not fit
        self._check_open()
        self._share = share
        self._move(*self._resume_position())

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out: a small dict for JSON, the same on every rank."""
        epoch, consumed = self._resume_position()
        return LoaderState(
            fingerprint=self._manifest.fingerprint,
            num_samples=self._manifest.num_samples,
            seed=self._order.seed,
            shuffle=self._order.shuffle,
            lanes=self._order.lanes,
            window=self._order.window,
            epoch=epoch,
            consumed=consumed,
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called, with any world size, batch size and number of workers.

        Raises:
            StateMismatchError: the state is of another data set, seed or order; names what differs.
        """
        loaded = LoaderState.from_dict(state)
        loaded.check(
            fingerprint=self._manifest.fingerprint,
            num_samples=self._manifest.num_samples,
            seed=self._order.seed,
            shuffle=self._order.shuffle,
            lanes=self._fixed_lanes,
            window=self._fixed_window,
        )
        self._check_open()
        self._order = loaded.order
        self._move(loaded.epoch, loaded.consumed)

    def _resume_position(self) -> tuple[int, int]:
        return (self._epoch, self._consumed) if self.steps_left else (self._epoch + 1, 0)

    def _move(self, epoch: int, consumed: int) -> None:
        self._running.stop_pipeline()
        self._epoch, self._consumed = epoch, consumed
        self._epoch, self._consumed = self._resume_position()

    # -- running --------------------------------------------------------------------------------------------------

    def metrics(self) -> LoaderMetrics:
        """What was done so far, where the time went, and which stage bounds the throughput."""
        totals = self._counters.totals()
        pipeline = self._running.pipeline
        return LoaderMetrics(
            **totals.to_dict(),
            resident_bytes=pipeline.resident_bytes if pipeline else 0,
            peak_bytes=pipeline.peak_bytes if pipeline else 0,
            bottleneck=find_bottleneck(totals),
        )

    def activity(self) -> dict[str, Any]:
        """What the next batch waits for now, for people: such as ``{"waiting_for": "chunk at byte 0 of train-3.tar",
        "since_s": 4.2}``; empty where a batch is ready or none was asked for.

        Cheap, and may be called by any thread while another one iterates: a watchdog asks it why training stands still.
        """
        pipeline = self._running.pipeline
        return {} if pipeline is None else pipeline.activity()

    def close(self) -> None:
        """Stop all threads and processes, and close the store; the loader cannot be used again.

        Safe at any time, and twice.
        """
        self._finalizer()
        self._running.close()  # waits where another thread is closing it

    def __enter__(self) -> DistributedDataLoader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        share = self._share
        return (
            f"DistributedDataLoader({self._manifest.url!r}, {self._manifest.num_samples} samples, "
            f"global_batch_size={share.global_batch_size}, rank={share.rank}, world_size={share.world_size})"
        )

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise LoaderClosedError("the loader is closed; make another one")

    def _pipeline(self) -> Pipeline:
        self._check_open()
        if self._running.pipeline is None:
            if self._running.workers is not None:
                self._running.workers.start()
            self._running.pipeline = Pipeline(
                source=self._source,
                order=self._order,
                share=self._share,
                last_batch=self._last_batch,
                batch_options=self._batch_options,
                decoders=self._decoders,
                options=tune(
                    self._manifest,
                    self._order,
                    world_size=self._share.world_size,
                    memory_limit=self._memory_limit,
                    workers=self._workers,
                    is_local=self._is_local,
                    device=self._device,
                ),
                quarantine=self._quarantine,
                epoch=self._epoch,
                position=self._consumed,
                counters=self._counters,
                workers=self._running.workers,
            )
        return self._running.pipeline


class _Running:
    """What outlives a call and must be let go: kept apart from the loader, so that its finalizer can hold it."""

    def __init__(self) -> None:
        self.store: Any = None
        self.pipeline: Pipeline | None = None
        self.workers: WorkerPool | None = None
        self.log: DeliveryLog | None = None
        self._closing = threading.RLock()

    def stop_pipeline(self) -> None:
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None

    def close(self) -> None:
        with self._closing:
            if self.pipeline is not None:
                self.pipeline.stop()
            for owned in (self.workers, self.store):  # before the threads, which wait for these two
                if owned is not None:
                    owned.close()
            self.stop_pipeline()
            if self.log is not None:
                self.log.close()
            self.workers = self.log = self.store = None
