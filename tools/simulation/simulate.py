"""Simulates a job of many ranks: how long its steps wait for data, what the store has to answer, what bounds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...loader.errors import ConfigError
from ...loader.order.distinct import distinct
from ...loader.order.permutation import IntArray
from ...loader.order.plan import Order, require_steps, share_bounds
from .chunk_stream import ChunkStream
from .engine import Engine, Seconds, Timeline
from .schedule import schedule_reads
from .settings import MOST_RANKS, Machines, ReadAhead, choose_read_ahead

_MOST_READS = 600_000  # what decides how many steps are simulated, and so how long that takes
_MOST_EDGES = 4_000_000
_MOST_STEPS = 2_000
_FEWEST_STEPS = 12
_IS_BOUND = 0.02  # a share of waits from which on it is the data that bounds a job
_BUSY = 0.9
_HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Forecast of a job after ``warm_up_steps``, about half of those simulated, on the given machines.

    ``data_wait`` is the share of the ranks' time that they wait for a batch, ``data_wait_p99`` that share in the worst
    of a hundred (step, rank) pairs; ``lost_to_data`` is the share of the job's time that it would not take if no rank
    ever waited. ``ideal_samples_per_s`` is the rate then. ``read_amplification`` counts the requests to the store for a
    chunk, lanes' cuts included; ``requests_per_s`` is what steps need in the long run, ``peak_requests_per_s`` that of
    the busiest second. ``skew`` is between ranks' samples of one step. Bytes are what a rank's loader holds at most, of
    chunks and waiting batches; ``limit_bytes`` is its memory limit. ``shares`` are the parts of their time that what
    may bound the job is busy; ``bound_by`` names what does.
    """

    world_size: int
    global_batch_size: int
    lanes: int
    window: int
    steps: int
    warm_up_steps: int
    samples_per_s: float
    ideal_samples_per_s: float
    step_s: float
    data_wait: float
    data_wait_p99: float
    lost_to_data: float
    first_batch_s: float
    requests_per_s: float
    peak_requests_per_s: float
    bytes_per_s: float
    read_amplification: float
    skew: int
    threads: int
    rank_bytes: int
    node_bytes: int
    limit_bytes: int
    shares: dict[str, float]
    bound_by: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def simulate(
    stream: ChunkStream,
    order: Order,
    machines: Machines,
    *,
    world_size: int,
    global_batch_size: int,
    steps: int | None = None,
    seed: int = 0,
    advance: Callable[[int], None] = lambda count: None,
) -> Simulation:
    """Simulate the first steps of an epoch; as many as take a few seconds to simulate, unless ``steps`` are given.

    Raises:
        ConfigError, PartitionError: there can be no such run, or none that is simulated; says why.
    """
    if not 1 <= world_size <= MOST_RANKS:
        raise ConfigError(f"world_size={world_size}: simulated are 1 to {MOST_RANKS:,} ranks")
    if global_batch_size < world_size:
        raise ConfigError(f"global_batch_size={global_batch_size}: has no sample for each of {world_size} ranks")
    epoch = require_steps(stream.num_samples, global_batch_size, "drop", world_size=world_size)
    mean_memory = _mean_memory(stream)
    batch = -(-global_batch_size // world_size)
    chunk_samples = stream.num_samples / stream.num_chunks
    read_ahead = choose_read_ahead(
        machines,
        order,
        world_size=world_size,
        chunks=stream.num_chunks,
        mean_samples=chunk_samples,
        mean_memory=mean_memory,
        step_bytes=batch * mean_memory / chunk_samples,
    )
    if steps is None:
        steps = _choose_steps(order, world_size, global_batch_size, chunk_samples)
    elif steps < 3:
        raise ConfigError(f"steps={steps}: simulate 3 or more, of which the first half is warm-up")
    steps = min(steps, epoch)
    spans = span_of_steps(steps, read_ahead.span_steps)[:epoch]
    schedule = schedule_reads(
        stream, order, world_size=world_size, global_batch_size=global_batch_size, spans=spans, seed=seed
    )
    engine = Engine(
        schedule,
        machines,
        read_ahead,
        world_size=world_size,
        spans=spans,
        decode_s=batch / machines.decode_rate if machines.decode_rate else 0.0,
        computing=_draw_steps(machines, len(spans), world_size, seed),
        seed=seed + 1,
    )
    timeline = engine.run(advance)
    cut_chunks = 0.0 if order.piece else order.lanes - 1.0
    if machines.node_cache:  # of these, a node has one already where both lanes are read on it
        cut_chunks *= 1.0 - 1.0 / -(-world_size // machines.ranks_per_node)
    cuts = 1.0 + cut_chunks / stream.num_chunks
    return _summarise(
        timeline,
        machines,
        read_ahead,
        since=int(np.searchsorted(spans, spans[len(spans) // 2])),
        order=order,
        world_size=world_size,
        global_batch_size=global_batch_size,
        amplification=schedule.amplification * cuts,
        chunks_per_sample=stream.num_chunks / stream.num_samples,
        batch_bytes=batch * mean_memory / chunk_samples,
        held_bytes=stream.num_chunks * mean_memory,  # of any chunk, since the next epoch is read ahead, too
    )


def span_of_steps(steps: int, most: int) -> IntArray:
    """The span that each step is gathered in: one step at first, then twice as many, up to ``most``.

    (n,) int64 of whole spans, and so of ``steps`` or more: a span waits for what its last step needs.
    """
    lengths = [1]
    while sum(lengths) < steps:
        lengths.append(min(most, 2 * lengths[-1]))
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)


def _mean_memory(stream: ChunkStream) -> float:
    """The mean memory of a chunk, from at most 100,000 of them."""
    some = distinct(np.linspace(0, stream.num_chunks - 1, 100_000).astype(np.int64))
    return float(stream.sizes(some)[1].mean())


def _choose_steps(order: Order, world_size: int, global_batch_size: int, chunk_samples: float) -> int:
    """Enough for three turns of the windows, where they can be afforded."""
    reads = global_batch_size / chunk_samples
    turn = order.window * chunk_samples * order.lanes / global_batch_size
    affordable = min(_MOST_READS / max(reads, world_size / 8), _MOST_EDGES / (order.lanes + world_size), _MOST_STEPS)
    return int(max(_FEWEST_STEPS, min(affordable, max(100.0, 3.0 * turn))))


def _draw_steps(machines: Machines, steps: int, world_size: int, seed: int) -> Seconds:
    """The seconds that each rank computes in each step: (steps, ranks). Slow ranks are so for good."""
    rng = np.random.default_rng(seed + 2)
    spread = machines.step_spread
    drawn: Seconds = machines.step_s * np.exp(spread * rng.standard_normal((steps, world_size)) - spread**2 / 2)
    slow = rng.permutation(world_size)[: round(machines.slow_ranks * world_size)]
    drawn[:, slow] *= machines.slow_factor
    return drawn


def _summarise(
    timeline: Timeline,
    machines: Machines,
    read_ahead: ReadAhead,
    *,
    since: int,
    order: Order,
    world_size: int,
    global_batch_size: int,
    amplification: float,
    chunks_per_sample: float,
    batch_bytes: float,
    held_bytes: float,
) -> Simulation:
    steps = len(timeline.ends)
    lengths = np.diff(timeline.ends, prepend=0.0)[since:]
    waits, computing = timeline.waits[since:], timeline.computing[since:]
    took = float(lengths.sum())
    ideal = float(computing.max(axis=1).sum())
    rate = global_batch_size * len(lengths) / took
    traffic = timeline.traffic
    reads = len(traffic.asked) + traffic.cache_hits
    store_share = max(len(traffic.asked) / max(1, reads), 1.0 / amplification)  # each chunk is asked for once
    requests = rate * chunks_per_sample * amplification * store_share
    mean_bytes = float(np.mean(traffic.asked_bytes)) if traffic.asked_bytes else 0.0
    nodes = -(-world_size // machines.ranks_per_node)
    in_flight_s = traffic.busy_threads_s / max(1, reads)
    shares = {
        "threads": requests / max(store_share, 1e-9) * in_flight_s / (world_size * read_ahead.threads),
        "request rate": requests / machines.store_requests_per_s if machines.store_requests_per_s else 0.0,
        "node network": requests * mean_bytes / (nodes * machines.node_bytes_per_s),
        "store bandwidth": requests * mean_bytes / machines.store_bytes_per_s if machines.store_bytes_per_s else 0.0,
        "decoding": rate / world_size / machines.decode_rate if machines.decode_rate else 0.0,
    }
    # In few steps a job lives on what it read before them; in many, nothing is busy for more than all of the time.
    over = max(1.0, *(share for name, share in shares.items() if name != "threads"))
    requests, rate, took, idle = requests / over, rate / over, took * over, took * (over - 1.0) * world_size
    shares = {name: min(1.0, share / over) for name, share in shares.items()}
    lost = max(0.0, 1.0 - ideal / took)
    unhindered_s = machines.latency_s + mean_bytes / machines.request_bytes_per_s
    latency_share = shares["threads"] * min(1.0, unhindered_s / max(in_flight_s, 1e-12))
    waiting = int(min(read_ahead.waiting_batches, steps) * batch_bytes)
    rank_bytes = min(read_ahead.limit_bytes, min(read_ahead.chunk_budget_bytes, int(held_bytes)) + waiting)
    on_node = min(machines.ranks_per_node, world_size)
    sizes = np.diff(share_bounds(np.array([global_batch_size]), world_size)[0])
    return Simulation(
        world_size=world_size,
        global_batch_size=global_batch_size,
        lanes=order.lanes,
        window=order.window,
        steps=steps,
        warm_up_steps=since,
        samples_per_s=rate,
        ideal_samples_per_s=global_batch_size * len(lengths) / ideal,
        step_s=took / len(lengths),
        data_wait=float((waits.sum() + idle) / (took * world_size)),
        data_wait_p99=float(np.quantile(waits / lengths[:, None], 0.99)),
        lost_to_data=lost,
        first_batch_s=timeline.first_batch_s,
        requests_per_s=requests,
        peak_requests_per_s=_busiest(traffic.asked, float(timeline.ends[-1])),
        bytes_per_s=requests * mean_bytes,
        read_amplification=amplification * store_share,
        skew=int(sizes.max() - sizes.min()),
        threads=read_ahead.threads,
        rank_bytes=rank_bytes,
        node_bytes=rank_bytes * on_node,
        limit_bytes=read_ahead.limit_bytes,
        shares=shares,
        bound_by=_name_bound(lost, shares, latency_share, computing),
    )


def _busiest(asked: list[float], until: float) -> float:
    """Requests of the second that has the most; a rate over less where all of it takes less."""
    width = min(1.0, until)
    if not asked or not until:
        return 0.0
    return float(np.unique(np.floor(np.array(asked) / width), return_counts=True)[1].max() / width)


def _name_bound(lost: float, shares: dict[str, float], latency_share: float, computing: Seconds) -> str:
    """``latency_share``: what of the threads' time requests would take that queue for nothing."""
    if lost < _IS_BOUND:
        # The mean step beside that of the slowest rank: what ranks wait for one another.
        return "stragglers" if 1.0 - computing.mean() / computing.max(axis=1).mean() > 0.1 else "step"
    # Threads are busy too while they queue for anything else.
    name = max(shares.keys() - {"threads"}, key=lambda each: shares[each])
    if shares[name] >= _BUSY:
        return name
    if latency_share > _HALF:
        return "latency"
    return name if min(shares[name], shares["threads"]) > _HALF else "read-ahead"
