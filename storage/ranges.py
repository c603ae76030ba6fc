"""Coalescing: nearby ranges become one request, whose bytes are split into the ranges again. No I/O of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .store import ByteRange

# A request to an object store costs about as much as transferring 1 MiB (20 ms at 50 MB/s per connection).
GAP_BYTES = 1 << 20
MAX_REQUEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """One read that serves several ranges: ``members`` are indices into the list that was coalesced."""

    byte_range: ByteRange
    members: tuple[int, ...]


def coalesce(
    ranges: Sequence[ByteRange], *, gap_bytes: int = GAP_BYTES, max_bytes: int = MAX_REQUEST_BYTES
) -> list[Request]:
    """Join ranges whose gap is at most ``gap_bytes``, while a request stays within ``max_bytes``.

    Ranges may overlap, repeat and come in any order; each lies whole in exactly one request. A range longer than
    ``max_bytes`` is a request of its own. Empty ranges are in no request.
    The requests are sorted by their start.
    """
    if gap_bytes < 0 or max_bytes < 1:
        raise ValueError(f"coalesce(gap_bytes={gap_bytes}, max_bytes={max_bytes}): needs gap >= 0 and max >= 1")
    order = sorted((i for i in range(len(ranges)) if len(ranges[i])), key=lambda i: (ranges[i].start, ranges[i].stop))
    requests: list[Request] = []
    members: list[int] = []
    start = stop = 0
    for i in order:
        near = members and ranges[i].start <= stop + gap_bytes
        if near and (ranges[i].stop <= stop or ranges[i].stop - start <= max_bytes):
            stop = max(stop, ranges[i].stop)
        else:
            if members:
                requests.append(Request(ByteRange(start, stop), tuple(members)))
            members, start, stop = [], ranges[i].start, ranges[i].stop
        members.append(i)
    if members:
        requests.append(Request(ByteRange(start, stop), tuple(members)))
    return requests


def split(requests: Sequence[Request], buffers: Sequence[memoryview], ranges: Sequence[ByteRange]) -> list[memoryview]:
    """Slice the requests' buffers into the ranges, in the ranges' order, without copies."""
    result = [memoryview(b"")] * len(ranges)
    for request, buffer in zip(requests, buffers, strict=True):
        base = request.byte_range.start
        for i in request.members:
            result[i] = buffer[ranges[i].start - base : ranges[i].stop - base]
    return result


def read_ranges(
    read: Callable[[ByteRange], memoryview],
    ranges: Sequence[ByteRange],
    *,
    gap_bytes: int = GAP_BYTES,
    max_bytes: int = MAX_REQUEST_BYTES,
) -> list[memoryview]:
    """Read ``ranges`` with as few sequential calls of ``read`` as the limits allow."""
    requests = coalesce(ranges, gap_bytes=gap_bytes, max_bytes=max_bytes)
    return split(requests, [read(request.byte_range) for request in requests], ranges)
