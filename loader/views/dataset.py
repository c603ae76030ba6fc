"""The view of a loader's samples: each as a pass would make it, read separately."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from .samples import DatasetView, JointReader, SampleReader
from .selected_ids import JointIds, SelectedIds

if TYPE_CHECKING:
    from ..decoding.row_work import RowWork
    from ..run.run import Run
    from ..sources.sources import OpenSource


def open_view(run: Run) -> DatasetView:
    """Open a view of the samples of all sources. Reads nothing."""
    sources = run.sources.apart()
    kinds = {number: kind for kind in run.reading.kinds for number in kind.sources}
    readers = [
        SampleReader(
            source.chunks,
            kinds[number].decoders.on_host,
            partial(_work_on, run, number),
            run.resources.check_open,
            source.errors.avoided,
        )
        for number, source in enumerate(sources)
    ]
    ids = [_ids_of(source) for source in sources]
    views = [DatasetView(reader, own) for reader, own in zip(readers, ids, strict=True)]
    if not sources.is_mixed:
        return views[0]
    joint = JointIds(ids, sources.first_ids)
    return DatasetView(JointReader(sources, readers), joint, sources=dict(zip(sources.names, views, strict=True)))


def _ids_of(source: OpenSource) -> range | SelectedIds:
    return range(source.manifest.num_samples) if source.selection is None else SelectedIds(source.selection)


def _work_on(run: Run, number: int) -> RowWork:
    """Make the work on a source's samples, with the random numbers of its order, which a loaded state may bring."""
    options, seed = run.sources[number].options, run.sampler.orders[number].order.seed
    return replace(run.batch_options, transform=options.transform, may_drop=options.may_drop, seed=seed).work
