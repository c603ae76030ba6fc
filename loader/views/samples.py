"""The samples of a data set by id, one at a time, as training gets them or as they are stored."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

import numpy as np

from ...storage.threads.daemon_pool import DaemonPool
from ..columns import Block, IntArray
from ..decoding.decode import FieldDecoders
from ..decoding.gather import gather
from ..decoding.row_work import RowError, RowTask, RowWork, Sample
from ..decoding.rows import explain_row_error
from ..errors import ConfigError, SampleNotFoundError
from ..order.spans import ChunkRows
from ..progress import show_progress
from .search import find_rows, searched_field
from .selected_ids import JointIds, SelectedIds

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..decoding.rows import Rows
    from ..reading.chunk_source import ChunkSource
    from ..run.run import Run
    from ..sources.sources import OpenSource, Sources


_THREADS = 8
_MOST_BYTES = 256 << 20
_INTERRUPTED_S = 1.0


def load_ahead(
    load: Callable[[int], Block], reserve: Callable[[int], int], chunks: Iterable[int]
) -> Iterator[tuple[int, Block | Exception]]:
    """Yield each chunk with the result or error of ``load``, in the order of ``chunks``.

    A few are loaded at once, beyond the first no more than 256 MiB of them, by what ``reserve`` says of each.
    No thread outlives the iterator, unless it is interrupted: then requests in flight are waited for one second.
    """
    pool = DaemonPool("penstock-look", _THREADS)
    waiting: deque[tuple[int, Future[Block]]] = deque()
    held = 0
    patience_s: float | None = None
    try:
        for chunk in chunks:
            while waiting and (len(waiting) > _THREADS or held + reserve(chunk) > _MOST_BYTES):
                held -= reserve(waiting[0][0])
                yield _finished(*waiting.popleft())
            held += reserve(chunk)
            waiting.append((chunk, pool.submit(load, chunk)))
        while waiting:
            yield _finished(*waiting.popleft())
    except KeyboardInterrupt:
        patience_s = _INTERRUPTED_S
        raise
    finally:
        for _, future in waiting:
            future.cancel()
        pool.close(patience_s)


def _finished(chunk: int, future: Future[Block]) -> tuple[int, Block | Exception]:
    try:
        return chunk, future.result()
    except Exception as exc:  # noqa: BLE001 - the caller decides how to treat a bad chunk
        return chunk, exc


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


class SampleReader:
    """Reads one sample at a time: one chunk, of which one row is decoded and transformed. Any thread may call it.

    ``decoders`` and ``work`` are asked for at each call, for the running loader's settled choices; a choice settled
    here stays here. A bad sample is an error, whatever a pass does about it, as is one that is avoided. The only state
    is the chunk that was read last, so that neighbours are not fetched again.
    """

    def __init__(
        self,
        chunks: ChunkSource,
        decoders: Callable[[], FieldDecoders],
        work: Callable[[], RowWork],
        check_open: Callable[[], None],
        avoided: frozenset[int] = frozenset(),
    ) -> None:
        self.manifest: Manifest = chunks.manifest
        self._chunks = chunks
        self._decoders = decoders
        self._work = work
        self._check_open = check_open
        self._avoided = avoided
        self._last: tuple[int, Block] | None = None

    def sample(self, sample_id: int, epoch: int) -> Sample:
        """Decode and transform a sample, with the random numbers of ``epoch``.

        Raises:
            StorageError, FormatError: the sample's chunk cannot be read.
            DecodeError: a field cannot be decoded. What ``transform`` raises is raised, with a note.
        """
        work = replace(self._work(), goes_on=False)
        return self._work_on(sample_id, self._decoders(), work, epoch, self._avoided)

    def raw(self, sample_id: int) -> Sample:
        """Read a sample as it is stored: fields of files as bytes, columns as their values."""
        return self._work_on(sample_id, FieldDecoders(None), RowWork(transform=None, seed=0), 0)

    def _work_on(
        self,
        sample_id: int,
        decoders: FieldDecoders,
        work: RowWork,
        epoch: int,
        avoided: frozenset[int] = frozenset(),
    ) -> Sample:
        rows = self._read(sample_id, decoders)
        encoded = {name: found for name in rows.fields if (found := decoders.settled.get(name)) is not None}
        task = RowTask(epoch, 0, rows.ids, rows.fields, encoded, avoided=avoided)
        results = work.allocate(task)
        failed: RowError | None = None
        try:
            work.run(task, results, 0, 1, lambda: False)
        except RowError as error:
            failed = error
        if failed is not None:
            raise explain_row_error(failed, rows, self.manifest)
        sample = results.samples[0] if results.samples else task.sample(results.values, 0)
        if sample is None:
            raise SampleNotFoundError(f"sample {sample_id}: transform= drops it in epoch {epoch}")
        return sample

    def _read(self, sample_id: int, decoders: FieldDecoders) -> Rows:
        self._check_open()
        first_ids = self.manifest.first_ids
        chunk = self._chunk_of(sample_id)
        last = self._last
        block = last[1] if last is not None and last[0] == chunk else self._chunks.load(chunk)
        self._last = chunk, block
        group = ChunkRows(chunk, np.array([sample_id - first_ids[chunk]]), np.zeros(1, np.int64))
        return gather([(group, block)], 1, first_ids, decoders)

    def _chunk_of(self, sample_id: int) -> int:
        return int(np.searchsorted(self.manifest.first_ids, sample_id, side="right")) - 1

    def find(self, value: Any, field: str | None, ids: Sequence[int], *, progress: bool = True) -> int:
        """Find the first of ``ids`` whose ``field`` is ``value``, chunk after chunk; reads of columns that one's bytes.

        Raises:
            SampleNotFoundError: there is none.
            ConfigError: there is no such field, or it cannot be compared with ``value``.
        """
        self._check_open()
        name = searched_field(self.manifest, field)
        first_ids = self.manifest.first_ids
        ends = sorted((ids[0], ids[-1])) if len(ids) else []  # ids increase, or decrease
        chunks = range(self._chunk_of(ends[0]), self._chunk_of(ends[1]) + 1) if ends else range(0)
        source = self._chunks.apart([name])
        total = int(self.manifest.samples[chunks.start : chunks.stop].sum())
        with show_progress("searching", total, unit="samples", enabled=progress) as advance:
            for chunk, block in load_ahead(source.load, source.reserve, chunks):
                if not isinstance(block, Block):
                    raise block
                column = block.columns.get(name)
                rows = find_rows(column, value, name) if column is not None else ()
                found = sorted(sample_id for row in rows if (sample_id := int(first_ids[chunk]) + row) in ids)
                if found:
                    return found[0]
                advance(block.samples)
        raise SampleNotFoundError(f"{self.manifest.url}: none of {len(ids):,} samples has {name} {value!r}")


class ReadsSamples(Protocol):
    """A ``SampleReader``, or those of all sources of a mixture, by joint ids."""

    manifest: Manifest

    def sample(self, sample_id: int, epoch: int) -> Sample: ...

    def raw(self, sample_id: int) -> Sample: ...

    def find(self, value: Any, field: str | None, ids: Sequence[int]) -> int: ...


class JointReader:
    """Reads samples of all sources of a mixture, by joint ids. Any thread may call it."""

    def __init__(self, sources: Sources, readers: Sequence[SampleReader]) -> None:
        self.manifest = sources.manifest
        self._sources = sources
        self._readers = readers

    def sample(self, sample_id: int, epoch: int) -> Sample:
        source, own = self._own(sample_id)
        with self._sources.naming(source):
            return self._readers[source].sample(own, epoch)

    def raw(self, sample_id: int) -> Sample:
        source, own = self._own(sample_id)
        with self._sources.naming(source):
            return self._readers[source].raw(own)

    def find(self, value: Any, field: str | None, ids: Sequence[int]) -> int:
        assert isinstance(ids, JointIds)
        for source, reader in enumerate(self._readers):
            with suppress(SampleNotFoundError), self._sources.naming(source):
                return self._sources.first_ids[source] + reader.find(value, field, ids.of_source(source))
        name = field or "key"
        raise SampleNotFoundError(f"{self.manifest.url}: none of {len(ids):,} samples has {name} {value!r}")

    def _own(self, sample_id: int) -> tuple[int, int]:
        source = bisect_right(self._sources.first_ids, sample_id) - 1
        return source, sample_id - self._sources.first_ids[source]


class DatasetView:
    """The samples of a loader's data set, by id, beside its passes: nothing is consumed, and no state changes.

    ``dataset[i]`` is sample i as ``transform`` and ``collate`` get it in epoch 0: its fields decoded, then transformed,
    with the random numbers that depend on (seed, epoch, sample id) alone. ``dataset.sample(i, epoch=2)`` is the sample
    of epoch 2, ``dataset.raw(i)`` what is stored. Negative indices count from the end; a slice is a view of the samples
    in it, and reads nothing. Reading a sample fetches its chunk, which is kept until one of another chunk is read:
    neighbours are quick, a shuffled pass is not; that is what the loader is for. A bad sample raises its error,
    whatever ``on_error`` says; one that ``transform`` drops a ``SampleNotFoundError``. In a notebook a view shows as a
    table.

    Of a mixture, samples have joint ids: those of its first source, then those of the second, and so on.
    ``dataset.sources["web"][i]`` is sample i of one source, by the id that batches have beside ``__source__``; epochs
    and random numbers are those of the source.
    """

    def __init__(
        self,
        reader: ReadsSamples,
        ids: Sequence[int] | None = None,
        *,
        owner: object = None,
        sources: Mapping[str, DatasetView] | None = None,
    ) -> None:
        self._reader = reader
        self._ids = range(reader.manifest.num_samples) if ids is None else ids
        self._owner = owner  # a view keeps its loader, whose end would close the store
        self._sources = sources or {}

    def owned_by(self, owner: object) -> Self:
        """Make the same view, which keeps ``owner`` alive: the loader whose end would close its stores."""
        of_sources = {name: view.owned_by(owner) for name, view in self._sources.items()}
        return type(self)(self._reader, self._ids, owner=owner, sources=of_sources)

    @property
    def sources(self) -> Mapping[str, DatasetView]:
        """The samples of each source of a mixture, by its name; empty where there is one data set."""
        return MappingProxyType(dict(self._sources))

    @property
    def ids(self) -> IntArray:
        """(samples,) int64: the sample ids of the view, that is of the data set, the loader's subset, or a slice.

        An array of the caller's own, made anew at each call.
        """
        if isinstance(self._ids, SelectedIds | JointIds):
            return self._ids.array()
        return np.asarray(self._ids, np.int64)

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes that the numbers in ``cls`` stand for; None where the data set does not tell."""
        names = self._reader.manifest.classes
        return list(names) if names else None

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Sample | Self:
        if isinstance(index, slice):
            return type(self)(self._reader, self._ids[index], owner=self._owner)
        return self.sample(index)

    def __iter__(self) -> Iterator[Sample]:
        """The samples in the order of their ids, in epoch 0."""
        return (self.sample(index) for index in range(len(self)))  # no map, which a user's StopIteration would end

    def sample(self, index: int, *, epoch: int = 0) -> Sample:
        """Sample ``index`` as training gets it in ``epoch``.

        Raises:
            IndexError: there is no such sample.
            StorageError, FormatError, DecodeError: it cannot be read or decoded.
        """
        if epoch < 0:
            raise ConfigError(f"epoch={epoch}: must be 0 or more")
        return self._reader.sample(self._id(index), epoch)

    def raw(self, index: int) -> Sample:
        """Sample ``index`` as it is stored, not decoded. Raises IndexError, StorageError, FormatError."""
        return self._reader.raw(self._id(index))

    def find(self, value: Any, *, field: str | None = None) -> int:
        """The index of the first sample whose key, or whose ``field``, is ``value``.

        Reads chunk after chunk until it is found: all keys of a tar data set lie in its shards. A progress bar appears
        on terminals.

        Raises:
            SampleNotFoundError: there is none.
            ConfigError: the samples have no keys and no field is given, or it cannot be compared with ``value``.
        """
        return self._ids.index(self._reader.find(value, field, self._ids))

    def _id(self, index: int) -> int:
        try:
            return self._ids[operator.index(index)]
        except IndexError:
            count = len(self._ids)
            raise IndexError(f"sample {index} of {count:,}: there are 0 to {count - 1}, or -1 to -{count}") from None

    def __repr__(self) -> str:
        part = "" if len(self) == self._reader.manifest.num_samples else f" of {self._reader.manifest.num_samples:,}"
        return f"DatasetView({self._reader.manifest.url!r}, {len(self):,}{part} samples)"

    def _repr_html_(self) -> str:
        from .html import dataset_html

        return dataset_html(self)
