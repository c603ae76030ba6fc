"""A chunk reader on a source that is made up, and what tests wait for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from started_threads import started_threads

from penstock.loader.columns import Block, BytesColumn
from penstock.loader.counters import Counters
from penstock.loader.errors import FormatError
from penstock.loader.reading.chunk_memory import Leases
from penstock.loader.reading.chunk_reader import ChunkReader

NextUse = Callable[[Sequence[int]], dict[int, int]]


@dataclass
class FakeSource:
    """Chunks of given sizes that come after a random while; ``failing`` ones raise, ``held`` ones wait for ``gate``.

    Those that are ``shut`` come, and their opening waits for ``gate``.
    """

    sizes: Sequence[int]
    seed: int = 0
    latency_s: float = 0.0
    failing: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    shut: frozenset[int] = frozenset()
    gate: threading.Event = field(default_factory=threading.Event)
    opening: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    header_bytes = 0

    @property
    def manifest(self) -> SimpleNamespace:
        return SimpleNamespace(num_chunks=len(self.sizes))

    def reserve(self, index: int) -> int:
        return self.sizes[index]

    hold = reserve

    def fetch(self, index: int) -> None:
        with self._lock:
            self.loads.append(index)
            wait_s = self._random.random() * self.latency_s
        if index in self.held:
            assert self.gate.wait(60)
        time.sleep(wait_s)
        if index in self.failing:
            raise FormatError(f"shard-{index}", "broken")

    def open(self, index: int, fetched: None) -> Block:
        with self._lock:
            self.opening.append(index)
        if index in self.shut:
            assert self.gate.wait(60)
        column = BytesColumn(memoryview(bytes(self.sizes[index])), np.array([0]), np.array([1]))
        return Block(1, self.sizes[index], {"raw": column})


def make_reader(
    source: FakeSource,
    budget: int,
    threads: int = 4,
    next_use: NextUse | None = None,
    leases: Leases | None = None,
    *,
    keeps_unused: bool = False,
) -> ChunkReader:
    reader = ChunkReader(
        source,  # type: ignore[arg-type]
        budget_bytes=budget,
        threads=threads,
        next_use=next_use or (lambda chunks: dict.fromkeys(chunks, 0)),
        counters=Counters(),
        leases=leases,
        keeps_unused=keeps_unused,
    )
    reader.start()
    return reader


def close(reader: ChunkReader, within_s: float = 60.0) -> None:
    reader.close(time.monotonic() + within_s)


def fetch_threads() -> list[str]:
    return [thread.name for thread in started_threads() if thread.name.startswith("penstock-fetch")]


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)
