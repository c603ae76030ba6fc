"""The forecast against the plan itself, walked through rank by rank."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.errors import ConfigError, PartitionError
from penstock.loader.order.forecast import Forecast, forecast
from penstock.loader.order.plan import EpochPlan, Order, Share, count_steps
from penstock.loader.order.spans import EpochSpans


def forecast_of(sizes: np.ndarray, order: Order, world_size: int, batch: int, last_batch: str = "drop") -> Forecast:
    return forecast(
        sizes,
        chunk_bytes=sizes * 10,
        chunk_memory=sizes * 20,
        shards=1,
        order=order,
        world_size=world_size,
        global_batch_size=batch,
        last_batch=last_batch,
    )


def walk(
    sizes: np.ndarray, order: Order, world_size: int, batch: int, last_batch: str
) -> tuple[int, list[int], list[int], int]:
    """Reads of chunks by all ranks, samples of each rank, lanes of each rank, batches."""
    steps = count_steps(int(sizes.sum()), 0, batch, last_batch)
    reads, samples, lanes = 0, [], []
    for rank in range(world_size):
        spans = EpochSpans(EpochPlan(sizes, order, 0), Share(rank, world_size, batch))
        span, entered = spans.plan_span(0, steps)
        reads += sum(len(window.chunks) for window in entered)
        samples.append(int(span.num_valid.sum()))
        lanes.append(len(set(span.segments.lane.tolist())) if samples[-1] else 0)
    return reads, samples, lanes, steps


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.sampled_from([1, 2, 8, 16]),
    st.booleans(),
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from(["drop", "pad", "partial"]),
)
def test_batches_skew_and_what_is_left_out_are_exact(sizes, lanes, shuffle, world_size, per_rank, last_batch):
    sizes, batch = np.array(sizes, np.int64), world_size * per_rank
    order = Order(lanes=lanes, shuffle=shuffle, window=2)
    if not count_steps(int(sizes.sum()), 0, batch, last_batch):
        with pytest.raises(PartitionError, match=f"a global batch of {batch} is above"):
            forecast_of(sizes, order, world_size, batch, last_batch)
        return
    told = forecast_of(sizes, order, world_size, batch, last_batch)
    _, samples, _, steps = walk(sizes, order, world_size, batch, last_batch)
    assert told.batches_per_rank == steps
    assert told.skew == max(samples) - min(samples) <= 1
    assert told.batch_skew == 0
    assert told.samples_left_out == sizes.sum() - sum(samples)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("chunks", "largest", "lanes", "window", "world_size", "batch"),
    [
        (300, 20, 16, 4, 1, 12),
        (300, 20, 16, 4, 4, 12),
        (300, 20, 16, 4, 3, 12),
        (300, 20, 16, 4, 5, 40),
        (500, 5, 16, 2, 7, 21),
        (300, 1, 16, 4, 3, 30),
        (400, 3, 32, 8, 5, 25),
        (300, 50, 64, 2, 12, 48),
    ],
)
def test_reads_and_open_windows_are_as_a_walk_through_the_plan_has_them(
    chunks, largest, lanes, window, world_size, batch
):
    sizes = np.random.default_rng(0).integers(1, largest + 1, chunks)
    order = Order(lanes=lanes, window=window)
    told = forecast_of(sizes, order, world_size, batch)
    reads, _, lanes_of, _ = walk(sizes, order, world_size, batch, "drop")
    pieces = chunks + told.cut_chunks
    assert told.read_amplification == pytest.approx(reads / pieces, rel=0.04)
    assert told.open_windows == max(lanes_of)
    if lanes % world_size == 0:
        assert told.read_amplification == 1.0
        assert reads <= pieces
    assert told.window_bytes == int(max(lanes_of) * window * 20 * sizes.mean())


@pytest.mark.parametrize(("chunks", "world_size"), [(1, 8), (6, 4), (6, 1)])
def test_an_order_of_single_rows_is_forecast_to_hold_every_chunk_on_every_rank(chunks: int, world_size: int) -> None:
    sizes = np.full(chunks, 60, np.int64)
    order = Order(lanes=16, window=4096, piece=1)
    told = forecast_of(sizes, order, world_size, 4 * world_size)
    reads = 0
    for rank in range(world_size):
        spans = EpochSpans(EpochPlan(sizes, order, 0), Share(rank, world_size, 4 * world_size))
        _, entered = spans.plan_span(0, told.batches_per_rank)
        reads += len(np.unique(np.concatenate([window.chunks for window in entered])))
    assert told.read_amplification == pytest.approx(reads / chunks, rel=0.02)
    assert told.window_bytes == int(sizes.sum()) * 20
    assert told.cut_chunks == 0
    assert told.mixing is not None


@pytest.mark.parametrize(("chunks", "piece"), [(400, 64), (400, 20), (60, 30), (60, 12), (16, 7)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_of_pieces_a_rank_is_forecast_to_read_the_chunks_that_it_has_one_of(
    chunks: int, piece: int, world_size: int
) -> None:
    sizes = np.full(chunks, 60, np.int64)
    order = Order(lanes=16, window=4, piece=piece)
    told = forecast_of(sizes, order, world_size, 4 * world_size)
    read = []
    for rank in range(world_size):
        spans = EpochSpans(EpochPlan(sizes, order, 0), Share(rank, world_size, 4 * world_size))
        _, entered = spans.plan_span(0, told.batches_per_rank)
        read.append(len(np.unique(np.concatenate([window.chunks for window in entered]))))
    assert told.read_amplification == pytest.approx(sum(read) / chunks, rel=0.1)
    if piece < 60:
        assert told.window_bytes == pytest.approx(max(read) * 60 * 20, rel=0.1)
    else:  # such pieces are whole chunks
        assert told.window_bytes == forecast_of(sizes, replace(order, piece=0), world_size, 4 * world_size).window_bytes


def test_lanes_without_samples_are_no_reads_saved():
    assert forecast_of(np.array([8]), Order(lanes=16), 1, 8).read_amplification == 1.0


def test_open_windows_of_a_small_data_set_take_no_more_than_all_of_it() -> None:
    sizes = np.full(27, 35)
    told = forecast_of(sizes, Order(lanes=16, window=4), 1, 5)
    assert told.window_bytes == int(sizes.sum()) * 20


@pytest.mark.slow
def test_memory_grows_with_the_lanes_of_a_rank():
    sizes = np.full(5000, 10)
    few, many = (forecast_of(sizes, Order(lanes=64, window=2), world_size, 64) for world_size in (16, 1))
    assert many.window_bytes == 16 * few.window_bytes


@pytest.mark.parametrize(("world_size", "batch"), [(0, 8), (2, 0), (-1, 1)])
def test_what_cannot_be_is_refused(world_size, batch):
    with pytest.raises(ConfigError, match="at least 1"):
        forecast_of(np.array([5, 5]), Order(), world_size, batch)


@pytest.mark.slow
def test_a_billion_samples_in_a_million_chunks_are_forecast_in_seconds_and_in_250_megabytes():
    code = """
import json, time
import numpy as np
from penstock.loader.order.forecast import forecast
from penstock.loader.order.plan import auto_lanes
from penstock.loader.order.plan import Order
from penstock.storage.observability.process_usage import peak_resident_bytes
sizes = np.full(10**6, 1000, np.int64)
started = time.process_time()
for world_size in (1024, 1021):  # the second divides nothing
    order = Order(lanes=auto_lanes(shuffle=True, world_size=world_size), window=2)
    told = forecast(sizes, chunk_bytes=sizes, chunk_memory=sizes, shards=10**5, order=order, world_size=world_size,
                    global_batch_size=31 * world_size)
print(json.dumps([time.process_time() - started, peak_resident_bytes(), told.samples,
                  told.read_amplification]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    seconds, peak_bytes, samples, amplification = json.loads(out)
    assert seconds < 30
    assert peak_bytes < 250_000_000  # 160 million, of which 33 before it begins
    assert samples == 10**9
    assert 1.0 < amplification < 1.5
