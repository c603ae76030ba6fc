"""What the trainer knows of a batch: nested mappings and sequences of tensors, and penstock's two marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

VALID = "__valid__"  # (rows,) bool: False for a row of padding
IDS = "__id__"  # (rows,) int64: sample ids; of packed sequences (rows, most), filled up with -1


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; tensors that are there already, and other values, are not copied."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_batch(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [move_batch(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def find_rows(batch: Any) -> int:
    """How many rows a batch has, with those of padding: as many as its first field that goes by rows."""
    return known_rows(batch) or 0


def known_rows(batch: Any) -> int | None:
    """As ``find_rows``; None where no field goes by rows, as in an object of a class that is not known here."""
    # Fields are a mapping's values or a sequence's items.
    fields = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    return next((rows for field in fields if (rows := _rows_of(field)) is not None), None)


def has_rows(value: Any) -> bool:
    """Whether a value is a row after another, of which slices are some: a tensor, an array, a list, or the like."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return len(shape) > 0
    is_indexed = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return is_indexed and not isinstance(value, Mapping | str | bytes)


def _rows_of(field: Any) -> int | None:
    """The rows of a field; None where it has none, as numbers and text."""
    if isinstance(field, Mapping | tuple):  # nested fields, or bytes of rows laid end to end, which say how many
        nested = field.values() if isinstance(field, Mapping) else field
        known: int | None = getattr(field, "num_rows", None)
        return next((rows for one in nested if (rows := _rows_of(one)) is not None), None) if known is None else known
    return len(field) if has_rows(field) else None


def count_rows(batch: Any) -> int | torch.Tensor:
    """How many rows of a batch are samples: those marked valid, or all.

    A 0-dim tensor where the marks are on a device, which is not waited for.
    """
    if isinstance(batch, Mapping) and VALID in batch:
        valid = torch.as_tensor(batch[VALID]).sum()
        return int(valid) if valid.device.type == "cpu" else valid
    return find_rows(batch)


def sample_ids(batch: Any) -> list[int] | None:
    """The ids of the batch's samples, if the loader added them (``with_ids=True``)."""
    if not (isinstance(batch, Mapping) and IDS in batch):
        return None
    ids = torch.as_tensor(batch[IDS])
    found = (ids[batch[VALID].to(ids.device)] if VALID in batch else ids).flatten().tolist()
    return [i for i in found if i >= 0]
