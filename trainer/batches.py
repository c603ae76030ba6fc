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
    """How many rows a batch has, with those of padding: as many as its first tensor or list."""
    # Fields are a mapping's values or a sequence's items; each is a tensor, or a list where shapes differ.
    fields = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    for field in fields:
        if isinstance(field, list) or (isinstance(field, torch.Tensor) and field.ndim):
            return len(field)
        if isinstance(field, (Mapping, tuple)):
            return find_rows(field)
    return 0


def count_rows(batch: Any) -> int | torch.Tensor:
    """How many rows of a batch are samples: those marked valid, or as many as its first tensor or list has.

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
