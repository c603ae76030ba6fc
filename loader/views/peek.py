"""The first batch of a pass, made without a pipeline: what it needs is read, decoded and collated, and that is all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...storage.threads.daemon_pool import DaemonPool
from ...storage.threads.interruptible import Event
from ..columns import Block
from ..config.errors import ErrorPolicy
from ..decoding.batch import BatchMaker
from ..decoding.batch_options import BatchOptions
from ..decoding.decode import FieldDecoders
from ..decoding.gather import gather
from ..metrics import Counters
from ..order.costs.buckets import plan_epoch
from ..order.costs.costs import SampleCosts
from ..order.plan import Order, Share
from ..order.selecting.selection import Selection
from ..order.spans import ChunkRows, EpochSpans
from ..pipeline.assembler import cut_step
from ..pipeline.device import DeviceFeeder
from ..reading.bad.quarantine import Quarantine
from ..reading.chunk_source import ChunkSource
from ..run.resources import Resources
from ..run.run import Passes
from .ahead import load_ahead
from .samples import SampleReader
from .selected_ids import SelectedIds


class Look:
    """What a loader's users look into beside its passes, with readers and counters apart from those of its pipeline."""

    def __init__(
        self,
        chunks: ChunkSource,
        batch_options: BatchOptions,
        decoders: FieldDecoders,
        policy: ErrorPolicy,
        threads: int,
        device: torch.device | None,
        resources: Resources,
        selection: Selection | None = None,
        bucket_costs: SampleCosts | None = None,
    ) -> None:
        self.samples = SampleReader(chunks, decoders.on_host, batch_options.work, resources.check_open)
        self.ids = range(chunks.manifest.num_samples) if selection is None else SelectedIds(selection)
        self._decoders = decoders
        self._make = partial(
            first_batch,
            chunks=chunks,
            batch_options=batch_options,
            policy=policy,
            threads=threads,
            device=device,
            selection=selection,
            bucket_costs=bucket_costs,
        )

    def peek(self, passes: Passes) -> Any:
        """The first batch of a pass that would begin now. Used by the training loop's thread."""
        passes.resources.check_open()
        passes.check_rank()
        epoch, position = passes.position.pass_start
        order, decoders = passes.position.order, self._decoders.copy()
        return self._make(order=order, share=passes.share, epoch=epoch, position=position, decoders=decoders)


def first_batch(
    *,
    chunks: ChunkSource,
    order: Order,
    share: Share,
    epoch: int,
    position: int,
    batch_options: BatchOptions,
    decoders: FieldDecoders,
    policy: ErrorPolicy,
    threads: int,
    device: torch.device | None,
    selection: Selection | None = None,
    bucket_costs: SampleCosts | None = None,
) -> Any:
    """The batch of one rank at ``position`` of ``epoch``, as its pipeline would make it, for the caller's stream.

    Shares nothing that changes with a running pipeline, and ends every thread that it starts. Decoding and transform
    run on threads here, where the loader has worker processes too.
    """
    manifest = chunks.manifest
    spans = EpochSpans(plan_epoch(manifest.samples, order, epoch, selection, bucket_costs), share)
    span, _ = spans.plan_span(position, 1)
    groups = {group.chunk: group for group in spans.expand(span)}
    quarantine = Quarantine(chunks, policy.told.max_bad_chunks, selection)

    def blocks() -> Iterator[tuple[ChunkRows, Block]]:
        for chunk, loaded in load_ahead(chunks.load, chunks.reserve, groups):
            group = groups[chunk]
            yield (group, loaded) if isinstance(loaded, Block) else quarantine.replace(group, loaded)

    rows = gather(blocks(), span.num_rows, manifest.first_ids, decoders)
    rows, num_rows, num_valid = cut_step(rows, span, 0, share)
    pool = DaemonPool("penstock-look", threads)
    try:
        maker = BatchMaker(
            options=batch_options,
            decoders=decoders,
            manifest=manifest,
            pool=pool,
            workers=None,
            counters=Counters(),
            stopping=Event(),
            replacer=policy.replacer(chunks, batch_options.work, counts=False),
        )
        batch = maker.start(rows, epoch, num_rows, num_valid).result()
    finally:
        pool.close()
    return batch if device is None else copy_to(device, batch)


def copy_to(device: torch.device, batch: Any) -> Any:
    feeder = DeviceFeeder(device, slots=1)
    try:
        return feeder.stage(batch).take()
    finally:
        feeder.close()
