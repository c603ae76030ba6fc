"""The layout of a data set's samples, their fields and kinds, so that peers get the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..loader import DistributedDataLoader
from ..loader.dataset.manifest import Manifest
from ..loader.decoding.image_kind import image_kind
from ..loader.errors import ConfigError
from ..loader.formats.shard import ShardFormat

Layout = dict[str, dict[str, Any]]


def find_layout(
    manifest: Manifest, shard_format: ShardFormat | None, storage_options: Mapping[str, str] | None
) -> Layout:
    """Each field of the first samples: ``kind`` "bytes", "text", "array" or "object"; of arrays, dtype and shape.

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
    if kinds == {bytes}:
        mean = float(np.mean([len(value) for value in values]))
        return {"kind": "bytes", "image": image_kind(values[0]) is not None, "mean_bytes": mean}
    if kinds == {str}:
        return {"kind": "text", "mean_bytes": float(np.mean([len(value.encode()) for value in values]))}
    return {"kind": "object", "types": sorted(kind.__name__ for kind in kinds), "mean_bytes": 0.0}


def image_fields(layout: Layout) -> Sequence[str]:
    """The names of the fields that hold images.

    Raises:
        ConfigError: there are none.
    """
    names = [name for name, field in layout.items() if field.get("image")]
    if not names:
        raise ConfigError(f"--decode 224 needs images, but none of the fields {sorted(layout)} holds any")
    return names
