"""An epoch's chunks laid end to end: of a real data set, or of a made-up one that no array has to hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...loader.errors import ConfigError
from ...loader.order.permutation import IntArray
from ...loader.order.plan import EpochPlan


class ChunkStream(Protocol):
    """Chunks by their place in an epoch's order; all arguments and results are (n,) int64 arrays."""

    @property
    def num_samples(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def find(self, samples: IntArray) -> IntArray:
        """The places of the chunks that hold these samples of the stream."""

    def starts(self, places: IntArray) -> IntArray:
        """At which sample of the stream each place starts; that of ``num_chunks`` is the stream's end."""

    def sizes(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Bytes that are fetched, and that the chunk takes once opened."""

    def identities(self, places: IntArray) -> IntArray:
        """Numbers of the chunks, alike where the same bytes are read."""


@dataclass(frozen=True)
class ListedChunks:
    """The chunks of a manifest in the order of an epoch: ``fetched`` and ``memory`` are (chunks,) bytes."""

    plan: EpochPlan
    fetched: IntArray
    memory: IntArray

    @property
    def num_samples(self) -> int:
        return self.plan.num_samples

    @property
    def num_chunks(self) -> int:
        return len(self.plan.pieces.chunks)

    def find(self, samples: IntArray) -> IntArray:
        return np.searchsorted(self.plan.stream_starts, samples, side="right").astype(np.int64) - 1

    def starts(self, places: IntArray) -> IntArray:
        return self.plan.stream_starts[places]

    def sizes(self, places: IntArray) -> tuple[IntArray, IntArray]:
        chunks = self.plan.pieces.chunks[places]
        return self.fetched[chunks], self.memory[chunks]

    def identities(self, places: IntArray) -> IntArray:
        return self.plan.pieces.chunks[places]


@dataclass(frozen=True)
class UniformChunks:
    """Made-up chunks of equal size, to one sample: no permutation of them would change when one is read."""

    num_samples: int
    num_chunks: int
    total_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_chunks <= self.num_samples <= 1 << 40:
            raise ConfigError(
                f"{self.num_samples:,} samples in {self.num_chunks:,} chunks: needs at least a sample a chunk, and at "
                f"most {1 << 40:,} samples"
            )
        if not self.num_samples <= self.total_bytes <= 1 << 60:
            raise ConfigError(
                f"{self.num_samples:,} samples of {self.total_bytes:,} bytes in all: needs a byte a sample at least, "
                "and 2**60 bytes at most"
            )

    def find(self, samples: IntArray) -> IntArray:
        size, longer = divmod(self.num_samples, self.num_chunks)
        edge = longer * (size + 1)
        return np.where(samples < edge, samples // (size + 1), longer + (samples - edge) // size)

    def starts(self, places: IntArray) -> IntArray:
        size, longer = divmod(self.num_samples, self.num_chunks)
        starts: IntArray = places * size + np.minimum(places, longer)
        return starts

    def sizes(self, places: IntArray) -> tuple[IntArray, IntArray]:
        held = self.starts(places + 1) - self.starts(places)
        fetched = np.rint(held * (self.total_bytes / self.num_samples)).astype(np.int64)
        return fetched, fetched

    def identities(self, places: IntArray) -> IntArray:
        return places
