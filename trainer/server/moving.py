"""Moving: from one placement to another while a run goes on, some buckets at a time, whatever dies meanwhile.

A bucket leaves its shard, which answers no more for it; the journal says that it lies where it is to be; and its shard
takes it. Whoever moves it has its bytes from the first to the last of these, so that each can be tried again, also by
a shard that has started anew. Workers ask for the placement when a shard refuses them, and wait for no other bucket.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from .parcels import Parcels
from .placement import Placement, moves

_AT_ONCE = 256  # buckets
MOST_BYTES = 32 << 20
"""Bytes after which no other bucket is taken along."""


class Carrier(Protocol):
    """Calls of shards and of the journal. Each may be made again, and may raise ShardUnreachableError."""

    def depart(self, source: str, numbers: Collection[int]) -> Parcels:
        """Have a shard hand out the first of these buckets; asked again, the same ones as they were."""

    def note(self, numbers: Collection[int]) -> None:
        """Write down that these buckets lie where the weights say."""

    def arrive(self, target: str, parcels: Parcels) -> None:
        """Have a shard hold these buckets."""

    def forget(self, source: str, numbers: Collection[int]) -> None:
        """Tell a shard that these buckets have arrived."""

    def settle(self, shard: str, placement: Placement) -> int:
        """Have a shard place the copies of its buckets; returns how many are left to do."""


@dataclass(kw_only=True)
class _Load:
    """Buckets that are being moved. They are ``noted`` once the journal has them, and ``held`` by their target."""

    source: str
    target: str
    parcels: Parcels
    is_noted: bool = False
    is_held: bool = False


class Transition:
    """The way from a placement to weights that it already has, of which ``used`` buckets can hold something.

    All mutable state: the buckets to move, the load that is on its way, and the shards whose copies are to be placed.
    """

    def __init__(self, placement: Placement, used: Collection[int], carrier: Carrier) -> None:
        self._after = Placement(placement.weights)
        self._carrier = carrier
        self._left: dict[tuple[str, str], list[int]] = {}
        self._idle = sorted(placement.elsewhere.keys() - set(used))
        for move in moves(placement, self._after):
            if move.bucket in used:
                self._left.setdefault((move.source, move.target), []).append(move.bucket)
        self._load: _Load | None = None
        self._settling = sorted({*placement.shards, *placement.weights})
        self.moved = 0
        """Buckets that have moved."""

    @property
    def is_between(self) -> bool:
        """Return whether some buckets are on no shard: a checkpoint would lack them."""
        return self._load is not None

    @property
    def is_done(self) -> bool:
        """Return whether all is where it is to be, copies too."""
        return not (self._idle or self._left or self._load or self._settling)

    def awaited(self, shard: str) -> frozenset[int]:
        """The buckets that a shard is to hold, and will be brought."""
        load = self._load
        is_due = load is not None and load.is_noted and not load.is_held and load.target == shard
        return load.parcels.numbers if load is not None and is_due else frozenset()

    def step(self) -> None:
        """Move some buckets on, or place some copies.

        Raises:
            ShardUnreachableError: somebody gave no answer; call it again.
        """
        if self._idle:
            self._carrier.note(self._idle)
            self._idle = []
        if self._load is None and self._left:
            (source, target), numbers = next(iter(self._left.items()))
            parcels = self._carrier.depart(source, numbers[:_AT_ONCE])
            self._load = _Load(source=source, target=target, parcels=parcels)
        if self._load is not None:
            self._carry(self._load)
        elif self._settling and not self._carrier.settle(self._settling[0], self._after):
            self._settling.pop(0)

    def _carry(self, load: _Load) -> None:
        numbers = load.parcels.numbers
        if not load.is_noted:
            self._carrier.note(numbers)
            load.is_noted = True
        if not load.is_held:
            self._carrier.arrive(load.target, load.parcels)
            load.is_held = True
        self._carrier.forget(load.source, numbers)
        way = load.source, load.target
        self._left[way] = [number for number in self._left[way] if number not in numbers]
        if not self._left[way]:
            del self._left[way]
        self.moved += len(numbers)
        self._load = None
