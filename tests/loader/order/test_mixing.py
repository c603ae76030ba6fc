"""How well an order mixes is measured against a uniform shuffle, whose measures are 1."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.loader.order.forecast import batch_ids, measure_mixing
from penstock.loader.order.plan import EpochPlan, Order


def plan_of(chunks: int, samples: int, epoch: int = 0, **order: int | bool) -> EpochPlan:
    return EpochPlan(np.full(chunks, samples // chunks, np.int64), Order(**order), epoch)


def test_single_rows_mix_as_a_uniform_shuffle_does() -> None:
    mixing = measure_mixing(plan_of(1, 20_000, piece=1, window=4096), 64)
    assert mixing is not None
    assert mixing.neighbours == pytest.approx(1, abs=0.25)
    assert mixing.classes == pytest.approx(1, abs=0.15)
    assert abs(mixing.drift) < 0.1
    assert mixing.verdict == "uniform"


def test_lanes_of_one_chunk_keep_neighbours_apart() -> None:
    """Each batch has one sample of each sixteenth of the chunk: more even than chance, in every epoch."""
    mixing = measure_mixing(plan_of(1, 1000), 16)
    assert mixing is not None
    assert mixing.neighbours < 0.3
    assert mixing.classes < 0.6


def test_large_batches_from_few_places_are_poor() -> None:
    mixing = measure_mixing(plan_of(1000, 1_000_000, lanes=16, window=1), 1024)
    assert mixing is not None
    assert mixing.neighbours > 10
    assert mixing.classes > 4
    assert mixing.verdict == "poor"


def test_manifest_order_is_a_drift() -> None:
    mixing = measure_mixing(plan_of(100, 10_000, shuffle=False, lanes=1), 50)
    assert mixing is not None
    assert mixing.drift > 0.99
    assert mixing.verdict == "poor"


def test_orders_without_a_full_batch_have_no_measure() -> None:
    assert measure_mixing(plan_of(1, 10), 16) is None
    assert measure_mixing(plan_of(1, 10), 1) is None


def test_the_ids_of_batches_laid_end_to_end_are_the_data_set() -> None:
    plan = plan_of(7, 700, piece=3, window=5)
    first_ids = np.arange(7, dtype=np.int64) * 100
    ids = np.concatenate([batch_ids(plan, first_ids, first, 70) for first in range(0, 700, 70)])
    assert sorted(ids.tolist()) == list(range(700))
