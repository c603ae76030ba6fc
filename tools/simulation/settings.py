"""Machines of a simulated job, its store, nodes and steps, and the tuning of a rank's loader for them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from ...loader.errors import ConfigError
from ...loader.order.costs.buckets import count_open_chunks
from ...loader.order.plan import Order

MOST_RANKS = 4096
_NODE_REQUESTS = 256  # as the limiter of storage/: what all processes of a node may have in flight to one host
_AUTO_MEMORY_SHARE = 0.4  # this and the next three as loader/pipeline/tuning.py, which a test compares
_AHEAD_BYTES = 512 << 20
_SPAN_BYTES, _MOST_SPAN_BYTES, _SPAN_ROWS = 8 << 20, 32 << 20, 1024
_MOST_SPAN = 64
_MOST_WAITING = 256  # as DeliveryQueue: batches that wait at most
_FEWEST_WAITING = 2
_MOST = 1e9  # seconds, and seconds of one request or sample, that are simulated


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The store, the nodes and the training step of a simulated job; 0 is "no limit" where a rate may be unlimited.

    Seconds, bytes a second, and requests a second. Latencies are log-normal with mean ``latency_s`` and
    ``latency_spread`` as the standard deviation of their logarithm, and so are steps around ``step_s``;
    ``slow_ranks`` is the share of the ranks whose steps take ``slow_factor`` times as long. ``decode_rate`` is samples
    a second of one rank, 0 where decoding costs nothing.
    """

    latency_s: float = 0.03
    latency_spread: float = 0.5
    request_bytes_per_s: float = 100e6
    node_bytes_per_s: float = 10e9
    store_bytes_per_s: float = 0.0
    store_requests_per_s: float = 0.0
    ranks_per_node: int = 8
    node_memory_bytes: int = 1 << 40
    node_cache: bool = False
    step_s: float = 0.25
    step_spread: float = 0.02
    slow_ranks: float = 0.0
    slow_factor: float = 1.5
    decode_rate: float = 0.0
    threads: int = 16
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value <= sys.float_info.max:
                raise ConfigError(f"{field.name}={value}: must be a finite number, 0 or more")
        for name in ("request_bytes_per_s", "node_bytes_per_s", "ranks_per_node", "node_memory_bytes", "step_s"):
            if not getattr(self, name):
                raise ConfigError(f"{name}=0: must be above 0")
        if not 1 <= self.threads <= 1024:
            raise ConfigError(f"threads={self.threads}: must be from 1 to 1024 requests at a time")
        if self.memory_limit == 0:
            raise ConfigError("memory_limit=0: must be at least 1 byte")
        if self.slow_ranks > 1:
            raise ConfigError(f"slow_ranks={self.slow_ranks}: a share of the ranks, from 0 to 1")
        if self.slow_factor < 1:
            raise ConfigError(f"slow_factor={self.slow_factor}: slow ranks take at least as long as others, 1 or more")
        for name in ("step_s", "latency_s", "slow_factor"):  # beyond, sums of them are no finite numbers
            if getattr(self, name) > _MOST:
                raise ConfigError(f"{name}={getattr(self, name)}: at most {_MOST:g}")
        for name in ("store_bytes_per_s", "store_requests_per_s", "decode_rate"):
            if 0 < getattr(self, name) < 1 / _MOST:
                raise ConfigError(f"{name}={getattr(self, name)}: at least {1 / _MOST:g}, or 0 for no limit")
        for name in ("latency_spread", "step_spread"):
            if getattr(self, name) > 3:
                raise ConfigError(f"{name}={getattr(self, name)}: at most 3, the standard deviation of a logarithm")


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Read-ahead of one rank, chosen as ``loader.pipeline.tuning`` and the pipeline choose it.

    In bytes, threads, batches and steps. ``span_steps`` is the most steps gathered at once, ``waiting_batches`` the
    most batches that may wait for the loop.
    """

    threads: int
    limit_bytes: int
    chunk_budget_bytes: int
    open_bytes: int
    waiting_batches: int
    span_steps: int


def choose_read_ahead(
    machines: Machines,
    order: Order,
    *,
    world_size: int,
    chunks: int,
    mean_samples: float,
    mean_memory: float,
    step_bytes: float,
) -> ReadAhead:
    """Choose a rank's read-ahead as its loader will; ``step_bytes`` is the size of a rank's batch.

    Raises:
        ConfigError: the budget is below what the order keeps open, so that chunks would be read more than once. The
            simulation does not cover that.
    """
    own_lanes = -(-order.lanes // world_size) + 1
    open_bytes = int(chunks * mean_memory)
    if not order.piece:
        open_bytes = min(open_bytes, int(own_lanes * count_open_chunks(order, mean_samples) * mean_memory))
    limit = machines.memory_limit
    if limit is None:
        share = int(_AUTO_MEMORY_SHARE * machines.node_memory_bytes / min(machines.ranks_per_node, world_size))
        limit = min(share, 2 * open_bytes + _AHEAD_BYTES)
    batch_budget = limit // 4
    if open_bytes > limit - batch_budget:
        raise ConfigError(
            f"memory_limit={limit:,}: the {own_lanes} lanes of a rank keep about {open_bytes:,} bytes of chunks open, "
            f"and it has room for {limit - batch_budget:,}: chunks would be read several times, which is not "
            f"simulated. Give at least {open_bytes * 4 // 3 + 1:,} bytes, or fewer lanes or a smaller window"
        )
    span_bytes = max(_SPAN_BYTES, min(_MOST_SPAN_BYTES, _SPAN_ROWS * mean_memory / mean_samples))
    span_steps = int(min(_MOST_SPAN, max(1, min(span_bytes, batch_budget // 2) // max(1.0, step_bytes))))
    waiting = int(min(_MOST_WAITING, max(_FEWEST_WAITING, batch_budget // 2 // max(1.0, step_bytes))))
    on_node = min(machines.ranks_per_node, world_size)
    return ReadAhead(
        threads=max(1, min(machines.threads, _NODE_REQUESTS // on_node)),
        limit_bytes=limit,
        chunk_budget_bytes=limit - batch_budget,
        open_bytes=open_bytes,
        waiting_batches=waiting,
        span_steps=span_steps,
    )
