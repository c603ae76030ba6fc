"""The first batch of a pass over a mixture, made without a pipeline."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ...storage.threads.daemon_pool import DaemonPool
from ...storage.threads.interruptible import Event
from ..assembly.kind_rows import RowKinds
from ..columns import Block
from ..decoding.batch import BatchMaker
from ..decoding.batch_options import BatchOptions
from ..errors import ConfigError
from ..metrics import Counters
from ..mixtures.parts import MixtureParts
from ..order.spans import SpanPlanner
from ..pipeline.assembler import cut_step
from ..run.run import Passes
from ..sources.fields import check_fields
from ..sources.kinds import Kind
from ..sources.quarantine import MixedQuarantine
from ..sources.sources import JointChunks
from .ahead import load_ahead
from .peek import copy_to


class MixedLook:
    """What a loader of a mixture lets its users look at beside its passes. Used by the training loop's thread."""

    def __init__(
        self,
        parts: MixtureParts,
        batch_options: BatchOptions,
        max_bad_chunks: int,
        threads: int,
        device: torch.device | None,
    ) -> None:
        self._parts = parts
        self._options = batch_options
        self._max_bad_chunks = max_bad_chunks
        self._threads = threads
        self._device = device

    def peek(self, passes: Passes) -> Any:
        """The first batch of a pass that would begin now. Shares nothing that changes with a running pipeline."""
        passes.resources.check_open()
        passes.check_rank()
        parts, position = self._parts, self._parts.position
        orders = position.orders
        planner = SpanPlanner(orders, passes.share, position.course(*position.pass_start), "drop")
        span = planner.plan_next(1)
        for _ in planner.open_windows(span):
            pass
        groups = {group.chunk: group for group in planner.expand(span)}
        chunks = parts.sources.chunks.apart(None)
        assert isinstance(chunks, JointChunks)
        quarantine = MixedQuarantine(parts.sources, chunks.of_sources, self._max_bad_chunks)
        kinds = [Kind(kind.sources, kind.decoders.copy(), kind.transform) for kind in parts.kinds]
        pool = DaemonPool("penstock-look", self._threads)
        try:
            maker = BatchMaker(
                options=self._options,
                decoders=kinds[0].decoders,
                manifest=parts.sources.manifest,
                pool=pool,
                workers=None,
                counters=Counters(),
                stopping=Event(),
            )
            check_fields(parts.sources, kinds, maker)
            rows = RowKinds(parts.sources, kinds, orders, maker)
            blocks = (
                (groups[chunk], loaded) if isinstance(loaded, Block) else quarantine.replace(groups[chunk], loaded)
                for chunk, loaded in load_ahead(chunks.load, chunks.reserve, groups)
            )
            step = cut_step(rows.gather(span, blocks), span, 0, passes.share)
            [batch] = [begun.result() for begun in rows.start([step], span.epoch)[0]]
        finally:
            pool.close()
        return batch if self._device is None else copy_to(self._device, batch)

    @property
    def samples(self) -> NoReturn:
        names = self._parts.sources.names
        raise _NoSamplesError(
            f"dataset of a mixture of {len(names)} sources: samples by id are those of one data set; open one, such as "
            f"DistributedDataLoader({names[0]!r}, batch_size=1).dataset"
        )

    ids = samples


class _NoSamplesError(ConfigError, AttributeError):
    """The ConfigError of looking, which ``hasattr`` takes for an attribute that is not there, as frameworks ask."""
