"""Options for turning gathered rows into a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from .row_work import RowWork, Sample

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
