"""How far a loader plans ahead of what it assembles, and what it asks its reader for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from penstock import DistributedDataLoader
from penstock.loader import TokensFormat
from penstock.loader.assembly.look_ahead import Ahead, LookAhead
from penstock.loader.order.plan import Order, Share
from penstock.loader.order.spans import EpochCourse, SourceOrder, Span, SpanPlanner
from penstock.loader.pipeline.delivery_queue import DeliveryQueue

CHUNKS, ROWS, LANES = 64, 10, 4
SHARE = Share(rank=0, world_size=1, global_batch_size=8)
ORDER = Order(seed=3, lanes=LANES, window=4)


class Reader:
    """Notes what it is asked for."""

    def __init__(self, *, needs_requests: bool = False, keeps_unused: bool = True) -> None:
        self.has_room = True
        self.needs_requests = needs_requests
        self.keeps_unused = keeps_unused
        self.asked: list[int] = []

    def request(self, chunks: Sequence[int], *, at_once: bool = False) -> None:
        self.asked += chunks

    def release(self, chunks: Sequence[int]) -> None:
        raise NotImplementedError

    def take(self, chunks: Sequence[int]) -> Iterator[Any]:
        raise NotImplementedError


class Planned:
    """Spans of a few steps, epoch after epoch; notes the last epoch that any is of."""

    def __init__(self, steps: int = 4) -> None:
        self.planner = SpanPlanner(
            [SourceOrder(chunk_samples=np.full(CHUNKS, ROWS), order=ORDER)], SHARE, EpochCourse(0, 0), "partial"
        )
        self.steps = steps
        self.epoch = -1
        self.spans = 0

    def __iter__(self) -> Iterator[Span]:
        while True:
            span = self.planner.plan_next(self.steps)
            self.epoch, self.spans = span.epoch, self.spans + (span.steps > 0)
            yield span


def look(planned: Planned, reader: Reader, *, epochs: int = 1, is_short: Callable[[], bool]) -> Iterator[Span]:
    ahead = Ahead(per_span=8, most=1024, epochs=epochs)
    return iter(LookAhead(planned.planner, iter(planned), reader, ahead, is_short=is_short))


@pytest.mark.parametrize("epochs", [1, 8])
@pytest.mark.parametrize("is_short", [False, True])
def test_no_more_epochs_are_planned_ahead_than_ask_for_every_chunk(epochs: int, is_short: bool) -> None:
    planned = Planned(1000)
    ahead = look(planned, Reader(needs_requests=True), epochs=epochs, is_short=lambda: is_short)
    seen = [next(ahead) for _ in range(40)]
    assert [span.epoch for span in seen] == [i // 2 for i in range(40)]
    assert [not span.steps for span in seen] == [False, True] * 20
    assert planned.epoch <= 19 + epochs + 1
    assert is_short or planned.epoch >= 19 + epochs


def test_while_batches_are_short_what_is_planned_comes_first() -> None:
    planned, reader = Planned(), Reader()
    ahead = look(planned, reader, is_short=lambda: True)
    for number in range(1, 100):
        next(ahead)
        assert planned.spans <= number


def test_the_reader_has_what_keeps_it_busy_though_batches_are_short_but_of_the_next_epoch_only_at_the_end() -> None:
    planned, reader = Planned(), Reader(needs_requests=True)
    ahead = look(planned, reader, is_short=lambda: True)
    next(ahead)
    assert planned.spans == 8
    steps = CHUNKS * ROWS // SHARE.global_batch_size // planned.steps
    taken = 1
    while planned.epoch == 0:
        next(ahead)
        taken += 1
    assert taken > steps - 9
    assert set(reader.asked) == set(range(CHUNKS))


def test_where_chunks_without_requests_are_dropped_nothing_waits() -> None:
    planned, reader = Planned(), Reader(keeps_unused=False)
    ahead = look(planned, reader, is_short=lambda: True)
    for number in range(1, 50):
        next(ahead)
        assert planned.spans >= min(8 * number, CHUNKS * ROWS // SHARE.global_batch_size // planned.steps)


def test_windows_are_opened_one_by_one_until_batches_are_short() -> None:
    left = [10]
    planned, reader = Planned(1000), Reader()

    def is_short() -> bool:
        left[0] -= 1
        return left[0] < 0

    ahead = look(planned, reader, is_short=is_short)
    next(ahead)
    assert (planned.epoch, left[0]) == (1, -1)  # it looked after each window, and after each epoch
    assert len(reader.asked) == CHUNKS, "the next epoch's windows are open in part, and ask for nothing yet"
    next(ahead)
    next(ahead)
    assert len(reader.asked) == 2 * CHUNKS


@pytest.mark.parametrize("is_short", [False, True])
def test_every_span_comes_once_and_asks_for_the_chunks_of_all_windows(is_short: bool) -> None:
    planned, reader = Planned(3), Reader()
    for span in look(planned, reader, is_short=lambda: is_short):
        if span.epoch == 2:
            break
        assert {group.chunk for group in planned.planner.expand(span)} <= set(reader.asked)
    counts = np.bincount(reader.asked, minlength=CHUNKS)
    assert counts.min() >= 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_that_waits_gets_the_same_batches_and_reads_each_chunk_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    tokens = np.arange(512 * 8, dtype=np.uint16)
    tokens.tofile(tmp_path / "a.bin")

    def read() -> list[Any]:
        with DistributedDataLoader(
            tmp_path, format=TokensFormat(seq_len=8, chunk_bytes=256), batch_size=4, rank=0, world_size=ranks, window=2
        ) as loader:
            ids = [batch["tokens"].tolist() for _ in range(6) for batch in loader]
            if ranks == 1:
                assert loader.metrics().fetched_chunks == loader.manifest.num_chunks
        return ids

    found = []
    for is_short in (True, False):
        monkeypatch.setattr(DeliveryQueue, "is_short", lambda queue, is_short=is_short: is_short)
        found.append(read())
    assert found[0] == found[1]
