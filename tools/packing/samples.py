"""Samples in a fixed order: what is packed, whatever it comes from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Batch:
    """Some items: samples, or the rows of a record batch. A source can begin anew at any ``piece``."""

    piece: int
    items: Sequence[Any] | pa.RecordBatch

    def __len__(self) -> int:
        return len(self.items)


class SampleSource(Protocol):
    """A stream of samples in a fixed order.

    ``total``: the samples, None if not known. ``identity``: JSON-able, changes with the content; None if the content
    cannot be recognised. ``hints``: types that tables should have. ``classes``: the names for the numbers in ``cls``.
    ``has_members``: values are the bytes of files, named as files are. ``notes`` tell the user how the source was
    understood.
    """

    @property
    def total(self) -> int | None: ...
    @property
    def identity(self) -> Any: ...
    @property
    def hints(self) -> Mapping[str, pa.DataType]: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def has_members(self) -> bool: ...

    def batches(self, first_piece: int = 0) -> Iterator[Batch]: ...

    def before(self, piece: int) -> int:
        """Number of samples before a piece, as far as that is known."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Options for reading a source. ``is_mapped``: samples are changed after reading."""

    follow_links: bool = False
    classes: tuple[str, ...] | None = None
    extensions: tuple[str, ...] | None = None
    delimiter: str | None = None
    decimal_point: str | None = None
    is_mapped: bool = False

    @property
    def is_for_tables(self) -> bool:
        """Return whether an option for CSV files is set."""
        return self.delimiter is not None or self.decimal_point is not None


class IterableSource:
    """Samples, texts, lists of integers or record batches from Python."""

    def __init__(self, items: Iterable[Any], group: int, classes: tuple[str, ...] | None = None) -> None:
        self.total = len(items) if isinstance(items, Sequence) else None
        self.identity = None
        self.hints: Mapping[str, pa.DataType] = {}
        self.classes = classes or ()
        self.notes: Sequence[str] = ()
        self.has_members = False
        self._items = items
        self._group = group

    def batches(self, first_piece: int = 0) -> Iterator[Batch]:
        items = iter(self._items)
        number = 0
        for is_table, run in itertools.groupby(items, lambda item: isinstance(item, pa.RecordBatch)):
            if is_table:
                for batch in run:
                    yield Batch(number, batch)
                    number += 1
            else:
                while some := list(itertools.islice(run, self._group)):
                    yield Batch(number, some)
                    number += 1

    def before(self, piece: int) -> int:
        return 0

    def close(self) -> None:
        pass
