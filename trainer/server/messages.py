"""Requests to a shard and its replies: plain values, arrays of numbers, and payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .payloads import CodecConfig, Payload

PROTOCOL = 2

PieceKey = tuple[str, int]
"""A dense tensor's name and the index of its piece."""


READER = -1
"""The incarnation of who pulls and nothing else: it need not join, waits for nobody, and nobody for it."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The sender of a request, and what it believes to talk to; the token is the run's secret."""

    run: str
    schema: str
    worker: str
    incarnation: int = 0
    """Higher each time that the worker starts anew; requests of a lower one are refused."""
    token: str = field(default="", repr=False)
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class Join:
    """Ask to count as a worker from step ``clock`` on; a shard may answer with a later one."""

    header: Header
    clock: int


@dataclass(frozen=True, kw_only=True)
class Joined:
    clock: int


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Forget a worker: nobody waits for it any more, and what it pushed still counts."""

    header: Header
    worker: str


@dataclass(frozen=True, kw_only=True)
class Create:
    """Give pieces their first values; those that are there already stay as they are."""

    header: Header
    pieces: Mapping[PieceKey, Payload]


@dataclass(frozen=True, kw_only=True)
class Push:
    """Gradients of a worker's step, in parts: one for each bucket that they touch.

    A shard applies all parts that are new to it, each whole, or refuses the push. What a message has of a part: its
    place in ``buckets``, and the pieces and rows that lie in that bucket.
    """

    header: Header
    step: int
    """The worker's clock while it computed these."""
    buckets: NDArray[np.int64]
    """Buckets (n,), ascending and distinct."""
    sequences: NDArray[np.int64]
    """The parts (n,) that this worker's incarnation sent to each bucket, with this one: from 1 and without gaps."""
    bases: NDArray[np.int64]
    """The versions (n,) of the buckets that the gradients are of."""
    pieces: Mapping[PieceKey, Payload] = field(default_factory=dict)
    rows: Mapping[str, tuple[NDArray[np.int64], Payload]] = field(default_factory=dict)
    """By table: ids (m,) of all buckets, ascending and distinct, and gradients (m, width)."""
    weight: float = 1.0
    """Samples or tokens, for means."""
    rate: float | None = None
    unit: int | None = None
    """The number of the batch that the gradients are of, through all epochs: a bucket counts those of each once."""
    settled: int = 0
    """All batches before this one count already."""


class Outcome(IntEnum):
    """The outcome of a part: after a gap, what follows the shard's last one must be sent."""

    APPLIED = 0
    DUPLICATE = 1
    GAP = 2
    MOVED = 3


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Ask what a shard has of the parts that a worker sent to these buckets (n,), without sending them again."""

    header: Header
    buckets: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The outcomes of a push by bucket; to ``Ask`` they are DUPLICATE or MOVED."""

    buckets: NDArray[np.int64]
    outcomes: NDArray[np.int8]
    sequences: NDArray[np.int64]
    """The last sequence (n,) of the worker that the shard has."""
    durables: NDArray[np.int64]
    """The last sequence (n,) that no loss of one shard can undo: a worker need not keep parts up to it."""
    versions: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Say that a worker has finished ``clock`` steps, and how many parts it sent to each bucket in all."""

    header: Header
    clock: int
    buckets: NDArray[np.int64]
    """Buckets (n,) by number, each once."""
    counts: NDArray[np.int64]
    """The parts (n,) sent to each."""


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """The buckets that lack parts, by the last sequence they have; their clocks stay until those are sent again."""

    behind: Mapping[int, int]
    moved: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Ask for whole buckets of dense pieces, and for rows, of another version than the worker has (-1: nothing).

    A bucket that was restored may be of an older one.
    """

    header: Header
    clock: int
    buckets: Mapping[int, int] = field(default_factory=dict)
    rows: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=dict)
    """By table: ids (n,) and known versions (n,)."""
    codec: CodecConfig = field(default_factory=CodecConfig)


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """Pieces and rows that are newer; nothing but names in ``waiting_for`` if the worker has to wait for those."""

    versions: Mapping[int, int] = field(default_factory=dict)
    pieces: Mapping[PieceKey, Payload] = field(default_factory=dict)
    rows: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64], Payload]] = field(default_factory=dict)
    """By table: ids (n,), versions (n,) and values (n, width)."""
    waiting_for: tuple[str, ...] = ()
    moved: tuple[int, ...] = ()


Request = Join | Leave | Create | Push | Ask | Advance | Pull
Reply = Joined | Pushed | Advanced | Pulled | None
REQUESTS = (Join, Leave, Create, Push, Ask, Advance, Pull)


def count_bytes(message: Request | Reply) -> int:
    """The bytes of the arrays of a message: values as they are encoded, and what numbers them, most in 8 bytes each."""
    if isinstance(message, Push):
        rows = sum(ids.nbytes + payload.data.nbytes for ids, payload in message.rows.values())
        return _sizes(message.buckets, message.sequences, message.bases) + _payloads(message.pieces) + rows
    if isinstance(message, Pushed):
        found = (message.buckets, message.outcomes, message.sequences, message.durables, message.versions)
        return _sizes(*found)
    if isinstance(message, Create):
        return _payloads(message.pieces)
    if isinstance(message, Ask):
        return message.buckets.nbytes
    if isinstance(message, Advance):
        return _sizes(message.buckets, message.counts)
    if isinstance(message, Pull):
        return sum(_sizes(ids, versions) for ids, versions in message.rows.values())
    if isinstance(message, Pulled):
        rows = sum(_sizes(ids, versions, payload.data) for ids, versions, payload in message.rows.values())
        return _payloads(message.pieces) + rows
    return 0


def _payloads(pieces: Mapping[PieceKey, Payload]) -> int:
    return sum(payload.data.nbytes for payload in pieces.values())


def _sizes(*arrays: NDArray[Any]) -> int:
    return sum(array.nbytes for array in arrays)
