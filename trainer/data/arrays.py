"""Batches of arrays in memory, with the data loader's interface: for small data, tests and benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import TrainerConfigError
from ..options import check_choice, check_range
from .batches import IDS, VALID

_VERSION = 1


class ArrayLoader:
    """Yields rows of equally long arrays in a seeded order; which rows make a global batch does not depend on ranks.

    Position p of epoch e is row ``permutation(seed, e)[p]``; global batch s is positions [sG, (s+1)G), cut into
    contiguous shares, one per rank. A pass begins at its epoch's beginning; only an iterator that is kept, and the
    first pass after ``load_state_dict``, continue in mid-epoch. The mutable state is (epoch, consumed positions),
    whether it was just loaded, the shares' weights, and counts of passes begun and of epochs set.
    ``last_batch`` is "drop", "pad" (real rows are marked in ``__valid__``) or "partial" (a share may be empty).
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last_batch: str = "drop",
        with_ids: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        here = dist.is_initialized()
        found_size = dist.get_world_size() if here else int(os.environ.get("WORLD_SIZE", "1"))
        found_rank = dist.get_rank() if here else int(os.environ.get("RANK", "0"))
        if found_size > 1 and world_size is None and not here and "RANK" not in os.environ:
            raise TrainerConfigError(
                f"WORLD_SIZE={found_size} in the environment without RANK: every process would take itself for rank 0. "
                "Give rank= and world_size=, start the ranks with torchrun, or initialise torch.distributed first"
            )
        self.world_size = found_size if world_size is None else world_size
        self._rank = found_rank if rank is None else rank
        if (batch_size is None) == (global_batch_size is None):
            raise TrainerConfigError("give one of batch_size= (per rank) and global_batch_size=")
        self.global_batch_size = global_batch_size or (batch_size or 0) * self.world_size
        if self.global_batch_size < 1:
            raise TrainerConfigError(f"batch_size={batch_size}, global_batch_size={global_batch_size}; give at least 1")
        check_choice("last_batch", last_batch, ("drop", "pad", "partial"))
        self._arrays = {name: torch.as_tensor(array) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise TrainerConfigError(f"arrays differ in length: {lengths}; give one row for each sample in each")
        self._rows = next(iter(lengths.values()))
        self._shuffle, self._seed, self._last_batch, self._with_ids = shuffle, seed, last_batch, with_ids
        self._weights = np.ones(self.world_size)
        self._epoch, self._consumed = 0, 0
        self._is_loaded = False
        self._passes = self._times_set = 0
        if not len(self):
            raise TrainerConfigError(
                f"global_batch_size={self.global_batch_size} is above the {self._rows} rows and last_batch='drop' "
                "drops the only batch; use a smaller batch, or last_batch='partial'"
            )

    @property
    def epoch(self) -> int:
        """The epoch of the last batch yielded; before the first one, and after loading a state, of the next batch."""
        return self._epoch

    def __len__(self) -> int:
        whole, rest = divmod(self._rows, self.global_batch_size)
        return whole + (rest > 0 and self._last_batch != "drop")

    @property
    def steps_left(self) -> int:
        """Count the batches from here to the epoch's end."""
        whole, rest = divmod(self._rows - self._consumed, self.global_batch_size)
        return whole + (rest > 0 and self._last_batch != "drop")

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if not self._is_loaded:
            self._epoch, self._consumed = self._epoch + (not self._has_more), 0
        self._passes += 1
        return self._batches(self._passes)

    def _batches(self, number: int) -> Iterator[dict[str, torch.Tensor]]:
        at: tuple[int, int] | None = None  # the epoch, and how often it was set, at the last batch
        while True:
            if number != self._passes:
                raise TrainerConfigError(
                    "another pass over this loader has begun, and a loader has one position; keep the newest iterator, "
                    "or make one loader per pass"
                )
            if at is not None and at != (self._epoch, self._times_set):
                return
            if not self._has_more:
                self._epoch, self._consumed = self._epoch + 1, 0
                return
            if at is None:
                order = self._order(self._epoch)
            rows = order[self._consumed : self._consumed + self.global_batch_size]
            self._consumed += len(rows)
            self._is_loaded = False
            at = (self._epoch, self._times_set)
            yield self._take(rows)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless a state that was just loaded is inside it. Ends the running pass."""
        if not (self._is_loaded and epoch == self._epoch):
            self._epoch, self._consumed, self._is_loaded = epoch, 0, False
            self._times_set += 1

    def set_shares(self, weights: Sequence[float]) -> None:
        """Cut the following global batches in proportion to ``weights``, one per rank, the same on every rank."""
        if len(weights) != self.world_size or min(weights) <= 0:
            raise TrainerConfigError(f"shares={list(weights)}; give {self.world_size} positive weights, one per rank")
        self._weights = np.asarray(weights, dtype=np.float64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "seed": self._seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
            "rows": self._rows,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != _VERSION or state.get("seed") != self._seed:
            raise TrainerConfigError(
                f"the state was taken with version={state.get('version')}, seed={state.get('seed')} and this loader "
                f"has version={_VERSION}, seed={self._seed}; build it with the same seed"
            )
        for name, mine in (("rows", self._rows), ("shuffle", self._shuffle)):
            if state.get(name, mine) != mine:  # states of before have neither
                raise TrainerConfigError(
                    f"the state was taken with {name}={state[name]} and this loader has {name}={mine}, which makes "
                    "another order of samples; build it as it was, or begin a new run with init_from"
                )
        self._epoch, self._consumed, self._is_loaded = int(state["epoch"]), int(state["consumed"]), True
        self._skip_end()

    def seek(self, epoch: int, batch: int) -> None:
        """Go to a batch by its number in an epoch; the next pass begins there."""
        check_range("epoch", epoch, low=0)
        if not 0 <= batch < len(self):
            raise TrainerConfigError(f"seek({epoch}, {batch}): an epoch has {len(self)} batches; give a lower number")
        self._epoch, self._consumed, self._is_loaded = epoch, batch * self.global_batch_size, True
        self._times_set += 1

    def skip_batches(self, count: int) -> None:
        """Skip ``count`` global batches, past an epoch's end into the next epoch, as if that state were loaded.

        A running pass continues there, or ends if that is in another epoch, whose end no pass then reports.
        """
        check_range("count", count, low=0)
        self._skip_end()
        for _ in range(count):
            self._consumed = min(self._consumed + self.global_batch_size, self._rows)
            self._skip_end()
        self._is_loaded = True

    def _skip_end(self) -> None:
        if not self._has_more:
            self._epoch, self._consumed = self._epoch + 1, 0

    @property
    def _has_more(self) -> bool:
        rest = self._rows - self._consumed
        return rest >= self.global_batch_size if self._last_batch == "drop" else rest > 0

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._rows)
        return torch.from_numpy(np.random.default_rng((self._seed, epoch)).permutation(self._rows))

    def _take(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        mine = rows[self._cut(len(rows))]
        valid = len(mine)
        if self._last_batch == "pad" and len(rows) < self.global_batch_size:
            room = self._cut(self.global_batch_size)
            mine = torch.cat([mine, rows[:1].expand(room.stop - room.start - valid)])
        batch = {name: array[mine] for name, array in self._arrays.items()}
        if self._last_batch == "pad":
            batch[VALID] = torch.arange(len(mine)) < valid
        if self._with_ids:
            batch[IDS] = mine
        return batch

    def _cut(self, rows: int) -> slice:
        ends = np.rint(np.cumsum(self._weights) / self._weights.sum() * rows).astype(int)
        return slice(int(ends[self._rank - 1]) if self._rank else 0, int(ends[self._rank]))
