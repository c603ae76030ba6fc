"""Replicas: a primary passes each request on before it is acknowledged, and a copy that lags is replaced as a whole.

Both shards are the same state machine, so that the same requests in the same order give the same bits. ``changes``
tells whether a copy stands where the primary stood before a request.
"""

from __future__ import annotations

from ..errors import ServerRefusedError
from .messages import Advance, Create, Pull, Push, Reply, Request
from .placement import bucket_of_piece, buckets_of_rows
from .shard import Shard


def touched(request: Request, shard: Shard) -> list[int]:
    """The buckets of a shard that a request may change."""
    if isinstance(request, Push):
        numbers = {part.bucket for part in request.parts}
    elif isinstance(request, Create):
        numbers = {bucket_of_piece(*key) for key in request.pieces}
    elif isinstance(request, Advance):
        numbers = set(request.counts)
    elif isinstance(request, Pull):  # time may close a round
        numbers = set(request.buckets).union(
            *(buckets_of_rows(table, ids).tolist() for table, (ids, _) in request.rows.items())
        )
    else:
        numbers = set(shard.buckets)
    return sorted(numbers & set(shard.buckets))


def lagging(primary: dict[int, int], copy: Shard) -> list[int]:
    """The buckets that a copy has to get whole, given the primary's ``changes`` before a request."""
    return [
        number
        for number, changes in primary.items()
        if number not in copy.buckets or copy.buckets[number].changes != changes
    ]


def handle_replicated(primary: Shard, copy: Shard, request: Request, now: float) -> Reply:
    """Have both shards handle a request; the copy of every bucket that it changes equals the primary's afterwards.

    ``copy`` holds copies only, and answers nobody. If it raises, the reply is lost, the worker sends the request again,
    and the copy is brought up to date then.
    """
    marks = {number: primary.buckets[number].changes for number in touched(request, primary)}
    reply = primary.handle(request, now)
    late = set(lagging(marks, copy))
    if not late and not isinstance(request, Pull):
        try:
            copy.handle(request, now)
        except ServerRefusedError:  # a copy that has not heard of the worker
            late = set(marks)
    late |= set(lagging({number: primary.buckets[number].changes for number in marks}, copy))
    for number in sorted(late):
        copy.adopt(primary.snapshot(number), place=f"the copy of bucket {number}")
    copy.members, copy.fenced = dict(primary.members), dict(primary.fenced)
    return reply
