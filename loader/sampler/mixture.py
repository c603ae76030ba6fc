"""The schedule of a mixture: its epochs follow each other without a gap in any source, and it may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ..config.mixture import Mixture, check_position, update_weights
from ..errors import ConfigError, StateMismatchError
from ..order.costs.buckets import Bucket, BucketedOrder, add_buckets, check_bucket
from ..order.mixture import Cursor, Lap, MixturePlan, is_over
from ..order.mixture_state import MixtureState, SourceState, SourceStream
from ..order.outputs import Cursors
from ..order.permutation import FOR_SOURCES, IntArray, stream_key
from ..order.plan import Choice, Order, Share, choose_order, lane_sizes
from ..order.spans import MixtureCourse, SourceOrder
from .resuming import identity_of, match_sources, merge_changes, refuse_other_stream, yields_alike
from .schedule import Place, Schedule
from .unsized import Laps, Unsized

if TYPE_CHECKING:
    from ..order.costs.costs import SampleCosts
    from ..order.costs.steps import Steps
    from ..order.outputs import Cursors
    from ..pipeline.delivery_queue import Delivery
    from ..ranks.ledger import EpochLedger, Ledgers
    from ..sources.sources import OpenSource, Sources

_MOST_AHEAD = 10_000  # epochs, whose ends are found one after another


@dataclass(frozen=True, slots=True)
class _Epoch:
    """An epoch's start, and a place inside it that is known: ``left`` batches before its end (None: it has none)."""

    start: Cursor
    base: Cursor
    left: int | None

    @property
    def base_consumed(self) -> int:
        return self.base.position - self.start.position


@dataclass(frozen=True, slots=True)
class _Steps:
    """The batches of an epoch, each of ``size`` samples; ``left_at`` counts those that are left at a position."""

    size: int
    left_at: Callable[[int], int | None]

    def ahead(self, first: int, most: int) -> int:
        left = self.left_at(first)
        return most if left is None else min(most, left)

    def bounds(self, first: int, steps: int) -> IntArray:
        found: IntArray = first + np.arange(steps + 1, dtype=np.int64) * self.size
        return found

    def count(self, first: int) -> int:
        left = self.left_at(first)
        if left is None:
            raise TypeError("a mixture with stop='never' has no length; count the steps, or give another stop")
        return left


@dataclass(frozen=True, kw_only=True)
class StreamPlace:
    """The place from which a run with dropped or packed samples is read.

    It is at ``here``, ``consumed`` samples into an epoch that began at ``start``. The sources are at ``laps``;
    at the epoch's beginning they were at ``starts``. ``cursors`` are those of the lanes.
    """

    plan: MixturePlan
    orders: Sequence[SourceOrder]
    epoch: int
    start: Cursor
    consumed: int
    here: Cursor
    starts: Laps
    laps: Laps
    cursors: tuple[Cursors, ...]


class MixtureSchedule(Schedule):
    """The order of a mixture's sources, and the boundaries of its epochs, as far as they are known.

    Raises:
        ConfigError: no order has such a seed, number of lanes, window or piece.
        PartitionError: stratified batches do not fit the global batch.
    """

    subject = "a mixture with sources that drop or pack samples"

    def __init__(
        self,
        mixture: Mixture,
        sources: Sources,
        *,
        seed: int,
        shuffle: bool,
        lanes: Choice,
        window: Choice,
        piece: Choice,
        share: Share,
        bucket: Bucket | None = None,
        bucket_costs: Sequence[SampleCosts] | None = None,
        ledgers: Ledgers | None = None,
    ) -> None:
        self._sources = sources
        self._bucket = bucket
        self._bucket_costs = bucket_costs
        self._stratified = mixture.stratified
        self._given = mixture.changes()
        self._fixed = {name: None if v == "auto" else v for name, v in (("window", window), ("piece", piece))}
        self._fixed_lanes = None if lanes == "auto" else lanes
        self._order = choose_order(
            seed=seed,
            shuffle=shuffle,
            lanes=lanes,
            window=1 if window == "auto" else window,
            piece=0,
            world_size=share.world_size,
            chunk_samples=sources.manifest.samples,
            chunk_memory=sources.manifest.memory,
        )
        self.share = share
        choices = {"window": window, "piece": piece, "world_size": share.world_size}
        self._orders = [self._choose(number, **choices) for number in range(len(sources))]
        self._parted: tuple[SourceState, ...] = ()  # as in epoch ``_parted_in``
        self._parted_in = 0
        self.plan = MixturePlan(
            tuple(source.num_samples for source in sources),
            share.global_batch_size,
            self._given,
            mixture.stop or "first_exhausted",
            mixture.stratified,
        )
        if ledgers is not None:
            kinds = [source.stream_kind for source in sources]
            self.unsized = Unsized(ledgers, kinds, lambda: self._orders, is_mixed=True)
        begin = Cursor.begin(len(sources))
        self._epochs = {0: self._epoch(begin, begin)}
        self.check_share(share)

    def _choose(self, number: int, **choices: Any) -> SourceOrder:
        """Choose the order of a source that begins here: seeded by its name, so that other sources do not change it."""
        source: OpenSource = self._sources[number]
        seed = stream_key(FOR_SOURCES, self._order.seed, xxhash.xxh3_64_intdigest(source.name.encode()))
        counts = source.chunk_samples
        order = choose_order(
            seed=seed,
            shuffle=self._order.shuffle,
            lanes=self._order.lanes,
            chunk_samples=counts[counts > 0],
            chunk_memory=source.manifest.memory[counts > 0],
            held_bytes=int(self._sources.manifest.memory.sum() - source.manifest.memory.sum()),
            **choices,
        )
        return self._ordered(number, self._add_buckets(number, order))

    def _add_buckets(self, number: int, order: Order) -> Order:
        """Bucket a source's samples, if that is asked for: by default, a run is its largest part of a global batch."""
        if self._bucket is None or self._bucket_costs is None:
            return order
        source: OpenSource = self._sources[number]
        part = max(change.weights[number] / sum(change.weights) for change in self._given)
        return add_buckets(
            order,
            self._bucket,
            self._bucket_costs[number],
            global_batch_size=max(1, round(part * self.share.global_batch_size)),
            window_samples=order.window * (order.piece or source.num_samples / source.manifest.num_chunks),
        )

    def _ordered(self, number: int, order: Order) -> SourceOrder:
        source: OpenSource = self._sources[number]
        return SourceOrder(
            chunk_samples=source.manifest.samples,
            order=order,
            first_chunk=self._sources.first_chunks[number],
            selection=source.selection,
            bucket_costs=None if self._bucket_costs is None else self._bucket_costs[number],
        )

    def _begin_anew(self, number: int) -> SourceOrder:
        """Make the order of a source that a loaded state does not have, on the state's lanes."""
        plain = {name: getattr(self._orders[number].order, name) for name in ("seed", "shuffle", "window", "piece")}
        return self._ordered(number, self._add_buckets(number, Order(lanes=self._order.lanes, **plain)))

    @property
    def order(self) -> Order:
        """The seed, shuffle and lanes that all sources share. Each has a seed, window and piece of its own."""
        return self._order

    @property
    def orders(self) -> Sequence[SourceOrder]:
        return self._orders

    # -- epochs ---------------------------------------------------------------------------------------------------

    def check_share(self, share: Share) -> None:
        replace(self.plan, global_batch_size=share.global_batch_size)

    def set_share(self, share: Share, here: Place) -> None:
        if share.global_batch_size != self.plan.global_batch_size:
            cursors = self.cursor_at(*here)
            self.plan = replace(self.plan, global_batch_size=share.global_batch_size)
            for before in [number for number in self._epochs if number < here[0]]:
                first = self._epochs[before].start
                self._epochs[before] = self._epoch(first, first)
            self._rebase(here[0], *cursors)
        self.share = share

    def count_steps(self, here: Place, upcoming: Place) -> int:
        return self.steps(upcoming[0]).count(0)

    def steps(self, epoch: int) -> Steps:
        return _Steps(self.plan.global_batch_size, partial(self._left_at, epoch))

    def _epoch(self, start: Cursor, here: Cursor) -> _Epoch:
        """Make the epoch that began at ``start``, of which ``here`` is known."""
        return _Epoch(start, here, None if self.unsized is not None else self.plan.steps_left(start, here))

    def _left_at(self, epoch: int, consumed: int) -> int | None:
        """Count the batches from a position to its epoch's end; None for an endless one."""
        known = self._known(epoch)
        if known.left is None:
            return None
        if consumed < known.base_consumed:
            return self.plan.steps_left(known.start, known.start) if not consumed else None
        return known.left - (consumed - known.base_consumed) // self.plan.global_batch_size

    def _known(self, epoch: int) -> _Epoch:
        before = max((known for known in self._epochs if known <= epoch), default=None)
        if before is None:
            raise ConfigError(
                f"epoch {epoch} of a mixture lies before epoch {min(self._epochs)}, in which the loaded state is, and "
                "where it began is not known; load an earlier state"
            )
        if epoch - before > _MOST_AHEAD:
            raise ConfigError(
                f"epoch {epoch} of a mixture, from epoch {before}: go ahead by {_MOST_AHEAD} epochs at most"
            )
        while before < epoch:
            last = self._epochs[before]
            if last.left is None:
                raise self._no_later(epoch)
            start = self.plan.advance(last.base, last.left)
            before += 1
            self._epochs[before] = self._epoch(start, start)
        return self._epochs[epoch]

    def _no_later(self, epoch: int) -> ConfigError:
        if self.unsized is None:
            return ConfigError(f"epoch {epoch} of a mixture with stop='never': there is only epoch 0, which is endless")
        return ConfigError(
            f"epoch {epoch} of a mixture of which sources drop or pack samples: where it begins is known once the "
            f"epochs before it are read, and the last one known is {max(self._epochs)}; read on"
        )

    def check_epoch(self, epoch: int) -> None:
        self._known(epoch)

    def go_to(self, epoch: int, consumed: int, *, is_back: bool) -> None:
        if is_back:  # what follows is counted anew, by the batches of now
            self._epochs = {number: known for number, known in self._epochs.items() if number <= epoch}
            if self.unsized is not None:
                self.unsized.forget_after(epoch)
        known = self._known(epoch)
        if consumed < known.base_consumed:  # from a place that was loaded
            self._rebase(epoch, known.start, known.start)

    def take(self, item: Delivery) -> None:
        super().take(item)
        if item.laps is not None and item.is_last:
            _, here = self.cursor_at(item.epoch, item.stop)
            self._epochs[item.epoch + 1] = self._epoch(here, here)

    def cursor_at(self, epoch: int, consumed: int) -> tuple[Cursor, Cursor]:
        """Find the beginning of an epoch, and the run's place at a position in it."""
        known = self._known(epoch)
        base, first = (known.start, 0) if consumed < known.base_consumed else (known.base, known.base_consumed)
        return known.start, self.plan.advance(base, (consumed - first) // self.plan.global_batch_size)

    def course(self, epoch: int, consumed: int) -> MixtureCourse:
        return MixtureCourse(self.plan, epoch, *self.cursor_at(epoch, consumed))

    def _rebase(self, epoch: int, start: Cursor, here: Cursor) -> None:
        """Count the epochs from a place alone from now on, and from those that began before."""
        self._epochs = {e: v for e, v in self._epochs.items() if e < epoch}
        self._epochs[epoch] = self._epoch(start, here)

    def set_weights(self, weights: Mapping[str, float], at: int | None, here: Place) -> None:
        start, cursor = self.cursor_at(*here)
        if at is not None:
            check_position("set_weights(at=)", at, 0)
        position = cursor.position if at is None else int(at)
        if position < cursor.position:
            raise ConfigError(
                f"set_weights(at={at}): the run is at {cursor.position:,} samples already; give a later one"
            )
        index = max(i for i, change in enumerate(self.plan.changes) if change.position <= position)
        current = self.plan.changes[index].weights
        changed = update_weights(self._sources.names, current, weights, self._stratified)
        self.plan = self.plan.change_weights(position, changed)
        self._rebase(here[0], start, cursor)

    # -- what only reading tells ----------------------------------------------------------------------------------

    def stream_place(self, epoch: int, consumed: int) -> StreamPlace:
        """Find the place to read from for a pipeline that starts at the upcoming place, or an epoch's beginning."""
        assert self.unsized is not None
        start, here = self.cursor_at(epoch, consumed)
        laps = self.unsized.laps_at(epoch, consumed)
        return StreamPlace(
            plan=self.plan,
            orders=self._orders,
            epoch=epoch,
            start=start,
            consumed=consumed,
            here=here,
            starts=self.unsized.starts[epoch],
            laps=laps,
            cursors=tuple(self.unsized.cursors_at(number, lap) for number, lap in enumerate(laps)),
        )

    def open_ledger(self, number: int, epoch: int, ledgers: Ledgers | None = None) -> EpochLedger:
        """Open the ledger of an epoch of a source; in ``ledgers`` if given."""
        assert self.unsized is not None
        return self.unsized.open_ledger(number, epoch, self.share, ledgers)

    def count_epochs(self, number: int, taken: int, here: Place) -> float:
        """Count the epochs of a source completed after ``taken`` of its samples, at the upcoming place."""
        source = self._sources[number]
        if not source.stream_kind:
            return float(taken / source.num_samples)
        assert self.unsized is not None
        lap = self.unsized.laps_at(*here)[number]
        if lap.epoch:  # finished epochs give an estimate of the outputs of one
            return lap.epoch + min(lap.outputs * lap.epoch / (taken - lap.outputs), 0.999)
        whole = self.unsized.estimate(number)
        return min(lap.outputs / whole, 0.999) if whole else 0.0

    # -- states ---------------------------------------------------------------------------------------------------

    def to_state(self, epoch: int, consumed: int) -> MixtureState:
        start, here = self.cursor_at(epoch, consumed)
        plan = self.plan.forget_before(start.position)
        parted = self._parted  # which gave some in the epoch that was loaded, and none since
        if epoch != self._parted_in:
            parted = tuple(source.begin_epoch() for source in parted)
        return MixtureState(
            seed=self._order.seed,
            shuffle=self._order.shuffle,
            lanes=self._order.lanes,
            epoch=epoch,
            start=(start.position, start.steps),
            here=(here.position, here.steps),
            given=self._given,
            changes=plan.changes,
            sources=tuple(
                SourceState(
                    **identity_of(source),
                    seed=ordered.order.seed,
                    window=ordered.order.window,
                    piece=ordered.order.piece,
                    start=start.taken[k],
                    taken=here.taken[k],
                    stream=self._stream_state(k, epoch, consumed),
                    bucket=ordered.order.bucket if isinstance(ordered.order, BucketedOrder) else {},
                )
                for k, (source, ordered) in enumerate(zip(self._sources, self._orders, strict=True))
            ),
            parted=parted,
        )

    def _stream_state(self, number: int, epoch: int, consumed: int) -> Mapping[str, Any]:
        """Make a source's part of a state, where its outputs are not arithmetic."""
        kind = self._sources[number].stream_kind
        if not kind:
            return {}
        assert self.unsized is not None
        lap = self.unsized.laps_at(epoch, consumed)[number]
        start, cursors = self.unsized.starts[epoch][number], self.unsized.cursors_at(number, lap)
        return SourceStream(kind, start, lap, cursors).to_dict()

    def check_state(self, state: Mapping[str, Any]) -> MixtureState:
        loaded = MixtureState.from_dict(state)
        for name, value in (("seed", self._order.seed), ("shuffle", self._order.shuffle), ("lanes", self._fixed_lanes)):
            if value is not None and getattr(loaded, name) != value:
                raise StateMismatchError(
                    "the state belongs to another run's order and cannot be resumed here; "
                    f"{name}: {getattr(loaded, name)!r} in the state, {value!r} here"
                )
        known = match_sources(self._sources, loaded)
        for number, (source, found) in enumerate(zip(self._sources, known, strict=True)):
            if found is not None:
                _check_stream(source, found, loaded.lanes)
                where = f"the state's source {source.name!r}"
                check_bucket(self._bucket, self._orders[number].order, found.bucket, loaded.lanes, where)
            for name, value in self._fixed.items() if found is not None else ():
                if value is not None and getattr(found, name) != value:
                    raise StateMismatchError(
                        f"the source {source.name!r} has {name}={getattr(found, name)} in the state, {value} here; "
                        "leave it out, or give that of the state"
                    )
        return loaded

    def load(self, state: MixtureState) -> tuple[Place, Sequence[str]]:
        known = match_sources(self._sources, state)
        self._order = replace(self._order, lanes=state.lanes)
        self._orders = [
            self._begin_anew(number) if old is None else self._ordered(number, state.order_of(old))
            for number, old in enumerate(known)
        ]
        start = Cursor(*state.start, tuple(0 if old is None else old.start for old in known))
        here = Cursor(*state.here, tuple(0 if old is None else old.taken for old in known))
        kept = {old.name for old in known if old is not None}
        self._parted = tuple(old for old in (*state.parted, *state.sources) if old.name not in kept)
        self._parted_in = state.epoch
        changes, news = merge_changes(self._sources.names, self._given, state, known, self._stratified)
        self.plan = replace(self.plan, changes=changes)
        place = state.epoch, here.position - start.position
        if self.unsized is not None:
            starts, laps = self._load_laps(state, known)
            if place[1] and is_over(self.plan.stop, starts, laps, changes[-1].weights):
                place, start = (state.epoch + 1, 0), here
                self.unsized.starts = {place[0]: laps}
        self._epochs = {place[0]: self._epoch(start, here)}
        return place, news

    def _load_laps(self, state: MixtureState, known: Sequence[SourceState | None]) -> tuple[Laps, Laps]:
        """Take over the sources' laps, with their lanes, from a state: where its epoch began, and at its place."""
        assert self.unsized is not None
        starts, laps, cursors = [], [], {}
        for number, (source, old) in enumerate(zip(self._sources, known, strict=True)):
            if old is None:
                start = here = Lap()
            elif not source.stream_kind or not old.stream:
                start, here = (Lap(*divmod(taken, source.num_samples)) for taken in (old.start, old.taken))
                if source.stream_kind:  # it begins to skip bad samples
                    cursors[number] = Cursors.of_all(here.outputs, state.lanes)
            else:
                stream = _read_stream(source, old, state.lanes)
                start, here = stream.start, stream.here
                cursors[number] = stream.cursors
            starts.append(start)
            laps.append(here)
        self.unsized.load(state.epoch, tuple(starts), tuple(laps), cursors)
        return tuple(starts), tuple(laps)


def _read_stream(source: OpenSource, state: SourceState, lanes: int) -> SourceStream:
    return SourceStream.from_dict(state.stream, name=source.name, lane_sizes=lane_sizes(source.num_samples, lanes))


def _check_stream(source: OpenSource, state: SourceState, lanes: int) -> None:
    """Raise StateMismatchError where a state's stream part does not fit this source, or is damaged."""
    if not yields_alike(source, state):
        refuse_other_stream(source.name, state.stream, source.stream_kind)
    if not source.stream_kind or not state.stream:
        return
    stream, given = _read_stream(source, state, lanes), state.taken - state.start
    is_within = stream.start.epoch == stream.here.epoch
    if stream.start > stream.here or (is_within and stream.here.outputs - stream.start.outputs != given):
        raise StateMismatchError(
            f"a damaged loader state of a mixture: source {source.name!r} has given {given} since it was at "
            f"{stream.start}, and is at {stream.here}"
        )
