"""``penstock plan --simulate``: how long ranks will wait for data, on machines that are not there yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
import tyro

from ..loader.errors import ConfigError, PartitionError
from ..loader.limits import parse_bytes
from ..loader.order.permutation import IntArray
from ..loader.order.plan import EpochPlan, Order
from ..loader.order.selecting import Subset
from ..loader.progress import show_progress
from ..tools.simulation.chunk_stream import ChunkStream, ListedChunks, UniformChunks
from ..tools.simulation.settings import Machines
from ..tools.simulation.simulate import Simulation, simulate
from .common import Flag, OptionalNumber, in_option_words, print_json
from .plan_data import Chunks, PlanDataArguments, list_chunks, made_up, order_for
from .screen import console, fact_table, format_bytes, format_seconds, print_columns, wrapped

_MOST_LISTED = 1 << 20  # made-up chunks beyond are not listed, which changes nothing but the time it takes
Size = Annotated[str, tyro.conf.arg(metavar="SIZE")]
Rate = Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class SimulationArguments(PlanDataArguments):
    """The machines of a simulated job."""

    simulate: Flag = False
    """Simulate the first steps, on machines as the options below say."""

    steps: OptionalNumber = None
    """With --simulate: steps to simulate; if not given, as many as take some seconds."""

    step_s: float = 0.25
    """With --simulate: seconds that a rank computes in a step."""

    step_spread: float = 0.02
    """With --simulate: spread of a step's seconds, the standard deviation of their logarithm."""

    slow_ranks: float = 0.0
    """With --simulate: share of ranks whose steps always take --slow-factor as long."""

    slow_factor: float = 1.5
    """With --simulate: how much longer slow ranks take."""

    latency_s: float = 0.03
    """With --simulate: mean seconds to a request's first byte."""

    latency_spread: float = 0.5
    """With --simulate: spread of latencies, the standard deviation of their logarithm."""

    request_bytes_per_s: Size = "100MB"
    """With --simulate: bytes a second of one request."""

    node_bytes_per_s: Size = "10GB"
    """With --simulate: bytes a second of a node's network."""

    store_bytes_per_s: Rate = None
    """With --simulate: bytes a second of the store to all nodes; no limit if not given."""

    store_requests_per_s: float = 0.0
    """With --simulate: requests a second that the store takes, 0 for any: S3 takes 5,500 for each prefix."""

    ranks_per_node: int = 8
    """With --simulate: ranks of a node."""

    node_memory: Size = "1TiB"
    """With --simulate: memory of a node."""

    node_cache: Flag = False
    """With --simulate: the ranks of a node share a cache_dir, empty at first."""

    memory_limit: Rate = None
    """With --simulate: a rank's memory_limit; as the loader chooses it if not given."""

    threads: int = 16
    """With --simulate: a rank's requests in flight: 16, or 4 of a local disk, until a loader tunes itself."""

    decode_rate: float = 0.0
    """With --simulate: samples a second that one rank decodes on all its threads, 0 where that costs nothing."""

    def machines(self) -> Machines:
        """The machines that the options describe. Raises ConfigError."""
        same = {field.name for field in fields(Machines)} & {"step_s", "step_spread", "slow_ranks", "slow_factor"}
        same |= {"latency_s", "latency_spread", "store_requests_per_s", "ranks_per_node", "node_cache", "threads"}
        return Machines(
            **{name: getattr(self, name) for name in same | {"decode_rate"}},
            request_bytes_per_s=parse_bytes(self.request_bytes_per_s, "--request-bytes-per-s"),
            node_bytes_per_s=parse_bytes(self.node_bytes_per_s, "--node-bytes-per-s"),
            store_bytes_per_s=_optional(self.store_bytes_per_s, "--store-bytes-per-s") or 0.0,
            node_memory_bytes=parse_bytes(self.node_memory, "--node-memory"),
            memory_limit=_optional(self.memory_limit, "--memory-limit"),
        )


def _optional(text: str | None, option: str) -> int | None:
    return None if text is None else parse_bytes(text, option)


def refuse_unused(given: SimulationArguments) -> None:
    """Raise ConfigError where an option of ``--simulate`` is given without it, which would change nothing."""
    own = {field.name for field in fields(SimulationArguments)} - {field.name for field in fields(PlanDataArguments)}
    for field in fields(SimulationArguments):
        if field.name in own and getattr(given, field.name) != field.default:
            raise ConfigError(f"--{field.name.replace('_', '-')} without --simulate, which it is for; add that")


def run_simulation(given: SimulationArguments) -> int:
    machines = given.machines()
    name, facts = _data_set(given)
    found: list[Simulation] = []
    refused: list[tuple[int, ConfigError | PartitionError]] = []
    for world_size in given.world_size:
        try:
            with show_progress(f"simulating {world_size:,} ranks", given.steps, unit="steps") as advance:
                found.append(_simulate(given, machines, facts, world_size, advance))
        except (ConfigError, PartitionError) as exc:
            refused.append((world_size, exc))
    if not found:
        raise refused[0][1]
    if given.json:
        rows = [each.to_dict() for each in found]
        print_json(rows + [{"world_size": each, "error": in_option_words(str(exc))} for each, exc in refused])
    else:
        _report(name, facts, found, refused)
    return 0


@dataclass(frozen=True, slots=True)
class _Facts:
    """A data set: all its chunks, or how many equal ones."""

    samples: int
    bytes: int
    chunks: int
    listed: Chunks | None

    def stream(self, order: Order) -> ChunkStream:
        if self.listed is not None:
            return ListedChunks(EpochPlan(self.listed.samples, order, 0), self.listed.bytes, self.listed.memory)
        if order.piece:
            raise ConfigError(f"piece={order.piece}: is for small data sets, and this one has {self.chunks:,} chunks")
        return UniformChunks(self.samples, self.chunks, self.bytes)


def _data_set(given: SimulationArguments) -> tuple[str, _Facts]:
    if given.samples is None:
        name, chunks = list_chunks(given)
    else:
        name, data = "hypothetical", made_up(given)
        if data.chunks > _MOST_LISTED and given.share is None:
            return name, _Facts(data.samples, data.bytes, data.chunks, None)
        chunks = data.listed()
    if given.share is not None:
        chunks = chunks.part(Subset.share(*given.share))
    return name, _Facts(int(chunks.samples.sum()), int(chunks.bytes.sum()), len(chunks.samples), chunks)


def _simulate(
    given: SimulationArguments, machines: Machines, facts: _Facts, world_size: int, advance: Callable[[int], None]
) -> Simulation:
    if facts.listed is not None:
        samples, memory = facts.listed.samples, facts.listed.memory
    else:
        samples, memory = _means(facts.samples, facts.chunks), _means(facts.bytes, facts.chunks)
    order = order_for(given, samples, memory, world_size)
    return simulate(
        facts.stream(order),
        order,
        machines,
        world_size=world_size,
        global_batch_size=given.samples_of_step(world_size),
        steps=given.steps,
        advance=advance,
    )


def _means(total: int, count: int) -> IntArray:
    """As much as an order's choice looks at of chunks that are not listed: that they are many, and their mean."""
    return np.full(_MOST_LISTED, total // count, np.int64)


def _rows() -> tuple[tuple[str, Callable[[Simulation], str]], ...]:
    return (
        ("global batch", lambda s: f"{s.global_batch_size:,}"),
        ("samples/s", lambda s: f"{s.samples_per_s:,.0f}"),
        ("samples/s without any wait", lambda s: f"{s.ideal_samples_per_s:,.0f}"),
        ("seconds of a step", lambda s: f"{s.step_s:.3f}"),
        ("data wait, share of a step", lambda s: f"{s.data_wait:.1%}"),
        ("the same, p99", lambda s: f"{s.data_wait_p99:.1%}"),
        ("time lost to data by the job", lambda s: f"{s.lost_to_data:.1%}"),
        ("first batch", lambda s: format_seconds(s.first_batch_s)),
        ("requests/s", lambda s: f"{s.requests_per_s:,.0f}"),
        ("requests/s, busiest second", lambda s: f"{s.peak_requests_per_s:,.0f}"),
        ("read from the store, a second", lambda s: format_bytes(s.bytes_per_s)),
        ("read amplification", lambda s: f"{s.read_amplification:.2f}"),
        ("skew of a batch, samples", lambda s: f"{s.skew}"),
        ("memory of a rank, at most", lambda s: format_bytes(s.rank_bytes)),
        ("memory of a node, at most", lambda s: format_bytes(s.node_bytes)),
        ("requests in flight, a rank", lambda s: f"{s.shares['threads'] * s.threads:.1f} of {s.threads}"),
        ("bound by", lambda s: s.bound_by),
        ("steps simulated", lambda s: f"{s.steps:,}"),
    )


def _report(
    name: str,
    facts: _Facts,
    found: Sequence[Simulation],
    refused: Sequence[tuple[int, Exception]],
) -> None:
    screen = console()
    table = fact_table()
    table.add_row("data set", name)
    table.add_row("samples", f"{facts.samples:,}")
    table.add_row("bytes", f"{format_bytes(facts.bytes)}, read in {facts.chunks:,} chunks")
    screen.print(table)
    screen.print()
    rows = _rows()
    cells = [[f"{each.world_size:,}", *(show(each) for _, show in rows)] for each in found]
    print_columns(screen, ["ranks", *(label for label, _ in rows)], cells)
    notes: list[Any] = [f"{ranks:,} ranks: {in_option_words(str(exc))}" for ranks, exc in refused]
    notes += [_ADVICE[bound] for bound in dict.fromkeys(each.bound_by for each in found) if bound in _ADVICE]
    for note in notes:
        screen.print()
        for line in wrapped(note, screen.width):
            screen.print(line)


_ADVICE = {
    "latency": "Bound by latency: a rank's requests in flight are too few for what it needs. Write larger chunks, or "
    "use more ranks for the same global batch.",
    "request rate": "Bound by the request rate: the store takes fewer requests a second than the steps need. Spread "
    "shards over more prefixes, write larger chunks, or keep a node cache over epochs.",
    "node network": "Bound by the nodes' network: the ranks of a node need more bytes than it carries. Store samples "
    "smaller, or use fewer ranks a node.",
    "store bandwidth": "Bound by the store's bandwidth: all nodes together need more than it gives.",
    "decoding": "Bound by decoding: give a rank more cores, or samples that decode faster.",
    "read-ahead": "Bound by bursts: on average everything is fast enough, but windows end together and what is read "
    "ahead does not bridge them. Raise --memory-limit.",
    "stragglers": "Bound by stragglers: ranks wait for the slowest, not for data.",
}
