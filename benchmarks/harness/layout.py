"""The layout of a data set's samples, their fields and kinds, so that peers get the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...loader import DistributedDataLoader
from ...loader.dataset.manifest import Manifest
from ...loader.decoding.images.kind import image_kind
from ...loader.errors import ConfigError
from ...loader.formats.shard import ShardFormat

Layout = dict[str, dict[str, Any]]


def find_layout(
    manifest: Manifest, shard_format: ShardFormat | None, storage_options: Mapping[str, str] | None
) -> Layout:
    """Each field of the first samples, and its kind: "bytes", "text", "array", "vector" or "object".

    An array has dtype and shape, a vector, a list of numbers, only a dtype. ``missing``: some samples lack the field.
    ``mean_bytes`` is the mean size; ``image`` is True where bytes begin as a JPEG, PNG or WebP. Names that begin with
    "__" are left out: they are keys, not content.
    """
    with DistributedDataLoader(
        manifest,
        batch_size=min(64, manifest.num_samples),
        shuffle=False,
        decode=None,
        last_batch="partial",
        storage_options=storage_options,
        rank=0,
        world_size=1,
        threads=1,
        memory_limit="256MiB",
    ) as loader:
        batch = next(iter(loader))
    return {name: _describe(values) for name, values in batch.items() if not name.startswith("__")}


def _describe(values: Any) -> dict[str, Any]:
    if isinstance(values, torch.Tensor):
        array = values.numpy()
        return {
            "kind": "array",
            "dtype": array.dtype.name,
            "shape": list(array.shape[1:]),
            "mean_bytes": array.nbytes / len(array),
        }
    kinds = {type(value) for value in values}
    if kinds - {type(None)} == {bytes}:
        there = [value for value in values if value is not None]
        mean = sum(map(len, there)) / len(values)
        field = {"kind": "bytes", "image": image_kind(there[0]) is not None, "mean_bytes": mean}
        return field | ({"missing": True} if len(there) < len(values) else {})
    if kinds == {list} and (dtype := _number_dtype(values)) is not None:
        mean = float(np.mean([len(value) for value in values])) * dtype.itemsize
        return {"kind": "vector", "dtype": dtype.name, "mean_bytes": mean}
    if kinds == {str}:
        return {"kind": "text", "mean_bytes": float(np.mean([len(value.encode()) for value in values]))}
    return {"kind": "object", "types": sorted(kind.__name__ for kind in kinds), "mean_bytes": 0.0}


def _number_dtype(values: Sequence[list[Any]]) -> np.dtype[Any] | None:
    """int64 or float64 where all that lists hold are such numbers, else None."""
    kinds = {type(each) for value in values for each in value}
    return {frozenset({int}): np.dtype(np.int64), frozenset({float}): np.dtype(np.float64)}.get(frozenset(kinds))


def image_fields(layout: Layout) -> Sequence[str]:
    """The names of the fields that hold images.

    Raises:
        ConfigError: there are none.
    """
    names = [name for name, field in layout.items() if field.get("image")]
    if not names:
        raise ConfigError(f"--decode 224 needs images, but none of the fields {sorted(layout)} holds any")
    return names
