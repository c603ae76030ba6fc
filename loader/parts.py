"""What a loader is made of that depends on what it reads: one data set, or a mixture of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, Protocol

import torch

from ..storage import EncryptedStore, open_store
from ..storage.options import MappedReads
from ..storage.telling.counts import fastest_response_s
from .arguments.common import LastBatch, SampleWeights, check_names, fields_of, make_selection
from .arguments.costs import CostArguments
from .arguments.errors import ErrorArguments
from .arguments.groups import GroupArguments
from .dataset.index import find_manifest
from .dataset.manifest import Manifest
from .decoding.batch_options import BatchOptions
from .decoding.decode import DecodeChoice, FieldDecoders, RawValues
from .decoding.images.device_codec import DeviceCodec
from .decoding.images.first_values import ImageFields
from .decoding.row_work import RowWork
from .decoding.workers.images import ImageProcesses, count_image_processes
from .decoding.workers.pool import WorkerPool
from .formats.detect import make_format
from .formats.shard import ShardFormat
from .metrics import Counters
from .mixtures.parts import MixtureParts, open_mixture
from .mixtures.stream_position import MixedStreamPosition
from .order.plan import Order, Share
from .order.selecting.selection import Selection
from .order.selecting.subset import Subset
from .packing.config import Packing
from .passes.assembly import make_assembler, make_mixed_assembler, make_position, peek_alone, peek_mixed
from .passes.passes import Passes
from .passes.resources import Resources
from .pipeline.pipeline import Pipeline
from .pipeline.tuner import Tuner
from .pipeline.tuning import PipelineOptions, TuningChoice, tune
from .positions.position import RunPosition
from .positions.stream_position import StreamPosition
from .reading.bad.quarantine import BadChunk, Quarantine
from .reading.bad.samples import BadSamples
from .reading.chunk_source import ChunkSource, reads_locally
from .reading.kept_layouts import KeptLayouts
from .sources.keep import KeepChoice
from .sources.kinds import Kind, group_kinds
from .sources.mixture import Mixture, Source
from .sources.reshaping import Reshaping
from .sources.sources import OpenSource, Sources
from .views.mixed_peek import MixedLook
from .views.peek import Look


class HoldsRecords(Protocol):
    """A quarantine."""

    @property
    def records(self) -> list[BadChunk]: ...


@dataclass(frozen=True, kw_only=True)
class Common:
    """The arguments of a loader, checked, that mean the same for whatever it reads. ``ordering`` makes its order."""

    share: Share
    group: GroupArguments
    resources: Resources
    counters: Counters
    batch_options: BatchOptions
    last_batch: LastBatch
    decode: DecodeChoice
    raw: RawValues
    errors: ErrorArguments
    tuning_choice: TuningChoice
    device: torch.device | None
    codec: DeviceCodec | None
    memory_bytes: int | None
    columns: Sequence[str] | None
    format: ShardFormat | str | None
    storage_options: Mapping[str, Any] | None
    cache_dir: str | PathLike[str] | None
    cache_bytes: int | None
    ordering: Mapping[str, Any]
    is_logged: bool
    keep: KeepChoice | None
    packing: Packing | None

    @property
    def tuning(self) -> dict[str, Any]:
        return {
            "world_size": self.share.world_size,
            "memory_limit": self.memory_bytes,
            "threads": self.threads,
            "fetch_threads": self.tuning_choice.fetch_threads,
            "read_ahead": self.tuning_choice.read_ahead_bytes,
            "device": self.device,
        }

    @property
    def threads(self) -> int:
        """How many threads decode and transform, to begin with."""
        return self.tuning_choice.first_decode_threads

    @property
    def max_bad_chunks(self) -> int | None:
        return self.errors.max_bad_chunks

    @property
    def maps_files(self) -> MappedReads:
        """Whether values may be read from files when they are due: what is wrong with a chunk then ends the run."""
        if self.errors.on_error != "stop" or self.max_bad_chunks:
            return False
        return "views" if self.raw == "view" else True

    def start_workers(self, work: RowWork, decode: DecodeChoice, *, are_alike: bool = True) -> None:
        """Processes that decode and transform: those asked for, or of images alone what the machine has cores for.

        ``are_alike``: whether all rows are worked on in the same way.
        """
        if asked := self.tuning_choice.asked_processes:
            self.resources.workers = WorkerPool(work, decode, asked)
        elif are_alike and work.transform is None and self.raw == "bytes" and self.tuning_choice.is_free:
            count = count_image_processes(self.tuning_choice.cores)
            self.resources.images = ImageProcesses(work, count) if count else None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loader's face hands on to: its manifest, share, position, bad chunks, views, tuning and pipelines.

    ``mixture`` is None where it reads one data set.
    """

    manifest: Manifest
    share: Share
    position: RunPosition
    quarantine: HoldsRecords
    look: Look | MixedLook
    peek: Callable[[Passes], Any]
    tune: Callable[[Order], PipelineOptions]
    make_pipeline: Callable[..., Pipeline]
    mixture: MixtureParts | None = None
    bad: BadSamples | None = None
    selection: Selection | None = None

    def passes(self, common: Common, check_rank: Callable[[], None]) -> Passes:
        return Passes(
            position=self.position,
            share=self.share,
            resources=common.resources,
            counters=common.counters,
            tune=self.tune,
            make_pipeline=self.make_pipeline,
            check_rank=check_rank,
        )


def open_one(
    source: str | PathLike[str] | Sequence[str | PathLike[str]] | Manifest,
    common: Common,
    told: CostArguments,
    reshaping: Reshaping | None,
    *,
    split: Any,
    subset: Subset | None,
    weights: SampleWeights | None,
) -> Parts:
    """The parts of a loader of one data set."""
    decoders = FieldDecoders(common.decode, common.raw, common.tuning_choice.asked_processes, common.codec)
    batch_options = common.batch_options
    common.start_workers(batch_options.work, common.decode)
    with ExitStack() as lingering:  # until the data's store has taken over their connections
        manifest = find_manifest(
            source,
            lingering,
            split=split,
            storage_options=common.storage_options,
            format=common.format,
            cache_dir=common.cache_dir,
        )
        store = common.resources.store = open_store(
            manifest.url,
            storage_options=common.storage_options,
            cache_dir=common.cache_dir,
            cache_limit=common.cache_bytes,
        )
    selection = make_selection(manifest, subset, weights)
    policy = common.errors.open(manifest, common.share, selection)
    if policy.avoided:
        batch_options = replace(batch_options, avoided=policy.avoided)
        common.start_workers(batch_options.work, common.decode)
    share, bucket_costs = told.open(
        manifest, common.share, storage_options=common.storage_options, cache_dir=common.cache_dir
    )
    names = check_names(manifest, common.columns, common.decode)
    batch_options.refuse_taken_names(fields_of(manifest) if names is None else names, manifest.url)
    names, batch_options = common.group.open(manifest, names, batch_options)
    read = names
    if reshaping is not None:
        names = reshaping.columns_of_batches(manifest, names)
        read = reshaping.columns_to_read(manifest, names)
    shard_format = make_format(manifest.format, manifest.config)
    chunks = ChunkSource(
        manifest,
        shard_format,
        store,
        read,
        common.counters,
        common.memory_bytes,
        policy.avoided_chunks,
        maps_files=common.maps_files,
        # Nothing that was encrypted goes onto a disk, and these hold keys and small values.
        kept=None if isinstance(store, EncryptedStore) else KeptLayouts(manifest, read, common.cache_dir),
    )
    common.resources.others.append(chunks)
    options = Source(
        source,
        columns=common.columns,
        decode=common.decode,
        keep=common.keep,
        transform=batch_options.transform,
        may_drop=batch_options.may_drop,
        packing=common.packing,
        format=common.format,
        storage_options=common.storage_options,
        split=split,
        subset=subset,
    )
    sources = Sources(
        [
            OpenSource(
                name=manifest.url,
                options=options,
                manifest=manifest,
                selection=selection,
                columns=names,
                store=store,
                chunks=chunks,
                reshaping=reshaping,
            )
        ],
        is_mixed=False,
    )
    position = make_position(
        sources,
        share=share,
        last_batch=common.last_batch,
        bucket=told.bucket,
        bucket_costs=bucket_costs,
        **common.ordering,
    )
    if isinstance(position, StreamPosition):
        common.resources.others.append(position.ledgers)
    decoders.are_images = ImageFields(chunks)
    decoders.of_columns = manifest.has_columns
    kinds = [Kind((0,), decoders, batch_options.transform, batch_options.may_drop)]
    quarantine = Quarantine(chunks, common.max_bad_chunks, selection, policy.bad)
    look = Look(
        chunks.apart(names),
        batch_options,
        decoders,
        policy,
        common.threads,
        common.device,
        common.resources,
        selection,
        bucket_costs,
    )
    make_pipeline = partial(
        Pipeline,
        source=chunks,
        batch_options=batch_options,
        decoders=decoders,
        counters=common.counters,
        workers=common.resources.workers,
        images=common.resources.images,
        replacer=policy.replacer(chunks.apart(names), batch_options.work),
        bad=policy.bad,
        tuner=Tuner(common.tuning_choice),
        make_assembler=make_assembler(
            sources,
            kinds,
            position,
            last_batch=common.last_batch,
            quarantine=quarantine,
            bucket_costs=bucket_costs,
            is_logged=common.is_logged,
        ),
    )
    return Parts(
        manifest=manifest,
        share=share,
        position=position,
        quarantine=quarantine,
        look=look,
        peek=look.peek if reshaping is None else partial(peek_alone, make_pipeline, decoders),
        tune=partial(
            tune, manifest, is_local=reads_locally(store), response_s=fastest_response_s(store), **common.tuning
        ),
        make_pipeline=make_pipeline,
        bad=policy.bad,
        selection=selection,
    )


def open_several(mixture: Mixture, common: Common) -> Parts:
    """The parts of a loader of a mixture."""
    parts = open_mixture(
        mixture,
        opening={
            "columns": common.columns,
            "decode": common.decode,
            "keep": common.keep,
            "transform": common.batch_options.transform,
            "may_drop": common.batch_options.may_drop,
            "packing": common.packing,
            "format": common.format,
            "storage_options": common.storage_options,
            "counters": common.counters,
            "memory_limit": common.memory_bytes,
            "maps_files": common.maps_files,
            "cache_dir": common.cache_dir,
            "cache_limit": common.cache_bytes,
        },
        ordering={**common.ordering, "share": common.share},
        raw=common.raw,
        processes=common.tuning_choice.asked_processes,
        max_bad_chunks=common.max_bad_chunks or 0,
        is_logged=common.is_logged,
    )
    common.resources.store = parts.sources
    if isinstance(parts.position, MixedStreamPosition):
        common.resources.others.append(parts.position.ledgers)
    options = replace(parts.batch_options(common.batch_options), finish=common.group.cut)
    for source in parts.sources:
        options.refuse_taken_names(source.columns or fields_of(source.manifest), f"source {source.name!r}")
    first = parts.kinds[0]
    work = replace(options, transform=first.transform, may_drop=first.may_drop).work
    are_alike = len(group_kinds(parts.sources)) == 1
    common.start_workers(work, parts.sources[0].options.decode, are_alike=are_alike)

    def fit_options(order: Order) -> PipelineOptions:
        others = [(one.manifest, own.order) for one, own in zip(parts.sources, parts.orders, strict=True)]
        return tune(parts.sources.manifest, order, is_local=parts.sources.are_local, others=others, **common.tuning)

    look = MixedLook(parts, options, common.max_bad_chunks or 0, common.threads, common.device)
    make_pipeline = partial(
        Pipeline,
        source=parts.sources.chunks,
        batch_options=options,
        decoders=parts.kinds[0].decoders,
        counters=common.counters,
        workers=common.resources.workers,
        images=common.resources.images,
        tuner=Tuner(common.tuning_choice),
        make_assembler=make_mixed_assembler(parts),
    )
    return Parts(
        manifest=parts.sources.manifest,
        share=common.share,
        position=parts.position,
        quarantine=parts.quarantine,
        look=look,
        peek=partial(peek_mixed, make_pipeline, parts) if parts.sources.are_streams else look.peek,
        tune=fit_options,
        make_pipeline=make_pipeline,
        mixture=parts,
    )
