"""Batches of samples from sources that are decoded and transformed differently, put together row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .batch import BatchMaker, UnfinishedBatch, are_rows_done, cancel_rows, wait_for_rows
from .byte_views import ByteViews
from .row_job import collate_values

if TYPE_CHECKING:
    from ...storage.threads.interruptible import Future
    from ..columns import IntArray
    from .row_job import RowJob
    from .row_work import Batch, Sample


@dataclass(frozen=True, slots=True)
class ReadySamples:
    """Samples of a source that are decoded and transformed."""

    samples: list[Sample]
    is_done = True

    def finish(self) -> None:
        pass

    def columns(self) -> dict[str, Any]:
        raise NotImplementedError("a batch that has samples is made of samples")

    def all_samples(self) -> list[Sample]:
        return self.samples

    def cancel(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class LateJob:
    """Work on rows of one kind, which are copied before it."""

    job: Future[RowJob]

    @property
    def is_done(self) -> bool:
        return are_rows_done(self.job)

    @property
    def ids(self) -> IntArray:
        return self.job.result().ids

    def finish(self) -> None:
        wait_for_rows(self.job).finish()

    def columns(self) -> dict[str, Any]:
        return self.job.result().columns()

    def all_samples(self) -> list[Sample]:
        return self.job.result().all_samples()

    def cancel(self) -> None:
        cancel_rows(self.job)


class MixedBatch(UnfinishedBatch):
    """A batch of several kinds of rows: those of each ``parts`` and their places. ``ids`` (rows,) are those of all.

    ``by_samples``: it is made of samples, not of whole fields, as one that is collated by a function always is. Where
    bad rows may be replaced, ``planned`` (rows,) are the ids that the order asked for.
    """

    def __init__(
        self,
        maker: BatchMaker,
        parts: Sequence[tuple[IntArray, RowJob | LateJob | ReadySamples]],
        ids: IntArray,
        num_rows: int,
        num_valid: int,
        *,
        by_samples: bool,
        planned: IntArray | None = None,
    ) -> None:
        self._maker = maker
        self._parts = parts
        self._ids = ids
        self._num_rows = num_rows
        self._num_valid = num_valid
        self._by_samples = by_samples or maker.options.collate is not None
        self._planned = planned

    def result(self) -> Batch:
        for _, part in self._parts:
            part.finish()
        if self._planned is not None:
            self._ids = self._ids.copy()
            for where, part in self._parts:
                if isinstance(part, LateJob):
                    self._ids[where] = part.ids
        count, ids = len(self._ids), self._ids
        if self._by_samples:
            samples: list[Sample] = [{}] * count
            for where, part in self._parts:
                for row, sample in zip(where.tolist(), part.all_samples(), strict=True):
                    samples[row] = sample
            return self._maker.join(samples, ids, self._num_rows, self._num_valid).result()
        fields: dict[str, list[tuple[IntArray, Any]]] = {}
        for where, part in self._parts:
            for name, values in part.columns().items():
                fields.setdefault(name, []).append((where, values))
        batch = {name: _merge(parts, count) for name, parts in fields.items()}
        return self._maker.complete(batch, ids, self._num_rows, self._num_valid)

    @property
    def delivered(self) -> IntArray | None:
        return None if self._planned is None else self._ids[: self._num_valid]

    @property
    def is_done(self) -> bool:
        return all(part.is_done for _, part in self._parts)

    def cancel(self) -> None:
        for _, part in self._parts:
            part.cancel()


def _merge(parts: Sequence[tuple[IntArray, Any]], count: int) -> Any:
    """Merge the parts' values of a field, in the order of all rows, as collating all their samples would."""
    tensors = [values for _, values in parts if isinstance(values, torch.Tensor)]
    are_all = len(tensors) == len(parts) and sum(len(where) for where, _ in parts) == count
    if are_all and len({(values.dtype, values.shape[1:]) for values in tensors}) == 1:
        if len(tensors) == 1:
            return tensors[0]
        joined = torch.cat(tensors)
        order = torch.from_numpy(np.argsort(np.concatenate([where for where, _ in parts]), kind="stable"))
        picked = joined[order]
        is_last = tensors[0].dim() == 4 and tensors[0].is_contiguous(memory_format=torch.channels_last)
        return picked.contiguous(memory_format=torch.channels_last) if is_last else picked
    merged: list[Any] = [None] * count
    for where, values in parts:
        of_rows = values.numpy() if isinstance(values, torch.Tensor) else values
        for row, value in zip(where.tolist(), of_rows, strict=True):
            merged[row] = value
    return ByteViews(merged) if all(isinstance(v, ByteViews) for _, v in parts) else collate_values(merged)
