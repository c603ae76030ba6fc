"""What may replace a sample follows from (seed, epoch, sample id) alone."""

from __future__ import annotations

import numpy as np

from penstock.loader import Subset
from penstock.loader.decoding.replace import FAR, NEAR, candidates
from penstock.loader.order.selecting import Selection

SAMPLES = np.array([1, 30, 0, 5, *[4] * 20], np.int64)
FIRST_IDS = np.cumsum(SAMPLES) - SAMPLES


def tried(seed: int, epoch: int, sample_id: int, selection: Selection | None = None) -> list[int]:
    found = candidates(seed, epoch, sample_id, FIRST_IDS, SAMPLES, selection)
    return [int(FIRST_IDS[chunk]) + row for chunk, row in found]


def test_the_same_chunk_comes_first_and_then_one_sample_each_of_others() -> None:
    ids = tried(7, 0, 12)
    assert len(set(ids)) == NEAR + FAR
    assert 12 not in ids
    assert all(1 <= i < 31 for i in ids[:NEAR])
    chunks = np.searchsorted(FIRST_IDS, ids[NEAR:], side="right") - 1
    assert len(set(chunks.tolist()) - {1}) == FAR
    assert len(tried(7, 0, 0)) == FAR, "a sample that is alone in its chunk"


def test_it_is_pinned_and_differs_by_seed_epoch_and_sample() -> None:
    assert tried(7, 0, 12) == [13, 10, 25, 14, 4, 21, 26, 16, 0, 72, 100, 80, 106, 114, 49, 59]
    others = [tried(8, 0, 12), tried(7, 1, 12), tried(7, 0, 13)]
    assert all(other != tried(7, 0, 12) for other in others)


def test_samples_outside_of_the_subset_are_no_candidates() -> None:
    selection = Selection(SAMPLES, Subset.share(0, 0.5))
    ids = tried(7, 0, 12, selection)
    assert ids
    assert all(selection.place_of(sample_id) is not None for sample_id in ids)
