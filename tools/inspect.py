"""A summary of a data set: format, fields, sizes, and the first sample."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..loader.columns import KEY_COLUMN, ArrayColumn, Block, BytesColumn, Column, IntArray
from ..loader.dataset.index import open_manifest
from ..loader.dataset.manifest import Manifest
from ..loader.dataset.source import Source
from ..loader.dataset.splits import Split
from ..loader.decoding.images.kind import image_kind
from ..loader.errors import ConfigError, DecodeError
from ..loader.formats.arrow.columns import value_sizes
from ..loader.formats.detect import make_format
from ..loader.formats.shard import ShardFormat
from ..loader.reading.checksum import read_chunk
from ..loader.views.describe import FieldView, describe_bytes, shorten
from ..storage import open_store
from .batch_types import batch_types

WIDTH, HEIGHT = 24, 24  # of thumbnails
Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
_BARS = "▁▂▃▄▅▆▇█"
_BINS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Result of ``inspect_dataset``. Sizes are in bytes, measured on ``sizes_of`` samples.

    ``classes``: the names for the numbers in ``cls``, None where they are not known.
    """

    url: str
    format: str
    config: Mapping[str, Any]
    schema: Mapping[str, Any]
    fingerprint: str
    shards: int
    chunks: int
    samples: int
    bytes: int
    checksums: bool
    shard_sizes: Spread
    shard_samples: Spread
    chunk_sizes: Spread
    sample_sizes: Spread
    sizes_of: int
    histogram: tuple[int, ...]
    histogram_edges: tuple[float, ...]
    fields: tuple[FieldView, ...]
    thumbnails: tuple[Thumbnail, ...] = ()
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Smallest, median, mean and largest of some numbers."""

    low: int
    median: float
    mean: float
    high: int

    @staticmethod
    def of(values: IntArray) -> Spread:
        """The spread of (n,) values, at least one."""
        return Spread(
            low=int(values.min()), median=float(np.median(values)), mean=float(values.mean()), high=int(values.max())
        )


def inspect_dataset(
    source: Source | Manifest,
    *,
    split: Split | None = None,
    storage_options: Mapping[str, Any] | None = None,
    format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
    cache_dir: str | os.PathLike[str] | None = None,
    chunks: int = 16,
    thumbnails: int = 0,
    progress: bool = True,
) -> Inspection:
    """Describe a data set from its manifest and ``chunks`` of its chunks, spread evenly over it.

    With ``thumbnails``, the images of so many of the first samples are decoded, if the libraries for that are there.

    Raises:
        DatasetError, FormatError, StorageError: as ``open_manifest`` does.
    """
    if chunks < 1:
        raise ConfigError(f"chunks={chunks}: needs 1 or more")
    manifest = open_manifest(
        source, split=split, storage_options=storage_options, format=format, cache_dir=cache_dir, progress=progress
    )
    shard_format = make_format(manifest.format, manifest.config)
    store = open_store(manifest.url, storage_options=storage_options)
    try:
        count = min(chunks, manifest.num_chunks)
        sizes = []
        fields: tuple[FieldView, ...] = ()
        pictures: tuple[Thumbnail, ...] = ()
        for index in np.unique(np.linspace(0, manifest.num_chunks - 1, count).astype(np.int64)).tolist():
            chunk = manifest.chunk(index)
            header = shard_format.open_shard(store, chunk.shard)
            block = read_chunk(store, shard_format, header, chunk, manifest.schema)
            sizes.append(sample_sizes(block))
            if not fields:
                types = batch_types(block)
                fields = tuple(replace(view, in_batch=types[view.name]) for view in view_sample(block, 0))
                pictures = make_thumbnails(block, thumbnails)
        read = np.concatenate(sizes)
    finally:
        store.close()
    counts, edges = size_histogram(read)
    per_shard = np.bincount(manifest.shard_index, weights=manifest.samples, minlength=len(manifest.shards))
    return Inspection(
        url=store.url,
        format=manifest.format,
        config=dict(manifest.config),
        schema=dict(manifest.schema),
        fingerprint=manifest.fingerprint,
        shards=len(manifest.shards),
        chunks=manifest.num_chunks,
        samples=manifest.num_samples,
        bytes=sum(shard.size for shard in manifest.shards),
        checksums=manifest.checksums is not None,
        shard_sizes=Spread.of(np.array([shard.size for shard in manifest.shards])),
        shard_samples=Spread.of(per_shard.astype(np.int64)),
        chunk_sizes=Spread.of(manifest.lengths),
        sample_sizes=Spread.of(read),
        sizes_of=len(read),
        histogram=tuple(counts.tolist()),
        histogram_edges=tuple(edges.tolist()),
        fields=fields,
        thumbnails=pictures,
        classes=manifest.classes or None,
    )


def sample_sizes(block: Block) -> IntArray:
    """(samples,) int64: the bytes of each sample's values, without what marks where they begin and what is null."""
    total = np.zeros(block.samples, np.int64)
    for column in block.columns.values():
        if isinstance(column, BytesColumn):
            total += np.where(column.starts >= 0, column.stops - column.starts, 0)
        elif isinstance(column, ArrayColumn):
            total += column.nbytes // max(1, block.samples)  # all rows of an array have one size
        else:
            total += value_sizes(column.values)
    return total


def size_histogram(sizes: IntArray, bins: int = _BINS) -> tuple[IntArray, np.ndarray[Any, Any]]:
    """Counts of ``bins`` bins of equal ratio from the smallest size to the largest, and their (bins + 1,) edges."""
    low, high = max(1, int(sizes.min())), max(1, int(sizes.max()))
    if low == high:
        return np.array([len(sizes)], np.int64), np.array([low, high + 1], float)
    edges = np.geomspace(low, high, bins + 1)
    places = np.clip(np.searchsorted(edges, sizes, side="right") - 1, 0, bins - 1)
    return np.bincount(places, minlength=bins).astype(np.int64), edges


def draw_bars(counts: tuple[int, ...]) -> str:
    """One character per count: the highest is a full block, only 0 is blank."""
    top = max(counts)
    return "".join(_BARS[(count * (len(_BARS) - 1) + top - 1) // top] if count else " " for count in counts)


def view_sample(block: Block, row: int) -> tuple[FieldView, ...]:
    return tuple(_view_field(name, column, row) for name, column in block.columns.items())


def _view_field(name: str, column: Column, row: int) -> FieldView:
    if isinstance(column, ArrayColumn):
        value = column.values[row]
        kind = f"{value.dtype}" + (f" {list(value.shape)}" if value.shape else "")
        text = np.array2string(value, threshold=12, edgeitems=6) if value.shape else str(value)
        return FieldView(name=name, kind=kind, value=" ".join(text.split()))
    (value,) = column.take(np.array([row]))
    if value is None:
        return FieldView(name=name, kind="missing", value="")
    if isinstance(value, bytes):
        kind, text = describe_bytes(value)
        return FieldView(name=name, kind=kind, value=text)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return FieldView(name=name, kind=type(value).__name__, value=shorten(text))


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """An image of one sample, at most WIDTH x HEIGHT pixels. ``pixels``: (height, width, 3) uint8 RGB."""

    name: str
    pixels: Pixels


def make_thumbnails(block: Block, count: int) -> tuple[Thumbnail, ...]:
    """The images of the first ``count`` samples of a chunk; none where they cannot be decoded on this machine."""
    rows = np.arange(min(count, block.samples))
    columns = {name: column for name, column in block.columns.items() if isinstance(column, BytesColumn)}
    keys = columns[KEY_COLUMN].take(rows) if KEY_COLUMN in columns else [f"sample {row}" for row in rows.tolist()]
    found = []
    for name, column in columns.items():
        for key, value in zip(keys, column.take(rows), strict=True):
            if isinstance(value, bytes) and image_kind(value) is not None:
                pixels = _shrink(value)
                if pixels is not None:
                    found.append(Thumbnail(f"{key} {name}", pixels))
    return tuple(found[:count])


def _shrink(data: bytes) -> Pixels | None:
    try:
        import cv2

        from ..loader.decoding.images.images import ImageDecoder

        whole: Any = ImageDecoder(layout="hwc")(memoryview(data), None)
    except (ImportError, ConfigError, DecodeError):
        return None
    height, width = whole.shape[:2]
    scale = min(WIDTH / width, HEIGHT / height, 1.0)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small: Pixels = cv2.resize(whole, size, interpolation=cv2.INTER_AREA)
    return small
