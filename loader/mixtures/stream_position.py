"""Where a loader of a mixture is of which sources drop or pack samples: only reading tells where their epochs end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import ConfigError, StateMismatchError
from ..order.cursors import Cursors
from ..order.mixtures.laps import Lap, is_over
from ..order.mixtures.mixture import Cursor
from ..order.mixtures.source_stream import SourceStream
from ..order.mixtures.state import MixtureState, SourceState
from ..order.permutation import IntArray
from ..order.plan import lane_sizes
from ..pipeline.delivery_queue import Delivery
from ..positions.uncounted import UncountedPosition
from ..ranks.ledger import EpochLedger, Ledgers, PlainLedger, order_key
from ..sources.sources import OpenSource
from .epochs import EpochPlace, Place
from .position import MixturePosition
from .resuming import refuse_other_stream, yields_alike


@dataclass(frozen=True, kw_only=True)
class StreamPlace(Place):
    """Also laps of the sources: ``starts`` where the mixture's epoch began, ``laps`` here, and cursors of the lanes."""

    starts: tuple[Lap, ...]
    laps: tuple[Lap, ...]
    cursors: tuple[Cursors, ...]


class MixedStreamPosition(UncountedPosition, MixturePosition):
    """As ``MixturePosition``; batches tell where sources are after them, and whether they are an epoch's last.

    Mutable state besides: the laps at the beginnings of the epochs that are known, and here; and of each source, the
    last cursors that were asked for.
    """

    who = "a mixture with sources that drop or pack samples"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._laps: tuple[Lap, ...] = tuple(Lap() for _ in self._sources)
        self._starts = {0: self._laps}
        self._cursors: dict[int, tuple[Lap, Cursors]] = {}

    # -- epochs ---------------------------------------------------------------------------------------------------

    def _epoch(self, start: Cursor, here: Cursor) -> EpochPlace:
        return EpochPlace(start, here, None)

    def _refuse_later(self, epoch: int) -> NoReturn:
        raise ConfigError(
            f"epoch {epoch} of a mixture of which sources drop or pack samples: where it begins is known once the "
            f"epochs before it are read, and the last one known is {max(self._epochs)}; read on"
        )

    def take(self, item: Delivery) -> None:
        super().take(item)
        if item.laps is None:  # an epoch's end, which its last batch told already
            return
        self._laps = tuple(item.laps)
        if item.is_last:
            _, here = self.cursor_at(item.epoch, item.stop)
            self._epochs[item.epoch + 1] = self._epoch(here, here)
            self._starts[item.epoch + 1] = self._laps
        for number, start in enumerate(self._starts[self.upcoming[0]]):
            self.ledgers.forget(start.epoch, self._key(number))

    def save(self) -> tuple[Any, ...]:
        return (*super().save(), self._laps)

    def restore(self, saved: tuple[Any, ...]) -> None:
        *others, self._laps = saved
        super().restore(tuple(others))

    def set_epoch(self, epoch: int) -> bool:
        is_back = epoch < self.epoch
        moved = super().set_epoch(epoch)
        if is_back:
            self._starts = {number: laps for number, laps in self._starts.items() if number <= epoch}
        return moved

    def _stand(self, epoch: int, start: Cursor, here: Cursor, is_loaded: bool) -> None:
        super()._stand(epoch, start, here, is_loaded)
        self._has_ended = False

    # -- places ---------------------------------------------------------------------------------------------------

    def laps_at(self, epoch: int, consumed: int) -> tuple[Lap, ...]:
        """Where the sources are at the upcoming position, or at the beginning of an epoch."""
        return self._laps if consumed else self._starts[epoch]

    def place(self) -> StreamPlace:
        return self.place_at(*self.upcoming)

    def place_at(self, epoch: int, consumed: int) -> StreamPlace:
        """From where on a pipeline reads that starts at the upcoming position, or at the beginning of an epoch."""
        start, here = self.cursor_at(epoch, consumed)
        laps = self.laps_at(epoch, consumed)
        return StreamPlace(
            plan=self.plan,
            orders=self._orders,
            epoch=epoch,
            start=start,
            consumed=consumed,
            here=here,
            starts=self._starts[epoch],
            laps=laps,
            cursors=tuple(self._cursors_at(number, lap) for number, lap in enumerate(laps)),
        )

    def _cursors_at(self, number: int, lap: Lap) -> Cursors:
        """At which inputs of its lanes work on a source begins again."""
        if not lap.outputs:
            return Cursors.at_start(self._order.lanes)
        known = self._cursors.get(number)
        if known is None or known[0] != lap:
            known = self._cursors[number] = lap, self.open_ledger(number, lap.epoch).cursors_at(lap.outputs)
        return known[1]

    def _key(self, number: int) -> str:
        return f"{number}-{order_key(self._orders[number].order)}"

    def open_ledger(self, number: int, epoch: int, ledgers: Ledgers | None = None) -> EpochLedger:
        """What is known of an epoch of a source; of ``ledgers`` if given."""
        lanes = self._order.lanes
        if self._sources[number].reshaping is None:
            count, share = self._orders[number].num_samples, self.share
            return PlainLedger(count, lanes=lanes, rank=share.rank, world_size=share.world_size)
        return (ledgers or self.ledgers).open(self._key(number), lanes, epoch)

    def count_epochs(self, source: int, taken: int) -> float:
        if not self._sources[source].stream_kind:
            return super().count_epochs(source, taken)
        lap = self.laps_at(*self.upcoming)[source]
        if lap.epoch:  # the epochs that are over tell about how many outputs one has
            return lap.epoch + min(lap.outputs * lap.epoch / (taken - lap.outputs), 0.999)
        ledger = self.ledgers.find(self._key(source), 0)
        whole = None if ledger is None else ledger.estimate(self._lane_sizes(source))
        return min(lap.outputs / whole, 0.999) if whole else 0.0

    # -- states ---------------------------------------------------------------------------------------------------

    def _stream_state(self, source: int) -> Mapping[str, Any]:
        kind = self._sources[source].stream_kind
        if not kind:
            return {}
        epoch, consumed = self.upcoming
        lap = self.laps_at(epoch, consumed)[source]
        return SourceStream(kind, self._starts[epoch][source], lap, self._cursors_at(source, lap)).to_dict()

    def _check_stream(self, source: OpenSource, state: SourceState, lanes: int) -> None:
        kind = source.stream_kind
        if not yields_alike(source, state):
            refuse_other_stream(source.name, state.stream, kind)
        if kind:
            stream = self._read(source, state, lanes)
            given = state.taken - state.start
            if (stream.start > stream.here) or (
                (stream.start.epoch == stream.here.epoch) and (stream.here.outputs - stream.start.outputs != given)
            ):
                raise StateMismatchError(
                    f"a damaged loader state of a mixture: source {source.name!r} has given {given} since it "
                    f"was at {stream.start}, and is at {stream.here}"
                )

    def _read(self, source: OpenSource, state: SourceState, lanes: int) -> SourceStream:
        return SourceStream.from_dict(state.stream, name=source.name, lane_sizes=lane_sizes(source.num_samples, lanes))

    def _lane_sizes(self, source: int) -> IntArray:
        return lane_sizes(self._sources[source].num_samples, self._order.lanes)

    def _take_over(self, state: MixtureState, known: Sequence[SourceState | None]) -> None:
        starts, laps = [], []
        self._cursors = {}
        for number, (source, old) in enumerate(zip(self._sources, known, strict=True)):
            if old is None:
                start = here = Lap()
            elif not source.stream_kind:
                start, here = (Lap(*divmod(taken, source.num_samples)) for taken in (old.start, old.taken))
            else:
                stream = self._read(source, old, state.lanes)
                start, here = stream.start, stream.here
                self._cursors[number] = here, stream.cursors
            starts.append(start)
            laps.append(here)
        self._starts, self._laps, self._has_ended = {state.epoch: tuple(starts)}, tuple(laps), False
        super()._take_over(state, known)
        if self.consumed and is_over(self.plan.stop, starts, laps, self.plan.changes[-1].weights):
            _, _, here_ = self.cursor()
            self._starts = {state.epoch + 1: self._laps}
            self._epochs = {}
            self._stand(state.epoch + 1, here_, here_, True)
