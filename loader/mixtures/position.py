"""Where a loader of a mixture is in its run, what comes next, and what becomes of it when the mixture changes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import xxhash

from ..config.mixture import Mixture, check_position, update_weights
from ..errors import ConfigError, StateMismatchError
from ..order.auto import Choice, choose_order
from ..order.costs.steps import Steps
from ..order.courses import MixtureCourse
from ..order.mixtures.mixture import Cursor, MixturePlan
from ..order.mixtures.state import MixtureState, SourceState
from ..order.permutation import stream_key
from ..order.plan import Order, Share
from ..order.spans import SourceOrder
from ..positions.position import RunPosition, Tell, tell_nobody
from ..sources.sources import OpenSource, Sources
from .epochs import EpochPlace, EpochSteps, Place
from .resuming import identity_of, match_sources, merge_changes, refuse_other_stream

_FOR_SOURCES = 6  # what a stream of random numbers is used for, as in plan.py
_MOST_AHEAD = 10_000  # epochs, whose ends are found one after another


class MixtureChangedWarning(UserWarning):
    """A state was loaded into a mixture of other sources or weights; says what became of each."""


class MixturePosition(RunPosition):
    """The position in a run of a mixture: epochs of the mixture follow each other without a gap in any source.

    Raises:
        ConfigError: no order has such a seed, number of lanes, window or piece.
        PartitionError: stratified batches do not fit the global batch.
    """

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
    ) -> None:
        self._sources = sources
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
        begin = Cursor.begin(len(sources))
        self._epochs = {0: self._epoch(begin, begin)}
        super().__init__(share)

    def _choose(self, number: int, **choices: Any) -> SourceOrder:
        """The order of a source that begins here: seeded by its name, so that other sources do not change it."""
        source: OpenSource = self._sources[number]
        seed = stream_key(_FOR_SOURCES, self._order.seed, xxhash.xxh3_64_intdigest(source.name.encode()))
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
        return self._ordered(number, order)

    def _ordered(self, number: int, order: Order) -> SourceOrder:
        source: OpenSource = self._sources[number]
        return SourceOrder(
            chunk_samples=source.manifest.samples,
            order=order,
            first_chunk=self._sources.first_chunks[number],
            selection=source.selection,
        )

    def _epoch(self, start: Cursor, here: Cursor) -> EpochPlace:
        """An epoch that began at ``start``, of which ``here`` is known."""
        return EpochPlace(start, here, self.plan.steps_left(start, here))

    # -- epochs ---------------------------------------------------------------------------------------------------

    @property
    def order(self) -> Order:
        """The seed, shuffle and lanes that all sources share. Each has a seed, window and piece of its own."""
        return self._order

    @property
    def orders(self) -> Sequence[SourceOrder]:
        return self._orders

    def check_share(self, share: Share) -> None:
        replace(self.plan, global_batch_size=share.global_batch_size)

    def change_share(self, share: Share, tell: Tell = tell_nobody) -> None:
        if share.global_batch_size != self.plan.global_batch_size:
            epoch, start, here = self.cursor()
            self.plan = replace(self.plan, global_batch_size=share.global_batch_size)
            for before in [number for number in self._epochs if number < epoch]:
                first = self._epochs[before].start
                self._epochs[before] = self._epoch(first, first)
            self._stand(epoch, start, here, self.is_loaded)
        super().change_share(share, tell)

    @property
    def steps_per_epoch(self) -> int:
        return self._steps(self.upcoming[0]).count(0)

    def _steps(self, epoch: int) -> Steps:
        return EpochSteps(self.plan.global_batch_size, partial(self._left_at, epoch))

    def _left_at(self, epoch: int, consumed: int) -> int | None:
        """Batches from a position to its epoch's end; None if that never comes."""
        known = self._known(epoch)
        if known.left is None:
            return None
        if consumed < known.base_consumed:
            return self.plan.steps_left(known.start, known.start) if not consumed else None
        return known.left - (consumed - known.base_consumed) // self.plan.global_batch_size

    def _known(self, epoch: int) -> EpochPlace:
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
                self._refuse_later(epoch)
            start = self.plan.advance(last.base, last.left)
            before += 1
            self._epochs[before] = self._epoch(start, start)
        return self._epochs[epoch]

    def _refuse_later(self, epoch: int) -> NoReturn:
        raise ConfigError(f"epoch {epoch} of a mixture with stop='never': there is only epoch 0, which is endless")

    def set_epoch(self, epoch: int) -> bool:
        self._known(epoch)
        is_back, moved = epoch < self.epoch, super().set_epoch(epoch)
        if is_back:  # what follows is counted anew, by the batches of now
            self._epochs = {number: known for number, known in self._epochs.items() if number <= epoch}
        self._begin_anew()
        return moved

    def begin_pass(self) -> bool:
        moved = super().begin_pass()
        self._begin_anew()
        return moved

    def _begin_anew(self) -> None:
        """Count from the epoch's beginning, if the position went back there from a place that was loaded."""
        known = self._known(self.epoch)
        if self.consumed < known.base_consumed:
            self._stand(self.epoch, known.start, known.start, self.is_loaded)

    def cursor(self) -> tuple[int, Cursor, Cursor]:
        """The epoch of the upcoming batch, where it began, and where the run is."""
        epoch, consumed = self.upcoming
        return (epoch, *self.cursor_at(epoch, consumed))

    def cursor_at(self, epoch: int, consumed: int) -> tuple[Cursor, Cursor]:
        """Where an epoch began, and where the run is at a position in it."""
        known = self._known(epoch)
        base, first = (known.start, 0) if consumed < known.base_consumed else (known.base, known.base_consumed)
        return known.start, self.plan.advance(base, (consumed - first) // self.plan.global_batch_size)

    def course(self, epoch: int, consumed: int) -> MixtureCourse:
        return MixtureCourse(self.plan, epoch, *self.cursor_at(epoch, consumed))

    def place(self) -> Place:
        """From where on a pipeline that starts now reads."""
        epoch, start, here = self.cursor()
        return Place(
            plan=self.plan,
            orders=self._orders,
            epoch=epoch,
            start=start,
            consumed=here.position - start.position,
            here=here,
        )

    def set_weights(self, weights: Mapping[str, float], at: int | None) -> None:
        """Change weights by name, from the upcoming batch on or from the first at position ``at`` of the run on."""
        epoch, start, here = self.cursor()
        if at is not None:
            check_position("set_weights(at=)", at, 0)
        position = here.position if at is None else int(at)
        if position < here.position:
            raise ConfigError(
                f"set_weights(at={at}): the run is at {here.position:,} samples already; give a later one"
            )
        index = max(i for i, change in enumerate(self.plan.changes) if change.position <= position)
        current = self.plan.changes[index].weights
        changed = update_weights(self._sources.names, current, weights, self._stratified)
        self.plan = self.plan.change_weights(position, changed)
        self._stand(epoch, start, here, self.is_loaded)

    def _stand(self, epoch: int, start: Cursor, here: Cursor, is_loaded: bool) -> None:
        """Go to a place, of which alone the epochs are counted from now on."""
        self._epochs = {e: v for e, v in self._epochs.items() if e < epoch}
        self._epochs[epoch] = self._epoch(start, here)
        self.epoch, self.consumed, self.is_loaded = epoch, here.position - start.position, is_loaded

    # -- states ---------------------------------------------------------------------------------------------------

    def to_state(self) -> MixtureState:
        epoch, start, here = self.cursor()
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
                    stream=self._stream_state(k),
                )
                for k, (source, ordered) in enumerate(zip(self._sources, self._orders, strict=True))
            ),
            parted=parted,
        )

    def count_epochs(self, source: int, taken: int) -> float:
        """How often a whole source has come where so many of its samples were handed out."""
        return float(taken / self._sources[source].num_samples)

    def _stream_state(self, source: int) -> Mapping[str, Any]:
        """What a state has of a source besides, where its outputs are not arithmetic."""
        return {}

    def _check_stream(self, source: OpenSource, state: SourceState, lanes: int) -> None:
        """Raise StateMismatchError where what a state has of a source besides means nothing here."""
        if state.stream:
            refuse_other_stream(source.name, state.stream, {})

    def check_state(self, state: Mapping[str, Any]) -> MixtureState:
        loaded = MixtureState.from_dict(state)
        for name, value in (("seed", self._order.seed), ("shuffle", self._order.shuffle), ("lanes", self._fixed_lanes)):
            if value is not None and getattr(loaded, name) != value:
                raise StateMismatchError(
                    "the state belongs to another run's order and cannot be resumed here; "
                    f"{name}: {getattr(loaded, name)!r} in the state, {value!r} here"
                )
        known = match_sources(self._sources, loaded)
        for source, found in zip(self._sources, known, strict=True):
            if found is not None:
                self._check_stream(source, found, loaded.lanes)
            for name, value in self._fixed.items() if found is not None else ():
                if value is not None and getattr(found, name) != value:
                    raise StateMismatchError(
                        f"the source {source.name!r} has {name}={getattr(found, name)} in the state, {value} here; "
                        "leave it out, or give that of the state"
                    )
        return loaded

    def load(self, state: MixtureState, tell: Tell = tell_nobody) -> None:
        self._take_over(state, match_sources(self._sources, state))

    def _take_over(self, state: MixtureState, known: Sequence[SourceState | None]) -> None:
        self._order = replace(self._order, lanes=state.lanes)
        self._orders = [
            self._ordered(number, replace(ordered.order, lanes=state.lanes) if old is None else state.order_of(old))
            for number, (ordered, old) in enumerate(zip(self._orders, known, strict=True))
        ]
        start = Cursor(*state.start, tuple(0 if old is None else old.start for old in known))
        here = Cursor(*state.here, tuple(0 if old is None else old.taken for old in known))
        kept = {old.name for old in known if old is not None}
        self._parted = tuple(old for old in (*state.parted, *state.sources) if old.name not in kept)
        self._parted_in = state.epoch
        changes, news = merge_changes(self._sources.names, self._given, state, known, self._stratified)
        self.plan = replace(self.plan, changes=changes)
        self._epochs = {}
        self._stand(state.epoch, start, here, True)
        self.skip_end()
        if news:
            warnings.warn("the mixture is not the state's: " + "; ".join(news), MixtureChangedWarning, stacklevel=4)
