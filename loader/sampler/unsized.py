"""Epochs without a known size: after dropping or packing, only reading finds the places of sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..order.mixture import Lap
from ..order.outputs import Cursors
from ..ranks.ledger import EpochLedger, Ledgers, PlainLedger, order_key

if TYPE_CHECKING:
    from ..order.plan import Share
    from ..order.spans import SourceOrder
    from ..pipeline.assembler import Delivery

Laps = tuple[Lap, ...]  # of all sources


class Unsized:
    """The places of a run's sources as its batches have shown them, beside the ranks' ``ledgers``.

    ``kinds`` describe the dropping and packing of each source, as states do; empty where all samples are delivered.
    Mutable state: the laps of a mixture's sources at the beginnings of the epochs that are known, and here; of each
    source, the cursors that were asked for last; and whether the epoch ``has_ended``.
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
        self._cursors: dict[int, tuple[Lap, Cursors]] = {}

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
        elif item.laps is not None:  # else it is an epoch's end, which its last batch showed already
            self.here = tuple(item.laps)
            if item.is_last:
                self.starts[item.epoch + 1] = self.here
            for number, start in enumerate(self.starts[item.epoch + item.is_last]):
                self.ledgers.forget(start.epoch, self._key(number))

    def forget_after(self, epoch: int) -> None:
        """Forget the epochs after one, where the run went back."""
        self.starts = {number: laps for number, laps in self.starts.items() if number <= epoch}

    def load(self, epoch: int, starts: Laps, here: Laps, cursors: Mapping[int, Cursors]) -> None:
        """Go to a loaded place: the laps where its epoch began, and there, with cursors of sources where known."""
        self.has_ended = False
        self.starts, self.here = {epoch: starts}, here
        self._cursors = {number: (here[number], known) for number, known in cursors.items()}

    def cursors_at(self, number: int, lap: Lap) -> Cursors:
        """Find the inputs of its lanes at which work on a source begins again."""
        if not lap.outputs:
            return Cursors.at_start(self._orders()[number].order.lanes)
        known = self._cursors.get(number)
        if known is None or known[0] != lap:
            ledger = self.ledgers.open(self._key(number), self._orders()[number].order.lanes, lap.epoch)
            known = self._cursors[number] = lap, ledger.cursors_at(lap.outputs)
        return known[1]

    def open_ledger(self, number: int, epoch: int, share: Share, ledgers: Ledgers | None = None) -> EpochLedger:
        """Open the ledger of an epoch of a source; in ``ledgers`` if given."""
        source = self._orders()[number]
        lanes = source.order.lanes
        if not self.kinds[number]:
            return PlainLedger(source.num_samples, lanes=lanes, rank=share.rank, world_size=share.world_size)
        return (ledgers or self.ledgers).open(self._key(number), lanes, epoch)

    def find_ledger(self, number: int, epoch: int) -> EpochLedger | None:
        """Find the ledger of an epoch of a source, if it has been opened."""
        return self.ledgers.find(self._key(number), epoch)

    def _key(self, number: int) -> str:
        key = order_key(self._orders()[number].order)
        return f"{number}-{key}" if self.is_mixed else key
