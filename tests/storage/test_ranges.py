"""Coalescing: fewer requests, the same bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage import ByteRange
from penstock.storage.ranges import Request, coalesce, read_ranges, split

SIZE = 2000
DATA = memoryview(bytes(i * 7 % 256 for i in range(SIZE)))
RANGES = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, 300)).map(lambda x: ByteRange(x[0], min(SIZE, x[0] + x[1]))),
    max_size=20,
)


@given(RANGES, st.integers(0, 200), st.integers(1, 600))
def test_whatever_is_coalesced_the_bytes_are_those_of_each_range(
    ranges: list[ByteRange], gap_bytes: int, max_bytes: int
) -> None:
    got = read_ranges(lambda r: DATA[r.start : r.stop], ranges, gap_bytes=gap_bytes, max_bytes=max_bytes)
    assert got == [DATA[r.start : r.stop] for r in ranges]


@given(RANGES, st.integers(0, 200), st.integers(1, 600))
def test_requests_keep_to_their_limits_and_hold_each_range_once(
    ranges: list[ByteRange], gap_bytes: int, max_bytes: int
) -> None:
    requests = coalesce(ranges, gap_bytes=gap_bytes, max_bytes=max_bytes)
    assert sorted(i for request in requests for i in request.members) == [i for i, r in enumerate(ranges) if len(r)]
    assert [r.byte_range.start for r in requests] == sorted(r.byte_range.start for r in requests)
    for request in requests:
        members = sorted((ranges[i] for i in request.members), key=lambda r: (r.start, r.stop))
        assert request.byte_range.start == members[0].start
        assert request.byte_range.stop == max(r.stop for r in members)
        assert len(request.byte_range) <= max(max_bytes, *(len(r) for r in members))
        reached = members[0].stop
        for member in members[1:]:
            assert member.start - reached <= gap_bytes
            reached = max(reached, member.stop)


@pytest.mark.parametrize(
    ("gap_bytes", "expected"), [(0, [(0, 20), (30, 40)]), (9, [(0, 20), (30, 40)]), (10, [(0, 40)])]
)
def test_ranges_join_where_the_gap_is_small_enough(gap_bytes: int, expected: list[tuple[int, int]]) -> None:
    ranges = [ByteRange(30, 40), ByteRange(0, 10), ByteRange(10, 20)]
    got = coalesce(ranges, gap_bytes=gap_bytes)
    assert [(request.byte_range.start, request.byte_range.stop) for request in got] == expected


def test_slices_share_the_memory_of_the_request() -> None:
    request = Request(ByteRange(10, 20), (0,))
    (piece,) = split([request], [DATA[10:20]], [ByteRange(12, 14)])
    assert piece.obj is DATA.obj


@pytest.mark.parametrize(("gap_bytes", "max_bytes"), [(-1, 1), (0, 0)])
def test_limits_that_make_no_sense_are_refused(gap_bytes: int, max_bytes: int) -> None:
    with pytest.raises(ValueError, match="needs gap"):
        coalesce([], gap_bytes=gap_bytes, max_bytes=max_bytes)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_a_range_that_is_none_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="ByteRange"):
        ByteRange(start, stop)
