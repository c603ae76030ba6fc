"""The thread that tunes a running pipeline: it measures, asks ``autotune`` for a change, and applies it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

from .autotune import Bounds, Measured, Settings, State, step

if TYPE_CHECKING:
    from ...storage.threads.interruptible import Event
    from .tuning import PipelineOptions, TuningChoice

TICK_S = 1.0
_LONGEST_TICK_S = 30.0
_WAITING_TICK_S = 2.0  # where the loop only waits: so 1 fetch thread becomes 64 within 30 s, two ticks a doubling
_FEWEST_BATCHES = 4
_FEWEST_FETCH_THREADS = 2  # that are left when threads are given back


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Totals of a pipeline so far; seconds of threads are summed over them."""

    at_s: float
    process_s: float
    waited_s: float
    chunk_waited_s: float
    fetching_s: float
    decoding_s: float
    fetched_bytes: int
    decoded_rows: int
    batches: int
    evicted_chunks: int


class Tunable(Protocol):
    """A pipeline that can be measured and changed."""

    def sums(self) -> Sums: ...

    def apply(self, settings: Settings) -> None: ...


def measure(before: Sums, now: Sums) -> Measured:
    """Measure the pipeline between two moments; ``now`` is the later one."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    return Measured(
        waited=min(1.0, (now.waited_s - before.waited_s) / seconds),
        chunk_waited=min(1.0, (now.chunk_waited_s - before.chunk_waited_s) / seconds),
        fetching=(now.fetching_s - before.fetching_s) / seconds,
        decoding=(now.decoding_s - before.decoding_s) / seconds,
        cores=(now.process_s - before.process_s) / seconds,
        fetched_bytes_per_s=(now.fetched_bytes - before.fetched_bytes) / seconds,
        decoded_rows_per_s=(now.decoded_rows - before.decoded_rows) / seconds,
        batches_per_s=(now.batches - before.batches) / seconds,
        evicted_chunks=now.evicted_chunks - before.evicted_chunks,
    )


class Tuner:
    """Tunes a loader's pipelines, one after another; results of one carry over to the next.

    Mutable state: the controller's, replaced as a whole by the tuning thread, and between pipelines by the training
    loop's.
    """

    def __init__(self, choice: TuningChoice) -> None:
        self._choice = choice
        self._bounds: Bounds | None = None
        self._state: State | None = None

    @property
    def is_on(self) -> bool:
        """Return whether there is anything to change."""
        return self._bounds is not None and self._bounds.least != self._bounds.most

    @property
    def changes(self) -> int:
        return 0 if self._state is None else self._state.changes

    @property
    def reason(self) -> str:
        """The last decision, in words."""
        if not self.is_on:
            return "off" if self._choice.autotune is False else "every setting is given"
        return "" if self._state is None else self._state.reason

    def begin(self, options: PipelineOptions, chunk_bytes: int) -> PipelineOptions:
        """Choose the options with which a pipeline begins. Called before its thread runs."""
        start = Settings(
            fetch_threads=options.fetch_threads,
            decode_threads=options.decode_threads,
            read_ahead_bytes=options.read_ahead_bytes,
        )
        choice = self._choice
        least = Settings(
            fetch_threads=min(start.fetch_threads, _FEWEST_FETCH_THREADS),
            decode_threads=1,
            read_ahead_bytes=1,
        )
        in_memory = math.ceil(options.chunk_budget_bytes / max(1, chunk_bytes))  # further threads would wait for room
        most = Settings(
            fetch_threads=max(start.fetch_threads, min(options.most_fetch_threads, in_memory)),
            decode_threads=choice.cores,
            read_ahead_bytes=options.chunk_budget_bytes,
        )
        kept = {name: getattr(start, name) for name in choice.kept}
        self._bounds = Bounds(
            least=replace(least, **kept),
            most=replace(most, **kept),
            chunk_bytes=chunk_bytes,
            cores=choice.cores_of_node,
        )
        settings = self._bounds.clamp(start if self._state is None else self._state.settings)
        known = self._state or State(settings=settings)
        self._state = replace(known, settings=settings, trial=None, taken_back=None, given_back=None)
        return replace(options, **asdict(settings))

    def run(self, pipeline: Tunable, stopping: Event) -> None:
        """Tune until the pipeline stops. An error here ends the tuning, not the training."""
        before = pipeline.sums()
        while not stopping.wait(TICK_S):
            now = pipeline.sums()
            if not _is_over(before, now):
                continue
            assert self._state is not None
            assert self._bounds is not None
            decided = step(self._state, measure(before, now), self._bounds)
            is_changed, self._state = decided.settings != self._state.settings, decided
            if is_changed:
                try:
                    pipeline.apply(decided.settings)
                except RuntimeError as exc:
                    self._state = replace(decided, reason=f"ended: {exc}")
                    return
                now = pipeline.sums()
            before = now


def _is_over(before: Sums, now: Sums) -> bool:
    """Return whether the interval suffices to judge by; a loop that is away (evaluates, say) gives none."""
    seconds = now.at_s - before.at_s
    waits = now.waited_s - before.waited_s > seconds / 2
    return (
        now.batches - before.batches >= _FEWEST_BATCHES
        or (seconds >= _WAITING_TICK_S and waits)
        or (seconds >= _LONGEST_TICK_S and now.batches > before.batches)
    )
