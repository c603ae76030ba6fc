"""Types of a batch's fields, found in the stored values of some samples: what a loader delivers by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..loader.columns import ArrayColumn, Block, BytesColumn, Column, IntArray
from ..loader.decoding.decode import FieldDecoders, is_channels_first
from ..loader.decoding.images.kind import image_kind
from ..loader.decoding.row_work import channels_first
from ..storage import PenstockError

_ROWS = 8  # decoded to see whether their shapes agree
_TENSORS = "biufc"  # kinds of numpy's dtypes that torch has
_MOST = (1 << 63) - 1


def batch_types(block: Block) -> dict[str, str]:
    """The type of each field in a batch of a loader with the defaults, by some samples of a chunk.

    Like ``int64 (B, 16)`` for a tensor, ``list of str`` for a list. ``?``: values that cannot be decoded here.
    """
    rows = np.unique(np.linspace(0, block.samples - 1, min(_ROWS, block.samples)).astype(np.int64))
    return {name: _type_of(name, column, rows) for name, column in block.columns.items()}


def _type_of(name: str, column: Column, rows: IntArray) -> str:
    decoders = FieldDecoders("auto")
    if isinstance(column, ArrayColumn):
        return _tensor(decoders.dtype_of(column.values), column.values.shape[1:])
    values = column.take(rows)
    if isinstance(column, BytesColumn) and not column.text:
        decoders.are_images = lambda _: isinstance(values[0], bytes) and image_kind(values[0]) is not None
        try:
            decoder = decoders.of(name, column)
            if decoder is not None:
                values = [None if value is None else decoder(memoryview(value), None) for value in values]
                if is_channels_first(decoder):
                    values = [channels_first(value) for value in values]
        except (PenstockError, ValueError, OSError):
            return "?"
    return _type_of_values(values)


def _type_of_values(values: Sequence[Any]) -> str:
    """The type of what ``collate_values`` makes of them."""
    kinds = set(map(type, values))
    if kinds == {bool}:
        return _tensor(np.dtype(bool))
    if kinds == {int} and all(-_MOST - 1 <= value <= _MOST for value in values):
        return _tensor(np.dtype(np.int64))
    if float in kinds and kinds <= {int, float}:
        return _tensor(np.dtype(np.float64))
    if all(isinstance(value, np.ndarray | np.generic) for value in values):
        if len({(value.shape, value.dtype) for value in values}) == 1:
            return _tensor(values[0].dtype, values[0].shape)
        return "list of tensors" if all(value.dtype.kind in _TENSORS for value in values) else "list of arrays"
    named = sorted({"None" if value is None else type(value).__name__ for value in values})
    return f"list of {' and '.join(named)}"


def _tensor(dtype: np.dtype[Any], shape: Sequence[int] = ()) -> str:
    if dtype.kind not in _TENSORS:
        return "list of arrays"
    return f"{dtype.newbyteorder('=').name} ({', '.join(['B', *map(str, shape)])})"
