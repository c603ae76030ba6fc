"""Batches as the trainer sees them: nested mappings and sequences of tensors, and penstock's two marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

VALID = "__valid__"  # (rows,) bool: False for a row of padding
IDS = "__id__"  # (rows,) int64: sample ids; of packed sequences (rows, most), filled up with -1


def move_batch(batch: Any, device: torch.device) -> Any:
    """Move a batch's tensors to ``device``; tensors that are there already, and other values, are not copied.

    To a CUDA device they are copied from pinned memory and on a stream of their own, for which the current one waits:
    from other memory CUDA copies once the current stream is idle, and the host waits for that.
    """
    if device.type != "cuda":
        return _map_tensors(batch, lambda value: value if value.device == device else value.to(device))
    made: list[torch.Tensor] = []
    current, own = torch.cuda.current_stream(device), _copy_stream(device)

    def copy(value: torch.Tensor) -> torch.Tensor:
        if value.device.type != "cpu" or value.layout != torch.strided:
            return value if value.device == device else value.to(device, non_blocking=True)
        with torch.cuda.stream(own):
            pinned = value if value.is_pinned() else value.pin_memory()  # torch keeps it until the copy is done
            made.append(pinned.to(device, non_blocking=True))
        return made[-1]

    moved = _map_tensors(batch, copy)
    if made:
        current.wait_stream(own)
        for one in made:
            one.record_stream(current)
    return moved


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def list_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in the order of its fields."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(batch, keep)
    return found


def _map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [_map_tensors(value, change) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def find_rows(batch: Any) -> int:
    """Count the rows of a batch, with those of padding: as many as its first field that goes by rows."""
    return known_rows(batch) or 0


def find_doubt(batch: Any) -> str | None:
    """Name the part of a batch that may be samples or rows as well as fields; None where it is certain.

    It may be a list or tuple of samples, or a field that is a tuple of rows. Nested tuples are surely of fields where
    what they hold has as many rows as the fields that are no tuples.
    """
    if _is_of_samples(batch):
        return f"the batch is a {type(batch).__name__} of {len(batch)} alike, which may be samples"
    fields = _name_fields(batch)
    rows = {_rows_of(field) for _, field in fields if not _is_of_rows(field)} - {None}
    for name, field in fields:
        if _is_of_rows(field) and not (rows and set(_leaves(field)) == rows) and rows <= {len(field)}:
            return f"batch{name} is a tuple of {len(field)} alike, which may be rows"
    return None


def known_rows(batch: Any) -> int | None:
    """Count rows as ``find_rows`` does; None where no field goes by rows, as in an object of an unknown class.

    Where ``find_doubt`` has a doubt, returns the more likely number.
    """
    fields = [field for _, field in _name_fields(batch)]
    tuples = [field for field in fields if _is_of_rows(field)]
    if _is_of_samples(batch) and len(tuples) < len(fields):
        return len(batch)
    counted = next((rows for field in fields if not _is_of_rows(field) and (rows := _rows_of(field)) is not None), None)
    if counted is not None or not tuples:
        return counted
    leaves = [set(_leaves(field)) for field in tuples]
    if all(leaves) and len(set().union(*leaves)) == 1:  # as fields, each with all rows
        return leaves[0].pop()
    return len(tuples[0]) if any(leaves) and len(set(map(len, tuples))) == 1 else _rows_of(tuples)


def has_rows(value: Any) -> bool:
    """Return whether a value consists of rows that slices cut: a tensor, an array, a list, or the like."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return len(shape) > 0
    is_indexed = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return is_indexed and not isinstance(value, Mapping | str | bytes)


def _rows_of(field: Any) -> int | None:
    """Count the rows of a field; None where it has none, as numbers and text."""
    if isinstance(field, Mapping | tuple):  # nested fields, or bytes of rows laid end to end, which say how many
        nested = field.values() if isinstance(field, Mapping) else field
        known: int | None = getattr(field, "num_rows", None)
        return next((rows for one in nested if (rows := _rows_of(one)) is not None), None) if known is None else known
    return len(field) if has_rows(field) else None


def _name_fields(batch: Any) -> list[tuple[str, Any]]:
    """List a mapping's values or a sequence's items, with what to append to the batch's name for each."""
    if isinstance(batch, Mapping):
        return [(f"[{key!r}]", field) for key, field in batch.items()]
    return [(f"[{i}]", field) for i, field in enumerate(batch)] if isinstance(batch, (list, tuple)) else [("", batch)]


def _is_of_samples(batch: Any) -> bool:
    """Return whether a list or tuple holds only mappings or tuples with the same fields of the same kinds."""
    if type(batch) not in (list, tuple) or not all(isinstance(one, Mapping | tuple) for one in batch):
        return False
    kinds = {
        (
            type(one),
            *((key, type(field)) for key, field in (one.items() if isinstance(one, Mapping) else enumerate(one))),
        )
        for one in batch
        if not hasattr(one, "num_rows")
    }
    return len(kinds) == 1


def _is_of_rows(field: Any) -> bool:
    """Return whether a field is a plain tuple of values of one kind."""
    return type(field) is tuple and len(set(map(type, field))) == 1


def _leaves(field: Any) -> list[int]:
    """List the rows of all that goes by rows in nested fields."""
    if isinstance(field, Mapping | tuple) and not hasattr(field, "num_rows"):
        nested = field.values() if isinstance(field, Mapping) else field
        return [rows for one in nested for rows in _leaves(one)]
    rows = _rows_of(field)
    return [] if rows is None else [rows]


def count_rows(batch: Any) -> int | torch.Tensor:
    """Count the rows of a batch that are samples: those marked valid, or all.

    Returns a 0-dim tensor where the marks are on a device, which is not waited for.
    """
    if isinstance(batch, Mapping) and VALID in batch:
        valid = torch.as_tensor(batch[VALID]).sum()
        return int(valid) if valid.device.type == "cpu" else valid
    return find_rows(batch)


def sample_ids(batch: Any) -> list[int] | None:
    """List the ids of the batch's samples, if the loader added them (``with_ids=True``)."""
    if not (isinstance(batch, Mapping) and IDS in batch):
        return None
    ids = torch.as_tensor(batch[IDS])
    found = (ids[batch[VALID].to(ids.device)] if VALID in batch else ids).flatten().tolist()
    return [i for i in found if i >= 0]
