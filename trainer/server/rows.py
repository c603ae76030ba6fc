"""The rows of a table that a shard holds, of all its buckets together: found, made and stepped many at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import placement
from .optimizers import Optimizer, State
from .schema import TableSpec

Numbers = NDArray[np.int64]
_RUN_RATIO = 4  # a sorted run is merged with the next once that is not so many times shorter
_SLACK = 1024  # rows that are not worth a pass over all


@dataclass(frozen=True, kw_only=True)
class HeldRows:
    """Rows of one bucket: ids (n,), in the order in which they came, values (n, width), and what belongs to each."""

    ids: Numbers
    values: Tensor
    state: State
    versions: Numbers
    """The bucket's version (n,) at the last change of each."""


class TableRows:
    """The rows of a table that were ever pushed to.

    Memory grows by doubling, so that a new row costs the same however many there are. Ids are found in sorted runs,
    each a multiple of the next one's length (a log-structured merge: O'Neil et al. 1996). All mutable state: these.
    """

    def __init__(self, spec: TableSpec, optimizer: Optimizer) -> None:
        self.spec, self._optimizer = spec, optimizer
        self.counts = np.zeros(placement.BUCKETS, np.int64)
        """The number of rows of each bucket."""
        self._clear()

    def _clear(self) -> None:
        none = torch.zeros(0, self.spec.width)
        self.values, self.state = none, self._optimizer.new_state(none)
        """Of the rows by their places, and of places that are not used."""
        self.versions, self._ids, self._numbers = (np.zeros(0, np.int64) for _ in range(3))
        self._count = self._dead = 0
        self._runs: list[tuple[Numbers, Numbers]] = []
        """Ids in order, and their places."""
        self._order, self._starts, self._ordered = np.zeros(0, np.int64), np.zeros(placement.BUCKETS + 1, np.int64), 0
        """The first ``_ordered`` places by bucket, and where each bucket's begin."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the rows that are held, and of their state."""
        held = self._count - self._dead
        return sum(held * tensor[:1].nbytes for tensor in (self.values, *self.state.values()) if len(tensor))

    def places(self, ids: Numbers) -> Numbers:
        """Find the places (n,) of the rows with these ids (n,); -1 for those that are not there."""
        found = np.full(len(ids), -1, np.int64)
        for run_ids, run_places in self._runs:
            near = np.searchsorted(run_ids, ids)
            near[near == len(run_ids)] = 0
            at = run_places[near]
            is_here = (run_ids[near] == ids) & (self._numbers[at] >= 0)
            found[is_here] = at[is_here]
        return found

    def make(self, ids: Numbers, numbers: Numbers) -> Numbers:
        """Make the rows of distinct ids (n,), of buckets (n,), that are not there; returns the places (n,) of all."""
        places = self.places(ids)
        is_new = places < 0
        if is_new.any():
            first = self.spec.first_rows(ids[is_new])
            versions = np.zeros(len(first), np.int64)
            state = self._optimizer.new_state(first)
            held = HeldRows(ids=ids[is_new], values=first, state=state, versions=versions)
            places[is_new] = self._add(held, numbers[is_new])
        return places

    def step(self, places: Numbers, gradients: Tensor, rate: float, versions: Numbers) -> None:
        """Step rows by their places (n,) along gradients (n, width); they change with these versions (n,)."""
        at = torch.from_numpy(places)
        values, state = self.values[at], {slot: tensor[at] for slot, tensor in self.state.items()}
        self._optimizer.step(values, gradients, state, rate)
        self.values[at] = values
        for slot, tensor in state.items():
            self.state[slot][at] = tensor
        self.versions[places] = versions

    def rows_of(self, number: int) -> HeldRows:
        """Copy the rows of a bucket."""
        places = self._places_of(number)
        at = torch.from_numpy(places)
        state = {slot: tensor[at] for slot, tensor in self.state.items()}
        return HeldRows(
            ids=self._ids[places], values=self.values[at], state=state, versions=self.versions[places].copy()
        )

    def put(self, number: int, held: HeldRows) -> None:
        """Hold rows of a bucket that has none here."""
        if len(held.ids):
            self._add(held, np.full(len(held.ids), number, np.int64))

    def remove(self, number: int) -> None:
        """Hold the rows of a bucket no longer."""
        if not self.counts[number]:
            return
        self._numbers[self._places_of(number)] = -1
        self._dead += int(self.counts[number])
        self.counts[number] = 0
        if self._dead > self._count // 2 + _SLACK:
            self._compact()

    def _add(self, held: HeldRows, numbers: Numbers) -> Numbers:
        """Append rows whose ids are not there, and return their places."""
        start, stop = self._count, self._count + len(held.ids)
        if stop > len(self._ids):
            self._grow(max(stop, 2 * len(self._ids)))
        self._ids[start:stop], self._numbers[start:stop] = held.ids, numbers
        self.versions[start:stop], self.values[start:stop] = held.versions, held.values
        for slot, tensor in held.state.items():
            self.state[slot][start:stop] = tensor
        self._count = stop
        np.add.at(self.counts, numbers, 1)
        places = np.arange(start, stop)
        order = np.argsort(held.ids, kind="stable")
        self._runs.append((held.ids[order], places[order]))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < _RUN_RATIO * len(self._runs[-1][0]):
            self._merge_runs()
        return places

    def _merge_runs(self) -> None:
        """Merge the last two runs, without rows that are held no longer."""
        ids, places = (np.concatenate(pair) for pair in zip(*self._runs[-2:], strict=True))
        is_held = self._numbers[places] >= 0
        ids, places = ids[is_held], places[is_held]
        order = np.argsort(ids, kind="stable")
        self._runs[-2:] = [(ids[order], places[order])] if len(ids) else []

    def _grow(self, rows: int) -> None:
        def longer(tensor: Tensor) -> Tensor:
            grown = tensor.new_zeros(rows, *tensor.shape[1:])
            grown[: len(tensor)] = tensor
            return grown

        self.values = longer(self.values)
        self.state = {slot: longer(tensor) for slot, tensor in self.state.items()}
        more = np.zeros(rows - len(self._ids), np.int64)
        self._ids, self._numbers, self.versions = (
            np.concatenate([one, more]) for one in (self._ids, self._numbers, self.versions)
        )

    def _places_of(self, number: int) -> Numbers:
        """The places of a bucket's rows, in order."""
        if self._count - self._ordered > self._ordered // 8 + _SLACK:
            self._order = np.argsort(self._numbers[: self._count], kind="stable")
            self._starts = np.searchsorted(self._numbers[self._order], np.arange(placement.BUCKETS + 1))
            self._ordered = self._count
        head = self._order[self._starts[number] : self._starts[number + 1]]
        tail = self._ordered + np.flatnonzero(self._numbers[self._ordered : self._count] == number)
        return np.concatenate([head[self._numbers[head] == number], tail])

    def _compact(self) -> None:
        """Let go of the memory of rows that are held no longer."""
        kept = np.flatnonzero(self._numbers[: self._count] >= 0)
        at = torch.from_numpy(kept)
        state = {slot: tensor[at] for slot, tensor in self.state.items()}
        held = HeldRows(ids=self._ids[kept], values=self.values[at], state=state, versions=self.versions[kept])
        numbers = self._numbers[kept]
        self._clear()
        self.counts[:] = 0
        if len(kept):
            self._add(held, numbers)
