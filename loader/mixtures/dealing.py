"""Steps of a mixture of which sources drop or pack samples, cut into shares and made into batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..columns import IntArray
from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..decoding.mixed_batch import MixedBatch, ReadySamples
from ..decoding.row_job import RowJob
from ..decoding.rows import Rows
from ..metrics import Counters
from ..order.plan import Share, column_segments, share_bounds
from ..order.spans import Span, pick_segments
from ..pipeline.assembler import Equipment
from ..pipeline.delivery_log import to_keys
from ..sources.sources import Sources
from ..streams.deal import find_dropped, ids_in, spread
from ..streams.epoch_supply import EpochSupply
from ..streams.feed import LaneOutputs
from ..streams.packed_batch import PackedUnit
from ..streams.row_reader import pick_rows
from ..streams.work import WindowWork
from .packed import MixedPackedBatch

_NO_IDS: IntArray = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class DealtPart:
    """What a rank has of one epoch of one source in some steps: ``rows`` of chunks, or ``samples`` that are ready.

    ``where`` (rows,) are their places among the rows of all, increasing; ``ids`` (rows,) their ids in the source;
    ``row_bytes`` what a sample takes, about.
    """

    source: int
    span: Span
    at_hand: Mapping[int, LaneOutputs]
    where: IntArray
    ids: IntArray
    rows: Rows | None
    samples: Sequence[Any]
    row_bytes: int


class Dealer:
    """Deals steps that all ranks know enough of. Used by the assembler thread."""

    def __init__(
        self,
        maker: BatchMaker,
        share: Share,
        sources: Sources,
        seen: Sequence[Equipment],
        works: Sequence[WindowWork],
        counts: Sequence[Counters],
    ) -> None:
        self.maker = maker
        self.sources = sources
        self.seen = seen
        self.works = works
        self.counts = counts
        self._share = share

    def deal(self, taken: IntArray, pieces: Mapping[int, Iterable[tuple[EpochSupply, IntArray]]]) -> DealtSteps:
        """This rank's share of some steps. ``pieces``: of each source, its epochs and (steps + 1,) positions in them.

        A step takes from each lane of each epoch its next outputs; these, sorted by (lane, source, epoch), are cut into
        shares. Raises what reading raises.
        """
        steps, share = len(taken) - 1, self._share
        # Ranks may have begun with sources in other orders, and must sort alike: else shares overlap.
        cut = [(k, supply, bounds) for k in sorted(pieces) for supply, bounds in pieces[k]]
        columns = np.stack([supply.ledger.taken_at_each(bounds) for _, supply, bounds in cut], axis=-1)
        cuts = share_bounds(np.full(steps, share.global_batch_size), share.world_size, share.weights)
        segments = column_segments(columns.reshape(steps + 1, -1), share.rank, share.world_size, cuts=cuts)
        num_valid = cuts[:, share.rank + 1] - cuts[:, share.rank]
        row_starts = np.zeros(steps + 1, np.int64)
        np.cumsum(num_valid, out=row_starts[1:])
        part_of = segments.lane % len(cut)
        parts = []
        for number, (source, supply, bounds) in enumerate(cut):
            own = pick_segments(segments, part_of == number, len(cut))
            span = Span(supply.plan.epoch, bounds, own, row_starts, num_valid)
            supply.reach_parts(own)
            if len(own.lane):
                parts.append(self._gather(source, span, supply.at_hand(own)))
        return DealtSteps(self, parts, row_starts)

    def _gather(self, source: int, span: Span, at_hand: Mapping[int, LaneOutputs]) -> DealtPart:
        work = self.works[source]
        targets_of, index_of, lanes_of = [], [], []
        for lane, index, targets in spread(span):
            targets_of.append(targets)
            index_of.append(index - at_hand[lane].first)
            lanes_of.append(at_hand[lane])
        targets = np.concatenate(targets_of)
        order = np.argsort(targets, kind="stable")
        where = targets[order]
        if not work.gives_samples:
            chunks = np.concatenate([of.chunks[index] for of, index in zip(lanes_of, index_of, strict=True)])[order]
            numbers = np.concatenate([of.rows[index] for of, index in zip(lanes_of, index_of, strict=True)])[order]
            rows = work.reader.gather(pick_rows(chunks, numbers), len(where))
            return DealtPart(source, span, at_hand, where, rows.ids, rows, (), 0)
        ids = np.concatenate([of.ids[of.places[index]] for of, index in zip(lanes_of, index_of, strict=True)])[order]
        every = [of.samples[i] for of, index in zip(lanes_of, index_of, strict=True) for i in index.tolist()]
        if not work.one_each:  # rows of what several outputs share
            numbers = np.concatenate([of.rows[index] for of, index in zip(lanes_of, index_of, strict=True)])
            every = list(zip(every, numbers.tolist(), strict=True))
        nbytes = sum(of.sample_bytes * len(index) for of, index in zip(lanes_of, index_of, strict=True))
        samples = [every[i] for i in order.tolist()]
        return DealtPart(source, span, at_hand, where, ids, None, samples, nbytes // len(samples))


@dataclass(frozen=True, slots=True)
class DealtSteps:
    """This rank's parts of some steps, whose rows begin at ``row_starts`` (steps + 1,)."""

    dealer: Dealer
    parts: Sequence[DealtPart]
    row_starts: IntArray

    def batch(self, step: int) -> tuple[UnfinishedBatch, int]:
        """A step's batch, begun now, and its bytes, about."""
        start, stop = int(self.row_starts[step]), int(self.row_starts[step + 1])
        dealer, count = self.dealer, stop - start
        ids = np.empty(count, np.int64)
        made: list[tuple[IntArray, RowJob | ReadySamples]] = []
        sequences: list[tuple[int, PackedUnit, int] | None] = [None] * count
        nbytes, by_samples = 0, False
        for part in self.parts:
            low, high = np.searchsorted(part.where, (start, stop)).tolist()
            if low == high:
                continue
            where, maker = part.where[low:high] - start, dealer.seen[part.source].maker
            ids[where] = part.ids[low:high] + dealer.sources.first_ids[part.source]
            if part.rows is not None:
                rows = part.rows.cut(low, high)
                nbytes += rows.count_bytes(maker.decoders.settled)
                by_samples |= maker.options.transform is not None
                made.append((where, maker.work(rows, part.span.epoch)))
                continue
            nbytes += part.row_bytes * (high - low)
            by_samples = True
            if dealer.works[part.source].one_each:
                made.append((where, ReadySamples(list(part.samples[low:high]))))
            else:
                for place, (unit, row) in zip(where.tolist(), part.samples[low:high], strict=True):
                    sequences[place] = part.source, unit, row
        if not made:
            packed = [each for each in sequences if each is not None]
            return MixedPackedBatch(dealer.maker, packed, dealer.counts), nbytes
        return MixedBatch(dealer.maker, made, ids, count, count, by_samples=by_samples), nbytes

    def ids_and_keys(self, step: int) -> tuple[IntArray, IntArray]:
        """The joint ids of the samples that a step gives this rank, and what a log has of them."""
        ids, keys = [_NO_IDS], [_NO_IDS]
        for part in self.parts:
            if self.dealer.works[part.source].one_each:
                low, high = np.searchsorted(part.where, self.row_starts[step : step + 2]).tolist()
                own = part.ids[low:high]
            else:
                own = ids_in(part.span, step, part.at_hand)
            ids.append(own + self.dealer.sources.first_ids[part.source])
            keys.append(self.to_keys(part.source, part.span.epoch, own))
        return np.concatenate(ids), np.concatenate(keys)

    def dropped(self, step: int) -> IntArray:
        """What a log has of the samples that were dropped on the way to this rank's of a step."""
        return np.concatenate(
            [
                _NO_IDS,
                *(
                    self.to_keys(part.source, part.span.epoch, find_dropped(part.span, step, part.at_hand))
                    for part in self.parts
                ),
            ]
        )

    def to_keys(self, source: int, epoch: int, ids: IntArray) -> IntArray:
        """What a log has of samples of a source."""
        joint: IntArray = ids + self.dealer.sources.first_ids[source]
        return to_keys(joint, np.full(len(ids), epoch, np.int64))
