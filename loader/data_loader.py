"""The loader as its users see it: an iterable of batches with a position that can be saved and loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, cast

import torch

from ..storage.observability.timeline import Timeline, write_chrome_trace
from .config.checks import LastBatch, PlaceChoice, SampleWeights, check_at_least
from .config.foreign import NoItems, refuse_foreign
from .config.loader_config import LoaderConfig
from .counters import Counters
from .decoding.row_work import BatchT
from .errors import ConfigError
from .ranks.attempts import tell_of_failure
from .run.assembly import make_sampler
from .run.batch_iterator import BatchIterator
from .run.resources import Resources
from .run.run import Run
from .sources.opening import open_sources

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .config.errors import OnError
    from .config.keep import KeepChoice
    from .config.mixture import Mixture
    from .dataset.manifest import Manifest
    from .dataset.splits import Split
    from .decoding.decode import DecodeChoice, RawValues
    from .decoding.row_work import Sample
    from .formats.shard import ShardFormat
    from .metrics import LoaderMetrics
    from .order.costs.buckets import Bucket
    from .order.costs.budget import TokenBudget
    from .order.costs.costs import Cost
    from .order.plan import Choice, Order
    from .order.selecting import Subset
    from .packing.config import Packing
    from .ranks.model_parallel import FieldsByStage, SequenceCut
    from .ranks.naming import Attempt
    from .reading.bad.chunks import BadChunk
    from .reading.bad.file import Paths, Quarantined
    from .views.samples import DatasetView


class DistributedDataLoader(Generic[BatchT]):
    """Batches of a sharded data set, streamed from where it lies, balanced over the ranks, resumable anywhere.

    One pass of ``for batch in loader`` is one epoch, from its beginning; the pass after an epoch that ended is the next
    epoch. A loop left early and begun again starts the same epoch anew. In mid-epoch continue only an iterator that is
    kept and the first pass after ``load_state_dict``. A loader has one position, so an older iterator raises once a
    newer pass has begun. A batch is a dict of field name to tensor, or to a list where values have no common shape.
    Every rank gets the same number of batches. ``DistributedDataLoader[B]`` is one whose ``collate`` returns B.

    Args:
        source: URL or path of a prefix, of one shard, a pattern (``s3://b/x-{000..099}.tar``, ``s3://b/x-*.tar``), a
            list of these, a ``Manifest``, or a ``Mixture`` of several data sets. What has no index is indexed on first
            use.
        split: "train", a list of splits, or "all", told by names of folders and shards; a folder of several needs it.
        batch_size: samples per rank and batch. Or:
        global_batch_size: samples of all ranks together per batch; must be a multiple of the world size.
        shuffle, seed: whether each epoch has its own random order, and the seed of these orders.
        lanes, window: how finely the order is spread and how far samples are mixed; "auto" fits the data set and the
            world size when a run starts, and adopts those of a loaded state.
        piece: how many rows of a chunk a shuffle moves together, 0 for whole chunks; "auto" moves single rows where a
            data set has few chunks and is small, and adopts that of a loaded state.
        subset: a part of the samples, decided by their ids: ``Subset.share``, ``Subset.split`` or ``Subset.take``.
        weights: draw samples with replacement, each in proportion to its weight: one a sample id, or a mapping from
            patterns of shard names to the weight of each of their samples. An epoch has as many draws as samples.
        columns: the fields to read; None reads all. Of parquet only the bytes of these are fetched.
        decode: "auto" decodes by extension and type, None returns raw bytes, a mapping sets decoders by field. A field
            without an extension has images if its value with the lowest sample id, among the first 8 chunks, is one.
        raw: what is not decoded is handed out as a list of "bytes", or with "view" as ``ByteViews`` of the chunks'
            memory, without a copy or an object a sample; users' decoders and transforms then get memoryviews, too.
        keep: drop samples before they are decoded: a function of a sample as it is stored (dict of field to value) that
            returns whether it stays, or ``Keep(columns, predicate)`` of many samples at once.
        transform: a function from a sample (dict of field to value; images are (3, h, w) arrays) to a sample. If it has
            a parameter ``rng``, it gets a generator that depends on seed, epoch and sample id alone.
        may_drop: ``transform`` may return None, which drops the sample. Of what is left, batches are as large as ever.
        packing: a ``Packing``, to make sequences of one length of documents: token ids, or texts that are tokenised.
        collate: a function from a list of samples to a batch.
        cost: cut each global batch so that all ranks' parts cost the same, to within one sample, instead of counting as
            many samples: the name of an index of costs (``penstock index --cost``), or a ``Cost`` of it.
        bucket: bring samples of about the same length together: the name of such an index, or a ``Bucket``.
        batch_tokens: instead of a batch size, as many samples as so many padded tokens a rank hold, by the index
            "tokens"; or a ``TokenBudget``.
        last_batch: what happens to samples that do not fill a global batch: "drop" leaves them out; "pad" fills the
            batch with repeated samples, marked False in ``batch["__valid__"]``; "partial" returns smaller batches,
            which on some ranks may have 0 samples.
        device: None leaves batches in host memory; "cuda" copies them ahead of need, through pinned buffers, on a
            stream of the loader's own, to the current device, and "cuda:1" to that one.
        threads, fetch_threads, read_ahead: how many threads decode and transform, how many chunks are fetched at a
            time, and how many bytes are held ahead of need; "auto" begins with what fits machine and store.
        autotune: "auto" changes those not given while the loader runs, True also those given, False none.
        processes: worker processes that decode and transform instead of threads, with the same results: for a
            transform in pure Python, which holds the GIL; define it at the top level of a module. ``memory_limit`` does
            not cover the processes' own memory. "auto": of images alone, where a rank has six cores or more, after a
            thousand images: cores - 1 - cores // 8 of them, at most 32, and as many as 5% of the memory holds.
        place: "process" plans, reads, decodes and makes batches in a process of its own beside this one, so that no
            thread of the loader holds up the training loop; "auto" does so where images or functions of yours are
            worked on and can be sent there. Define functions at the top level of a module.
        memory_limit: bytes (or '2GiB') for everything that the loader holds; "auto" follows the machine and cgroup.
        cache_dir, cache_limit: a folder, shared by the node's processes, to keep fetched chunks in, and its size.
        rank, world_size: by default those of torch.distributed, else of torchrun's environment, else 0 of 1. What was
            found is compared with torch.distributed again at the first batch; WORLD_SIZE above 1 without RANK is
            refused.
        mesh, data_dims: a ``DeviceMesh`` instead, and its dimensions along which samples differ (by default those with
            the usual names, such as dp and dp_shard); along all others, such as tp and pp, samples are the same.
        fields_by_stage: fields that only some stages of the mesh's pipeline dimension read, decode and hand out, like
            ``{"tokens": "first", "labels": "last"}``, or by number.
        sequence_cut: a ``SequenceCut`` of the fields of which each process along the mesh's context dimension gets its
            part, with ``batch["__positions__"]``.
        storage_options: credentials, endpoint and the like for the store.
        with_ids: add ``batch["__id__"]``, (B,) int64 sample ids.
        format: a format with its own settings, such as ``TokensFormat(seq_len=2048)``; None detects it.
        audit_dir: a folder to log every delivery in, for ``penstock audit``.
        on_error: what a sample that cannot be read, decoded or transformed does: "stop" raises; "skip" drops it;
            "replace" delivers another one, which depends on (seed, epoch, sample id) alone.
        max_errors: how many samples of an epoch may be bad on a rank, as a number or as a share of the rank's samples
            (by default 0.01), before it is an error; see ``bad_samples``. Of a mixture: of each source's own epoch.
        max_bad_chunks: how many unreadable chunks are replaced by others before it is an error; each is reported by a
            warning and in ``bad_chunks``. None: with "stop" none, else as many as ``max_errors`` allows.
        quarantine: a folder in which each rank writes down its bad samples and chunks; by default ``audit_dir``.
        avoid: such files or folders of an earlier run, whose samples and chunks are bad from the start, untried.

    Raises:
        ConfigError, PartitionError: an argument, or a combination of arguments, cannot work; says what would.
        DatasetError, FormatError, StorageError: the data set cannot be found, listed or indexed.
    """

    _attempt: Attempt | None

    @refuse_foreign
    @tell_of_failure
    def __init__(
        self,
        source: str | PathLike[str] | Sequence[str | PathLike[str]] | Manifest | Mixture,
        *,
        split: Split | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        lanes: Choice = "auto",
        window: Choice = "auto",
        piece: Choice = "auto",
        subset: Subset | None = None,
        weights: SampleWeights | None = None,
        columns: Sequence[str] | None = None,
        decode: DecodeChoice = "auto",
        raw: RawValues = "bytes",
        keep: KeepChoice | None = None,
        transform: Callable[..., Sample | None] | None = None,
        may_drop: bool = False,
        packing: Packing | None = None,
        collate: Callable[[list[Sample]], BatchT] | None = None,
        cost: str | Cost | None = None,
        bucket: str | Bucket | None = None,
        batch_tokens: int | TokenBudget | None = None,
        last_batch: LastBatch = "drop",
        device: str | torch.device | None = None,
        threads: int | Literal["auto"] = "auto",
        fetch_threads: int | Literal["auto"] = "auto",
        read_ahead: int | str = "auto",
        autotune: bool | Literal["auto"] = "auto",
        processes: int | Literal["auto"] = "auto",
        place: PlaceChoice = "threads",
        memory_limit: int | str = "auto",
        cache_dir: str | PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        data_dims: Sequence[str] | None = None,
        fields_by_stage: FieldsByStage | None = None,
        sequence_cut: SequenceCut | None = None,
        storage_options: Mapping[str, Any] | None = None,
        with_ids: bool = False,
        format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
        audit_dir: str | PathLike[str] | None = None,
        on_error: OnError = "stop",
        max_errors: int | float | None = None,
        max_bad_chunks: int | None = None,
        quarantine: str | PathLike[str] | None = None,
        avoid: Paths | None = None,
    ) -> None:
        self._resources = Resources()
        self._finalizer = weakref.finalize(self, self._resources.abandon)
        config = LoaderConfig(
            source=source,
            split=split,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            lanes=lanes,
            window=window,
            piece=piece,
            subset=subset,
            weights=weights,
            columns=columns,
            decode=decode,
            raw=raw,
            keep=keep,
            transform=transform,
            may_drop=may_drop,
            packing=packing,
            collate=collate,
            cost=cost,
            bucket=bucket,
            batch_tokens=batch_tokens,
            last_batch=last_batch,
            device=device,
            threads=threads,
            fetch_threads=fetch_threads,
            read_ahead=read_ahead,
            autotune=autotune,
            processes=processes,
            place=place,
            memory_limit=memory_limit,
            cache_dir=cache_dir,
            cache_limit=cache_limit,
            rank=rank,
            world_size=world_size,
            mesh=mesh,
            data_dims=data_dims,
            fields_by_stage=fields_by_stage,
            sequence_cut=sequence_cut,
            storage_options=storage_options,
            with_ids=with_ids,
            format=format,
            audit_dir=audit_dir,
            on_error=on_error,
            max_errors=max_errors,
            max_bad_chunks=max_bad_chunks,
            quarantine=quarantine,
            avoid=avoid,
        )
        counters = Counters()
        sources = self._resources.sources = open_sources(config, counters)
        self._run = Run(config, sources, make_sampler(config, sources), self._resources, counters)
        self._view: DatasetView | None = None
        self._run.join(self._attempt)

    def __iter__(self) -> Iterator[BatchT]:
        """A pass: the batches of an epoch from its beginning, or from a state that was just loaded."""
        self._run.begin()
        return BatchIterator(self._run, self)

    def peek(self) -> BatchT:
        """The first batch of the next pass. Consumes nothing, whenever it is called, and leaves no thread behind."""
        from .run.peek import peek

        return cast(BatchT, peek(self._run))

    @property
    def dataset(self) -> DatasetView:
        """The samples by id, beside all passes: ``len``, ``dataset[i]``, ``find``; a table in notebooks. With a
        ``subset`` those that are in it, whose sample ids are ``dataset.ids``. Of a mixture, those of all sources, and
        of each by its name: ``dataset.sources["web"]``.
        """
        if self._view is None:
            from .views.samples import open_view

            self._view = open_view(self._run)
        return self._view.owned_by(self)

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank; with ``batch_tokens``, of the epoch of ``epoch``.

        Raises:
            TypeError: samples may be dropped, so that only reading tells; or the epoch never ends, as that of a mixture
                with stop="never". As of torch's iterable data sets.
        """
        return self._run.sampler.steps_per_epoch

    def __bool__(self) -> bool:
        """True: ``if loader:`` asks whether there is one, and not for a number of batches, which may not be known."""
        return True

    if not TYPE_CHECKING:  # for type checkers, indexing a loader is the error that it is
        __getitem__ = NoItems(
            "a DistributedDataLoader is no data set that something else makes batches of: it shuffles, reads and "
            "batches itself; loop over it, `for batch in loader`, in place of torch's DataLoader. What takes nothing "
            "but a DataLoader takes TorchLoader(loader) of penstock.loader.integrations; in Hugging Face's Trainer, "
            "return that from get_train_dataloader, and leave train_dataset= away. Parts of the data are subset=, "
            "single samples loader.dataset[i]"
        )

        def __array__(self, *_: object, **__: object) -> NoReturn:
            # Without this numpy would read the whole epoch, and keep all batches as objects of one array.
            raise TypeError(
                "a DistributedDataLoader is no array: numpy would read its whole epoch and keep every batch; loop over "
                "it, `for batch in loader`, and make arrays of a batch's fields; all batches of a small epoch at once "
                "are list(loader)"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Frameworks copy what holds a loader, such as a module or its arguments; Python's error would name a lock.
        raise TypeError(
            "a DistributedDataLoader has threads and one position, so it is neither copied nor pickled: make it in the "
            "process that needs it, as in train_dataloader(), and keep it out of what is copied, as the attributes "
            "of a module are; state_dict() is its position, for another loader"
        )

    def describe(self) -> str:
        """The pipe from the sources to the device for people to read: a line a stage, with what was chosen and why.

        ``print(loader.describe())``. Reads nothing and starts nothing.
        """
        from .run.describe import describe

        return describe(self._run)

    def __repr__(self) -> str:
        share, manifest = self._run.share, self.manifest
        return (
            f"DistributedDataLoader({manifest.url!r}, {manifest.num_samples} samples, "
            f"global_batch_size={share.global_batch_size}, rank={share.rank}, world_size={share.world_size})"
        )

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all threads and processes, and close the store, at any time; the loader cannot be used again."""
        self._resources.close()  # waits where another thread is closing it
        self._finalizer.detach()  # now only: if an interrupt came before this, it does the rest

    def close_too(self, owned: Any) -> None:
        """Call ``owned.close()`` when the loader is closed, however that comes about. Raises LoaderClosedError."""
        self._resources.check_open()
        self._resources.others.append(owned)
        self._resources.close_if_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- where it stands ----------------------------------------------------------------------------------------------

    @property
    def steps_left(self) -> int:
        """Batches from the current position to the epoch's end: fewer than ``len`` after a resume in mid-epoch.

        Raises:
            TypeError: as of ``len``.
        """
        return self._run.sampler.steps_left

    @property
    def drops_samples(self) -> bool:
        """True if ``keep=`` or ``transform=`` may drop samples, so that epochs have no known number of batches."""
        return self._run.sampler.drops_samples

    @property
    def epoch(self) -> int:
        """The epoch of the last batch handed out; after a pass has ended, the next pass's."""
        return self._run.sampler.epoch

    @property
    def batch_size(self) -> int:
        """Samples in a full batch of this rank; with ``cost`` or ``batch_tokens``, about so many."""
        return self._run.share.batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples in a full batch of all ranks together; with ``batch_tokens``, about so many."""
        return self._run.share.global_batch_size

    @property
    def is_batched_by_tokens(self) -> bool:
        """True if ``batch_tokens`` decides how many samples a batch has, so that each epoch has its own ``len``."""
        return self._run.share.budget is not None

    @property
    def rank(self) -> int:
        return self._run.share.rank

    @property
    def world_size(self) -> int:
        return self._run.share.world_size

    @property
    def manifest(self) -> Manifest:
        return self._run.sources.manifest

    @property
    def order(self) -> Order:
        return self._run.sampler.order

    # -- what moves it, and changes its batches: each alike on all ranks, in the training loop's thread ---------------

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless a state that was just loaded is inside it. Ends the running pass."""
        self._run.set_epoch(check_at_least("epoch", epoch, 0))

    def set_shares(self, weights: Sequence[float] | None) -> None:
        """From the next batch on, cut global batches in proportion to ``weights``, one positive number per rank.

        None makes the shares equal again. Every rank must call this with the same weights after the same batch. Global
        batches keep their samples. What was read ahead is dropped.

        Raises:
            PartitionError: the weights are not one positive number per rank.
            ConfigError: ``batch_tokens`` bounds each rank's rows.
        """
        budget = self._run.share.budget
        if weights is not None and budget is not None and budget.padded:
            raise ConfigError(
                "set_shares with batch_tokens= of padded tokens: a rank would have more rows than its budget holds; "
                "give the loader TokenBudget(padded=False), or batch_size="
            )
        if isinstance(weights, Iterable) and not isinstance(weights, str | bytes):
            weights = tuple(weights)
        share = replace(self._run.share, weights=weights)
        shown = None if weights is None else [float(weight) for weight in weights]
        self._run.change_share(share, f"set_shares({shown})")

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch of the newest pass: a small dict for JSON, the same on every rank."""
        return self._run.sampler.to_state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called, with any world size, batch size and number of threads.

        The next pass begins there; a running one goes on from there, or ends if the state is in another epoch.

        Raises:
            StateMismatchError: the state belongs to another data set, seed or order; names what differs.
        """
        self._run.load(state)

    def skip_batches(self, count: int) -> None:
        """Go on ``count`` global batches further, without reading them; past an epoch's end in the next epoch.

        As after ``load_state_dict``, the next pass begins there; a running one goes on from there, or ends if that is
        in another epoch, whose end is then not told by a pass. Every rank must skip as many after the same batch. An
        audit counts their samples as skipped.

        Raises:
            ConfigError: the count is negative or no integer.
        """
        self._run.skip(check_at_least("count", count, 0))

    def seek(self, epoch: int, batch: int) -> None:
        """Go to a batch by its number in an epoch, for whoever is told which batches to take; reads nothing.

        As after ``load_state_dict``, the next pass begins there. What was read ahead is kept where that is the next
        batch anyway. Every rank must seek alike. An audit takes the logs of all loaders that seek for one: each batch
        counts once, whoever got it, and what was handed out again is replayed.

        Raises:
            ConfigError: a number is negative or no integer, the epoch has fewer batches, or samples may be dropped or
                packed, so that only reading tells where a batch begins.
        """
        self._run.seek(check_at_least("epoch", epoch, 0), check_at_least("batch", batch, 0))

    def set_batch_size(self, batch_size: int) -> None:
        """From the next batch on, each rank's batches have ``batch_size`` samples: a warm-up of the batch size, say.

        Every rank must call this with the same number after the same batch. What was read ahead is dropped; positions,
        and with them states, stay what they are. An epoch that has no batch left is over. States hold no batch size:
        after a resume, set it again. An audit counts with it from here on.

        Raises:
            ConfigError: it is no whole number of at least 1, or batches are cut by ``batch_tokens``.
            PartitionError: an epoch would have no batch.
        """
        batch_size = check_at_least("batch_size", batch_size, 1)
        share = self._run.share
        if share.budget is not None:
            raise ConfigError("set_batch_size: batch_tokens= decides how many samples a batch has; leave it out")
        self._resources.check_open()
        share = replace(share, global_batch_size=batch_size * share.world_size)
        self._run.sampler.check_share(share)
        self._run.change_share(share, f"set_batch_size({batch_size})")
        if self._resources.log is not None:
            self._resources.log.record_batch_size(*self._run.sampler.upcoming, share.global_batch_size)

    def set_weights(self, weights: Mapping[str, float], *, at: int | None = None) -> None:
        """Change the weights of a mixture's sources, by name, from the next batch on; each goes on where it was.

        Sources that are not named keep theirs; what its schedule said of later positions is dropped. With ``at``, the
        weights change at the first batch from that position on, counted in samples of all ranks since the run began
        (``metrics().run_samples``). Every rank must call this with the same weights after the same batch; states hold
        the change.

        Raises:
            ConfigError: this is no mixture, a name or a weight is not possible, or the position has passed.
        """
        self._run.set_weights(weights, at)

    # -- what others ask while it runs, from any thread; all of it is cheap -------------------------------------------

    def metrics(self) -> LoaderMetrics:
        """Return what was done so far, where the time went, how full queues are, and the stage that limits throughput.

        Also after ``close``. ``new.since(old)`` tells of the time between two of them. Of a mixture,
        ``MixtureMetrics``: also how far the run is in each source.
        """
        return self._run.metrics()

    @property
    def bad_chunks(self) -> list[BadChunk]:
        """The chunks that could not be read and were replaced, at most ``max_bad_chunks``."""
        return self._run.reading.quarantine.records

    @property
    def bad_samples(self) -> list[Quarantined]:
        """The latest 1,000 samples and chunks that ``on_error`` was asked about on this rank, each once."""
        bad = self._run.sources.bad
        return [] if bad is None else bad.records

    def activity(self) -> dict[str, Any]:
        """Describe what the next batch is waiting for, for people to read; empty if one is ready or none was asked for.

        For example ``{"waiting_for": "chunk at byte 0 of train-3.tar", "since_s": 4.2}``. Cheap, and safe to call from
        any thread while another one iterates: a watchdog asks it why training has stopped.
        """
        return self._resources.activity()

    @contextmanager
    def trace(self, path: str | PathLike[str]) -> Iterator[None]:
        """Record what each of the loader's threads does inside the block, and write it to ``path`` as a Chrome trace.

        Open the file in https://ui.perfetto.dev. Record some seconds: after 200,000 spans no more are kept. A block
        that raises leaves a trace, too.

        Raises:
            ConfigError: the file cannot be written, or a trace is being recorded already.
        """
        from ..storage.files import check_output

        timeline = Timeline()
        try:  # a file that cannot be written fails before the work, not after it
            check_output(path)
        except OSError as exc:
            raise _unwritable(path, exc) from exc
        self.record_timeline(timeline)
        try:
            yield
        except BaseException:
            self.record_timeline(None)
            with suppress(OSError):
                write_chrome_trace(path, timeline.events(f"penstock rank {self.rank}"))
            raise
        self.record_timeline(None)
        try:
            write_chrome_trace(path, timeline.events(f"penstock rank {self.rank}"))
        except OSError as exc:
            raise _unwritable(path, exc) from exc

    def record_timeline(self, timeline: Timeline | None) -> None:
        """Add the spans of all stages to ``timeline`` from now on; None ends that.

        Raises:
            ConfigError: another timeline is being recorded.
        """
        self._run.record_timeline(timeline)


def _unwritable(path: str | PathLike[str], error: OSError) -> ConfigError:
    return ConfigError(f"trace({fspath(path)!r}) cannot be written ({error.strerror or error}); give a file that can")
