"""A plain loader plans ahead, and requests the chunks of the windows that spans enter, in order of first use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ..order.spans import EnteredWindow, EpochSpans, Span, chunks_by_first_use
from .assembler import ReadsChunks


class LookAhead:
    """Plans spans ahead and requests their chunks as long as the reader has room; yields the spans one by one.

    A few spans are planned for each one yielded, so that the first does not wait for the planning of many others.
    Nothing is planned beyond ``epochs`` after the one that is consumed: those ask for all there is, so that no chunk is
    dropped and fetched again, and of a small data set not hundreds are planned that nobody may ever ask for.

    Where the reader keeps chunks also without requests, what is planned already comes first while batches are short
    (``is_short``), unless the reader needs requests; and the next epoch comes last: its first span enters a window of
    each lane, which takes a sort of all their samples. Else a request that comes late has a chunk read again which
    an earlier window shares.
    """

    _PER_SPAN = 8
    _MOST = 1024

    def __init__(
        self,
        planned: Iterator[tuple[EpochSpans, Span | None]],
        reader: ReadsChunks,
        *,
        epochs: int,
        is_short: Callable[[], bool],
    ) -> None:
        self._source = planned
        self._reader = reader
        self._epochs = epochs
        self._is_short = is_short
        self._planned: deque[tuple[EpochSpans, Span | None]] = deque()
        self._ended = -1  # the last epoch that is planned to its end

    def __iter__(self) -> Iterator[tuple[EpochSpans, Span | None]]:
        planning = self._plan()
        while True:
            spans = 0
            while not self._planned or (spans < self._PER_SPAN and self._goes_on):
                spans += next(planning)
            yield self._planned.popleft()

    def _plan(self) -> Iterator[bool]:
        """Plan spans, without an end; yields after each window that is opened, and whether a span is planned now."""
        is_first = True
        for spans, span in self._source:
            if span is None:
                self._ended = spans.plan.epoch
            elif is_first:
                _request_first(self._reader, spans, span)
            else:
                entered: list[EnteredWindow] = []
                for window in spans.open_windows(span.segments):
                    entered.append(window)
                    yield False
                self._reader.request(chunks_by_first_use(entered))
            is_first = False
            self._planned.append((spans, span))
            yield True

    @property
    def _goes_on(self) -> bool:
        """Whether to plan more than there is."""
        planned = len(self._planned)
        epochs = self._ended - self._planned[0][0].plan.epoch  # that are planned to their end after this one; this: 0
        can_wait = not self._reader.needs_requests or (epochs >= 0 and planned > self._PER_SPAN)
        if self._reader.keeps_unused and can_wait and self._is_short():
            return False
        return planned < self._MOST and epochs < self._epochs and self._reader.has_room


def _request_first(reader: ReadsChunks, spans: EpochSpans, span: Span) -> None:
    """Of the span that the training loop waits for: each window's as soon as that is open, the others after all.

    Its rows are gathered lane by lane, and windows are opened in that order.
    """
    stop = int(span.bounds[-1])
    later: list[EnteredWindow] = []
    for window in spans.open_windows(span.segments):
        is_needed = window.first_uses < stop
        reader.request(chunks_by_first_use([_part(window, is_needed)]), at_once=True)
        later.append(_part(window, ~is_needed))
    reader.request(chunks_by_first_use(later))


def _part(window: EnteredWindow, kept: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> EnteredWindow:
    return replace(window, chunks=window.chunks[kept], first_uses=window.first_uses[kept])
