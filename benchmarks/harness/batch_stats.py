"""Consume a batch, the same way for every contender: count its samples and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

_MASK = (1 << 64) - 1
_PAGE = 4096  # bytes; of each page of a value one byte is read


def batch_stats(batch: Any) -> tuple[int, int]:
    """(samples, bytes of payload) of a batch: a mapping of field to tensor or list, or a list of samples.

    Names that begin with "__" are the loaders' own (keys, URLs, ids), and do not count. Of every bytes object and view
    a byte of each page is read, so that memory which was only mapped, and not yet read, gains nothing.
    """
    samples = payload = 0
    for values in _fields(batch):
        if isinstance(values, torch.Tensor | np.ndarray):
            samples, payload = len(values), payload + values.nbytes
        elif _is_gathered(values):
            _touch(values.data.numpy().data)
            samples, payload = len(values.offsets) - 1, payload + values.data.nbytes
        else:
            samples, payload = len(values), payload + sum(map(_size, values))
    return samples, payload


def _is_gathered(values: Any) -> bool:
    """Return whether these are our ``GatheredBytes``, without importing our loader into a peer's process."""
    return isinstance(values, tuple) and hasattr(values, "offsets")


def _touch(value: bytes | memoryview) -> None:
    pages = value[::_PAGE]
    if isinstance(pages, memoryview):
        pages.tobytes()  # its slice alone has read nothing yet


def _fields(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return [values for name, values in batch.items() if not name.startswith("__")]
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [batch]
    if batch and isinstance(batch[0], Mapping):
        names = [name for name in batch[0] if not name.startswith("__")]
        return [[sample[name] for sample in batch] for name in names]
    return list(batch)


def _size(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bytes | memoryview):
        _touch(value)
        return len(value)
    if isinstance(value, list):
        return 8 * len(value)  # of int64 or float64
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.nbytes
    return len(value) if isinstance(value, Sequence) else 8


def checksum(batch: Any) -> int:
    """A sum over the content of a batch, modulo 2^64, that depends neither on order nor on how fields are grouped.

    Numbers add their bit patterns, bytes and text their hash. Two passes over the same samples give the same total.
    """
    total = 0
    for values in _fields(batch):
        if isinstance(values, torch.Tensor):
            values = values.numpy()
        if _is_gathered(values):
            ends = values.offsets.tolist()
            data = values.data.numpy().data
            values = [data[start:stop] for start, stop in itertools.pairwise(ends)]
        if isinstance(values, np.ndarray):
            total += _sum_bits(values)
        else:
            total += sum(map(_hash, values))
    return total & _MASK


def _sum_bits(values: np.ndarray[Any, np.dtype[Any]]) -> int:
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    return int(bits.sum(dtype=np.uint64))


def _hash(value: Any) -> int:
    if value is None or (isinstance(value, bytes | memoryview) and not len(value)):
        return 0  # peers have nothing for a missing value
    if isinstance(value, list):
        value = np.asarray(value)
        if value.dtype.kind not in "iuf":
            return xxhash.xxh3_64_intdigest(repr(value.tolist()).encode())
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        return _sum_bits(np.asarray(value))
    if isinstance(value, int):
        return value & _MASK
    return xxhash.xxh3_64_intdigest(value.encode() if isinstance(value, str) else value)
