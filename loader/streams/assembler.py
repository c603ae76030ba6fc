"""The assembler of streams: batches of one data set, or of a mixture, of which samples are dropped or packed.

Only reading tells how many outputs a lane yields, so ranks exchange counts::

    lane            the samples of one lane, in the order of the plan (``EpochPlan``)
      |  read ahead and worked on window by window: ``LaneBuffers`` run a source's ``LaneTransform``
    outputs         what keep=, transform= and packing= leave of them, numbered by lane
      |  counted, and posted to all ranks through the ``EpochLedger``
    agreed totals   how far all lanes are known to reach, where one ends, how many outputs an epoch has
      |  laid end to end, epoch after epoch: a ``SourceStream`` for each source
    steps           what the next global batches take of each epoch of each source
      |  cut into the ranks' shares by the ``Dealer``
    batches         those of this rank, with what was dropped on the way to them

One data set and a mixture differ in their ``Epochs``: where these end, where an epoch's tail begins (``TailRule``), and
which lanes a rank keeps to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PartitionError
from ..order.outputs import Cursors
from ..order.plan import Share, share_bounds
from ..order.spans import SourceOrder
from ..pipeline.assembler import Equipment, Start, gather_apart, hand_over, pick_uses, steps_at_once, time_assembly
from ..pipeline.delivery_log import to_keys
from ..pipeline.delivery_queue import Delivery
from ..ranks.channel import wait_for_ranks
from ..ranks.ledger import EpochLedger, Ledgers, order_key
from ..sources.fields import check_fields
from .dealing import Dealer, DealtIds, DealtSteps
from .epoch_supply import EpochSupply
from .epochs import CutEpochs, Epochs, JoinedEpochs, Steps
from .source_stream import SourceStream
from .source_view import choose_lane_options, equipment_of, make_transform

if TYPE_CHECKING:
    from ..columns import IntArray
    from ..counters import Counters
    from ..decoding.batch import UnfinishedBatch
    from ..reading.bad.samples import BadSamples
    from ..sampler.mixture import StreamPlace
    from ..sources.kinds import Kind
    from ..sources.quarantine import Quarantine
    from ..sources.sources import Sources

_STRIDE = 64  # steps whose outputs, handed out before, are skipped together
_AHEAD_AT_ONCE = 8
_NO_IDS: IntArray = np.empty(0, np.int64)

OpenLedger = Callable[[int, int], EpochLedger]


class StreamAssembler:
    """Deals the outputs that all ranks have agreed upon, of all sources. Used by the pipeline's thread.

    Mutable state: a stream for each source that has been taken of, and where the run is (``epochs``).
    """

    def __init__(
        self,
        equipment: Equipment,
        share: Share,
        *,
        sources: Sources,
        kinds: Sequence[Kind],
        orders: Sequence[SourceOrder],
        epochs: Epochs,
        quarantine: Quarantine,
        open_ledger: OpenLedger,
        is_logged: bool,
        bad: Sequence[BadSamples | None],
        counts: Sequence[Counters] = (),
    ) -> None:
        """Take, by source, ``orders``, ``counts`` of what is packed, ``bad`` samples, and ``open_ledger`` of (source,
        epoch).

        ``kinds`` are those of single sources, in their order.
        """
        self._equipment = equipment
        self._share = share
        self._sources = sources
        self._kinds = kinds
        self._orders = orders
        self._epochs = epochs
        self._open_ledger = open_ledger
        self._is_logged = is_logged
        sizes = np.diff(share_bounds(np.array([share.global_batch_size]), share.world_size, share.weights)[0])
        if not sizes.all():
            raise PartitionError(
                f"shares={list(share.weights or ())} of a global batch of {share.global_batch_size} leave "
                f"nothing to rank {int(sizes.argmin())}; where samples are dropped, each rank needs one at least"
            )
        numbers = range(len(sources))
        self._of = [equipment_of(equipment, sources, kinds[k], k, orders[k].order.seed, bad[k]) for k in numbers]
        self._transforms = [make_transform(sources[k], self._of[k], quarantine.of_source(k)) for k in numbers]
        self._options = [
            choose_lane_options(self._transforms[k], self._of[k], len(sources), patience=epochs.patience)
            for k in numbers
        ]
        self._streams: dict[int, SourceStream] = {}
        self._dealer = Dealer(equipment.maker, share, sources, self._of, self._transforms, counts)
        self._waiting: tuple[str, float] | None = None
        dropping = next(k for k in numbers if sources[k].reshaping is not None)
        open_ledger(dropping, epochs.laps[dropping].epoch)  # refuses ranks without a channel

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        check_fields(self._sources, self._kinds, self._equipment.maker)
        output_bytes = max(transform.output_bytes for transform in self._transforms)
        most = steps_at_once(self._equipment.options, self._share.batch_size, output_bytes)
        at_once = 1  # so that the first batch does not wait for others
        while not self._equipment.stopping.is_set():
            steps = self._agree(at_once)
            if self._equipment.stopping.is_set() or not self._deliver(steps):
                return
            end = self._end(steps) if steps.is_end else None
            self._epochs.pass_by(steps)
            for number, stream in self._streams.items():
                stream.pass_by(int(steps.taken[-1, number]))
            self._look_ahead()
            if end is not None and not self._equipment.deliver(end):
                return
            at_once = 1 if end is not None else min(most, 2 * at_once)

    def _stream(self, number: int, taken: int) -> SourceStream:
        """Get a source's stream, begun where the run is when it is first taken of."""
        if number not in self._streams:
            lap, cursors = self._epochs.laps[number], self._epochs.cursors[number]
            stream = self._streams[number] = SourceStream(
                self._sources.names[number] if self._sources.is_mixed else None,
                partial(self._make_epoch, number),
                self._epochs.rule,
                lap=lap,
                taken=taken,
                cursors=cursors,
            )
            if not self._epochs.cursors_are_exact:
                stream.catch_up(cursors.outputs, _STRIDE * self._share.global_batch_size)
        return self._streams[number]

    def _make_epoch(self, number: int, epoch: int, position: int, cursors: Cursors) -> EpochSupply:
        source, share = self._orders[number], self._share
        return EpochSupply(
            source.plan(epoch),
            share,
            self._transforms[number],
            self._of[number],
            self._open_ledger(number, epoch),
            self._options[number],
            cursors=cursors,
            own=self._epochs.own_lanes(position, source.order.lanes, share).tolist(),
        )

    # -- agreeing -------------------------------------------------------------------------------------------------

    def _agree(self, at_once: int) -> Steps:
        """Agree on the next steps, at most ``at_once``, that all ranks know enough of to deal; at least one.

        None are left at the end of an epoch. Raises the error that keeps a source from filling the first one.
        """
        taken = self._epochs.plan(2 * at_once)
        here: list[int] = taken[0].tolist()
        used = np.flatnonzero(taken[at_once] > taken[0]).tolist()
        streams = {number: self._stream(number, here[number]) for number in used}
        goals = {k: (int(taken[at_once, k]), int(taken[2 * at_once, k])) for k in used}
        for number, stream in streams.items():
            stream.rate = max(1.0, goals[number][0] - here[number]) / at_once
            stream.work(*goals[number])

        def settled(number: int) -> int:
            # A source's place now is known, even before other ranks have worked on its outputs for later steps.
            return max(streams[number].settled, here[number])

        def lacking() -> list[int]:
            return [k for k in used if settled(k) < taken[1, k]]

        def look() -> bool:
            short = lacking()
            before = [streams[number].settled for number in short]
            for number in short:
                streams[number].look()
                streams[number].work(*goals[number])
            return before != [streams[number].settled for number in short]

        def is_enough() -> bool:
            short = lacking()
            return not short or any(streams[k].is_blocked(int(taken[1, k])) for k in short)

        if not is_enough():
            self._wait(is_enough, look, [streams[k].describe_wait(int(taken[1, k])) for k in lacking()])
        for number in lacking():
            streams[number].raise_blocked(int(taken[1, number]))
        steps = min(int(np.searchsorted(taken[1 : at_once + 1, k], settled(k), side="right")) for k in used)
        return self._epochs.cut(taken[: steps + 1], self._streams)

    def _wait(self, is_enough: Callable[[], bool], look: Callable[[], bool], reasons: Sequence[str | None]) -> None:
        reason = next((text for text in reasons if text), "other ranks")
        self._waiting = reason, time.perf_counter()
        try:
            wait_for_ranks(is_enough, look, self._equipment.stopping.is_set, reason)
        finally:
            self._waiting = None

    # -- delivering -----------------------------------------------------------------------------------------------

    def _deliver(self, steps: Steps) -> bool:
        """Deliver some steps that are settled; False where the pipeline is stopped."""
        if not len(steps):
            return True
        apart = gather_apart(steps, self._deal, Steps.apart, self._equipment.stopping)
        return all(self._hand_out(part, dealt) for part, dealt in apart)

    def _deal(self, steps: Steps) -> DealtSteps:
        with time_assembly(self._equipment.counters, spans=1):
            return self._dealer.deal(steps.taken, self._cut(steps.taken))

    def _hand_out(self, steps: Steps, dealt: DealtSteps) -> bool:
        ids, dropped = dealt.ids(), dealt.dropped() if self._is_logged else None
        started = time.perf_counter()
        for step, (batch, nbytes) in enumerate(dealt.batches()):
            item = self._describe(steps, step, ids, dropped, batch, nbytes)
            if not hand_over(self._equipment, item, started):
                return False
            started = time.perf_counter()
        return True

    def _cut(self, taken: IntArray) -> Iterator[tuple[int, EpochSupply, IntArray]]:
        """Yield the epochs that steps take of, in the order of sources: alike on ranks that resumed differently."""
        for number in sorted(self._streams):
            for supply, positions in self._streams[number].cut(taken[:, number]):
                yield number, supply, positions

    def _describe(
        self,
        steps: Steps,
        step: int,
        ids: Sequence[DealtIds],
        dropped: Sequence[DealtIds] | None,
        batch: UnfinishedBatch,
        nbytes: int,
    ) -> Delivery:
        """Describe a step's batch: its samples on this rank, and the positions that it consumes."""
        passed_over = left = None
        if dropped is not None:
            rest, left = self._rest(steps.taken[step], steps.taken[step + 1])
            passed_over = np.concatenate([self._to_keys(dropped, step), rest])
        return Delivery(
            epoch=steps.epoch,
            start=int(steps.bounds[step]),
            stop=int(steps.bounds[step + 1]),
            ids=_join([by_step[step] for _, by_step in ids]),
            nbytes=nbytes,
            batch=batch,
            logged=self._to_keys(ids, step) if self._sources.is_mixed else None,
            dropped=passed_over,
            left=left,
            is_last=steps.is_end and step == len(steps) - 1,
            laps=None if steps.laps is None else steps.laps[step + 1],
        )

    def _end(self, steps: Steps) -> Delivery:
        """Make the end of the epoch after some steps."""
        stop = int(steps.bounds[-1])
        end = Delivery.end_of(steps.epoch, stop, stop)
        if len(steps) or not self._is_logged:
            return end
        dropped, left = self._rest(steps.taken[-1] - 1, steps.taken[-1])  # no batch was known to be the last
        return replace(end, dropped=dropped, left=left)

    def _rest(self, before: IntArray, after: IntArray) -> tuple[IntArray, IntArray | None]:
        """Collect this rank's inputs at the ends of epochs between two steps: the inputs dropped, and those left over.

        ``before`` and ``after`` (sources,) are outputs of the run. A mixture has none left over.
        """
        dropped, left, is_end = [_NO_IDS], [_NO_IDS], False
        for number, stream in self._streams.items():
            if self._sources[number].reshaping is not None:
                for supply, total in stream.ended(int(before[number]), int(after[number])):
                    of_epoch = supply.rest(total)
                    joint = of_epoch[0] + self._sources.first_ids[number]
                    dropped.append(self._to_keys([(supply.plan.epoch, [joint])], 0))
                    left.append(of_epoch[1])
                    is_end = True
        return np.concatenate(dropped), np.concatenate(left) if is_end and not self._sources.is_mixed else None

    def _to_keys(self, dealt: Sequence[DealtIds], step: int) -> IntArray:
        """Make the log keys of a step's samples."""
        if not self._sources.is_mixed:
            return _join([by_step[step] for _, by_step in dealt])
        every = [(epoch, by_step[step]) for epoch, by_step in dealt]
        return _join([to_keys(ids, np.full(len(ids), epoch, np.int64)) for epoch, ids in every])

    # -- reading ahead, and what others ask -----------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Request inputs of the sources that are the least far ahead, as long as the reader has room."""
        horizons = {number: stream.horizon for number, stream in self._streams.items()}
        for _ in range(_AHEAD_AT_ONCE * len(self._streams)):
            nearest = min(horizons, key=horizons.__getitem__, default=None)
            if nearest is None or not self._equipment.reader.has_room:
                return
            if self._streams[nearest].look_ahead():
                horizons[nearest] = self._streams[nearest].horizon
            else:
                del horizons[nearest]

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        uses: dict[int, int] = {}
        for number, stream in list(self._streams.items()):
            first = self._sources.first_chunks[number]
            uses |= {first + chunk: int(1024 * use) for chunk, use in stream.next_uses().items()}
        return pick_uses(chunks, uses)

    def fail(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            stream.post_error(error)

    def waiting_for(self) -> dict[str, Any] | None:
        waiting = self._waiting or next((s.waiting for s in list(self._streams.values()) if s.waiting), None)
        if waiting is None:
            return None
        what, since = waiting
        return {"waiting_for": what, "since_s": round(time.perf_counter() - since, 1)}


def _join(arrays: Sequence[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate([_NO_IDS, *arrays])


def assemble_one(
    equipment: Equipment,
    start: Start,
    *,
    sources: Sources,
    kinds: Sequence[Kind],
    quarantine: Quarantine,
    ledgers: Ledgers,
    last_batch: str,
    is_logged: bool,
    bad: Sequence[BadSamples | None],
) -> StreamAssembler:
    """Make the assembler of one data set."""
    [source], order = sources, start.order
    key, lanes = order_key(order), order.lanes
    cursors = Cursors.at_start(lanes) if start.cursors is None else start.cursors
    return StreamAssembler(
        equipment,
        start.share,
        sources=sources,
        kinds=kinds,
        orders=[
            SourceOrder(chunk_samples=source.chunk_samples, order=order, first_chunk=0, selection=source.selection)
        ],
        epochs=CutEpochs(start.share.global_batch_size, start.epoch, start.position, cursors, last_batch),
        quarantine=quarantine,
        open_ledger=lambda _, epoch: ledgers.open(key, lanes, epoch),
        is_logged=is_logged,
        bad=bad,
    )


def assemble_mixture(
    equipment: Equipment,
    share: Share,
    *,
    sources: Sources,
    kinds: Sequence[Kind],
    quarantine: Quarantine,
    place: StreamPlace,
    open_ledger: OpenLedger,
    counts: Sequence[Counters],
    is_logged: bool,
    bad: Sequence[BadSamples | None],
) -> StreamAssembler:
    """Make the assembler of a mixture, from ``place`` on."""
    return StreamAssembler(
        equipment,
        share,
        sources=sources,
        kinds=kinds,
        orders=place.orders,
        epochs=JoinedEpochs(share.global_batch_size, place),
        quarantine=quarantine,
        open_ledger=open_ledger,
        is_logged=is_logged,
        bad=bad,
        counts=counts,
    )
