"""A bucket apart from its shard, so that it can move; gradients that were pushed, and how several become one."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import placement
from .messages import PieceKey
from .optimizers import State
from .payloads import Payload
from .rows import HeldRows

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
Reduction = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Decoded gradients of a push: pieces (1, n) by key, and by table ids (m,), ascending, and values (m, width)."""

    worker: str
    step: int
    weight: float
    rate: float | None
    arrived: float
    buckets: Numbers
    """The buckets (n,), ascending and distinct, that a part was sent for."""
    bases: Numbers
    """The versions (n,) of these that the gradients are of."""
    pieces: Mapping[PieceKey, Tensor]
    rows: Mapping[str, tuple[Numbers, Numbers, Tensor]]
    """By table ids, the buckets of each, and values."""

    def only(self, is_wanted: Mask, bucket_of: Mapping[PieceKey, int]) -> Gradients | None:
        """Return the part of these that is of buckets which a mask over all has; None if there is nothing."""
        of_buckets = is_wanted[self.buckets]
        if of_buckets.all():
            return self
        if not of_buckets.any():
            return None
        rows = {}
        for table, (ids, numbers, values) in self.rows.items():
            chosen = is_wanted[numbers]
            if chosen.any():
                rows[table] = ids[chosen], numbers[chosen], values[torch.from_numpy(chosen)]
        return replace(
            self,
            buckets=self.buckets[of_buckets],
            bases=self.bases[of_buckets],
            pieces={key: tensor for key, tensor in self.pieces.items() if is_wanted[bucket_of[key]]},
            rows=rows,
        )

    def own(self) -> Gradients:
        """Copy what shares the memory of a request, to keep it beyond that."""
        rows = {table: (ids.copy(), numbers, values.clone()) for table, (ids, numbers, values) in self.rows.items()}
        return replace(self, pieces={key: tensor.clone() for key, tensor in self.pieces.items()}, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Update:
    """Gradients to step along, in these buckets (n,). Other arrays are over all buckets."""

    buckets: Numbers
    bases: Numbers
    rates: NDArray[np.float64]
    """NaN: the optimizer's own."""
    pieces: Mapping[PieceKey, Tensor]
    rows: Mapping[str, tuple[Numbers, Numbers, Tensor]]


class Piece:
    """Values (1, n) of a piece of a dense tensor, with the optimizer's state.

    Values that were handed out are frozen: while anybody has them, a step goes to a copy.
    """

    def __init__(self, values: Tensor, state: State) -> None:
        self.values, self.state = values, state
        self._handed: weakref.ref[NDArray[np.uint8]] | None = None

    def hand_out(self) -> Payload:
        """Share the values as they are now, to read."""
        shared = None if self._handed is None else self._handed()
        if shared is None:
            shared = self.values[0].view(torch.uint8).numpy()
            shared.flags.writeable = False
            self._handed = weakref.ref(shared)
        return Payload(codec="fp32", shape=(self.values.shape[1],), data=shared)

    def take_writable(self) -> Tensor:
        """Return the values to step, in place where nobody has them."""
        if self._handed is not None:
            if self._handed() is not None:
                self.values = self.values.clone()
            self._handed = None
        return self.values


@dataclass(kw_only=True)
class Bucket:
    """All of a bucket, apart from its shard."""

    number: int
    version: int = 0
    changes: int = 0
    sequences: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The incarnation of each worker and its last sequence here."""
    clocks: dict[str, int] = field(default_factory=dict)
    fenced: dict[str, int] = field(default_factory=dict)
    """The last incarnation of each worker that was forgotten."""
    settled: int = 0
    """All batches before this one count."""
    counted: set[int] = field(default_factory=set)
    """The batches from there on whose gradients count here."""
    pending: list[Gradients] = field(default_factory=list)
    """Gradients that were accepted and not applied yet, in the order of their coming."""
    pieces: dict[PieceKey, Piece] = field(default_factory=dict)
    tables: dict[str, HeldRows] = field(default_factory=dict)


def as_update(gradients: Gradients) -> Update:
    """Step along the gradients of one push."""
    bases = np.zeros(placement.BUCKETS, np.int64)
    bases[gradients.buckets] = gradients.bases
    rates = np.full(placement.BUCKETS, np.nan if gradients.rate is None else gradients.rate)
    return Update(buckets=gradients.buckets, bases=bases, rates=rates, pieces=gradients.pieces, rows=gradients.rows)


def merge(
    several: Sequence[Gradients],
    reduction: Reduction,
    bucket_of: Mapping[PieceKey, int],
    took_part: Collection[str] = (),
) -> Update:
    """Add gradients up in the order of workers' names, or take their mean by weights, in each bucket for itself.

    In a mean of rows, those who took part and sent nothing for the bucket count besides, as if they had sent zeros:
    they have no such row in their batches.

    Equal weights divide as DDP does, so that the mean over two workers is DDP's to the bit. In a mean, who sent nothing
    for a piece or row counts as zero if it sent anything for the bucket.
    """
    ordered = sorted(several, key=lambda one: (one.worker, one.step))
    shares = _Shares(ordered, took_part)
    pieces: dict[PieceKey, Tensor] = {}
    rows: dict[str, list[tuple[Numbers, Numbers, Tensor]]] = {}
    for one in ordered:
        for key, tensor in one.pieces.items():
            part = tensor if reduction == "sum" else shares.of_piece(tensor, bucket_of[key], one.weight)
            pieces[key] = pieces[key] + part if key in pieces else part
        for table, (ids, numbers, values) in one.rows.items():
            part = values if reduction == "sum" else shares.of_rows(values, numbers, one.weight)
            rows.setdefault(table, []).append((ids, numbers, part))
    return Update(
        buckets=np.flatnonzero(shares.counts),
        bases=shares.bases,
        rates=shares.rates,
        pieces=pieces,
        rows={table: _add_rows(parts) for table, parts in rows.items()},
    )


class _Shares:
    """The shares of pushes in the mean of each bucket, the least base and the first rate."""

    def __init__(self, ordered: Sequence[Gradients], took_part: Collection[str]) -> None:
        size = placement.BUCKETS
        self.counts = np.zeros(size, np.int64)
        self.totals, least, most = np.zeros(size), np.full(size, np.inf), np.zeros(size)
        self.rates = np.full(size, np.nan)
        self.bases = np.full(size, np.iinfo(np.int64).max)
        absent = np.full(size, len(took_part), np.int64)
        seen: dict[str, Mask] = {}
        for one in ordered:
            at = one.buckets
            self.counts[at] += 1
            self.totals[at] += one.weight
            least[at], most[at] = np.minimum(least[at], one.weight), np.maximum(most[at], one.weight)
            self.bases[at] = np.minimum(self.bases[at], one.bases)
            if one.worker in took_part:
                is_seen = seen.setdefault(one.worker, np.zeros(size, bool))
                absent[at] -= ~is_seen[at]
                is_seen[at] = True
        for one in reversed(ordered):
            self.rates[one.buckets] = np.nan if one.rate is None else one.rate
        self.is_even = least == most
        self.absent = absent

    def of_piece(self, tensor: Tensor, number: int, weight: float) -> Tensor:
        if self.is_even[number]:
            return tensor / int(self.counts[number])
        return tensor * (weight / float(self.totals[number]))

    def of_rows(self, values: Tensor, numbers: Numbers, weight: float) -> Tensor:
        """Take the share of rows (m, width), each by its bucket (m,)."""
        counts, is_even = self.counts[numbers], self.is_even[numbers]
        absent = self.absent[numbers]
        shares = values / torch.from_numpy((counts + absent).astype(np.float32))[:, None]
        if not is_even.all():
            factors = weight / (self.totals[numbers] * (1 + absent / counts))
            others = values * torch.from_numpy(factors.astype(np.float32))[:, None]
            shares = torch.where(torch.from_numpy(is_even)[:, None], shares, others)
        return shares


def _add_rows(parts: Sequence[tuple[Numbers, Numbers, Tensor]]) -> tuple[Numbers, Numbers, Tensor]:
    """Add rows of equal ids, one part after another."""
    ids, first = np.unique(np.concatenate([part for part, _, _ in parts]), return_index=True)
    values = torch.zeros(len(ids), parts[0][2].shape[1])
    for part, _, gradient in parts:
        values[torch.from_numpy(np.searchsorted(ids, part))] += gradient
    return ids, np.concatenate([numbers for _, numbers, _ in parts])[first], values
