"""Values of a field as views of the chunks' bytes: no Python object and no copy a sample until one is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, Self, overload

import numpy as np
import pyarrow as pa

from ..errors import ConfigError
from ..reading.chunk_memory import owner_of

if TYPE_CHECKING:
    import torch  # worker processes import this module and need not wait for torch

    from ..columns import AnyArray, BytesColumn, IntArray

Lend = Callable[[memoryview], memoryview | None]

_INLINE_BYTES = 12  # values up to this long stand in Arrow's view itself
_MOST_BYTES = (1 << 31) - 1
# So many are copied into the memory that the batch before has left, which Arrow does not do, and the GIL is soon free.
_JOINED_BYTES = 8 << 20
_VIEW = np.dtype([("length", "<i4"), ("prefix", "<u4"), ("buffer", "<i4"), ("offset", "<i4")])
# A field whose values take less of its chunk than this is copied: a view of it would keep all of the chunk alive.
_LEAST_SHARE = 1 / 4


class GatheredBytes(NamedTuple):
    """Values end to end: value i is ``data[offsets[i]:offsets[i + 1]]``; those that are missing are empty.

    ``data`` is uint8, ``offsets`` (n + 1,) int64 from 0 on, ``missing`` (n,) bool.
    """

    data: torch.Tensor
    offsets: torch.Tensor
    missing: torch.Tensor

    @property
    def num_rows(self) -> int:
        """The number of values."""
        return len(self.missing)

    def to(self, *args: Any, **kwargs: Any) -> GatheredBytes:
        """Copy to another device, as ``torch.Tensor.to`` does; dtypes must stay."""
        return GatheredBytes(*(tensor.to(*args, **kwargs) for tensor in self))

    def pin_memory(self) -> GatheredBytes:
        """Copy into page-locked memory."""
        return GatheredBytes(*(tensor.pin_memory() for tensor in self))


class ByteViews:
    """The n values of a field as read-only memoryviews, None where missing; what ``raw="view"`` puts into a batch.

    A view keeps its whole chunk in memory for as long as it lives, so keep ``to_bytes()`` or ``gather()`` of what is
    wanted for long. Where a batch would hold more than half of the chunks' part of ``memory_limit``, values are copied;
    so are, always, fields below a quarter of their chunk. Slices are ``ByteViews`` too; equal bytes compare equal
    (``views[0] == b"..."``); pickling copies.

    It has a sequence's methods but is no ``collections.abc.Sequence``: frameworks walk into those, down to each byte of
    a memoryview, which is one as well.
    """

    __slots__ = ("_buffers", "_starts", "_stops", "_which")

    def __init__(self, values: Iterable[bytes | bytearray | memoryview | None] = ()) -> None:
        given = [None if value is None else memoryview(value).toreadonly().cast("B") for value in values]
        self._buffers: list[memoryview] = [memoryview(b"") if value is None else value for value in given]
        self._which = np.arange(len(given))
        self._starts = np.array([-1 if value is None else 0 for value in given], np.int64)
        self._stops = np.array([-1 if value is None else len(value) for value in given], np.int64)

    @classmethod
    def of_buffers(cls, buffers: list[memoryview], which: IntArray, starts: IntArray, stops: IntArray) -> Self:
        """Value i is ``buffers[which[i]][starts[i]:stops[i]]``, missing where starts[i] < 0."""
        made = cls.__new__(cls)
        made._buffers, made._which, made._starts, made._stops = buffers, which, starts, stops
        return made

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> memoryview | None: ...
    @overload
    def __getitem__(self, index: slice) -> ByteViews: ...
    def __getitem__(self, index: int | slice) -> memoryview | ByteViews | None:
        if isinstance(index, slice):
            return self._at(index)
        start = int(self._starts[index])
        return None if start < 0 else self._buffers[self._which[index]][start : self._stops[index]]

    def __iter__(self) -> Iterator[memoryview | None]:
        buffers = self._buffers
        for which, start, stop in zip(self._which.tolist(), self._starts.tolist(), self._stops.tolist(), strict=True):
            yield buffers[which][start:stop] if start >= 0 else None

    def index(self, value: object, start: int = 0, stop: int = sys.maxsize) -> int:
        """Find the first row from ``start`` on, before ``stop``, with an equal value. Raises ValueError if none has."""
        return list(self).index(value, start, stop)  # type: ignore[arg-type]

    def count(self, value: object) -> int:
        """Count the values equal to this one."""
        return list(self).count(value)  # type: ignore[arg-type]

    def pick(self, rows: Sequence[int] | Sequence[bool] | AnyArray | torch.Tensor) -> ByteViews:
        """Take the values of ``rows``, or those where a mask of (n,) bools is True; keep only their own chunks alive.

        Raises:
            IndexError: there is no such row, or a mask has not one value a row.
        """
        given: AnyArray = np.asarray(rows)
        return self._at(np.arange(len(self))[given if given.size else given.astype(np.int64)])

    def _at(self, rows: IntArray | slice) -> ByteViews:
        starts = self._starts[rows]
        present = starts >= 0
        used = self._which[rows][present]
        is_used = np.zeros(len(self._buffers), bool)
        is_used[used] = True
        which = np.zeros(len(starts), np.int64)
        which[present] = (np.cumsum(is_used) - 1)[used]
        return ByteViews.of_buffers(list(compress(self._buffers, is_used)), which, starts, self._stops[rows])

    @property
    def missing(self) -> AnyArray:
        """(n,) bool: rows without a value."""
        absent: AnyArray = self._starts < 0
        return absent

    @property
    def nbytes(self) -> int:
        """Bytes of the values, not of the chunks that they keep alive."""
        return int((self._stops - self._starts)[self._starts >= 0].sum())

    @property
    def are_shared(self) -> bool:
        """Return whether most values are views of buffers that others share: chunks, not copies."""
        return 2 * len(self._buffers) <= len(self)

    def to_bytes(self) -> list[bytes | None]:
        """Copy the values."""
        return [None if value is None else value.tobytes() for value in self]

    def gather(self) -> GatheredBytes:
        """Copy all bytes into one tensor with int64 offsets: keeps no chunk alive; large copies release the GIL.

        Raises:
            ConfigError: a value is longer than 2 GiB.
        """
        import torch

        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(np.where(self._starts < 0, 0, self._stops - self._starts), out=offsets[1:])
        nbytes = int(offsets[-1])
        if nbytes <= _JOINED_BYTES:
            joined: Any = bytearray().join([b"" if value is None else value for value in self])
        else:
            joined = self.arrow().cast(pa.large_binary()).buffers()[2]
        return GatheredBytes(
            data=torch.frombuffer(joined if nbytes else bytearray(1), dtype=torch.uint8)[:nbytes],
            offsets=torch.from_numpy(offsets),
            missing=torch.from_numpy(self.missing),
        )

    def arrow(self) -> pa.Array:
        """Wrap the same memory in a pyarrow array of type ``binary_view``, null where missing; keeps the chunks alive.

        Raises:
            ConfigError: a value is longer than 2 GiB.
        """
        present = self._starts >= 0
        lengths = np.where(present, self._stops - self._starts, 0)
        if len(lengths) and int(lengths.max()) > _MOST_BYTES:
            raise ConfigError(f"a value has {int(lengths.max()):,} bytes, and Arrow's views take 2 GiB at most")
        views = np.zeros(len(self), _VIEW)
        views["length"] = lengths
        short = np.flatnonzero(present & (lengths <= _INLINE_BYTES)).tolist()
        room = views.view(np.uint8).reshape(-1, _VIEW.itemsize)
        for row in short:
            room[row, 4 : 4 + lengths[row]] = np.frombuffer(self[row] or b"", np.uint8)
        long = np.flatnonzero(lengths > _INLINE_BYTES)
        places = zip(self._which[long].tolist(), self._starts[long].tolist(), strict=True)
        heads = b"".join([self._buffers[which][start : start + 4] for which, start in places])
        views["prefix"][long] = np.frombuffer(heads, "<u4")
        views["buffer"][long] = self._which[long]
        views["offset"][long] = self._starts[long]
        valid = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
        buffers = [valid, pa.py_buffer(views), *map(pa.py_buffer, self._buffers)]
        return pa.Array.from_buffers(pa.binary_view(), len(self), buffers)

    def __reduce__(self) -> tuple[type[ByteViews], tuple[list[bytes | None]]]:
        return ByteViews, (self.to_bytes(),)

    def __repr__(self) -> str:
        return f"ByteViews({len(self)} values, {self.nbytes:,} bytes)"


class ViewsOfSpan:
    """Collects one field's views of a span of batches, chunk by chunk in the order in which these arrive."""

    def __init__(self) -> None:
        self._buffers: list[memoryview] = []
        self._counts: list[int] = []  # how many values in a row lie in each
        self._starts: list[IntArray] = []
        self._stops: list[IntArray] = []
        self._count = 0

    def add(self, column: BytesColumn, rows: IntArray, lend: Lend | None) -> None:
        """Add the values of ``rows``: views where the chunk may be lent, else separate copies."""
        lent = _lend(column, lend)
        if lent is not None:
            self._note([lent], [len(rows)], column.starts[rows], column.stops[rows])
        else:
            copies = ByteViews(column.copies(rows))
            self._note(copies._buffers, [1] * len(rows), copies._starts, copies._stops)

    def _note(self, buffers: list[memoryview], counts: list[int], starts: IntArray, stops: IntArray) -> None:
        self._buffers += buffers
        self._counts += counts
        self._starts.append(starts)
        self._stops.append(stops)
        self._count += len(starts)

    def pad(self, count: int) -> None:
        """Add missing values until there are ``count``."""
        if count > self._count:
            absent = np.full(count - self._count, -1, np.int64)
            self._note([memoryview(b"")], [len(absent)], absent, absent)

    def finish(self, order: IntArray) -> ByteViews:
        which = np.repeat(np.arange(len(self._buffers)), self._counts)[order]
        starts, stops = (np.concatenate(parts)[order] for parts in (self._starts, self._stops))
        return ByteViews.of_buffers(self._buffers, which, starts, stops)


def take_views(column: BytesColumn, rows: IntArray, lend: Lend | None) -> list[memoryview | None]:
    """Take the values of ``rows`` for decoders: views where the chunk may be lent, else copies."""
    lent = _lend(column, lend)
    if lent is None:
        return column.copies(rows)
    places = zip(column.starts[rows].tolist(), column.stops[rows].tolist(), strict=True)
    return [lent[start:stop] if start >= 0 else None for start, stop in places]


def _lend(column: BytesColumn, lend: Lend | None) -> memoryview | None:
    """Return the column's buffer to view values in; None where they must be copied."""
    if lend is None or column.bytes_about < _LEAST_SHARE * owner_of(column.buffer)[1]:
        return None
    return lend(column.buffer)
