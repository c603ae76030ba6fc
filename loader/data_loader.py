"""The loader as its users see it: an iterable of batches with a position that can be saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

import torch

from .config.checks import (
    LastBatch,
    SampleWeights,
    check_at_least,
    check_last_batch,
    check_order,
    check_selection,
    check_shuffle,
    make_share,
    parse_cache_limit,
)
from .config.costs import CostArguments
from .config.device import open_image_codec
from .config.errors import ErrorArguments, OnError
from .config.foreign import refuse_foreign
from .config.groups import GroupArguments
from .config.keep import KeepChoice
from .config.mixture import Mixture
from .config.reshaping import Reshaping
from .config.tuning import read_tuning
from .control import Control
from .dataset.manifest import Manifest
from .dataset.splits import Split
from .decoding.batch_options import BatchOptions, BatchT
from .decoding.decode import DecodeChoice, FieldDecoders, RawValues
from .decoding.row_work import Sample
from .formats.shard import ShardFormat
from .metrics import Counters
from .mixtures.parts import refuse_whole
from .observed import Observed
from .order.auto import Choice
from .order.costs.buckets import Bucket
from .order.costs.budget import TokenBudget
from .order.costs.costs import Cost
from .order.selecting.subset import Subset
from .packing.config import Packing
from .parts import Common, open_one, open_several
from .pipeline.delivery_log import DeliveryLog
from .pipeline.device import resolve_cuda
from .ranks.calls import Calls
from .ranks.detect import check_rank
from .ranks.naming import Attempt
from .ranks.peers import tell_of_failure
from .ranks.sequence_cut import SequenceCut
from .ranks.stages import FieldsByStage
from .reading.bad.file import Paths, Quarantined
from .reading.bad.quarantine import BadChunk
from .run.resources import Owner
from .run.standing import Standing
from .views.samples import DatasetView

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DistributedDataLoader(Observed, Standing, Control, Owner, Generic[BatchT]):
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
        decode: "auto" decodes by extension and type, None returns raw bytes, a mapping sets decoders by field.
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
            not cover the processes' own memory. "auto": of images alone, where a rank has many cores.
        memory_limit: bytes (or '2GiB') for everything that the loader holds; "auto" follows the machine and cgroup.
        cache_dir, cache_limit: a folder, shared by the node's processes, to keep fetched chunks in, and its size.
        rank, world_size: by default those of torch.distributed, else of torchrun's environment, else 0 of 1. What was
            found is compared with torch.distributed again at the first batch.
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
            (by default 0.01), before it is an error; see ``bad_samples``.
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
        super().__init__()
        if isinstance(source, Mixture):
            refuse_whole(
                split=split,
                subset=subset,
                weights=weights,
                cost=cost,
                bucket=bucket,
                batch_tokens=batch_tokens,
                fields_by_stage=fields_by_stage,
                on_error=None if on_error == "stop" else on_error,
            )
        check_shuffle(shuffle)
        check_order(lanes=lanes, window=window, piece=piece)
        check_selection(shuffle=shuffle, is_weighted=weights is not None, is_audited=audit_dir is not None)
        check_last_batch(last_batch)
        sizes = batch_size, global_batch_size
        told = CostArguments.read(cost, bucket, batch_tokens, last_batch=last_batch, batch_sizes=sizes)
        sizes = sizes if told.budget is None else (1, None)
        share = make_share(rank, world_size, *sizes, pad=last_batch == "pad", mesh=mesh, data_dims=data_dims)
        batch_options = BatchOptions(
            transform=transform,
            collate=collate,
            with_ids=with_ids,
            pad=last_batch == "pad",
            seed=seed,
            may_drop=may_drop,
            goes_on=on_error != "stop",
        )
        if isinstance(source, Mixture):
            reshaping, drops = None, source.drops(keep=keep, may_drop=may_drop, packing=packing, transform=transform)
            packs = source.packs(packing)
        else:
            reshaping = Reshaping.of(keep, may_drop, transform, packing, told, on_error)
            drops, packs = reshaping is not None, packing is not None
        errors = ErrorArguments.read(
            on_error,
            max_errors,
            max_bad_chunks,
            quarantine,
            avoid,
            drops=drops,
            packs=packs,
            by_stage=fields_by_stage is not None,
            has_budget=told.budget is not None,
            audit_dir=audit_dir,
        )
        asked_processes = 0 if processes == "auto" else processes
        check_at_least("processes", asked_processes, 0)
        FieldDecoders(decode, raw, asked_processes)
        group = GroupArguments.read(
            fields_by_stage,
            sequence_cut,
            mesh,
            data_dims,
            max_bad_chunks=errors.max_bad_chunks or 0,
            may_drop=may_drop,
            keeps_by_all=reshaping is not None and reshaping.asks_about_all,
            packs=packs,
            has_collate=collate is not None,
        )
        on_device = None if device is None or str(device) == "cpu" else resolve_cuda(device)
        needs_host = {
            "transform=": transform,
            "collate=": collate,
            "processes=": asked_processes or None,
            "keep=, may_drop=, packing= or on_error='skip'": reshaping,
            "a Mixture": source if isinstance(source, Mixture) else None,
        }
        codec = open_image_codec(decode, on_device, needs_host)
        choice = read_tuning(threads, fetch_threads, read_ahead, autotune, memory_limit, processes)
        self._counters = Counters()
        common = Common(
            share=share,
            group=group,
            resources=self._resources,
            counters=self._counters,
            batch_options=batch_options,
            last_batch=last_batch,
            decode=decode,
            raw=raw,
            errors=errors,
            tuning_choice=choice,
            device=on_device,
            codec=codec,
            memory_bytes=choice.memory_bytes,
            columns=columns,
            format=format,
            storage_options=storage_options,
            cache_dir=cache_dir,
            cache_bytes=parse_cache_limit(cache_dir, cache_limit),
            ordering={"seed": seed, "shuffle": shuffle, "lanes": lanes, "window": window, "piece": piece},
            is_logged=audit_dir is not None,
            keep=keep,
            packing=packing,
        )
        if isinstance(source, Mixture):
            self._parts = open_several(source, common)
        else:
            self._parts = open_one(source, common, told, reshaping, split=split, subset=subset, weights=weights)
        self._manifest = self._parts.manifest
        self._position = self._parts.position
        self._passes = self._parts.passes(
            common,
            partial(check_rank, share.rank, share.world_size, is_given=rank is not None or mesh is not None),
        )
        if self._attempt is not None and share.world_size > 1:
            processes = share.world_size if mesh is None else mesh.size()
            selection = {} if self._parts.selection is None else self._parts.selection.to_dict()
            name = self._attempt.name(self._manifest.fingerprint, selection, shuffle=shuffle, processes=processes)
            self._resources.names = name, *self._attempt.names
            self._resources.calls = Calls(name, processes)
        if audit_dir is not None:
            self._resources.log = DeliveryLog(
                audit_dir,
                manifest=self._manifest,
                rank=share.rank,
                world_size=share.world_size,
                selection=self._parts.selection,
                may_drop=drops,
                is_packed=packs,
                bad=self._parts.bad,
                sources=() if self._parts.mixture is None else self._parts.mixture.sources.describe(),
            )
        if share.world_size > 1:
            self._resources.join_peers()

    def __iter__(self) -> Iterator[BatchT]:
        """A pass: the batches of an epoch from its beginning, or from a state that was just loaded."""
        return self._passes.begin(self)

    @property
    def bad_chunks(self) -> list[BadChunk]:
        """The chunks that could not be read and were replaced, at most ``max_bad_chunks``."""
        return self._parts.quarantine.records

    @property
    def bad_samples(self) -> list[Quarantined]:
        """The latest 1,000 samples and chunks that ``on_error`` was asked about on this rank, each once."""
        return [] if self._parts.bad is None else self._parts.bad.records

    @property
    def dataset(self) -> DatasetView:
        """The samples by id, beside all passes: ``len``, ``dataset[i]``, ``find``; a table in notebooks. With a
        ``subset`` those that are in it, whose sample ids are ``dataset.ids``.
        """
        look = self._parts.look
        return DatasetView(look.samples, look.ids, owner=self)

    def peek(self) -> BatchT:
        """The first batch of the next pass. Consumes nothing, whenever it is called, and leaves no thread behind."""
        return cast(BatchT, self._parts.peek(self._passes))

    def __repr__(self) -> str:
        share = self._passes.share
        return (
            f"DistributedDataLoader({self._manifest.url!r}, {self._manifest.num_samples} samples, "
            f"global_batch_size={share.global_batch_size}, rank={share.rank}, world_size={share.world_size})"
        )
