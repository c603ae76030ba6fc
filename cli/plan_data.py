"""Inputs of ``penstock plan``: the chunks of a data set, existing or made up, and the order of a run over them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from ..loader.columns import IntArray
from ..loader.dataset.index import open_manifest
from ..loader.errors import ConfigError
from ..loader.formats.shard import CHUNK_BYTES
from ..loader.limits import parse_bytes
from ..loader.order.plan import Order, choose_order
from ..loader.order.selecting import Selection, Subset
from .common import Flag, OptionalNumber, SourceArguments

_MOST_LISTED = 1 << 26  # chunks of which every one has its place in arrays


def parse_count(text: str, option: str) -> int:
    """A whole number, such as 1000000000, 1_000_000_000 or 1e9. Raises ConfigError."""
    if re.fullmatch(r"\d[\d_]{,99}", text):
        return int(text)
    value = float(text) if re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", text) else 0.5
    if not value.is_integer():
        raise ConfigError(f"{option} {text}: is no whole number; write 1000000000 or 1e9")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class PlanDataArguments(SourceArguments):
    """Data of a run, and how it is cut."""

    source: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SOURCE ...]", help_behavior_hint="")
    ] = ()
    """URL or path of a folder of shards or of one shard, or a quoted pattern; none for a hypothetical data set."""

    world_size: tuple[int, ...] = (1, 8, 64)
    """Numbers of ranks to compare."""

    batch_size: int = 32
    """Samples per batch on each rank."""

    global_batch_size: OptionalNumber = None
    """Samples per batch over all ranks, instead of --batch-size."""

    lanes: OptionalNumber = None
    """Lanes of the order, a power of two; chosen for each world size if not given."""

    window: OptionalNumber = None
    """Chunks of a lane (or pieces of --piece rows) to shuffle together; chosen if not given."""

    piece: OptionalNumber = None
    """Rows that a shuffle moves together, 0 for whole chunks; chosen if not given."""

    shuffle: Flag = True
    """Plan for sequential order."""

    share: Annotated[tuple[float, float] | None, tyro.conf.arg(metavar="START STOP", help_behavior_hint="")] = None
    """Part of the samples to plan for, such as 0 0.95: that of Subset.share."""

    samples: Annotated[str | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Samples of a hypothetical data set, such as 1e9."""

    shards: int = 1000
    """Shards of a hypothetical data set."""

    sample_bytes: int = 100_000
    """Bytes per sample of a hypothetical data set."""

    bytes: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """Bytes of all samples of a hypothetical data set, such as 1PB, instead of --sample-bytes."""

    def refuse_no_samples(self) -> None:
        """Raise ConfigError where there are no ranks, or none of them has a sample in a batch."""
        if not self.world_size:
            raise ConfigError("--world-size without a number; give one or several, such as 8 64")
        if self.global_batch_size is None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be at least 1")
        for number in self.world_size:
            if number < 1:
                raise ConfigError(f"--world-size {number}: must be at least 1")

    def samples_of_step(self, world_size: int) -> int:
        """The global batch."""
        return self.batch_size * world_size if self.global_batch_size is None else self.global_batch_size


@dataclass(frozen=True, slots=True)
class Chunks:
    """Samples, bytes and bytes once opened of each chunk: (chunks,) each."""

    samples: IntArray
    bytes: IntArray
    memory: IntArray
    shards: int

    def part(self, subset: Subset) -> Chunks:
        """Keep a subset's part of the chunks; chunks without any of it are never read."""
        counts = Selection(self.samples, subset).counts
        used = counts > 0
        return Chunks(counts[used], self.bytes[used], self.memory[used], self.shards)


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A hypothetical data set, of chunks as equal as can be."""

    samples: int
    bytes: int
    shards: int
    chunks: int

    def listed(self) -> Chunks:
        """Every chunk of it.

        Raises:
            ConfigError: there are too many to list.
        """
        if self.chunks > _MOST_LISTED:
            raise ConfigError(
                f"{self.samples:,} samples of {self.bytes:,} bytes lie in {self.chunks:,} chunks, and at most "
                f"{_MOST_LISTED:,} are planned one by one; --simulate needs no list of them"
            )
        samples = np.full(self.chunks, self.samples // self.chunks, np.int64)
        samples[: self.samples % self.chunks] += 1
        size = np.rint(samples * (self.bytes / self.samples)).astype(np.int64)
        return Chunks(samples, size, size, self.shards)


def made_up(given: PlanDataArguments) -> MadeUp:
    """The data set that ``--samples`` describes.

    Raises:
        ConfigError: there can be no such data set; names the options.
    """
    if given.source:
        raise ConfigError("give either a source, or --samples for a hypothetical data set")
    samples, shards = parse_count("0" if given.samples is None else given.samples, "--samples"), given.shards
    total = samples * given.sample_bytes if given.bytes is None else parse_bytes(given.bytes, "--bytes")
    size = f"--sample-bytes {given.sample_bytes}" if given.bytes is None else f"--bytes {given.bytes}"
    if given.bytes is not None and given.sample_bytes != PlanDataArguments.sample_bytes:
        raise ConfigError(f"{size} and --sample-bytes {given.sample_bytes}: give one of them")
    if total >= 1 << 63:
        raise ConfigError(f"--samples {samples} {size}: are {total:,} bytes, and at most 2^63 - 1 can be planned for")
    if not (samples >= shards >= 1 and total >= samples):
        raise ConfigError(f"--samples {samples} --shards {shards} {size}: needs samples >= shards >= 1, of 1 byte each")
    in_shard = samples // shards
    chunks_of_shard = max(1, min(in_shard, round(in_shard * (total / samples) / CHUNK_BYTES)))
    return MadeUp(samples, total, shards, shards * chunks_of_shard)


def list_chunks(given: PlanDataArguments) -> tuple[str, Chunks]:
    """Name and chunks of an existing data set."""
    for name in ("bytes", "shards", "sample_bytes"):
        if (value := getattr(given, name)) != getattr(PlanDataArguments, name):
            option = f"--{name.replace('_', '-')} {value}"
            raise ConfigError(f"{option} without --samples: it is that of a hypothetical data set")
    manifest = open_manifest(
        given.chosen_source(),
        split=given.chosen_split(),
        storage_options=given.options(),
        format=given.chosen_format(),
    )
    return manifest.url, Chunks(manifest.samples, manifest.lengths, manifest.memory, len(manifest.shards))


def order_for(given: PlanDataArguments, samples: IntArray, memory: IntArray, world_size: int) -> Order:
    """Order that a loader would choose on this many ranks."""
    return choose_order(
        seed=0,
        shuffle=given.shuffle,
        lanes="auto" if given.lanes is None else given.lanes,
        window="auto" if given.window is None else given.window,
        piece="auto" if given.piece is None else given.piece,
        world_size=world_size,
        chunk_samples=samples,
        chunk_memory=memory,
    )
