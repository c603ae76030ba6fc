"""Epochs without a known size: after dropping or packing, only reading finds the places of sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..order.mixture import Lap
from ..order.outputs import Cursors
from ..order.plan import lane_sizes
from ..ranks.ledger import EpochLedger, Ledgers, PlainLedger, order_key

if TYPE_CHECKING:
    from ..order.plan import Share
    from ..order.spans import SourceOrder
    from ..pipeline.delivery_queue import Delivery

Laps = tuple[Lap, ...]  # of all sources


class Unsized:
    """The places of a run's sources as its batches have shown them, beside the ranks' ``ledgers``.

    ``kinds`` describe the dropping and packing of each source, as states do; empty where all samples are delivered.
    Mutable state: the laps of a mixture's sources at the beginnings of the epochs that are known, and here; the cursors
    that are known at these, by source and lap; and whether the epoch ``has_ended``. Where another process keeps the
    ledgers, deliveries bring cursors, and its reports ``estimates`` of the outputs of a source's first epoch.
    """

    def __init__(
        self,
        ledgers: Ledgers,
        kinds: Sequence[Mapping[str, Any]],
        orders: Callable[[], Sequence[SourceOrder]],
        *,
        is_mixed: bool,
    ) -> None:
        self.ledgers = ledgers
        self.kinds = kinds
        self.has_ended = False
        self._orders = orders
        self.is_mixed = is_mixed
        self.here: Laps = tuple(Lap() for _ in kinds)
        self.starts = {0: self.here}
        self.estimates: Mapping[int, float] = {}
        self._cursors: dict[tuple[int, Lap], Cursors] = {}

    def laps_at(self, epoch: int, consumed: int) -> Laps:
        """Find the sources' laps at the upcoming place, or at the beginning of an epoch."""
        if not self.is_mixed:
            return (Lap(epoch, consumed),)
        return self.here if consumed else self.starts[epoch]

    def take(self, item: Delivery) -> None:
        """Note that a delivery was taken, at the upcoming place."""
        self.has_ended = item.is_last
        if not self.is_mixed:
            self.ledgers.forget(item.epoch)
            if not item.is_end:
                self._know((Lap(item.epoch, item.stop),), item.cursors or ())
        elif item.laps is not None:  # else it is an epoch's end, which its last batch showed already
            self.here = tuple(item.laps)
            if item.is_last:
                self.starts[item.epoch + 1] = self.here
            for number, start in enumerate(self.starts[item.epoch + item.is_last]):
                self.ledgers.forget(start.epoch, self._key(number))
            self._know(self.here, item.cursors or ())

    def _know(self, laps: Laps, cursors: Sequence[Cursors | None]) -> None:
        """Keep the cursors at some laps, beside those where known epochs begin; forget all others."""
        kept = {*enumerate(laps), *(place for start in self.starts.values() for place in enumerate(start))}
        self._cursors = {place: known for place, known in self._cursors.items() if place in kept}
        self._cursors |= {(k, laps[k]): known for k, known in enumerate(cursors) if known is not None}

    def cursors_after(self, item: Delivery) -> tuple[Cursors | None, ...] | None:
        """Find the cursors after a delivery that was just taken, for another process; None where that needs none."""
        if item.is_end or (self.is_mixed and item.laps is None):
            return None
        laps = self.here if self.is_mixed else (Lap(item.epoch, item.stop),)
        return tuple(self.cursors_at(k, lap) if self.kinds[k] else None for k, lap in enumerate(laps))

    def save(self) -> tuple[Any, ...]:
        """Save the place, for ``restore``."""
        return self.has_ended, self.here, self._cursors

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back to the place that ``save`` returned."""
        self.has_ended, self.here, self._cursors = saved

    def forget_after(self, epoch: int) -> None:
        """Forget the epochs after one, where the run went back."""
        self.starts = {number: laps for number, laps in self.starts.items() if number <= epoch}

    def load(self, epoch: int, starts: Laps, here: Laps, cursors: Mapping[int, Cursors]) -> None:
        """Go to a loaded place: the laps where its epoch began, and there, with cursors of sources where known."""
        self.has_ended = False
        self.starts, self.here = {epoch: starts}, here
        self._cursors = {(number, here[number]): known for number, known in cursors.items()}

    def cursors_at(self, number: int, lap: Lap) -> Cursors:
        """Find the inputs of its lanes at which work on a source begins again."""
        if not lap.outputs:
            return Cursors.at_start(self._orders()[number].order.lanes)
        known = self._cursors.get((number, lap))
        if known is None:
            ledger = self.ledgers.open(self._key(number), self._orders()[number].order.lanes, lap.epoch)
            known = self._cursors[number, lap] = ledger.cursors_at(lap.outputs)
        return known

    def open_ledger(self, number: int, epoch: int, share: Share, ledgers: Ledgers | None = None) -> EpochLedger:
        """Open the ledger of an epoch of a source; in ``ledgers`` if given."""
        source = self._orders()[number]
        lanes = source.order.lanes
        if not self.kinds[number]:
            return PlainLedger(source.num_samples, lanes=lanes, rank=share.rank, world_size=share.world_size)
        return (ledgers or self.ledgers).open(self._key(number), lanes, epoch)

    def estimate(self, number: int) -> float | None:
        """Estimate the outputs of a source's first epoch. None while nothing is known."""
        ledger = self.ledgers.find(self._key(number), 0)
        if ledger is None:
            return self.estimates.get(number)
        source = self._orders()[number]
        return ledger.estimate(lane_sizes(source.num_samples, source.order.lanes))

    def _key(self, number: int) -> str:
        key = order_key(self._orders()[number].order)
        return f"{number}-{key}" if self.is_mixed else key
