"""Events of a simulated job, in order of time: reads of all ranks, what they share, and steps that wait for each other.

A read takes a thread of its rank's, waits for its turn in the store's request rate, and arrives after its latency and
its transfer. Transfers share a node's network and the store's bandwidth first come, first served: a link is a queue
whose end moves by the read's bytes. With thousands of reads that is within a few percent of fair sharing, and one sum
a read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from ...loader.errors import ConfigError
from ...loader.order.permutation import IntArray
from .schedule import Schedule
from .settings import Machines, ReadAhead

Seconds = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_CACHE_BYTES_PER_S = 2e9  # a node's disk, or its page cache
_GATHERS = -1  # an event that is no read


@dataclass(slots=True)
class Traffic:
    """Reads of the job: send time and size of each request, and the seconds that threads were busy."""

    asked: list[float] = field(default_factory=list)
    asked_bytes: list[int] = field(default_factory=list)
    cache_hits: int = 0
    busy_threads_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """End of each step in a simulated job, (steps,), and each rank's wait for data, (steps, ranks)."""

    ends: Seconds
    waits: Seconds
    computing: Seconds
    first_batch_s: float
    traffic: Traffic


class Engine:
    """One simulation. Mutable state: everything below, by one thread; ``run`` is called once."""

    def __init__(
        self,
        schedule: Schedule,
        machines: Machines,
        read_ahead: ReadAhead,
        *,
        world_size: int,
        spans: IntArray,
        decode_s: float,
        computing: Seconds,
        seed: int,
    ) -> None:
        """``computing`` is (steps, ranks): the seconds of each step; ``decode_s`` the seconds of one rank's batch."""
        self._machines = machines
        self._world_size = world_size
        self._steps, self._spans = len(spans), int(spans[-1]) + 1
        self._first_of_span = np.searchsorted(spans, np.arange(self._spans + 1)).tolist()
        self._decode_s = decode_s
        self._computing = computing
        self._budget = read_ahead.chunk_budget_bytes
        self._waiting_batches = read_ahead.waiting_batches
        rng = np.random.default_rng(seed)
        self._lay_out(schedule, spans, rng)
        # Of each rank.
        self._next = self._first_read[:-1].copy()
        self._threads = [read_ahead.threads] * world_size
        self._held = [0] * world_size
        self._span = [0] * world_size
        # Of what they share: until when a link or the request rate is taken.
        nodes = -(-world_size // machines.ranks_per_node)
        self._node_free = [0.0] * nodes
        self._store_free = self._rate_free = 0.0
        self._cached: dict[int, float] = {}
        # Of the steps.
        self._gathered_at = np.zeros((self._spans, world_size))
        self._gathered = [0] * self._spans
        self._taken: list[list[float]] = []  # of each step done so far, when each rank took its batch
        self._waiters: dict[int, list[int]] = {}  # ranks that wait for room in their queue, by the step that makes it
        self._ready: Seconds = np.zeros(world_size)
        self._end: Seconds = np.zeros(1)
        self._ends = np.zeros(self._steps)
        self._waits = np.zeros((self._steps, world_size))
        self._events: list[tuple[float, int, int]] = []
        self.traffic = Traffic()

    def _lay_out(self, schedule: Schedule, spans: IntArray, rng: np.random.Generator) -> None:
        """Lists instead of arrays: events look at one number at a time."""
        ends = np.append(spans, self._spans)  # what is needed or dropped later belongs to a span that never comes
        need = ends[np.minimum(schedule.need, self._steps)]
        drop = ends[np.minimum(schedule.drop, self._steps)]
        cells = self._world_size * (self._spans + 1)
        missing = np.bincount(schedule.ranks * (self._spans + 1) + need, minlength=cells)
        dropped = np.bincount(schedule.ranks * (self._spans + 1) + drop, schedule.memory, minlength=cells)
        self._missing: list[int] = missing.tolist()
        self._dropped: list[float] = dropped.tolist()
        self._first_read: list[int] = np.searchsorted(schedule.ranks, np.arange(self._world_size + 1)).tolist()
        self._need: list[int] = need.tolist()
        self._chunks: list[int] = schedule.chunks.tolist()
        self._fetched: list[int] = schedule.fetched.tolist()
        self._memory: list[int] = schedule.memory.tolist()
        spread = self._machines.latency_spread
        draws = rng.standard_normal(len(need))
        self._latency: list[float] = (self._machines.latency_s * np.exp(spread * draws - spread**2 / 2)).tolist()

    def run(self, advance: Callable[[int], None]) -> Timeline:
        """Simulate all steps; ``advance`` is called with the number of steps done since.

        Raises:
            ConfigError: memory is full of chunks that are not needed yet, so that a loader would drop some of them.
        """
        for rank in range(self._world_size):
            self._gather(rank, 0.0)
            self._fetch(rank, 0.0)
        done = 0
        while self._events and len(self._taken) < self._steps:
            now, rank, read = heappop(self._events)
            if read == _GATHERS:
                self._gather(rank, now)
            else:
                self._arrive(rank, read, now)
            self._fetch(rank, now)
            if len(self._taken) > done:
                advance(len(self._taken) - done)
                done = len(self._taken)
        if len(self._taken) < self._steps:
            raise ConfigError(
                f"memory for {self._budget:,.0f} bytes of chunks is full of some that are not needed yet, at step "
                f"{len(self._taken)}: chunks of unlike sizes would be read several times, which is not simulated. Give "
                "twice the memory_limit, or fewer lanes or a smaller window"
            )
        first = max(self._taken[0])
        return Timeline(self._ends, self._waits, self._computing, first, self.traffic)

    # -- reads -----------------------------------------------------------------------------------------------------

    def _fetch(self, rank: int, now: float) -> None:
        """Begin as many reads as threads, memory and the plan allow."""
        stop = self._first_read[rank + 1]
        while self._threads[rank]:
            read = self._next[rank]
            if read >= stop:
                return
            size = self._fetched[read]
            reserve = size if size == self._memory[read] else size + self._memory[read]
            held = self._held[rank]
            # What the span at hand needs is read even beyond the budget, as by a reader that can evict nothing.
            if held and held + reserve > self._budget and self._need[read] > self._span[rank]:
                return
            self._next[rank] = read + 1
            self._threads[rank] -= 1
            self._held[rank] = held + reserve
            done = self._request(rank, read, size, now)
            self.traffic.busy_threads_s += done - now
            heappush(self._events, (done, rank, read))

    def _request(self, rank: int, read: int, size: int, now: float) -> float:
        """Send a read now and return the time of its arrival."""
        machines = self._machines
        node = rank // machines.ranks_per_node
        if machines.node_cache:
            key = self._chunks[read] * len(self._node_free) + node
            there = self._cached.get(key)
            if there is not None:
                self.traffic.cache_hits += 1
                return max(now, there) + size / _CACHE_BYTES_PER_S
        start = now
        if machines.store_requests_per_s:
            start = max(now, self._rate_free)
            self._rate_free = start + 1.0 / machines.store_requests_per_s
        moved = start + size / machines.request_bytes_per_s
        self._node_free[node] = max(self._node_free[node], start) + size / machines.node_bytes_per_s
        moved = max(moved, self._node_free[node])
        if machines.store_bytes_per_s:
            self._store_free = max(self._store_free, start) + size / machines.store_bytes_per_s
            moved = max(moved, self._store_free)
        done = moved + self._latency[read]
        self.traffic.asked.append(start)
        self.traffic.asked_bytes.append(size)
        if machines.node_cache:
            self._cached[key] = done
        return done

    def _arrive(self, rank: int, read: int, now: float) -> None:
        self._threads[rank] += 1
        if self._fetched[read] != self._memory[read]:
            self._held[rank] -= self._fetched[read]
        cell = rank * (self._spans + 1) + self._need[read]
        self._missing[cell] -= 1
        if not self._missing[cell] and self._need[read] == self._span[rank]:
            self._gather(rank, now)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _gather(self, rank: int, now: float) -> None:
        """Gather the spans that have arrived, as far as the queue of batches has room for earlier ones."""
        while (span := self._span[rank]) < self._spans:
            cell = rank * (self._spans + 1) + span
            if self._missing[cell]:
                return
            # The assembler is free once the last batch before this span lies in the queue.
            room = self._first_of_span[span] - 1 - self._waiting_batches
            if room >= len(self._taken):
                self._waiters.setdefault(room, []).append(rank)
                return
            if room >= 0 and self._taken[room][rank] > now:
                heappush(self._events, (self._taken[room][rank], rank, _GATHERS))
                return
            self._gathered_at[span, rank] = now
            self._held[rank] -= int(self._dropped[cell])
            self._span[rank] = span + 1
            self._gathered[span] += 1
            if self._gathered[span] == self._world_size:
                self._take_steps(span)

    def _take_steps(self, span: int) -> None:
        """The steps of a span that all ranks have gathered: each ends when its slowest rank has computed."""
        for step in range(self._first_of_span[span], self._first_of_span[span + 1]):
            made = self._gathered_at[span]
            if step >= self._waiting_batches:
                made = np.maximum(made, self._taken[step - self._waiting_batches])
            self._ready = np.maximum(self._ready, made) + self._decode_s
            taken = np.maximum(self._end, self._ready)
            self._waits[step] = taken - self._end
            self._end = np.max(taken + self._computing[step], keepdims=True)
            self._ends[step] = self._end[0]
            self._taken.append(taken.tolist())
            for rank in self._waiters.pop(step, ()):
                heappush(self._events, (self._taken[step][rank], rank, _GATHERS))
