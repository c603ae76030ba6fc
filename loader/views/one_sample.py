"""One sample of a data set, as it is stored: found by id or key, and described for people and programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...storage import open_store
from ..counters import Counters
from ..dataset.index import open_manifest
from ..decoding.decode import FieldDecoders
from ..decoding.row_work import RowWork
from ..errors import ConfigError
from ..formats.detect import make_format
from ..reading.chunk_source import ChunkSource
from .describe import FieldView, describe_value
from .samples import SampleReader

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..dataset.source import Source
    from ..dataset.splits import Split
    from ..formats.shard import ShardFormat

_VALUE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInspection:
    """One sample: its id, the shard and its ordinal there, and each field's type and value as text."""

    url: str
    format: str
    samples: int
    id: int
    shard: str
    number: int
    fields: tuple[FieldView, ...]


def inspect_sample(
    source: Source | Manifest,
    *,
    sample: int | None = None,
    key: str | None = None,
    field: str | None = None,
    split: Split | None = None,
    storage_options: Mapping[str, Any] | None = None,
    format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> SampleInspection:
    """Read one sample: the one with the id ``sample``, or the first whose key, or whose ``field``, is ``key``.

    A negative id counts from the end, and one chunk is read. By key, chunk after chunk is read until it is found.

    Raises:
        ConfigError: there is no such id; not one of ``sample`` and ``key`` is given; the samples have no such field.
        SampleNotFoundError: no sample has the key.
        DatasetError, FormatError, StorageError: as ``open_manifest`` does.
    """
    if (sample is None) == (key is None):
        given = "neither {} nor {} is given" if sample is None else "{} and {} are both given"
        raise ConfigError(f"{given.format('sample= (--sample)', 'key= (--key)')}; give one of them")
    if field is not None and key is None:
        raise ConfigError(f"field={field!r} says where to search for a key; give key= (--key) too")
    manifest = open_manifest(
        source, split=split, storage_options=storage_options, format=format, cache_dir=cache_dir, progress=progress
    )
    store = open_store(manifest.url, storage_options=storage_options)
    try:
        chunks = ChunkSource(manifest, make_format(manifest.format, manifest.config), store, None, Counters())
        as_stored = RowWork(transform=None, seed=0)
        reader = SampleReader(chunks, lambda: FieldDecoders(None), lambda: as_stored, lambda: None)
        if sample is None:
            found = reader.find(key, field, range(manifest.num_samples), progress=progress)
        else:
            found = _check_id(sample, manifest.num_samples)
        values = reader.raw(found)
    finally:
        store.close()
    shard, number = manifest.shard_of(found)
    fields = []
    for name, value in values.items():
        kind, text = describe_value(value, _VALUE_CHARS)
        fields.append(FieldView(name=name, kind=kind, value=text))
    return SampleInspection(
        url=store.url,
        format=manifest.format,
        samples=manifest.num_samples,
        id=found,
        shard=shard,
        number=number,
        fields=tuple(fields),
    )


def _check_id(sample: int, count: int) -> int:
    if not -count <= sample < count:
        raise ConfigError(f"sample {sample} of {count:,}: there are 0 to {count - 1}, or -1 to -{count}")
    return sample % count
