"""From the values of a field to one tensor, if their types and shapes allow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..columns import AnyArray, float_holds

_LISTED = {bytes, str}  # values that no tensor holds
_NUMBERS = {bool, int, float}
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def collate_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples to a batch: each field by ``collate_values``. A field that some samples lack is a list."""
    fields = dict.fromkeys(field for sample in samples for field in sample)
    return {field: collate_values([sample.get(field) for sample in samples]) for field in fields}


def collate_values(values: Sequence[Any], *, is_image: bool = False) -> Any:
    """Collate the B values of one field to a tensor, or to a list if they cannot be one.

    - arrays, tensors and numpy scalars of one shape and dtype: (B, *shape) of that dtype; arrays (c, h, w) whose memory
      is in the order (h, w, c) stay in it
    - bool: (B,) bool; int: (B,) int64; float, also mixed with int: (B,) float64, as torch's default_collate
    - arrays, tensors, numpy scalars and Python's numbers together: as if all were tensors, of these dtypes
    - arrays and tensors of different shapes or dtypes: a list of tensors
    - anything else (str, bytes, dict, list, None, mixtures, ints beyond 64 bits or, among floats, those that float64
      does not give back): the list unchanged

    With ``is_image`` the arrays are (h, w, c), and come out as (B, c, h, w) or a list of (c, h, w), without a copy:
    their memory format is channels_last.
    """
    if not values:
        return []
    kinds = set(map(type, values))
    if kinds <= _LISTED:
        return list(values)
    if kinds == {bool}:
        return torch.tensor(values, dtype=torch.bool)
    if kinds == {int} and min(values) >= _INT64_MIN and max(values) <= _INT64_MAX:
        return torch.tensor(values, dtype=torch.int64)
    if float in kinds and kinds <= {int, float}:
        are_held = all(float_holds(value) for value in values if type(value) is int)
        return torch.tensor(values, dtype=torch.float64) if are_held else list(values)
    if all(isinstance(value, np.ndarray | np.generic) for value in values):
        return _collate_arrays([np.asarray(value) for value in values], is_image)
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.stack(list(values)) if _are_alike(values) else list(values)
    return _collate_mixed(values, kinds)


def images_to_tensor(pixels: AnyArray) -> torch.Tensor:
    """View (..., h, w, c) pixels as a (..., c, h, w) tensor: a batch of four axes is channels_last."""
    return torch.from_numpy(pixels).movedim(-1, -3)


def _collate_mixed(values: Sequence[Any], kinds: set[type]) -> Any:
    """Values of several types: a tensor, if each by itself would be a part of it. Where each comes from decides what it
    is, and what else a batch has, whether they come together."""
    if all(kind in _NUMBERS or issubclass(kind, np.generic) for kind in kinds):
        return _collate_numbers(values, kinds)
    if not all(kind in _NUMBERS or issubclass(kind, np.ndarray | np.generic | torch.Tensor) for kind in kinds):
        return list(values)
    try:
        tensors = [
            value if isinstance(value, torch.Tensor) else _to_tensor(np.asarray(value), False) for value in values
        ]
    except TypeError:  # a dtype that torch lacks, as numpy's of ints beyond 64 bits
        return list(values)
    if _are_alike(tensors):
        return torch.stack(tensors)
    return tensors if kinds.isdisjoint(_NUMBERS) else list(values)


def _collate_numbers(values: Sequence[Any], kinds: set[type]) -> Any:
    """Numbers of Python's and numpy's: of one dtype, to which ints are added where it is that of Python's floats."""
    dtypes: set[np.dtype[Any]] = {np.dtype(kind) for kind in (kinds - {int} if kinds & {float, np.float64} else kinds)}
    if len(dtypes) > 1:
        return list(values)
    try:
        return _to_tensor(np.array(values, dtypes.pop()), False)
    except (TypeError, OverflowError):  # no dtype of torch's; ints beyond 64 bits, or beyond floats
        return list(values)


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    return len({(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}) == 1


def _collate_arrays(arrays: list[AnyArray], is_image: bool) -> Any:
    if not is_image and all(_is_channels_last(array) for array in arrays):
        arrays, is_image = [np.moveaxis(array, 0, -1) for array in arrays], True
    try:
        if len({(array.shape, array.dtype) for array in arrays}) == 1:
            return _to_tensor(np.stack(arrays), is_image)
        return [_to_tensor(array, is_image) for array in arrays]
    except TypeError:  # a dtype that torch lacks: text, records, dates
        return arrays


def _is_channels_last(array: AnyArray) -> bool:
    return array.ndim == 3 and not array.flags.c_contiguous and np.moveaxis(array, 0, -1).flags.c_contiguous


def _to_tensor(array: AnyArray, is_image: bool) -> torch.Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    writable = np.require(native, requirements=("C", "W"))
    return images_to_tensor(writable) if is_image and array.ndim >= 3 else torch.from_numpy(writable)
