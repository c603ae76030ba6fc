"""``keep=``: which samples stay, decided on values as they are read, before anything is decoded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decoding.decode import FieldDecoders
from ..errors import ConfigError
from ..formats.schema import null_marks

if TYPE_CHECKING:
    from ..decoding.rows import Rows

BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Keep:
    """A predicate over whole columns: it gets many samples at once, as a dict of ``columns``, and says which stay.

    A column is an array (n, ...) where its values have one shape and type, else a list of n values (bytes, str, None
    where missing). Where nulls of a column ``x`` are marked in batches, ``x__null`` is in the dict beside it.
    ``predicate`` returns n bools. Columns that the loader does not deliver are read for it alone.
    """

    columns: Sequence[str]
    predicate: Callable[[Mapping[str, Any]], Any]

    def __post_init__(self) -> None:
        is_list = isinstance(self.columns, Iterable) and not isinstance(self.columns, str | bytes)
        names = tuple(self.columns) if is_list else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"Keep(columns={self.columns!r}): give a list of the names of columns")
        if not callable(self.predicate):
            raise ConfigError(f"Keep(predicate={self.predicate!r}) cannot be called; pass a function of columns")
        object.__setattr__(self, "columns", names)


KeepChoice = Keep | Callable[[dict[str, Any]], Any]
"""Filter of samples: a function of a sample as it is stored that returns whether it stays, or a ``Keep`` of many."""


class Sieve:
    """Asks ``keep`` about rows, alike on every rank. ``columns``: those it needs, None for all that are read."""

    def __init__(self, keep: KeepChoice) -> None:
        if not isinstance(keep, Keep) and not callable(keep):
            raise ConfigError(f"keep={keep!r}: pass a function of a sample's fields, or Keep(columns, predicate)")
        self._keep = keep
        self.columns = keep.columns if isinstance(keep, Keep) else None
        self.decoders = FieldDecoders(None)  # values come as they are stored

    def fields(self, known: Collection[str]) -> list[str] | None:
        """List its fields of samples with the ``known`` ones: its columns with the marks of their nulls, or all."""
        return None if self.columns is None else [*self.columns, *null_marks(self.columns, known)]

    def holds(self, rows: Rows) -> BoolArray:
        """Compute (n,) bool: the rows, of its ``fields`` alone, that stay. Raises the predicate's errors."""
        if isinstance(self._keep, Keep):
            fields: dict[str, Any] = dict(rows.fields)
            missing = [name for name in self._keep.columns if name not in fields]
            fields |= {name: [None] * len(rows.ids) for name in missing}  # in none of these samples
            return _check(self._keep.predicate(fields), len(rows.ids))
        names, values = list(rows.fields), list(rows.fields.values())
        kept = [self._keep({n: of[i] for n, of in zip(names, values, strict=True)}) for i in range(len(rows.ids))]
        return np.fromiter(map(bool, kept), np.bool_, len(kept))


def _check(answer: Any, count: int) -> BoolArray:
    held = np.asarray(answer)
    if held.shape != (count,) or held.dtype != np.bool_:
        raise ConfigError(
            f"keep=Keep(...): the predicate got {count} samples and returned {type(answer).__name__} of shape "
            f"{held.shape} and type {held.dtype}; it must return {count} bools, one a sample"
        )
    return held
