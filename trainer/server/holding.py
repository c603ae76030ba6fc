"""The contents of a shard: pieces, rows, numbers and gradients that wait, by bucket where a bucket is asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from . import placement
from .bucket import Bucket, Gradients, Mask, Numbers, Piece, Update
from .ledger import Ledger
from .messages import PieceKey
from .optimizers import Optimizer
from .rows import HeldRows, TableRows
from .schema import Schema


class HeldBucket:
    """A bucket on its shard: its pieces, and what the shard knows of it."""

    def __init__(self, number: int, holding: Holding) -> None:
        self.number = number
        self.pieces: dict[PieceKey, Piece] = {}
        self._holding = holding

    @property
    def version(self) -> int:
        """The number of updates."""
        return int(self._holding.ledger.versions[self.number])

    @property
    def changes(self) -> int:
        """The number of changes of anything."""
        return int(self._holding.ledger.changes[self.number])

    @property
    def sequences(self) -> dict[str, tuple[int, int]]:
        """The incarnation of each worker and its last sequence here."""
        return self._holding.ledger.sequences_in(self.number)

    @property
    def clocks(self) -> dict[str, int]:
        """The clock of each worker."""
        return self._holding.ledger.clocks_in(self.number)

    @property
    def settled(self) -> int:
        """All batches before this one count."""
        return self._holding.ledger.settled

    @property
    def counted(self) -> set[int]:
        """The batches from there on whose gradients count here."""
        return self._holding.ledger.counted_in(self.number)

    @property
    def pending(self) -> list[Gradients]:
        """Gradients that were accepted and not applied yet, in the order of their coming."""
        is_this = mask_of([self.number])
        parts = (one.only(is_this, self._holding.bucket_of) for one in self._holding.pending)
        return [part for part in parts if part is not None]

    @property
    def tables(self) -> dict[str, HeldRows]:
        """Copies of the rows that lie here, by table; of tables without any there is nothing."""
        tables = self._holding.tables.items()
        return {name: table.rows_of(self.number) for name, table in tables if table.counts[self.number]}

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was created or pushed here."""
        has_rows = any(table.counts[self.number] for table in self._holding.tables.values())
        return not (self.pieces or has_rows or self.counted)


class Holding:
    """All that a shard holds. All mutable state: the buckets, their numbers, tables, and gradients that wait.

    Gradients that wait are in the order of their coming.
    """

    def __init__(self, schema: Schema, dense: Optimizer, rows: Optimizer, *, scales_by_staleness: bool) -> None:
        self.ledger = Ledger()
        self.buckets: dict[int, HeldBucket] = {}
        self.tables = {spec.name: TableRows(spec, rows) for spec in schema.tables}
        self.pending: list[Gradients] = []
        self.bucket_of: Mapping[PieceKey, int] = schema.places()
        self._dense, self._rows, self._scales = dense, rows, scales_by_staleness

    @property
    def numbers(self) -> Numbers:
        """The buckets that are held, in order."""
        return np.flatnonzero(self.ledger.is_held)

    def create(self, key: PieceKey, piece: Piece) -> None:
        """Give a piece its first values."""
        number = self.bucket_of[key]
        self.buckets[number].pieces[key] = piece
        self.ledger.changes[number] += 1

    def apply(self, update: Update) -> None:
        """Take one step along gradients; all buckets of the update become a new version."""
        versions, at = self.ledger.versions, update.buckets
        scales = np.ones(placement.BUCKETS)
        if self._scales:
            scales[at] = 1 / (1 + versions[at] - update.bases[at])
        versions[at] += 1
        self.ledger.changes[at] += 1
        rates = np.where(np.isnan(update.rates), self._dense.rate, update.rates) * scales
        for key, gradient in update.pieces.items():
            number = self.bucket_of[key]
            piece = self.buckets[number].pieces[key]
            self._dense.step(piece.take_writable(), gradient, piece.state, float(rates[number]))
        rates = np.where(np.isnan(update.rates), self._rows.rate, update.rates) * scales
        for name, (ids, numbers, gradient) in update.rows.items():
            table = self.tables[name]
            places, of_rows = table.make(ids, numbers), rates[numbers]
            for rate in np.unique(of_rows).tolist():
                chosen = of_rows == rate
                if chosen.all():
                    table.step(places, gradient, rate, versions[numbers])
                else:
                    table.step(places[chosen], gradient[chosen], rate, versions[numbers[chosen]])

    def take_pending(self, closings: Sequence[tuple[Mask, Collection[int]]]) -> list[list[Gradients]]:
        """Take gradients that wait out of the list: for each closing those at its places, as far as its mask goes."""
        taken: dict[int, Mask] = {}
        found: list[list[Gradients]] = []
        for is_ready, places in closings:
            chosen = []
            for place in places:
                part = self.pending[place].only(is_ready, self.bucket_of)
                if part is not None:
                    chosen.append(part)
                    taken[place] = taken[place] | is_ready if place in taken else is_ready
            found.append(chosen)
        left = (
            one.only(~taken[place], self.bucket_of) if place in taken else one for place, one in enumerate(self.pending)
        )
        self.pending = [one for one in left if one is not None]
        return found

    def hold(self, number: int) -> None:
        """Hold a bucket that has nothing yet."""
        self.drop(number)
        self.ledger.hold(number)
        self.buckets[number] = HeldBucket(number, self)

    def drop(self, number: int) -> None:
        """Hold a bucket no longer."""
        if self.buckets.pop(number, None) is None:
            return
        self.ledger.drop(number)
        for table in self.tables.values():
            table.remove(number)
        if self.pending:
            self.take_pending([(mask_of([number]), range(len(self.pending)))])

    def put(self, bucket: Bucket) -> None:
        """Hold a bucket as it was elsewhere, in place of the one of its number."""
        number, ledger = bucket.number, self.ledger
        self.hold(number)
        ledger.versions[number], ledger.changes[number] = bucket.version, bucket.changes
        for worker, (incarnation, sequence) in bucket.sequences.items():
            ledger.restore_worker(number, worker, incarnation, sequence, bucket.clocks.get(worker, 0))
        ledger.settle(bucket.settled)
        for unit in bucket.counted:
            ledger.count_unit(unit, np.array([number], np.int64))
        self.buckets[number].pieces = bucket.pieces
        for name, rows in bucket.tables.items():
            self.tables[name].put(number, rows)
        self.pending += bucket.pending


def mask_of(numbers: Collection[int] | Numbers) -> Mask:
    """Mark buckets (n,) among all."""
    mask = np.zeros(placement.BUCKETS, bool)
    mask[np.asarray(numbers, np.int64)] = True
    return mask
