"""The assembler of a mixture of which sources drop or pack samples: what each has to give, agreed upon and dealt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..columns import IntArray
from ..errors import PartitionError
from ..metrics import Counters
from ..order.cursors import Cursors
from ..order.mixtures.laps import Lap, is_over
from ..order.mixtures.mixture import Cursor
from ..order.outputs import keeper_ranks
from ..order.plan import EpochPlan, share_bounds
from ..pipeline.assembler import Equipment, Start, hand_over, pick_uses, steps_at_once
from ..pipeline.delivery_queue import Delivery
from ..sampler.mixture import StreamPlace
from ..sources.fields import check_fields
from ..sources.kinds import Kind
from ..sources.quarantine import Quarantine
from ..sources.sources import Sources
from ..streams.assembler import choose_feeding
from ..streams.epoch_supply import EpochSupply
from ..streams.ledger import EpochLedger
from ..streams.make_work import make_work
from ..streams.waiting import wait_for_ranks
from ..streams.work import WindowWork
from .dealing import Dealer, DealtSteps
from .source_view import see_source
from .supply import SourceSupply

_STRIDE = 64  # steps' outputs that are passed by together, of what was handed out before
_MOST_PARTS = 64  # epochs of sources that are dealt together
_AHEAD_AT_ONCE = 8
_PATIENCE = 16  # spans for which a lane of another rank is kept that was needed

OpenLedger = Callable[[int, int], EpochLedger]


class MixedStreamAssembler:
    """Deals what the supplies of all sources have agreed upon. Used by the pipeline's thread.

    Mutable state: one supply for each source that has been taken of, and where the run is in the mixture.
    """

    def __init__(
        self,
        equipment: Equipment,
        start: Start,
        *,
        sources: Sources,
        kinds: Sequence[Kind],
        quarantine: Quarantine,
        place: Callable[[], StreamPlace],
        open_ledger: OpenLedger,
        is_logged: bool,
        counts: Sequence[Counters],
    ) -> None:
        self._equipment = equipment
        self._share = start.share
        self._sources = sources
        self._kinds = kinds
        self._place = place()
        self._open_ledger = open_ledger
        self._is_logged = is_logged
        sizes = np.diff(
            share_bounds(np.array([self._share.global_batch_size]), self._share.world_size, self._share.weights)[0]
        )
        if not sizes.all():
            raise PartitionError(
                f"shares={list(self._share.weights or ())} of a global batch of {self._share.global_batch_size} leave "
                f"nothing to rank {int(sizes.argmin())}; where samples are dropped, each rank needs one at least"
            )
        self._seen = [see_source(equipment, sources, kind, k, self._place.orders[k]) for k, kind in enumerate(kinds)]
        self._works = [self._make_work(k, quarantine) for k in range(len(sources))]
        self._feeding = [
            choose_feeding(self._works[k], seen, len(sources), patience=_PATIENCE) for k, seen in enumerate(self._seen)
        ]
        self._supplies: dict[int, SourceSupply] = {}
        self._dealer = Dealer(equipment.maker, self._share, sources, self._seen, self._works, counts)
        self._waiting: tuple[str, float] | None = None
        streaming = next(k for k, source in enumerate(sources) if source.reshaping is not None)
        open_ledger(streaming, self._place.laps[streaming].epoch)  # refuses ranks without a channel

    def _make_work(self, number: int, quarantine: Quarantine) -> WindowWork:
        source = self._sources[number]
        own = quarantine.of_source(number)
        return make_work(source, self._seen[number], own)

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        check_fields(self._sources, self._kinds, self._equipment.maker)
        place, plan, size = self._place, self._place.plan, self._share.global_batch_size
        epoch, consumed, here, starts, laps = place.epoch, place.consumed, place.here, place.starts, place.laps
        most = self._choose_steps()
        at_once = 1  # so that the first batch does not wait for others
        while not self._equipment.stopping.is_set():
            taken = plan.bounds(here, 2 * at_once)
            steps = self._agree(taken, at_once, here, laps)
            if self._equipment.stopping.is_set():
                return
            steps = self._bound_parts(taken[: steps + 1])
            by_step = [laps, *(self._laps_at(taken[step + 1], laps) for step in range(steps))]
            weights = plan.changes[-1].weights
            ends = [step for step in range(1, steps + 1) if is_over(plan.stop, starts, by_step[step], weights)]
            steps = ends[0] if ends else steps
            bounds = consumed + np.arange(steps + 1, dtype=np.int64) * size
            if not self._deliver(epoch, bounds, taken[: steps + 1], by_step[: steps + 1], is_end=bool(ends)):
                return
            here, laps, consumed = plan.advance(here, steps), by_step[steps], int(bounds[-1])
            for number, supply in self._supplies.items():
                supply.pass_by(int(taken[steps, number]))
            self._look_ahead()
            if ends:
                if not self._equipment.deliver(Delivery.end_of(epoch, consumed, consumed)):
                    return
                epoch, consumed, starts = epoch + 1, 0, laps
            at_once = min(most, 2 * at_once)

    def _choose_steps(self) -> int:
        """The most steps that are dealt together."""
        output_bytes = max(work.output_bytes for work in self._works)
        return steps_at_once(self._equipment.options, self._share.batch_size, output_bytes)

    def _supply(self, number: int, taken: int, lap: Lap) -> SourceSupply:
        """A source's supply, begun where the run is when it is first taken of."""
        if number not in self._supplies:
            assert lap == self._place.laps[number]  # it was not taken of since the pipeline began
            self._supplies[number] = SourceSupply(
                self._sources[number].name,
                partial(self._make_epoch, number),
                lap=lap,
                taken=taken,
                cursors=self._place.cursors[number],
                stride=_STRIDE * self._share.global_batch_size,
            )
        return self._supplies[number]

    def _make_epoch(self, number: int, epoch: int, position: int, cursors: Cursors) -> EpochSupply:
        source = self._place.orders[number]
        keepers = keeper_ranks(source.order.lanes, self._share.world_size)
        return EpochSupply(
            EpochPlan(source.chunk_samples, source.order, epoch, source.selection),
            self._share,
            self._works[number],
            self._seen[number],
            self._open_ledger(number, epoch),
            self._feeding[number],
            position=position,
            cursors=cursors,
            lanes=np.flatnonzero(keepers == self._share.rank).tolist(),
        )

    def _agree(self, taken: IntArray, at_once: int, here: Cursor, laps: Sequence[Lap]) -> int:
        """How many of the first ``at_once`` steps all ranks know enough of to deal them; one or more.

        ``taken`` (2 * at_once + 1, sources) are the outputs of the run before each step. Raises what keeps a source
        from filling the first one.
        """
        used = np.flatnonzero(taken[at_once] > taken[0]).tolist()
        supplies = {number: self._supply(number, int(taken[0, number]), laps[number]) for number in used}
        goals = {k: (int(taken[at_once, k]), int(taken[2 * at_once, k])) for k in used}
        for number, supply in supplies.items():
            supply.rate = max(1.0, goals[number][0] - int(taken[0, number])) / at_once
            supply.work(*goals[number])

        def settled(number: int) -> int:
            # Where a source is now is known, whether or not other ranks have worked on what it gives to later steps.
            return max(supplies[number].settled, int(taken[0, number]))

        def lacking() -> list[int]:
            return [k for k in used if settled(k) < taken[1, k]]

        def look() -> bool:
            short = lacking()
            before = [supplies[number].settled for number in short]
            for number in short:
                supplies[number].look()
                supplies[number].work(*goals[number])
            return before != [supplies[number].settled for number in short]

        def is_enough() -> bool:
            short = lacking()
            return not short or any(supplies[k].is_blocked(int(taken[1, k])) for k in short)

        if not is_enough():
            self._wait(is_enough, look, [supplies[k].describe_wait(int(taken[1, k])) for k in lacking()])
        for number in lacking():
            supplies[number].raise_blocked(int(taken[1, number]))
        return int(min(np.searchsorted(taken[1 : at_once + 1, k], settled(k), side="right") for k in used))

    def _wait(self, is_enough: Callable[[], bool], look: Callable[[], bool], what: Sequence[str | None]) -> None:
        told = next((text for text in what if text), "other ranks")
        self._waiting = told, time.perf_counter()
        try:
            wait_for_ranks(is_enough, look, self._equipment.stopping.is_set, told)
        finally:
            self._waiting = None

    def _bound_parts(self, taken: IntArray) -> int:
        """How many steps have a number of sources' epochs in them that can be dealt together."""
        steps = len(taken) - 1
        while (
            steps > 1
            and sum(1 for k in self._supplies for _ in self._supplies[k].cut(taken[: steps + 1, k])) > _MOST_PARTS
        ):
            steps //= 2
        return steps

    def _laps_at(self, taken: IntArray, before: Sequence[Lap]) -> tuple[Lap, ...]:
        return tuple(
            self._supplies[k].lap_at(int(taken[k])) if k in self._supplies else lap for k, lap in enumerate(before)
        )

    # -- batches --------------------------------------------------------------------------------------------------

    def _deliver(
        self, epoch: int, bounds: IntArray, taken: IntArray, laps: Sequence[Sequence[Lap]], *, is_end: bool
    ) -> bool:
        """Deliver some steps that are settled; False where the pipeline is stopped."""
        steps = len(bounds) - 1
        started, waited = time.perf_counter(), self._equipment.counters.totals().chunk_wait_s
        try:
            dealt = self._dealer.deal(taken, {k: s.cut(taken[:, k]) for k, s in self._supplies.items()})
        except Exception:
            if steps == 1 or self._equipment.stopping.is_set():
                raise
            return all(  # the batches before the one that needs what failed are delivered
                self._deliver(
                    epoch,
                    bounds[step : step + 2],
                    taken[step : step + 2],
                    laps[step : step + 2],
                    is_end=is_end and step == steps - 1,
                )
                for step in range(steps)
            )
        waited = self._equipment.counters.totals().chunk_wait_s - waited
        busy = max(0.0, time.perf_counter() - started - waited)
        self._equipment.counters.add(since=started, assemble_s=busy, spans=1)
        started = time.perf_counter()
        for step in range(steps):
            item = self._make(dealt, step, epoch, bounds, taken, laps[step + 1])
            item = replace(item, is_last=is_end and step == steps - 1)
            if not hand_over(self._equipment, item, started):
                return False
            started = time.perf_counter()
        return True

    def _make(
        self, dealt: DealtSteps, step: int, epoch: int, bounds: IntArray, taken: IntArray, laps: Sequence[Lap]
    ) -> Delivery:
        batch, nbytes = dealt.batch(step)
        ids, keys = dealt.ids_and_keys(step)
        dropped = None
        if self._is_logged:
            rests = [
                dealt.to_keys(number, supply.plan.epoch, supply.rest(total)[0])
                for number, source in self._supplies.items()
                if self._sources[number].reshaping is not None
                for supply, total in source.ended(int(taken[step, number]), int(taken[step + 1, number]))
            ]
            dropped = np.concatenate([dealt.dropped(step), *rests])
        return Delivery(
            epoch=epoch,
            start=int(bounds[step]),
            stop=int(bounds[step + 1]),
            ids=ids,
            nbytes=nbytes,
            batch=batch,
            logged=keys,
            dropped=dropped,
            laps=laps,
        )

    # -- reading ahead, and what others ask -----------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Request inputs of the sources that are the least far ahead, as long as the reader has room."""
        horizons = {number: supply.horizon for number, supply in self._supplies.items()}
        for _ in range(_AHEAD_AT_ONCE * len(self._supplies)):
            nearest = min(horizons, key=horizons.__getitem__, default=None)
            if nearest is None or not self._equipment.reader.has_room:
                return
            if self._supplies[nearest].look_ahead():
                horizons[nearest] = self._supplies[nearest].horizon
            else:
                del horizons[nearest]

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        uses: dict[int, int] = {}
        for number, supply in list(self._supplies.items()):
            first = self._sources.first_chunks[number]
            uses |= {first + chunk: int(1024 * use) for chunk, use in supply.next_uses().items()}
        return pick_uses(chunks, uses)

    def fail(self, error: Exception) -> None:
        for supply in list(self._supplies.values()):
            supply.tell_error(error)

    def waiting_for(self) -> dict[str, Any] | None:
        waiting = self._waiting or next((s.waiting for s in list(self._supplies.values()) if s.waiting), None)
        if waiting is None:
            return None
        what, since = waiting
        return {"waiting_for": what, "since_s": round(time.perf_counter() - since, 1)}
