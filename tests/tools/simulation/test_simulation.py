"""The simulation of a job: what is known without it comes out of it, and its parts agree with the loader's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.loader.dataset.manifest import Manifest
from penstock.loader.errors import ConfigError
from penstock.loader.order.plan import EpochPlan, Order, Share, auto_lanes
from penstock.loader.order.spans import EpochSpans
from penstock.loader.pipeline.tuning import tune
from penstock.tools.simulation.chunk_stream import ListedChunks, UniformChunks
from penstock.tools.simulation.schedule import schedule_reads
from penstock.tools.simulation.settings import Machines, choose_read_ahead
from penstock.tools.simulation.simulate import Simulation, simulate, span_of_steps

FAST = Machines(latency_s=0.01, latency_spread=0.0, step_s=0.1, step_spread=0.0, node_bytes_per_s=1e15)
MIB = 1 << 20


def run(
    machines: Machines = FAST, *, world_size: int = 8, batch_size: int = 32, chunks: int = 100_000, **more: Any
) -> Simulation:
    """Chunks of 40 samples and 4 MiB, over which a rank needs 0.8 reads a step."""
    order = Order(lanes=auto_lanes(shuffle=True, world_size=world_size), window=2)
    stream = UniformChunks(40 * chunks, chunks, 4 * MIB * chunks)
    return simulate(stream, order, machines, world_size=world_size, global_batch_size=batch_size * world_size, **more)


def listed(samples: list[int], order: Order) -> ListedChunks:
    size = np.array(samples, np.int64) * 1000
    return ListedChunks(EpochPlan(np.array(samples, np.int64), order, 0), size, size)


def test_a_job_with_fast_data_runs_at_the_rate_of_its_steps() -> None:
    told = run()
    assert told.samples_per_s == pytest.approx(8 * 32 / 0.1, rel=1e-6)
    assert (told.data_wait, told.lost_to_data, told.bound_by) == (0, 0, "step")
    assert told.requests_per_s == pytest.approx(10 * 8 * 32 / 40, rel=0.01)


@pytest.mark.parametrize(
    ("changed", "reads_per_s", "bound_by"),
    [
        ({"latency_s": 2.0, "request_bytes_per_s": 1e12}, 8 * 16 / 2.0, "latency"),
        ({"latency_s": 0.0, "request_bytes_per_s": MIB}, 8 * 16 / 4.0, "latency"),
        ({"store_requests_per_s": 30.0}, 30.0, "request rate"),
        ({"node_bytes_per_s": 80.0 * MIB}, 20.0, "node network"),
        ({"store_bytes_per_s": 80.0 * MIB}, 20.0, "store bandwidth"),
    ],
)
def test_a_job_bounded_by_one_thing_runs_at_that_things_rate(
    changed: dict[str, float], reads_per_s: float, bound_by: str
) -> None:
    told = run(replace(FAST, **changed), batch_size=128, steps=120)
    assert told.requests_per_s == pytest.approx(reads_per_s, rel=0.06)
    assert told.samples_per_s == pytest.approx(40 * reads_per_s, rel=0.06)
    assert told.bound_by == bound_by
    assert told.lost_to_data == pytest.approx(1 - told.samples_per_s / told.ideal_samples_per_s, abs=1e-9)


@pytest.mark.parametrize(
    ("changed", "bound_by"),
    [
        ({"store_requests_per_s": 1.0}, "request rate"),
        ({"store_requests_per_s": 1e-9}, "request rate"),
        ({"node_bytes_per_s": 1000.0}, "node network"),
        ({"store_bytes_per_s": 1000.0}, "store bandwidth"),
        ({"latency_s": 1e3}, "latency"),
    ],
)
def test_what_bounds_a_job_is_named_where_an_epoch_has_few_windows_too(
    changed: dict[str, float], bound_by: str
) -> None:
    told = run(replace(FAST, **changed), chunks=2400, steps=10**22)  # as many as the epoch has
    assert told.steps == 40 * 2400 // 256
    assert told.bound_by == bound_by
    assert 0 < told.peak_requests_per_s <= 8 * 16 / min(1.0, changed.get("latency_s", 1.0))


def test_slow_decoding_bounds_a_job() -> None:
    told = run(replace(FAST, decode_rate=160.0))
    assert told.samples_per_s == pytest.approx(8 * 160, rel=0.01)
    assert told.bound_by == "decoding"


def test_stragglers_cost_time_that_is_no_wait_for_data() -> None:
    told = run(replace(FAST, slow_ranks=0.125, slow_factor=2.0))
    assert told.samples_per_s == pytest.approx(8 * 32 / 0.2, rel=1e-6)
    assert (told.bound_by, told.data_wait) == ("stragglers", 0)


def test_the_first_batch_takes_its_slowest_reads() -> None:
    # 8 chunks lie in a rank's open windows, and no thread fetches two of them.
    assert run(replace(FAST, latency_s=0.5, request_bytes_per_s=1e12)).first_batch_s == pytest.approx(0.5, rel=0.01)


def test_a_node_cache_reads_a_chunk_of_two_ranks_of_a_node_once() -> None:
    plain, shared = (run(replace(FAST, node_cache=cached), world_size=6) for cached in (False, True))
    assert plain.read_amplification > 1.1
    assert shared.read_amplification < plain.read_amplification - 0.05


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_on_one_node_with_a_cache_each_chunk_of_a_small_data_set_is_read_once(world_size: int) -> None:
    order = Order(lanes=16, window=4)
    machines = replace(FAST, node_cache=True)
    told = simulate(
        listed([11] * 500, order), order, machines, world_size=world_size, global_batch_size=32 * world_size
    )
    assert told.read_amplification == pytest.approx(1.0, abs=0.005)


def test_a_simulation_is_the_same_each_time() -> None:
    spread = replace(FAST, latency_spread=0.5, step_spread=0.1, latency_s=0.5)
    assert run(spread).to_dict() == run(spread).to_dict()
    assert run(spread).to_dict() != run(spread, seed=1).to_dict()


@pytest.mark.parametrize(("world_size", "samples"), [(4, [40] * 300), (3, [40] * 300), (4, [7, 90, 31, 2] * 80)])
def test_ranks_read_the_chunks_that_the_loader_plans_for_them(world_size: int, samples: list[int]) -> None:
    order, batch, steps = Order(lanes=16, window=4), 20, 60
    stream = listed(samples, order)
    spans = span_of_steps(steps, 8)
    assert spans[:8].tolist() == [0, 1, 1, 2, 2, 2, 2, 3]
    told = schedule_reads(
        stream, order, world_size=world_size, global_batch_size=batch * world_size, spans=spans, seed=0
    )
    for rank in range(world_size):
        own = EpochSpans(stream.plan, Share(rank, world_size, batch * world_size))
        planned: list[int] = []
        position = 0
        for length in np.bincount(spans).tolist():
            span, entered = own.plan_span(position, length)
            position = int(span.bounds[-1])
            planned += [chunk for window in entered for chunk in window.chunks.tolist()]
        assert sorted(told.chunks[told.ranks == rank].tolist()) == sorted(planned)
    assert (told.need <= told.drop).all()


def test_made_up_chunks_are_those_of_an_equal_list() -> None:
    order = Order(lanes=16, window=2, shuffle=False)
    made_up, there = UniformChunks(1003, 100, 1_003_000), listed([11] * 3 + [10] * 97, order)
    samples, places = np.arange(1003), np.arange(101)
    assert np.array_equal(made_up.find(samples), there.find(samples))
    assert np.array_equal(made_up.starts(places), there.starts(places))
    assert np.array_equal(made_up.sizes(places[:-1])[0], there.sizes(places[:-1])[0])


@pytest.mark.parametrize(("limit", "world_size"), [(None, 1), (None, 4), (64 * MIB, 4), (24 * MIB, 8)])
def test_a_rank_reads_ahead_as_its_loader_is_tuned(limit: int | None, world_size: int, some_manifest: Manifest) -> None:
    manifest, order = some_manifest, Order(lanes=32, window=2)
    tuned = tune(manifest, order, world_size=world_size, memory_limit=limit, threads=2, is_local=False, device=None)
    told = choose_read_ahead(
        Machines(memory_limit=limit),
        order,
        world_size=world_size,
        chunks=manifest.num_chunks,
        mean_samples=manifest.num_samples / manifest.num_chunks,
        mean_memory=float(manifest.memory.mean()),
        step_bytes=4000.0,
    )
    assert told.limit_bytes == tuned.memory_limit_bytes
    assert told.chunk_budget_bytes == tuned.chunk_budget_bytes
    assert told.threads == tuned.fetch_threads
    assert told.span_steps == min(64, tuned.span_bytes // 4000)
    assert told.waiting_batches == min(256, tuned.batch_budget_bytes // 4000)


@pytest.fixture(scope="module")
def some_manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    from penstock import pack
    from penstock.loader import open_manifest

    folder = tmp_path_factory.mktemp("data")
    pack([{"bin": bytes(5000)} for _ in range(800)], folder, shard_bytes=55_000, progress=False)
    return open_manifest(folder, progress=False)


@pytest.mark.parametrize(
    ("changed", "more", "message"),
    [
        ({"step_s": 0.0}, {}, "step_s=0"),
        ({"latency_s": float("nan")}, {}, "latency_s=nan"),
        ({"slow_ranks": 1.5}, {}, "slow_ranks=1.5"),
        ({"slow_factor": 0.5}, {}, "slow_factor=0.5"),
        ({"threads": 0}, {}, "threads=0"),
        ({"ranks_per_node": 0}, {}, "ranks_per_node=0"),
        ({"memory_limit": MIB}, {}, "memory_limit=1,048,576.*Give at least"),
        ({"step_s": 1e308}, {}, r"step_s=1e\+308: at most 1e\+09"),
        ({"decode_rate": 1e-300}, {}, "decode_rate=1e-300: at least 1e-09, or 0 for no limit"),
        ({}, {"world_size": 5000}, "world_size=5000"),
        ({}, {"steps": 2}, "steps=2"),
        ({}, {"batch_size": 0}, "global_batch_size=0"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    changed: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(replace(FAST, **changed), **more)


def test_chunks_of_unlike_sizes_that_fill_memory_are_refused_and_no_share_is_above_one() -> None:
    samples = [[2, 10, 100][(i + i // 20) % 3] for i in range(60)]
    order = Order(lanes=2, window=2, shuffle=False)
    size = np.array(samples, np.int64) * 100_000
    stream = ListedChunks(EpochPlan(np.array(samples, np.int64), order, 0), size, size)
    refused: list[str] = []
    for limit in range(20_000_000, 100_000_000, 5_000_000):
        machines = replace(FAST, memory_limit=limit, node_memory_bytes=1 << 40)
        try:
            told = simulate(stream, order, machines, world_size=1, global_batch_size=8)
        except ConfigError as exc:
            refused.append(str(exc))
        else:
            assert all(0 <= share <= 1 for share in told.shares.values())
    assert refused
    assert all("read several times" in message for message in refused)


def test_thousands_of_ranks_of_a_petabyte_need_no_list_of_its_chunks() -> None:
    order = Order(lanes=auto_lanes(shuffle=True, world_size=4096), window=2)
    stream = UniformChunks(10**9, 10**15 // (4 * MIB), 10**15)
    told = simulate(stream, order, Machines(), world_size=4096, global_batch_size=4096, steps=3)
    assert told.read_amplification == pytest.approx(1.0, abs=0.01)
    assert told.requests_per_s == pytest.approx(told.samples_per_s * stream.num_chunks / 1e9, rel=0.01)


@pytest.mark.parametrize("piece", [1, 12, 30, 60])
def test_of_pieces_a_rank_reads_the_chunks_that_it_has_one_of(piece: int) -> None:
    samples = [60] * 500
    order = Order(lanes=16, window=4, piece=piece)
    spans = np.zeros(500, np.int64)
    told = schedule_reads(listed(samples, order), order, world_size=4, global_batch_size=60, spans=spans, seed=0)
    reads = 0
    for rank in range(4):
        _, entered = EpochSpans(EpochPlan(np.array(samples), order, 0), Share(rank, 4, 60)).plan_span(0, 500)
        reads += len(np.unique(np.concatenate([window.chunks for window in entered])))
    assert len(told.chunks) == pytest.approx(reads, rel=0.05)
    assert told.amplification == pytest.approx(reads / 500, rel=0.05)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_may_hold_a_data_set_that_fits_whole_as_it_reads_the_next_epoch_ahead(world_size: int) -> None:
    order = Order(lanes=16, window=2)
    told = simulate(listed([8] * 4000, order), order, FAST, world_size=world_size, global_batch_size=32 * world_size)
    assert 4000 * 8 * 1000 <= told.rank_bytes < told.limit_bytes
