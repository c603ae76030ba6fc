"""Keys of streams are the same numbers for ever, however they are computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.order.permutation import mix64, permutation, random_numbers, stream_key

MASK = (1 << 64) - 1


@given(st.lists(st.integers(-(1 << 70), 1 << 70), max_size=6))
def test_a_key_is_what_mixing_its_words_as_arrays_gives(words: list[int]) -> None:
    key = 0
    for word in words:
        key = int(mix64(np.array([(key + 0x9E3779B97F4A7C15 + word) & MASK], np.uint64))[0])
    assert stream_key(*words) == key


def test_keys_stay_the_same() -> None:
    assert stream_key(1, 2, 3) == stream_key(np.int64(1), np.uint32(2), 3)  # type: ignore[arg-type]
    assert [stream_key(), stream_key(0), stream_key(1, 2, 3)] == [0, 16294208416658607535, 7702586659592502839]


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 2047, 2048, 2049, 65_536, 300_000, (1 << 21) - 1, 1 << 21])
def test_a_permutation_is_the_order_of_its_numbers(size: int) -> None:
    # Numbers that differ only where the index is put come in the order of their indexes.
    highest = random_numbers(0, size, 7) >> np.uint64(max(1, (size - 1).bit_length()))
    np.testing.assert_array_equal(permutation(size, 7), np.argsort(highest, kind="stable"))
