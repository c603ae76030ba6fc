"""Distinct values by sorting are those of a set, in order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.order.distinct import distinct


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 3)))
def test_distinct_values_are_those_of_a_set_in_ascending_order(values: list[int]) -> None:
    found = distinct(np.array(values, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == sorted(set(values))
