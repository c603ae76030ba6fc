"""Work on each row of a batch: decode, then transform; and the options of batches.

Threads and worker processes run the same code, so both return the same results. It does not import torch, so that a
worker process need not wait for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ..columns import AnyArray, IntArray, Ragged
from ..errors import ConfigError, DecodeError, MemoryLimitError
from ..order.permutation import DECODING, TRANSFORM, sample_rng
from .batch_memory import BatchMemory, new_array
from .byte_views import ByteViews
from .decode import FieldDecoder, batch_values, has_rng_parameter, is_channels_first
from .values import BatchValues

if TYPE_CHECKING:
    from .images.images import ImageDecoder, ImagePlan


Sample = dict[str, Any]
Values = AnyArray | ByteViews | Ragged | list[Any]
ResultValues = Values | BatchValues
Step = Literal["decode", "transform", "result", "avoid"]


class RowError(Exception):
    """An error of one row: its number in the batch, the step that failed, and the cause; users see it explained."""

    def __init__(self, row: int, step: Step, cause: Exception) -> None:
        super().__init__(row, step, cause)
        self.row = row
        self.step: Step = step
        self.cause = cause

    @property
    def is_of_sample(self) -> bool:
        """Return whether the sample is bad, not the loader's arguments, its machine or the transform's result."""
        wrong = ConfigError | MemoryLimitError | MemoryError
        return self.step != "result" and not isinstance(self.cause, wrong)


@dataclass(frozen=True, slots=True)
class RowTask:
    """Rows of one batch: (n,) int64 sample ids, and n values of each field; the ``encoded`` ones are to be decoded.

    ``first_row`` is the number of the first row within the batch. ``keys`` (n, 3) uint64 are the seed, epoch and sample
    id of each row's random numbers, where rows are of several data sets. ``avoided``: those of the ids that are bad
    without being tried.
    """

    epoch: int
    first_row: int
    ids: IntArray
    fields: Mapping[str, Values]
    encoded: dict[str, FieldDecoder]
    keys: AnyArray | None = None
    avoided: frozenset[int] = frozenset()

    def sample(self, values: Mapping[str, ResultValues], row: int) -> Sample:
        """Get one row of the decoded ``values``, as users see it: images are views in the layout of their decoder."""
        sample = {name: of_field[row] for name, of_field in values.items()}
        for name, decoder in self.encoded.items():
            if is_channels_first(decoder):
                sample[name] = channels_first(sample[name])
        return sample

    def cut(self, start: int, stop: int, *, with_plain: bool) -> RowTask:
        """Cut out a part of the rows; without the fields that are not decoded, unless ``with_plain``."""
        fields = {
            name: values.cut(start, stop) if isinstance(values, Ragged) else values[start:stop]
            for name, values in self.fields.items()
            if with_plain or name in self.encoded
        }
        keys = None if self.keys is None else self.keys[start:stop]
        first, ids = self.first_row + start, self.ids[start:stop]
        return RowTask(self.epoch, first, ids, fields, self.encoded, keys, self.avoided)


def channels_first(image: Any) -> Any:
    """View an image (..., h, w, c) as samples have it, (..., c, h, w). Anything else, such as None, stays."""
    return np.moveaxis(image, -1, -3) if isinstance(image, np.ndarray) and image.ndim >= 3 else image


@dataclass(frozen=True, slots=True)
class RowResults:
    """The results of a task: decoded ``values`` by field and, with a transform, ``samples``, one per row.

    ``failed``: the rows that have none, since their samples are bad; in no order.
    """

    values: dict[str, ResultValues]
    samples: list[Sample | None]
    failed: list[RowError] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """Decoding and ``transform``, with generators that depend on (seed, epoch, sample id) alone.

    Only with ``may_drop`` may the transform return None. With ``goes_on``, the results list the bad samples; else the
    first one is raised.
    """

    transform: Callable[..., Sample | None] | None
    seed: int
    may_drop: bool = False
    goes_on: bool = False

    def allocate(self, task: RowTask, memory: BatchMemory | None = None) -> RowResults:
        """Make room for the results: an array (n, *shape) where the decoder knows the shape, else a list.

        ``BatchValues`` for a field whose values are decoded together. Arrays come from ``memory`` where it is given.
        """
        count = len(task.ids)
        values: dict[str, ResultValues] = dict(task.fields)
        for name, decoder in task.encoded.items():
            if (together := batch_values(decoder, count)) is not None:
                values[name] = together
            elif decoder.slot is None:
                values[name] = [None] * count
            else:
                values[name] = new_array(memory, (count, *decoder.slot[0]), decoder.slot[1])
        return RowResults(values, [] if self.transform is None else [{} for _ in range(count)])

    def run(self, task: RowTask, out: RowResults, start: int, stop: int, is_stopped: Callable[[], bool]) -> None:
        """Work on some of the task's rows and put each result into its place in ``out``; threads may share the rows.

        Raises:
            RowError: a row cannot be decoded or transformed.
            CancelledError: ``is_stopped`` says that the results are no longer wanted.
        """
        with contextlib.ExitStack() as turns:
            for values in out.values.values():
                if isinstance(values, BatchValues):
                    turns.enter_context(values.preparing())
            self._run(task, out, start, stop, is_stopped)

    def _run(self, task: RowTask, out: RowResults, start: int, stop: int, is_stopped: Callable[[], bool]) -> None:
        takes_rng = self.transform is not None and has_rng_parameter(self.transform)
        plans = self._plan(task, out, start, stop)
        for row in range(start, stop):
            if is_stopped():
                raise CancelledError
            step: Step = "avoid"
            try:
                if task.avoided and int(task.ids[row]) in task.avoided:
                    raise DecodeError("avoid= names it")
                step = "decode"
                for name, decoder in task.encoded.items():
                    self._decode(task, row, name, decoder, out.values[name], plans.get((row, name)))
                if self.transform is not None:
                    step = "transform"
                    sample = task.sample(out.values, row)
                    rng = {"rng": self._rng(task, row, TRANSFORM)} if takes_rng else {}
                    changed = self.transform(sample, **rng)
                    step = "result"
                    out.samples[row] = self._check_sample(changed)
            except Exception as exc:
                error = RowError(task.first_row + row, step, exc)
                if not self.goes_on or not error.is_of_sample:
                    raise error from exc
                out.failed.append(error)

    def finish(self, task: RowTask, out: RowResults, is_stopped: Callable[[], bool]) -> None:
        """Decode values that are decoded together, once ``run`` was called for all rows. Raises what ``run`` raises."""
        errors = [
            RowError(task.first_row + row, "decode", exc)
            for values in out.values.values()
            if isinstance(values, BatchValues)
            for row, exc in values.decode(is_stopped)
        ]
        known = {error.row for error in out.failed}
        for error in sorted(errors, key=lambda each: each.row):
            if not self.goes_on or not error.is_of_sample:
                raise error from error.cause
            if error.row not in known:
                out.failed.append(error)
                known.add(error.row)

    def _plan(self, task: RowTask, out: RowResults, start: int, stop: int) -> dict[tuple[int, str], ImagePlan]:
        """Plan images by row and field, all before one is decoded: decoding empties the caches of the core.

        An image that cannot be planned has no plan: decoding meets the same error and reports it.
        """
        plans = {}
        for name, decoder in task.encoded.items():
            make_plan = getattr(decoder, "plan", None)
            if make_plan is None or isinstance(out.values[name], BatchValues):
                continue
            for row in range(start, stop):
                with contextlib.suppress(Exception):
                    rng = self._rng(task, row, DECODING) if decoder.takes_rng else None
                    plans[row, name] = make_plan(task.fields[name][row], rng)
        return plans

    def _decode(
        self, task: RowTask, row: int, name: str, decoder: FieldDecoder, out: Any, plan: ImagePlan | None
    ) -> None:
        data: Any = task.fields[name][row]
        if data is None and not getattr(decoder, "takes_missing", False):
            if decoder.slot is not None:
                raise DecodeError(f"has no field {name!r}, which is decoded into a tensor")
            return
        if plan is not None:
            cast("ImageDecoder", decoder).decode_planned(data, plan, out[row])
            return
        rng = self._rng(task, row, DECODING) if decoder.takes_rng else None
        if isinstance(out, BatchValues):
            out.prepare(row, data, rng)
        elif decoder.slot is not None:
            decoder.decode_into(data, out[row], rng)
        else:
            out[row] = decoder(data, rng)

    def _rng(self, task: RowTask, row: int, purpose: int) -> np.random.Generator:
        if task.keys is not None:
            seed, epoch, sample_id = task.keys[row].tolist()
            return sample_rng(seed, epoch, sample_id, purpose)
        return sample_rng(self.seed, task.epoch, int(task.ids[row]), purpose)

    def _check_sample(self, changed: Any) -> Sample | None:
        if isinstance(changed, dict) or (changed is None and self.may_drop):
            return changed
        if changed is None:
            raise ConfigError(
                "transform= returned None; where that means to drop the sample, give may_drop=True, so that all ranks "
                "know from the first batch on that samples may be dropped; else return a dict"
            )
        raise ConfigError(f"transform= returned {type(changed).__name__}; it must return a dict")


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from ..columns import IntArray

    # What collate= returns; without one a dict of name -> tensor or list.
    BatchT = TypeVar("BatchT", default=dict[str, Any])
else:
    from typing import TypeVar

    BatchT = TypeVar("BatchT")

Batch = Any
IDS, VALID = "__id__", "__valid__"


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of a batch: ``transform`` maps a sample to a sample, ``collate`` a list of samples to a batch.

    ``with_ids`` adds ``__id__``, a (B,) int64 tensor of sample ids; with ``collate``, to each sample.

    ``pad`` adds ``__valid__``, a (B,) bool tensor that is False for rows that only fill up the last batch.

    ``may_drop``: ``transform`` may return None, for a sample that is left out of every batch. ``goes_on``: a sample
    that cannot be decoded or transformed is not an error yet, nor is one of ``avoided``, which are not tried.

    ``identify`` gives the columns that ``with_ids`` adds, of the rows' sample ids; by default the ids themselves.

    ``finish`` maps each batch, complete, and its number of rows to the batch that is handed out.
    """

    transform: Callable[..., Sample | None] | None = None
    collate: Callable[[list[Sample]], Batch] | None = None
    with_ids: bool = False
    pad: bool = False
    seed: int = 0
    may_drop: bool = False
    identify: Callable[[IntArray], Mapping[str, IntArray]] | None = None
    finish: Callable[[Batch, int], Batch] | None = None
    goes_on: bool = False
    avoided: frozenset[int] = frozenset()

    @property
    def work(self) -> RowWork:
        """The work on each row."""
        return RowWork(
            transform=self.transform,
            seed=self.seed,
            may_drop=self.may_drop,
            goes_on=self.goes_on,
        )

    def refuse_taken_names(self, fields: Collection[str], data: str) -> None:
        """Raise ConfigError where a data set's field has the name of one that the loader adds, and would be lost."""
        ids = [IDS] if self.identify is None else self.identify(np.empty(0, np.int64))
        added = dict.fromkeys(ids, "with_ids=True") if self.with_ids else {}
        for name, option in {**added, **({VALID: "last_batch='pad'"} if self.pad else {})}.items():
            if name in fields:
                raise ConfigError(
                    f"{data} has a field {name!r}, which {option} adds to batches in its place; leave the field out by "
                    f"columns=, write it under another name, or leave {option} out"
                )

    def __post_init__(self) -> None:
        for name in ("transform", "collate"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name}={value!r} cannot be called; pass a function, or None")
