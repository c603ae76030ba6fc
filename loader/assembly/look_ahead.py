"""Planning ahead: spans are planned early, and the chunks of their new windows requested in order of first use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..order.spans import EnteredWindow, Span, SpanPlanner, chunks_by_first_use

if TYPE_CHECKING:
    from ..pipeline.assembler import ReadsChunks

# A rank of W reads about a W-th of the chunks in an epoch, so in 4 * W of them all but one in e^4, which is 55.
_EPOCHS_OF_A_RANK = 4


@dataclass(frozen=True, slots=True)
class Ahead:
    """Limits of planning ahead: so many spans for each one taken, ``most`` in all, and so many ``epochs``."""

    per_span: int
    most: int
    epochs: float

    @staticmethod
    def of(num_sources: int, world_size: int, *, is_selected: bool) -> Ahead:
        """Choose the limits: one data set plans until all its chunks are requested; many sources plan more slowly."""
        if num_sources > 1:
            return Ahead(per_span=2, most=256, epochs=math.inf)
        epochs = 1 if world_size == 1 and not is_selected else _EPOCHS_OF_A_RANK * world_size
        return Ahead(per_span=8, most=1024, epochs=epochs)


class LookAhead:
    """Plans spans ahead and requests their chunks as long as the reader has room; yields the spans one by one.

    A few spans are planned for each one yielded, so that the first does not wait for the planning of many others.
    Nothing is planned beyond so many epochs after the one that is consumed: those request all chunks, so that no
    chunk is dropped and fetched again, and a small data set does not plan hundreds of epochs that nobody may use.

    Where the reader keeps chunks also without requests, what is planned already comes first while batches are short
    (``is_short``), unless the reader needs requests; and the next epoch comes last: its first span enters a window of
    each lane, which takes a sort of all their samples. Else a request that comes late has a chunk read again which
    an earlier window shares.
    """

    def __init__(
        self,
        planner: SpanPlanner,
        spans: Iterator[Span],
        reader: ReadsChunks,
        ahead: Ahead,
        *,
        is_short: Callable[[], bool],
    ) -> None:
        """Take ``spans`` of the planner, one by one."""
        self._planner = planner
        self._spans = spans
        self._reader = reader
        self._ahead = ahead
        self._is_short = is_short
        self._planned: deque[Span] = deque()
        self._ended = -1  # the last epoch that is planned to its end

    def __iter__(self) -> Iterator[Span]:
        planning = self._plan()
        while True:
            spans = 0
            while not self._planned or (spans < self._ahead.per_span and self._goes_on):
                spans += next(planning)
            yield self._planned.popleft()

    def _plan(self) -> Iterator[bool]:
        """Plan spans endlessly; yields after each opened window, and says whether a span is planned now."""
        is_first = True
        for span in self._spans:
            if not span.steps:
                self._ended = span.epoch
            elif is_first:
                self._request_first(span)
            else:
                entered: list[EnteredWindow] = []
                for window in self._planner.open_windows(span):
                    entered.append(window)
                    yield False
                self._reader.request(chunks_by_first_use(entered))
            is_first = False
            self._planned.append(span)
            yield True

    @property
    def _goes_on(self) -> bool:
        """Return whether to plan further spans."""
        planned = len(self._planned)
        epochs = self._ended - self._planned[0].epoch  # that are planned to their end after this one; this: 0
        can_wait = not self._reader.needs_requests or (epochs >= 0 and planned > self._ahead.per_span)
        if self._reader.keeps_unused and can_wait and self._is_short():
            return False
        return planned < self._ahead.most and epochs < self._ahead.epochs and self._reader.has_room

    def _request_first(self, span: Span) -> None:
        """Request the chunks of the span that the loop waits for: each window's once that is open, the others last.

        Its rows are gathered lane by lane, and windows are opened in that order.
        """
        stop = int(span.bounds[-1])
        later: list[EnteredWindow] = []
        for window in self._planner.open_windows(span):
            is_needed = window.first_uses < stop
            self._reader.request(chunks_by_first_use([_part(window, is_needed)]), at_once=True)
            later.append(_part(window, ~is_needed))
        self._reader.request(chunks_by_first_use(later))


def _part(window: EnteredWindow, kept: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> EnteredWindow:
    return replace(window, chunks=window.chunks[kept], first_uses=window.first_uses[kept])
