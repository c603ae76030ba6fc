"""Arrays of different lengths that lie end to end."""

from __future__ import annotations

import numpy as np

from penstock.loader.columns import Ragged

LISTS = [[1, 2, 3], [], [4], [5, 6], []]


def test_a_cut_has_the_same_arrays_on_the_same_memory() -> None:
    ragged = Ragged.join([np.array(each, np.uint16) for each in LISTS])
    for start in range(len(LISTS) + 1):
        for stop in range(start, len(LISTS) + 1):
            cut = ragged.cut(start, stop)
            assert [each.tolist() for each in cut] == LISTS[start:stop]
            assert np.shares_memory(cut.values, ragged.values) or not len(cut.values)


def test_parts_of_different_dtypes_merge_into_one_that_holds_all() -> None:
    narrow = Ragged.join([np.array(each, np.uint16) for each in LISTS])
    wide = Ragged.join([np.array(each, np.int32) for each in ([70_000], [-1, 7])])
    parts = [(np.array([3, 0, 2]), narrow, np.array([0, 3, 1])), (np.array([1, 4]), wide, np.array([1, 0]))]
    merged = Ragged.merge(5, parts)
    assert merged.values.dtype == np.int32
    assert [each.tolist() for each in merged] == [[5, 6], [-1, 7], [], [1, 2, 3], [70_000]]
    merged.values[0] = 8  # of its own, and may be written to
    assert narrow[3].tolist() == [5, 6]
