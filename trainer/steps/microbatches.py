"""Batches cut into microbatches of some rows, on all ranks into as many, and the largest microbatch that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..data.batches import find_doubt, find_rows, has_rows, known_rows
from ..errors import TrainerConfigError, TrainerError
from ..ranks.world import World
from .step import StepConfig


def cut_batch(batch: Any, parts: int) -> list[Any]:
    """The batch in ``parts`` of consecutive rows, which differ by one row at most; some are empty if rows are fewer.

    Tensors are views. Tensors without dimensions, numbers and text are in each part.

    Raises:
        TrainerConfigError: a field has not one value a row, so that it is not known what of it belongs to which row.
    """
    if parts == 1:
        return [batch]
    _check_layout(batch)
    rows = find_rows(batch)
    starts = [part * rows // parts for part in range(parts + 1)]
    return [_cut(batch, start, stop, rows, "", is_field=False) for start, stop in pairwise(starts)]


def first_rows(batch: Any, rows: int) -> Any:
    """The first rows of a batch, all of it where it has no more. Raises TrainerConfigError as ``cut_batch``."""
    whole = find_rows(batch)
    if rows >= whole:
        return batch
    _check_layout(batch)
    return _cut(batch, 0, rows, whole, "", is_field=False)


def _cut(value: Any, start: int, stop: int, rows: int, name: str, *, is_field: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.ndim:
            return value
        _check_rows(value.shape[0], rows, name)
        return value[start:stop]
    if isinstance(value, Mapping):
        return {key: _cut(one, start, stop, rows, f"{name}[{key!r}]", is_field=True) for key, one in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and not is_field):
        parts = [_cut(one, start, stop, rows, f"{name}[{i}]", is_field=True) for i, one in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if has_rows(value):
        _check_rows(len(value), rows, name)
        return value[start:stop]
    if value is None or isinstance(value, bool | int | float | str | bytes) or getattr(value, "shape", None) == ():
        return value
    raise TrainerConfigError(
        f"batch{name} is a {type(value).__name__}, of which the trainer does not know what belongs to which row, so a "
        "batch with it is not cut into microbatches; hand out tensors or lists, or leave step.microbatch and "
        "step.adaptive_batch out"
    )


def _check_layout(batch: Any) -> None:
    doubt = find_doubt(batch)
    if doubt is not None:
        raise TrainerConfigError(
            f"{doubt}, or fields that each have all rows, so it is not known how to cut the batch into microbatches; "
            "hand out a mapping or a named tuple of fields, each a tensor or a list of rows, or leave step.microbatch "
            "and step.adaptive_batch out"
        )


def _count(batch: Any) -> int:
    """Its rows. Raises TrainerConfigError where they are not known: cutting would do nothing."""
    rows = known_rows(batch)
    if rows is None:
        raise TrainerConfigError(
            f"the batch is a {type(batch).__name__} without a field that goes by rows, so it is not known how to cut "
            "it into microbatches; hand out a mapping, list or tuple of tensors or lists, or leave step.microbatch and "
            "step.adaptive_batch out"
        )
    return rows


def _check_rows(found: int, rows: int, name: str) -> None:
    if found != rows:
        raise TrainerConfigError(
            f"batch{name} has {found} values and the batch {rows} rows, so it is not known what of it belongs to which "
            "row, and the batch is not cut into microbatches; leave the field out, give it one value a row, or leave "
            "step.microbatch and step.adaptive_batch out and use a smaller batch size with step.accumulate"
        )


def find_largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that fits, 0 if none: by halving from above, then by bisection.

    ``fits`` is True up to some number and False above it. It is asked about nothing much smaller than what fits, which
    a model may refuse for other reasons: a batch norm takes no single row.
    """
    good, bad, number = 0, most + 1, most
    while number and not good:
        if fits(number):
            good = number
        else:
            bad, number = number, number // 2
    while bad - good > 1 and good:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


class Microbatches:
    """Cuts the batches of a step. Mutable state: the rows of a microbatch once they are known, and the ranks' group.

    ``fits`` returns whether a number of microbatches like a given one, one after another, fit on this rank alone.
    ``memory`` says in words what that depends on; rows that were found are kept for a run that resumes with the same.
    """

    def __init__(
        self,
        config: StepConfig,
        loader: object,
        world: World,
        *,
        fits: Callable[[Any, int], bool],
        memory: str,
        remark: str = "",
    ) -> None:
        if config.adaptive_batch and getattr(loader, "is_batched_by_tokens", False):
            raise TrainerConfigError(
                "step.adaptive_batch=True with a loader of batch_tokens=: its batches differ in width, so rows say "
                "little of memory; batch_tokens= is itself what bounds it: leave step.adaptive_batch out"
            )
        self._config = config
        self._world = world
        self._fits = fits
        self._memory = memory
        self._remark = remark
        self._found: _Found | None = None
        self._is_checked = False  # whether what was found holds for the devices that are here now
        self._group: dist.ProcessGroup | None = None
        if self.is_on and world.world_size > 1:  # on CUDA nobody waits for the device then
            self._group = dist.new_group(backend="gloo")

    @property
    def is_on(self) -> bool:
        return self._config.adaptive_batch or self._config.microbatch is not None

    def state_dict(self) -> dict[str, Any] | None:
        """State for JSON, the same on every rank; None if nothing was found."""
        return None if self._found is None else asdict(self._found)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._is_checked = False
        if state is not None and self._config.adaptive_batch:
            self._found = _Found(
                int(state["rows"]), int(state["tried"]), list(state["memory"]), bool(state.get("alone", False))
            )

    def make(self, batches: Sequence[Any], note: Callable[[str], None]) -> list[Any]:
        """The microbatches of a step, as many on every rank. A collective where batches are cut at all.

        Before the first step, and where batches become larger than was tried, finds what fits and tells ``note``.

        Raises:
            TrainerError: on every rank, if not even one row fits.
            TrainerConfigError: a batch cannot be cut.
        """
        if not self.is_on:
            return list(batches)
        sizes = [self._most(_count(batch)) for batch in batches]
        largest = max(sizes)
        rows = min(largest, self._config.microbatch or largest)
        if self._config.adaptive_batch and largest:
            rows = self._settle(batches[sizes.index(largest)], rows, largest, note)
        parts = [max(1, -(-size // max(1, rows))) for size in sizes]
        return [part for batch, count in zip(batches, parts, strict=True) for part in cut_batch(batch, count)]

    def _settle(self, batch: Any, most: int, largest: int, note: Callable[[str], None]) -> int:
        """The rows of a microbatch, at most ``most``: those found before where they hold, else those that fit now."""
        if not self._is_checked:
            self._is_checked = True
            memory = sorted(set(self._gather(self._memory)))
            if self._found is not None and not set(memory) <= set(self._found.memory):
                self._found = None

        def is_alone(rows: int) -> bool:  # no gradients are kept while it is computed
            return rows >= largest and self._config.accumulate == 1

        found = self._found
        if found is not None and (most <= found.tried or found.rows < found.tried):
            rows = min(found.rows, most)
            if is_alone(rows) or not found.alone:
                return rows
        first_rows(batch, 1)  # a batch that cannot be cut is refused before it is tried

        def fits(rows: int) -> bool:
            return self._all(self._fits(first_rows(batch, rows), 1 if is_alone(rows) else 2))

        rows = find_largest(fits, most)
        if not rows:
            raise TrainerError(
                "step.adaptive_batch: not even one row fits into the memory of every rank's device; use a smaller "
                "model, precision.dtype='bf16', activation.every=1, or parallel.zero=3 with step.microbatch"
            )
        self._found = _Found(rows, most, sorted(set(self._gather(self._memory))), is_alone(rows))
        limit = "" if rows == most else f", {rows + 1} do not"
        note(f"microbatches of {rows} rows fit{limit}; batches have {largest} rows{self._remark}")
        return rows

    def _all(self, fits: bool) -> bool:
        """Return whether the batch fits on all ranks."""
        found = torch.tensor([int(fits)])
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return bool(found.item())

    def _most(self, rows: int) -> int:
        """The most rows that a rank has."""
        found = torch.tensor([rows])
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return int(found.item())

    def _gather(self, text: str) -> list[str]:
        texts = [text] * self._world.world_size
        if self._group is not None:
            dist.all_gather_object(texts, text, group=self._group)
        return texts


@dataclass(frozen=True)
class _Found:
    """Number of rows that fit, the number tried, and the ranks' memory.

    ``alone``: they fit as a step's only microbatch, beside which no gradients are kept.
    """

    rows: int
    tried: int
    memory: list[str]
    alone: bool = False
