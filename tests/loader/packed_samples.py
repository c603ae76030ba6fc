"""Reading a data set as plain samples, without the loader."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock import open_manifest, open_store
from penstock.loader.columns import ArrayColumn
from penstock.loader.formats.detect import make_format
from penstock.loader.reading.checksum import read_chunk


def read_samples(url: str) -> list[dict[str, Any]]:
    """Every sample of a data set, through the formats' own readers and the checksums of its manifest."""
    manifest = open_manifest(url)
    shard_format = make_format(manifest.format, manifest.config)
    store = open_store(manifest.url)
    samples: list[dict[str, Any]] = []
    for index in range(manifest.num_chunks):
        chunk = manifest.chunk(index)
        checksum = None if manifest.checksums is None else int(manifest.checksums[index])
        header = shard_format.open_shard(store, chunk.shard)
        block = read_chunk(store, shard_format, header, chunk, manifest.schema, checksum=checksum)
        rows = np.arange(block.samples)
        columns = {
            name: column.values.tolist() if isinstance(column, ArrayColumn) else column.take(rows)
            for name, column in block.columns.items()
        }
        samples += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    store.close()
    return samples
