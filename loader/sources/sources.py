"""The data sets of a loader, opened: each with its manifest, store and chunks, and all of them as one joint space.

Source k's chunk c has the joint number first_chunks[k] + c, and its sample i the joint id first_ids[k] + i, so that one
reader, one budget and one gathering serve all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ..config.mixture import naming_source
from ..dataset.manifest import Manifest
from ..decoding.row_work import IDS
from ..order.cached import cached_property
from ..reading.chunk_source import ChunkSource, Fetched, reads_locally

if TYPE_CHECKING:
    from ...storage import Store
    from ..columns import Block, IntArray
    from ..config.errors import ErrorPolicy
    from ..config.mixture import Source
    from ..config.reshaping import Reshaping
    from ..decoding.replace import Replacer
    from ..order.selecting import Selection
    from ..packing.packer import Packer
    from ..reading.bad.samples import BadOfSources

SOURCE = "__source__"


@dataclass(frozen=True, kw_only=True)
class OpenSource:
    """One data set, under its name in a mixture, else its URL.

    ``fields`` are those of the samples that were asked for, ``columns`` those of them that are decoded here, None for
    all. ``reshaping`` is None where all samples are delivered; ``errors`` is what bad ones do.
    """

    name: str
    options: Source
    manifest: Manifest
    selection: Selection | None
    fields: Sequence[str]
    columns: Sequence[str] | None
    store: Store
    chunks: ChunkSource
    reshaping: Reshaping | None
    errors: ErrorPolicy

    @property
    def num_samples(self) -> int:
        """The number of samples in one of its epochs."""
        return self.manifest.num_samples if self.selection is None else self.selection.num_samples

    @property
    def chunk_samples(self) -> IntArray:
        """(chunks,) int64: the number of samples of each chunk in an epoch."""
        return self.manifest.samples if self.selection is None else self.selection.counts

    @cached_property
    def stream_kind(self) -> Mapping[str, Any]:
        """The dropping and packing that states record; empty where all samples are delivered."""
        return {} if self.reshaping is None else self.reshaping.kind_for(self.manifest)

    @property
    def drops_only_bad(self) -> bool:
        """Return whether nothing is dropped but bad samples."""
        return self.reshaping is not None and self.reshaping.only_skips

    @property
    def packer(self) -> Packer | None:
        return None if self.reshaping is None else self.reshaping.packer


class Sources(Sequence[OpenSource]):
    """All sources of a loader, in order: those of a mixture, or a data set as a list of one. Owns their stores.

    Batches, logs and errors name a mixture's sources, even a single one; a data set alone keeps its own manifest.

    Mutable state: ``are_alike``, whether their samples were found to have the same fields.
    """

    def __init__(self, sources: Sequence[OpenSource], *, is_mixed: bool) -> None:
        self._sources = sources
        self.is_mixed = is_mixed
        self.are_alike = not is_mixed
        self.names = [source.name for source in sources]
        self.manifest = join_manifests(sources) if is_mixed else sources[0].manifest
        self.chunks: ChunkSource = JointChunks(self) if is_mixed else sources[0].chunks
        self.first_chunks = _starts([source.manifest.num_chunks for source in sources])
        self.first_ids = _starts([source.manifest.num_samples for source in sources])

    def apart(self) -> Sources:
        """Make a copy for use beside the pipelines, with its own headers and counters."""
        apart = copy(self)
        apart._sources = [replace(source, chunks=source.chunks.apart(source.columns)) for source in self._sources]
        apart.chunks = JointChunks(apart) if self.is_mixed else apart._sources[0].chunks
        return apart

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: Any) -> Any:
        return self._sources[index]

    def naming(self, source: int) -> AbstractContextManager[None]:
        """Name a mixture's source in the notes of what is raised inside."""
        return naming_source(self.names[source] if self.is_mixed else "")

    def of_chunk(self, chunk: int) -> tuple[int, int]:
        """Find the source of a joint chunk, and the chunk's number in it."""
        source = bisect_right(self.first_chunks, chunk) - 1
        return source, chunk - self.first_chunks[source]

    @cached_property
    def _id_edges(self) -> IntArray:
        return np.array(self.first_ids[1:], np.int64)

    def of_ids(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Find the source of each joint sample id, and the id in it: (n,) int64 each."""
        source = np.searchsorted(self._id_edges, ids, side="right")
        return source, ids - np.array(self.first_ids, np.int64)[source]

    def identify(self, ids: IntArray) -> Mapping[str, IntArray]:
        """Make the columns that ``with_ids`` adds: sample ids, and in a mixture before them the sources' numbers."""
        if not self.is_mixed:
            return {IDS: ids}
        source, own = self.of_ids(ids)
        return {SOURCE: source, IDS: own}

    def describe(self) -> list[tuple[str, str, int, int]]:
        """List the name, fingerprint and number of samples of each source's data set, and those of one of its epochs.

        Empty where there is one data set, which logs describe by itself.
        """
        if not self.is_mixed:
            return []
        return [(s.name, s.manifest.fingerprint, s.manifest.num_samples, s.num_samples) for s in self._sources]

    @property
    def avoided_ids(self) -> frozenset[int]:
        """The joint ids of samples that are treated as bad untried."""
        return frozenset(
            first + own
            for first, source in zip(self.first_ids, self._sources, strict=True)
            for own in source.errors.avoided
        )

    @cached_property
    def bad(self) -> BadOfSources | None:
        """The bad samples of this rank; None where the first one ends the run."""
        of_sources = [source.errors.bad for source in self._sources if source.errors.bad is not None]
        if not of_sources:
            return None
        from ..reading.bad.samples import BadOfSources

        return BadOfSources(of_sources, self.first_ids)

    def make_replacer(self, *, counts: bool = True) -> Replacer | None:
        """Make the replacer of bad samples, which reads by these sources; None where they are not replaced.

        Without ``counts`` it records nothing.
        """
        if self._sources[0].errors.arguments.on_error != "replace":
            return None
        from ..decoding.replace import Replacer

        of_sources = [
            source.errors.substitutes(source.chunks, first_id, counts=counts)
            for source, first_id in zip(self._sources, self.first_ids, strict=True)
        ]
        return Replacer(of_sources, self.manifest)

    @property
    def stores(self) -> list[Store]:
        """The stores of all sources, whose requests are counted together."""
        return [source.store for source in self._sources]

    @property
    def has_streams(self) -> bool:
        """Return whether any drops or packs samples, so that only reading finds the outputs of its epochs."""
        return any(source.reshaping is not None for source in self._sources)

    @property
    def is_local(self) -> bool:
        return all(reads_locally(source.store) for source in self._sources)

    def close(self) -> None:
        for source in self._sources:
            source.store.close()


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class JointManifest(Manifest):
    """The chunks of all sources laid end to end. Shards are named by their whole URLs."""

    names: Sequence[str]
    first_sample_ids: Sequence[int]
    fingerprints: Sequence[str]

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over the sources' names and fingerprints."""
        return xxhash.xxh3_128_hexdigest("\n".join(map("{}\t{}".format, self.names, self.fingerprints)).encode())

    def name_sample(self, sample_id: int) -> str:
        source = bisect_right(self.first_sample_ids, sample_id) - 1
        return f"sample {sample_id - self.first_sample_ids[source]} of source {self.names[source]!r}"


def join_manifests(sources: Sequence[OpenSource]) -> JointManifest:
    """Join all sources' chunks in one manifest for reading; it cannot be saved."""
    manifests = [source.manifest for source in sources]
    first_shards = _starts([len(manifest.shards) for manifest in manifests])
    fields = dict.fromkeys(name for manifest in manifests for name in manifest.fields)
    return JointManifest(
        url=f"mixture of {', '.join(source.name for source in sources)}",
        format=" and ".join(sorted({manifest.format for manifest in manifests})),
        config={},
        schema={"fields": list(fields)},
        shards=[
            replace(shard, key=f"{manifest.url.rstrip('/')}/{shard.key}")
            for manifest in manifests
            for shard in manifest.shards
        ],
        shard_index=np.concatenate([m.shard_index + s for m, s in zip(manifests, first_shards, strict=True)]),
        offsets=np.concatenate([manifest.offsets for manifest in manifests]),
        lengths=np.concatenate([manifest.lengths for manifest in manifests]),
        samples=np.concatenate([manifest.samples for manifest in manifests]),
        memory=np.concatenate([manifest.memory for manifest in manifests]),
        names=[source.name for source in sources],
        first_sample_ids=_starts([manifest.num_samples for manifest in manifests]),
        fingerprints=[manifest.fingerprint for manifest in manifests],
    )


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]


class JointChunks(ChunkSource):
    """Reads and opens the chunks of all sources, by joint numbers. Called by the fetch threads."""

    def __init__(self, sources: Sources) -> None:
        self.manifest = sources.manifest
        self.columns = None
        self._sources = sources
        self.of_sources = [source.chunks for source in sources]

    def fetch(self, index: int) -> Fetched | None:
        source, chunk = self._sources.of_chunk(index)
        with self._sources.naming(source):
            return self.of_sources[source].fetch(chunk)

    def open(self, index: int, fetched: Fetched | None) -> Block:
        source, chunk = self._sources.of_chunk(index)
        with self._sources.naming(source):
            return self.of_sources[source].open(chunk, fetched)

    @property
    def is_local(self) -> bool:
        return self._sources.is_local

    @property
    def header_bytes(self) -> int:
        return sum(chunks.header_bytes for chunks in self.of_sources)

    def limit_headers(self, budget_bytes: int) -> None:
        for chunks in self.of_sources:
            chunks.limit_headers(budget_bytes // len(self.of_sources))

    def limit_memory(self, limit_bytes: int) -> None:
        for chunks in self.of_sources:
            chunks.limit_memory(limit_bytes)

    def limit_pages(self, nbytes: int) -> None:
        for chunks in self.of_sources:
            chunks.limit_pages(nbytes // len(self.of_sources))

    def reserve(self, index: int) -> int:
        source, chunk = self._sources.of_chunk(index)
        return self.of_sources[source].reserve(chunk)

    def hold(self, index: int) -> int:
        source, chunk = self._sources.of_chunk(index)
        return self.of_sources[source].hold(chunk)
