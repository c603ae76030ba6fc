"""The numbers of a shard's buckets, as arrays over all buckets, so that a request changes many of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import placement

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
NEVER = int(np.iinfo(np.int64).max)


class _Track:
    """A worker's numbers by bucket: incarnation (-1: the bucket does not know it), last sequence, and clock."""

    def __init__(self) -> None:
        self.incarnations = np.full(placement.BUCKETS, -1, np.int64)
        self.sequences = np.zeros(placement.BUCKETS, np.int64)
        self.clocks = np.zeros(placement.BUCKETS, np.int64)


class Ledger:
    """Versions, clocks, sequences, and the batches that count, by bucket. ``changes`` counts all changes of a bucket.

    All mutable state: these arrays, of which places of buckets that are not held mean nothing, and ``settled``: all
    batches before it count, in every bucket.
    """

    def __init__(self) -> None:
        self.versions = np.zeros(placement.BUCKETS, np.int64)
        self.changes = np.zeros(placement.BUCKETS, np.int64)
        self.is_held = np.zeros(placement.BUCKETS, bool)
        self.settled = 0
        self._counted: dict[int, Mask] = {}
        """By batch from ``settled`` on, the buckets in which its gradients count."""
        self._tracks: dict[str, _Track] = {}
        self._durable: dict[str, tuple[Numbers, Numbers]] = {}
        """By worker, the incarnations and sequences that no loss of a shard can undo."""

    def hold(self, number: int) -> None:
        """Hold a bucket that has nothing yet."""
        self.drop(number)
        self.is_held[number] = True

    def drop(self, number: int) -> None:
        """Forget all of a bucket."""
        self.is_held[number] = False
        self.versions[number] = self.changes[number] = 0
        for track in self._tracks.values():
            track.incarnations[number] = -1
        for is_counted in self._counted.values():
            is_counted[number] = False

    # Workers

    def admit(self, worker: str, incarnation: int, clock: int, numbers: Numbers) -> None:
        """Count a worker in buckets from its clock on, its sequences anew if they were another incarnation's."""
        track = self._tracks.setdefault(worker, _Track())
        held = track.incarnations[numbers]
        clocks = np.where(held >= 0, track.clocks[numbers], 0)
        is_other = held != incarnation
        track.incarnations[numbers] = incarnation
        track.sequences[numbers] = np.where(is_other, 0, track.sequences[numbers])
        track.clocks[numbers] = np.maximum(clocks, clock)
        self.changes[numbers] += is_other | (track.clocks[numbers] != clocks)

    def forget(self, worker: str, numbers: Numbers) -> None:
        """Count a worker no more in buckets."""
        self.changes[numbers] += 1
        track = self._tracks.get(worker)
        if track is None:
            return
        track.incarnations[numbers] = -1
        if not (track.incarnations >= 0).any():
            del self._tracks[worker]
            self._durable.pop(worker, None)

    def restore_worker(self, number: int, worker: str, incarnation: int, sequence: int, clock: int) -> None:
        """Set a worker's numbers in a bucket."""
        track = self._tracks.setdefault(worker, _Track())
        track.incarnations[number], track.sequences[number], track.clocks[number] = incarnation, sequence, clock

    def last_sequences(self, worker: str, incarnation: int, numbers: Numbers) -> Numbers:
        """The sequences (n,) of the last parts that this incarnation of a worker sent to buckets (n,)."""
        track = self._tracks.get(worker)
        if track is None:
            return np.zeros(len(numbers), np.int64)
        return np.where(track.incarnations[numbers] == incarnation, track.sequences[numbers], 0)

    def take_sequences(self, worker: str, incarnation: int, numbers: Numbers, sequences: Numbers) -> None:
        """Note the last parts (n,) of buckets (n,)."""
        track = self._tracks.setdefault(worker, _Track())
        track.incarnations[numbers], track.sequences[numbers] = incarnation, sequences
        self.changes[numbers] += 1

    def sequences_in(self, number: int) -> dict[str, tuple[int, int]]:
        """The incarnation of each worker in a bucket, and its last sequence there."""
        return {
            worker: (int(track.incarnations[number]), int(track.sequences[number]))
            for worker, track in sorted(self._tracks.items())
            if track.incarnations[number] >= 0
        }

    # Clocks

    def clocks_of(self, worker: str, numbers: Numbers) -> Numbers:
        """A worker's clocks (n,) in buckets (n,); 0 where it is not counted."""
        track = self._tracks.get(worker)
        return np.zeros(len(numbers), np.int64) if track is None else track.clocks[numbers]

    def advance(self, worker: str, clock: int, numbers: Numbers) -> Numbers:
        """Set a worker's clock in the buckets that have an earlier one; returns those."""
        track = self._tracks.setdefault(worker, _Track())
        moved = numbers[track.clocks[numbers] < clock]
        track.clocks[moved] = clock
        self.changes[moved] += 1
        return moved

    def clocks_in(self, number: int) -> dict[str, int]:
        """The clock of each worker in a bucket."""
        return {
            worker: int(track.clocks[number])
            for worker, track in sorted(self._tracks.items())
            if track.incarnations[number] >= 0
        }

    def slowest(self, numbers: Numbers) -> dict[str, int]:
        """The least clock of each worker in buckets (n,)."""
        found = {}
        for worker, track in self._tracks.items():
            clocks = track.clocks[numbers][track.incarnations[numbers] >= 0]
            if len(clocks):
                found[worker] = int(clocks.min())
        return found

    def least_clocks(self) -> Numbers:
        """The least clock of any worker in each bucket, ``NEVER`` in those that know none."""
        least = np.full(placement.BUCKETS, NEVER, np.int64)
        for track in self._tracks.values():
            np.minimum(least, np.where(track.incarnations >= 0, track.clocks, NEVER), out=least)
        return least

    # Batches

    def settle(self, settled: int) -> None:
        """Note that all batches before this one count in every bucket."""
        if settled > self.settled:
            self.settled = settled
            self._counted = {unit: mask for unit, mask in self._counted.items() if unit >= settled}

    def count_unit(self, unit: int | None, numbers: Numbers) -> Mask:
        """Count a batch in buckets (n,); returns those in which it did not count before. Without a number all do."""
        if unit is None:
            return np.ones(len(numbers), bool)
        if unit < self.settled:
            return np.zeros(len(numbers), bool)
        is_counted = self._counted.setdefault(unit, np.zeros(placement.BUCKETS, bool))
        is_new: Mask = ~is_counted[numbers]
        is_counted[numbers] = True
        return is_new

    def counted_in(self, number: int) -> set[int]:
        """The batches from ``settled`` on whose gradients count in a bucket."""
        return {unit for unit, is_counted in self._counted.items() if is_counted[number]}

    # Durability

    def confirm(self, number: int, worker: str, incarnation: int, sequence: int) -> None:
        """Note that nothing can undo a worker's parts up to a sequence in a bucket."""
        if worker not in self._durable:
            self._durable[worker] = np.full(placement.BUCKETS, -1, np.int64), np.zeros(placement.BUCKETS, np.int64)
        incarnations, sequences = self._durable[worker]
        incarnations[number], sequences[number] = incarnation, sequence

    def durable_sequences(self, worker: str, incarnation: int, numbers: Numbers) -> Numbers:
        """The sequences (n,) of an incarnation that nothing can undo."""
        if worker not in self._durable:
            return np.zeros(len(numbers), np.int64)
        incarnations, sequences = self._durable[worker]
        return np.where(incarnations[numbers] == incarnation, sequences[numbers], 0)

    def durable_in(self, number: int) -> dict[str, tuple[int, int]]:
        """By worker the incarnation, and its last sequence in a bucket that nothing can undo, where there is one."""
        return {
            worker: (int(incarnations[number]), int(sequences[number]))
            for worker, (incarnations, sequences) in self._durable.items()
            if incarnations[number] >= 0
        }
