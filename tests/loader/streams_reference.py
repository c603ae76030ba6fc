"""What a loader that drops samples delivers, by the rules and nothing else: slow, in one process, for reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from penstock.loader.order.plan import EpochPlan

T = TypeVar("T")


def lanes_of_ids(plan: EpochPlan) -> list[list[int]]:
    """Each lane's sample ids, in order."""
    first_ids = np.cumsum(plan.chunk_samples) - plan.chunk_samples
    lanes = []
    for lane in range(plan.order.lanes):
        ids: list[int] = []
        size = int(plan.lane_starts[lane + 1] - plan.lane_starts[lane])
        index = 0
        while len(ids) < size:
            window = plan.open_window(lane, index)
            pieces, rows = window.locate(np.arange(window.start, window.stop))
            ids += (first_ids[window.chunks[pieces]] + rows).tolist()
            index += 1
        lanes.append(ids)
    return lanes


def global_batches(
    plan: EpochPlan, survives: Callable[[int], bool], sizes: Iterator[int], last_batch: str
) -> list[list[int]]:
    """The global batches of an epoch, each sorted by (lane, offset); ``sizes`` are the global batch sizes in turn."""
    outputs = [[i for i in lane if survives(i)] for lane in lanes_of_ids(plan)]
    return deal(outputs, plan.turns.tolist(), sizes, last_batch)


def deal(outputs: list[list[T]], turns: list[int], sizes: Iterator[int], last_batch: str) -> list[list[T]]:
    """Global batches of what each lane has, all different, which is used up."""
    left, lanes = outputs, len(outputs)
    batches: list[list[T]] = []
    position, in_tail = 0, False
    for size in sizes:
        # Rule 4: position p is the next output of the lane whose turn is p mod L.
        quota = [sum(p % lanes == turns[lane] for p in range(position, position + size)) for lane in range(lanes)]
        if not in_tail and all(len(lane) >= due for lane, due in zip(left, quota, strict=True)):
            batch = [i for lane, due in zip(left, quota, strict=True) for i in lane[:due]]
            left = [lane[due:] for lane, due in zip(left, quota, strict=True)]
        else:  # a lane has run dry: what is left is dealt lane by lane
            in_tail = True
            rest = [i for lane in left for i in lane]
            if len(rest) < size and (last_batch == "drop" or not rest):
                return batches
            batch = rest[:size]
            taken = set(batch)
            left = [[i for i in lane if i not in taken] for lane in left]
        position += len(batch)
        batches.append(batch)
        count = sum(map(len, left))
        if not count or (last_batch == "drop" and count < size):
            return batches  # the epoch is over for whoever took this batch
    return batches
