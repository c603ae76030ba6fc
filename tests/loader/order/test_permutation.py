"""Keys of streams are the same numbers for ever, however they are computed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.order.permutation import mix64, stream_key

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
