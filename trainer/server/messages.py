"""Requests to a shard and its replies: plain values, arrays of numbers, and payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .payloads import CodecConfig, Payload

PROTOCOL = 1

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
class Part:
    """The gradients of one bucket in a push; they are applied together or not at all.

    Sequences count the parts that this worker's incarnation sent to this bucket, from 1 and without gaps.
    """

    bucket: int
    sequence: int
    base: int
    """The bucket's version that the gradients are of."""
    pieces: Mapping[PieceKey, Payload] = field(default_factory=dict)
    rows: Mapping[str, tuple[NDArray[np.int64], Payload]] = field(default_factory=dict)
    """By table: ids (n,), ascending and distinct, and gradients (n, width)."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """Gradients of a worker's step. A shard applies all parts that are new to it, or refuses the push."""

    header: Header
    step: int
    """The worker's clock while it computed these."""
    parts: tuple[Part, ...]
    weight: float = 1.0
    """Samples or tokens, for means."""
    rate: float | None = None
    unit: int | None = None
    """The number of the batch that the gradients are of, through all epochs: a bucket counts those of each once."""
    settled: int = 0
    """All batches before this one count already."""


Outcome = Literal["applied", "duplicate", "gap", "moved"]


@dataclass(frozen=True, kw_only=True)
class Ack:
    """The outcome of a part: after a gap, ``sequence`` is the last that the shard has; what follows must be sent."""

    outcome: Outcome
    sequence: int = 0
    durable: int = 0
    """The last sequence that no loss of one shard can undo: a worker need not keep parts up to it."""
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class Pushed:
    acks: Mapping[int, Ack]


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


Request = Join | Leave | Create | Push | Advance | Pull
Reply = Joined | Pushed | Advanced | Pulled | None
REQUESTS = (Join, Leave, Create, Push, Advance, Pull)


def count_bytes(message: Request | Reply) -> int:
    """The bytes of the arrays of a message: values as they are encoded, ids, versions and counts of 8 bytes each."""
    if isinstance(message, Push):
        total = sum(payload.data.nbytes for part in message.parts for payload in part.pieces.values())
        rows = (one for part in message.parts for one in part.rows.values())
        return total + sum(ids.nbytes + payload.data.nbytes for ids, payload in rows)
    if isinstance(message, Create):
        return sum(payload.data.nbytes for payload in message.pieces.values())
    if isinstance(message, Advance):
        return message.buckets.nbytes + message.counts.nbytes
    if isinstance(message, Pull):
        return sum(ids.nbytes + versions.nbytes for ids, versions in message.rows.values())
    if isinstance(message, Pulled):
        total = sum(payload.data.nbytes for payload in message.pieces.values())
        rows_of = message.rows.values()
        return total + sum(ids.nbytes + versions.nbytes + payload.data.nbytes for ids, versions, payload in rows_of)
    return 0
