"""What an opened chunk consists of: columns of values, and the types of the arrays that they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from .order.plan import IntArray

__all__ = [
    "KEY_COLUMN",
    "AnyArray",
    "ArrayColumn",
    "Block",
    "BytesColumn",
    "Column",
    "IntArray",
    "ObjectColumn",
    "Records",
]

# The sample's key, where the format has keys: text, and the same for every member of a sample.
KEY_COLUMN = "__key__"

AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """Values of one shape and dtype: ``values`` is (samples, *shape)."""

    values: AnyArray

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


@dataclass(frozen=True, slots=True)
class BytesColumn:
    """Values that are slices of one buffer: value i is ``buffer[starts[i]:stops[i]]``, missing where starts[i] < 0.

    ``text`` says that the values are UTF-8 and are handed out as str; ``ascii`` may hold the whole buffer as one, where
    it is ASCII. The buffer is shared by the columns of a block and is counted once, in ``Block.nbytes``.
    """

    buffer: memoryview
    starts: IntArray
    stops: IntArray
    text: bool = False
    ascii: str | None = None

    def take(self, rows: IntArray) -> list[Any]:
        """The values of ``rows`` as bytes or str of their own; None where missing."""
        starts, stops = self.starts[rows].tolist(), self.stops[rows].tolist()
        # A slice of bytes or str is a copy in one step, where a view would be made first, and thrown away.
        whole = self.ascii if self.text else self.buffer.obj
        if whole is not None and type(whole) in (bytes, str) and len(whole) == len(self.buffer):  # type: ignore[arg-type]
            return [whole[a:b] if a >= 0 else None for a, b in zip(starts, stops, strict=True)]  # type: ignore[index]
        buffer = self.buffer
        if self.text:
            return [str(buffer[a:b], "utf-8") if a >= 0 else None for a, b in zip(starts, stops, strict=True)]
        return [bytes(buffer[a:b]) if a >= 0 else None for a, b in zip(starts, stops, strict=True)]

    def copies(self, rows: IntArray) -> list[memoryview | None]:
        """The values of ``rows`` as views of bytes of their own, for decoders; None where missing.

        Views into the buffer would keep it in memory until the last of them is decoded.
        """
        return [None if value is None else memoryview(value) for value in self.take(rows)]


@dataclass(frozen=True, slots=True)
class ObjectColumn:
    """Values that are neither: strings, lists, structs and the like, kept as an Arrow array until they are taken."""

    values: pa.Array

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    def take(self, rows: IntArray) -> list[Any]:
        """The values of ``rows`` as Python objects; None where null."""
        taken: list[Any] = self.values.take(pa.array(rows)).to_pylist()
        return taken


Column = ArrayColumn | BytesColumn | ObjectColumn


@dataclass(frozen=True, slots=True)
class Records:
    """Scalar columns laid row by row: ``rows`` is (samples,) of opaque bytes, each made of ``names`` and ``dtypes``.

    All dtypes have one item size. Formats give columns; the loader makes records of them.
    """

    names: tuple[str, ...]
    dtypes: tuple[np.dtype[Any], ...]
    rows: AnyArray


@dataclass(frozen=True, slots=True)
class Block:
    """An opened chunk: columns of ``samples`` values each, taking ``nbytes`` of memory in all."""

    samples: int
    nbytes: int
    columns: Mapping[str, Column] = field(default_factory=dict)
    records: tuple[Records, ...] = ()
