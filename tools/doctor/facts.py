"""Facts of a machine before it is judged: plain values, which tests make up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Library:
    """A distribution that penstock needs, always or for an extra, and the version that is installed."""

    name: str
    found: str | None
    least: str
    extra: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The GPUs that the system shows, and those that torch can use; ``torch_cuda`` is None for a torch for CPUs."""

    present: int = 0
    usable: int = 0
    torch_cuda: str | None = None
    is_hidden: bool = False
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class SpaceFacts:
    """A folder's disk: bytes, and files that can still be made (None where the file system does not count them)."""

    path: str
    free_bytes: int
    total_bytes: int
    free_files: int | None = None
    is_memory: bool = False
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """An attempt to list a store. ``skew_s`` is how far its clock is ahead of this one, None if it told no time."""

    url: str
    seconds: float = 0.0
    problem: str = ""
    skew_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Measurements of ranks: an ``all_reduce`` of one number, and the bytes a second that each sends in a large one.

    ``spread_s`` is the distance between the earliest and the latest clock; ``versions`` has, for each library in which
    the ranks differ, the versions that they have.
    """

    world_size: int
    hosts: int = 1
    backend: str = "gloo"
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    spread_s: float = 0.0
    versions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Everything that is judged of a machine; bytes, seconds and counts. ``ranks_here`` share its cores and memory."""

    python: str
    tested_pythons: tuple[str, ...]
    libraries: tuple[Library, ...]
    gpus: GpuFacts
    open_files: int
    open_files_most: int
    address_bytes: int | None
    memory_bytes: int
    memory_free: int
    machine_memory: int
    cores: int
    machine_cores: int
    numa_nodes: int
    shm: SpaceFacts
    tmp: SpaceFacts
    cache: SpaceFacts
    ranks_here: int = 1
    store: StoreFacts | None = None
    ranks: RankFacts | None = None
