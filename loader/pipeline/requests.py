"""What a plain loader asks its reader for: the chunks of the windows that a span enters, in order of first use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..order.spans import EnteredWindow, EpochSpans, Span, chunks_by_first_use
from .assembler import ReadsChunks


def request(reader: ReadsChunks, spans: EpochSpans, span: Span) -> None:
    """Open the windows that a span enters, and request their chunks."""
    reader.request(chunks_by_first_use(list(spans.open_windows(span.segments))))


def request_first(reader: ReadsChunks, spans: EpochSpans, span: Span) -> None:
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
