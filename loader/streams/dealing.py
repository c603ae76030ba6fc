"""Steps that all ranks agree on, cut into shares: this rank's batches, with the inputs accounted for by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..columns import IntArray
from ..decoding.mixed_batch import MixedBatch, ReadySamples
from ..order.plan import Share, column_segments
from ..order.spans import Span, pick_segments
from ..pipeline.assembler import Equipment, cut_step
from .lanes import LaneOutputs
from .transforms import Collected, LaneTransform, StepRows, pick_rows

if TYPE_CHECKING:
    from ..counters import Counters
    from ..decoding.batch import BatchMaker, UnfinishedBatch
    from ..decoding.row_job import RowJob
    from ..decoding.rows import Rows
    from ..sources.sources import Sources
    from .epoch_supply import EpochSupply

_NO_IDS: IntArray = np.empty(0, np.int64)

DealtIds = tuple[int, Sequence[IntArray]]  # the epoch of a source, and joint ids of its samples by step


@dataclass(frozen=True, slots=True)
class DealtPart:
    """A rank's part of one epoch of one source in some steps: ``rows`` of chunks, or ``samples`` that are ready.

    ``where`` (n,) are their places among the rows of all, increasing; ``ids`` (n,) their ids in the source;
    ``numbers`` (n,) the rows of ``samples`` that several outputs share, if they do; ``row_bytes`` the size of one,
    about.
    """

    source: int
    span: Span
    at_hand: Mapping[int, LaneOutputs]
    where: IntArray
    ids: IntArray
    numbers: IntArray
    rows: Rows | None
    samples: Sequence[Any]
    row_bytes: int


class Dealer:
    """Deals steps. ``equipment`` and ``transforms`` are those of each source. Used by the assembler thread.

    ``counts``: of each source of a mixture, the counters of what is packed.
    """

    def __init__(
        self,
        maker: BatchMaker,
        share: Share,
        sources: Sources,
        equipment: Sequence[Equipment],
        transforms: Sequence[LaneTransform],
        counts: Sequence[Counters],
    ) -> None:
        self.maker = maker
        self.share = share
        self.sources = sources
        self.equipment = equipment
        self.transforms = transforms
        self.counts = counts

    def deal(self, taken: IntArray, parts: Iterable[tuple[int, EpochSupply, IntArray]]) -> DealtSteps:
        """Deal this rank's share of the steps between ``taken`` (steps + 1, sources) outputs.

        ``parts``: the epochs that these are of, in the order of sources: the source's number, the epoch's supply, and
        (steps + 1,) positions in it. A step takes from each lane of each epoch its next outputs; these, sorted by
        (lane, source, epoch), are cut into shares. Raises the errors of reading.
        """
        steps, share, every = len(taken) - 1, self.share, list(parts)
        columns = np.stack([supply.ledger.taken_at_each(bounds) for _, supply, bounds in every], axis=-1)
        columns = columns.reshape(steps + 1, -1)
        sizes = np.diff(taken.sum(axis=1))
        cuts = share.cuts(sizes)
        segments = column_segments(columns, share.rank, share.world_size, cuts=cuts)
        num_valid = cuts[:, share.rank + 1] - cuts[:, share.rank]
        if not num_valid[-1]:  # the last step of an epoch may be that small: an output of others shows its fields
            segments = segments.join(column_segments(columns[-2:], 0, int(sizes[-1])), steps - 1)
        row_starts = np.zeros(steps + 1, np.int64)
        np.cumsum(np.maximum(num_valid, 1), out=row_starts[1:])
        part_of = segments.lane % len(every)
        dealt = []
        for number, (source, supply, bounds) in enumerate(every):
            own = pick_segments(segments, part_of == number, len(every))
            supply.reach_parts(own)
            if len(own.lane):
                span = Span(supply.plan.epoch, bounds, own, row_starts, num_valid)
                dealt.append(self._gather(source, span, supply.at_hand(own)))
        return DealtSteps(self, dealt, row_starts, num_valid)

    def _gather(self, source: int, span: Span, at_hand: Mapping[int, LaneOutputs]) -> DealtPart:
        transform = self.transforms[source]
        parts = [(at_hand[lane], index - at_hand[lane].first, targets) for lane, index, targets in spread(span)]
        targets = np.concatenate([targets for _, _, targets in parts])
        order = np.argsort(targets, kind="stable")
        where = targets[order]
        numbers = _NO_IDS
        if not transform.gives_samples:
            chunks = np.concatenate([of.chunks[index] for of, index, _ in parts])[order]
            rows = np.concatenate([of.rows[index] for of, index, _ in parts])[order]
            gathered = transform.reader.gather(pick_rows(chunks, rows), len(where))
            return DealtPart(source, span, at_hand, where, gathered.ids, numbers, gathered, (), 0)
        ids = np.concatenate([of.ids[of.places[index]] for of, index, _ in parts])[order]
        every = [of.samples[i] for of, index, _ in parts for i in index.tolist()]
        row_bytes = transform.output_bytes
        if transform.is_per_input:
            row_bytes = sum(of.sample_bytes * len(index) for of, index, _ in parts) // len(where)
        else:
            numbers = np.concatenate([of.rows[index] for of, index, _ in parts])[order]
        samples = [every[i] for i in order.tolist()]
        return DealtPart(source, span, at_hand, where, ids, numbers, None, samples, row_bytes)


@dataclass(frozen=True, slots=True)
class DealtSteps:
    """This rank's parts of some steps: their rows begin at ``row_starts`` (steps + 1,), ``num_valid`` of them count."""

    dealer: Dealer
    parts: Sequence[DealtPart]
    row_starts: IntArray
    num_valid: IntArray

    def batches(self) -> Iterator[tuple[UnfinishedBatch, int]]:
        """Yield a batch for each step, begun when it is asked for, and its estimated bytes."""
        first = self.parts[0]
        if self.dealer.sources.is_mixed and self.dealer.transforms[first.source].is_per_input:
            return map(self._mix, range(len(self.num_valid)))
        return self._join() if first.rows is None else self._start(first, first.rows)

    def _start(self, part: DealtPart, gathered: Rows) -> Iterator[tuple[UnfinishedBatch, int]]:
        """Start batches of rows of one data set."""
        maker = self.dealer.maker
        for step in range(part.span.steps):
            rows, num_rows, num_valid = cut_step(gathered, part.span, step, self.dealer.share)
            yield maker.start(rows, part.span.epoch, num_rows, num_valid), rows.count_bytes(maker.decoders.settled)

    def _join(self) -> Iterator[tuple[UnfinishedBatch, int]]:
        """Join samples of one data set, or sequences; a mixture has these of all its sources or of none."""
        dealer, count, share = self.dealer, int(self.row_starts[-1]), self.dealer.share
        ids, numbers, sources = np.zeros((3, count), np.int64)
        samples: list[Any] = [None] * count
        for part in self.parts:
            ids[part.where], sources[part.where] = part.ids, part.source
            if len(part.numbers):
                numbers[part.where] = part.numbers
            for place, sample in zip(part.where.tolist(), part.samples, strict=True):
                samples[place] = sample
        outputs = Collected(samples, numbers, ids, sources if dealer.sources.is_mixed else None, dealer.counts)
        starts, valid = self.row_starts.tolist(), self.num_valid.tolist()
        steps = [
            StepRows(low, high, max(num_valid, share.batch_size) if share.pad else num_valid, num_valid)
            for low, high, num_valid in zip(starts[:-1], starts[1:], valid, strict=True)
        ]
        first = self.parts[0]
        for rows, batch in zip(steps, dealer.transforms[first.source].join(outputs, steps), strict=True):
            yield batch, first.row_bytes * len(rows.picked)

    def _mix(self, step: int) -> tuple[UnfinishedBatch, int]:
        """Mix rows and samples of several sources."""
        start, stop = self.row_starts[step : step + 2].tolist()
        dealer, count = self.dealer, stop - start
        ids = np.empty(count, np.int64)
        made: list[tuple[IntArray, RowJob | ReadySamples]] = []
        nbytes, by_samples = 0, False
        for part in self.parts:
            low, high = np.searchsorted(part.where, (start, stop)).tolist()
            if low == high:
                continue
            where, maker = part.where[low:high] - start, dealer.equipment[part.source].maker
            ids[where] = part.ids[low:high] + dealer.sources.first_ids[part.source]
            if part.rows is None:
                nbytes += part.row_bytes * (high - low)
                by_samples = True
                made.append((where, ReadySamples(list(part.samples[low:high]))))
            else:
                rows = part.rows.cut(low, high)
                nbytes += rows.count_bytes(maker.decoders.settled)
                by_samples |= maker.options.transform is not None
                made.append((where, maker.work(rows, part.span.epoch)))
        return MixedBatch(dealer.maker, made, ids, count, count, by_samples=by_samples), nbytes

    # -- what is accounted for ------------------------------------------------------------------------------------

    def ids(self) -> list[DealtIds]:
        """List, by step, the ids of this rank's samples; a packed one is in the first sequence that holds some."""
        return [(part.span.epoch, self._delivered(part)) for part in self.parts]

    def dropped(self) -> list[DealtIds]:
        """List the samples that were dropped on the way to these."""
        return [(part.span.epoch, self._of_outputs(part, LaneOutputs.dropped)) for part in self.parts]

    def _delivered(self, part: DealtPart) -> list[IntArray]:
        if not self.dealer.transforms[part.source].is_per_input:
            return self._of_outputs(part, LaneOutputs.delivered)
        edges = np.searchsorted(part.where, [self.row_starts[:-1], self.row_starts[:-1] + self.num_valid])
        joint = part.ids + self.dealer.sources.first_ids[part.source]
        return [joint[low:high] for low, high in zip(*edges.tolist(), strict=True)]

    def _of_outputs(self, part: DealtPart, find: Callable[[LaneOutputs, int, int], IntArray]) -> list[IntArray]:
        """Collect the result of ``find`` for a part's outputs, by step."""
        own = part.span.segments
        runs = zip(own.lane.tolist(), own.start.tolist(), own.stop.tolist(), strict=True)
        ids = [find(part.at_hand[lane], start, stop) for lane, start, stop in runs]
        ends = np.cumsum([0, *map(len, ids)])
        bounds = ends[np.searchsorted(own.step, np.arange(part.span.steps + 1))].tolist()
        joint: IntArray = np.concatenate([_NO_IDS, *ids]) + self.dealer.sources.first_ids[part.source]
        return [
            joint[low:high] if num_valid else _NO_IDS
            for low, high, num_valid in zip(bounds[:-1], bounds[1:], self.num_valid.tolist(), strict=True)
        ]


def spread(span: Span) -> Iterator[tuple[int, IntArray, IntArray]]:
    """Yield, lane by lane, the numbers of its outputs in a span, and the rows of the span that they go to."""
    segments = span.segments
    lengths = segments.stop - segments.start
    within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    lanes = np.repeat(segments.lane, lengths)
    index = np.repeat(segments.start, lengths) + within
    targets = np.repeat(span.row_starts[segments.step] + segments.slot, lengths) + within
    by_lane = np.argsort(lanes, kind="stable")
    numbers, starts = np.unique(lanes[by_lane], return_index=True)
    edges = [*starts.tolist(), len(by_lane)]
    for lane, low, high in zip(numbers.tolist(), edges[:-1], edges[1:], strict=True):
        yield lane, index[by_lane[low:high]], targets[by_lane[low:high]]
