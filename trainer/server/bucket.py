"""A bucket: pieces of tensors and rows of tables with all that is known of them, so that it can move as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .messages import PieceKey
from .optimizers import Optimizer, State
from .schema import TableSpec

Reduction = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Decoded gradients of a part: pieces (1, n) by key, rows as ids (n,) and values (n, width) by table."""

    worker: str
    step: int
    base: int
    weight: float
    rate: float | None
    arrived: float
    pieces: Mapping[PieceKey, Tensor]
    rows: Mapping[str, tuple[NDArray[np.int64], Tensor]]


@dataclass(kw_only=True)
class Piece:
    """Values (1, n) of a piece of a dense tensor, with the optimizer's state."""

    values: Tensor
    state: State


class RowBlock:
    """The rows of a table that one bucket holds: those that were ever pushed to.

    Memory grows by doubling, so that a new row costs the same however many there are; what is read is the part in use.
    """

    def __init__(self, ids: NDArray[np.int64], values: Tensor, state: State, versions: NDArray[np.int64]) -> None:
        self._ids, self._values, self._state, self._versions = ids, values, state, versions
        self._count = len(ids)
        self._order = np.argsort(ids, kind="stable")
        """The places of the rows, by ascending ids."""

    @classmethod
    def empty(cls, spec: TableSpec, optimizer: Optimizer) -> RowBlock:
        none = torch.zeros(0, spec.width)
        return cls(np.zeros(0, np.int64), none, optimizer.new_state(none), np.zeros(0, np.int64))

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids (n,) in the order in which rows came."""
        return self._ids[: self._count]

    @property
    def values(self) -> Tensor:
        """The values (n, width), fp32, to write to in place."""
        return self._values[: self._count]

    @property
    def state(self) -> State:
        """The optimizer's state of each row, to write to in place."""
        return {slot: tensor[: self._count] for slot, tensor in self._state.items()}

    @property
    def versions(self) -> NDArray[np.int64]:
        """The bucket's version (n,) at the last change of each row, to write to in place."""
        return self._versions[: self._count]

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the rows with these ids; -1 for those that are not there."""
        if not self._count:
            return np.full(len(ids), -1, np.int64)
        near = np.searchsorted(self.ids, ids, sorter=self._order)
        places = self._order[np.minimum(near, self._count - 1)]
        return np.where(self._ids[places] == ids, places, -1)

    def add(self, ids: NDArray[np.int64], spec: TableSpec, optimizer: Optimizer) -> None:
        """Make the rows of ``ids`` that are not there yet."""
        new = ids[self.places(ids) < 0]
        if not len(new):
            return
        start, stop = self._count, self._count + len(new)
        if stop > len(self._ids):
            self._grow(max(stop, 2 * len(self._ids)))
        first = spec.first_rows(new)
        self._ids[start:stop], self._versions[start:stop], self._values[start:stop] = new, 0, first
        for slot, tensor in optimizer.new_state(first).items():
            self._state[slot][start:stop] = tensor
        self._count = stop
        self._order = np.argsort(self.ids, kind="stable")

    def _grow(self, rows: int) -> None:
        def longer(tensor: Tensor) -> Tensor:
            grown = tensor.new_zeros(rows, *tensor.shape[1:])
            grown[: len(tensor)] = tensor
            return grown

        self._values = longer(self._values)
        self._state = {slot: longer(tensor) for slot, tensor in self._state.items()}
        self._ids = np.concatenate([self._ids, np.zeros(rows - len(self._ids), np.int64)])
        self._versions = np.concatenate([self._versions, np.zeros(rows - len(self._versions), np.int64)])


class Bucket:
    """Values, versions, clocks and the last sequence of each worker. ``changes`` counts all changes of any of them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.version = 0
        self.changes = 0
        self.sequences: dict[str, tuple[int, int]] = {}
        """The incarnation of each worker and its last sequence here."""
        self.clocks: dict[str, int] = {}
        self.fenced: dict[str, int] = {}
        """The last incarnation of each worker that was forgotten."""
        self.settled = 0
        """All batches before this one count."""
        self.counted: set[int] = set()
        """The batches from there on whose gradients count here."""
        self.pending: list[Gradients] = []
        """Gradients that were accepted and not applied yet, in the order of their coming."""
        self.pieces: dict[PieceKey, Piece] = {}
        self.tables: dict[str, RowBlock] = {}

    def last_sequence(self, worker: str, incarnation: int) -> int:
        """The sequence of the last part that this incarnation of a worker sent here."""
        held, sequence = self.sequences.get(worker, (incarnation, 0))
        return sequence if held == incarnation else 0

    def count_unit(self, unit: int | None, settled: int) -> bool:
        """Count the gradients of a batch, and return whether they did not count before; without a number they do."""
        if settled > self.settled:
            self.settled = settled
            self.counted = {one for one in self.counted if one >= settled}
        if unit is None:
            return True
        if unit < self.settled or unit in self.counted:
            return False
        self.counted.add(unit)
        return True

    def apply(
        self, gradients: Gradients, specs: Mapping[str, TableSpec], dense: Optimizer, sparse: Optimizer, scale: float
    ) -> None:
        """Take one step along gradients, at the rate times ``scale``, and become a new version."""
        self.version += 1
        self.changes += 1
        for key, gradient in gradients.pieces.items():
            piece = self.pieces[key]
            rate = dense.rate if gradients.rate is None else gradients.rate
            dense.step(piece.values, gradient, piece.state, rate * scale)
        for table, (ids, gradient) in gradients.rows.items():
            block = self.tables.setdefault(table, RowBlock.empty(specs[table], sparse))
            block.add(ids, specs[table], sparse)
            places = block.places(ids)
            at = torch.from_numpy(places)
            values, state = block.values[at], {slot: tensor[at] for slot, tensor in block.state.items()}
            rate = sparse.rate if gradients.rate is None else gradients.rate
            sparse.step(values, gradient, state, rate * scale)
            block.values[at] = values
            for slot, tensor in state.items():
                block.state[slot][at] = tensor
            block.versions[places] = self.version


def merge(several: Sequence[Gradients], reduction: Reduction, absent: int = 0) -> Gradients:
    """Add gradients up in the order of workers' names, or take their mean by weights.

    In a mean of rows, so many workers count besides, as if they had sent zeros: they have no such row in their batches.

    Equal weights divide as DDP does, so that the mean over two workers is DDP's to the bit. In a mean, who sent nothing
    for a piece or row counts as zero if it sent anything for the bucket.
    """
    ordered = sorted(several, key=lambda one: (one.worker, one.step))
    total = sum(one.weight for one in ordered)
    is_even = len({one.weight for one in ordered}) == 1

    def share(tensor: Tensor, weight: float, others: int = 0) -> Tensor:
        if reduction == "sum":
            return tensor
        if is_even:
            return tensor / (len(ordered) + others)
        return tensor * (weight / (total * (1 + others / len(ordered))))

    pieces: dict[PieceKey, Tensor] = {}
    rows: dict[str, list[tuple[NDArray[np.int64], Tensor]]] = {}
    for one in ordered:
        for key, tensor in one.pieces.items():
            part = share(tensor, one.weight)
            pieces[key] = pieces[key] + part if key in pieces else part
        for table, (ids, values) in one.rows.items():
            rows.setdefault(table, []).append((ids, share(values, one.weight, absent)))
    first = ordered[0]
    return Gradients(
        worker=first.worker,
        step=first.step,
        base=min(one.base for one in ordered),
        weight=total,
        rate=first.rate,
        arrived=first.arrived,
        pieces=pieces,
        rows={table: _add_rows(parts) for table, parts in rows.items()},
    )


def _add_rows(parts: Sequence[tuple[NDArray[np.int64], Tensor]]) -> tuple[NDArray[np.int64], Tensor]:
    """Add rows of equal ids, one part after another."""
    ids = np.unique(np.concatenate([part for part, _ in parts]))
    values = torch.zeros(len(ids), parts[0][1].shape[1])
    for part, gradient in parts:
        values[torch.from_numpy(np.searchsorted(ids, part))] += gradient
    return ids, values
