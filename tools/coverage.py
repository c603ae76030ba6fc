"""Check that global batches were handed out whole and without a gap, by positions and ranks, not by samples.

So it also covers what samples cannot show: a mixture's unfinished epochs, and sequences of any number of samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..loader.errors import DatasetError
from .delivery_records import Delivered


class Standing(NamedTuple):
    """A record that counts, of a rank of ``world_size`` in an attempt, which are numbered in order."""

    attempt: int
    rank: int
    world_size: int
    record: Delivered


def count_lost(standing: Iterable[Standing], *, by_rows: bool = False) -> dict[int, int]:
    """By epoch: positions that no rank has a record of, and the shares of ranks that have none of a batch.

    With ``by_rows`` batches are full, so that their rows tell what is lost of them, where these are samples. A run's
    first epoch counts from where the run began, which a state may have said; every epoch as far as it was reached.
    """
    ranks: defaultdict[tuple[int, int, int], defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    worlds: dict[int, int] = {}
    rows: defaultdict[tuple[int, int, int], int] = defaultdict(int)
    ranges: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for attempt, rank, world_size, record in standing:
        ranges[record.epoch].append((record.start, record.stop))
        if by_rows and not record.is_skip and not record.is_packed:
            rows[record.epoch, record.start, record.stop] += len(record.ids)
        elif not record.is_skip and not record.is_drop:
            ranks[record.epoch, record.start, record.stop][attempt].add(rank)
            worlds[attempt] = world_size
    first = min(ranges, default=0)
    lost = {epoch: _count_gaps(of_epoch, is_first=epoch == first) for epoch, of_epoch in ranges.items()}
    for (epoch, start, stop), found in rows.items():
        lost[epoch] += max(0, stop - start - found)
    for (epoch, start, stop), by_attempt in ranks.items():
        absent = min(worlds[attempt] - len(of_attempt) for attempt, of_attempt in by_attempt.items())
        if absent:
            lost[epoch] += -(-(stop - start) * absent // max(worlds[attempt] for attempt in by_attempt))
    return lost


def _count_gaps(ranges: Sequence[tuple[int, int]], *, is_first: bool) -> int:
    gaps, end = 0, min(ranges)[0] if is_first else 0
    for start, stop in sorted(ranges):
        gaps += max(0, start - end)
        end = max(end, stop)
    return gaps


def refuse_other_order(starts: Sequence[tuple[int, int]], ends: Sequence[tuple[int, int]]) -> None:
    """Refuse attempts that cannot have come in the order of their clocks; ``starts`` and ``ends`` are theirs.

    Raises:
        DatasetError: one begins where none before it had come to, and a later one passed.
    """
    furthest = (-1, -1)
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        is_reached, furthest = start[1] == 0 or start <= furthest, max(furthest, end)
        if is_reached:
            continue
        passed = next((n for n in range(number + 1, len(starts)) if starts[n] < start <= ends[n]), None)
        if passed is not None:
            raise DatasetError(
                f"attempt {number + 1} begins at position {start[1]:,} of epoch {start[0]:,}, which no attempt before "
                f"it reached, but attempt {passed + 1} did, which began later by its host's clock: the clocks of hosts "
                "differ by more than a restart takes; set them, and correct started_ns in the first lines of these logs"
            )
