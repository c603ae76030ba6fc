"""Parts of batches that are kept, and the values that they must have at every later check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.loader import ByteViews
from penstock.storage.errors import PenstockError

from .keepers import Kept

Value = Callable[[str, int], Any]


class WrongValueError(PenstockError):
    """A value that was delivered is not the sample's, or is no longer."""


@dataclass
class Tally:
    """Tally of what was done and compared."""

    programmes: int = 0
    batches: int = 0
    values: int = 0
    looks: int = 0
    nbytes: int = 0
    ways: set[str] = field(default_factory=set)
    events: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """Kept part of one field of a batch: of the samples ``ids``, whose values ``value`` says."""

    name: str
    ids: Sequence[int]
    kept: Kept
    value: Value

    def check(self) -> int:
        """Compare the bytes and return their number. Raises WrongValueError where they are not what they were."""
        if self.kept.read is None:
            return 0
        wanted = wanted_of(self.name, self.ids, self.value)
        if differs(self.kept.read(self.kept.value), self.kept.pick(wanted)):
            what = f"{self.name} of samples {list(self.ids[:8])}, kept as {type(self.kept.value).__name__}"
            raise WrongValueError(f"{what}: it is no longer what was delivered")
        return count_bytes(wanted)


def wanted_of(name: str, ids: Sequence[int], value: Value) -> Any:
    """All values of a field, as batches have them: an array (n, ...) where they have one shape, else a list."""
    values = [value(name, i) for i in ids]
    if values and all(isinstance(one, int | float) for one in values):
        return np.array(values)
    if {type(one) for one in values} <= {np.ndarray, *np.sctypeDict.values()}:
        arrays = [np.asarray(one) for one in values]
        if len({(array.shape, array.dtype) for array in arrays}) == 1:
            return np.stack(arrays)
    return values


def delivered(values: Any) -> Any:
    """A field's values in a form that can be compared."""
    if isinstance(values, ByteViews):
        return values.to_bytes()
    if isinstance(values, list) and values and isinstance(values[0], memoryview):
        return list(map(bytes, values))
    return values


def differs(found: Any, wanted: Any) -> bool:
    """Return whether values differ, numbers bit by bit."""
    if isinstance(found, torch.Tensor):
        found = found.numpy()
    if isinstance(wanted, np.ndarray | np.generic):
        array = np.asarray(found)
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            return True
        return bool(array.tobytes() != wanted.tobytes())
    if isinstance(found, memoryview):
        return bool(bytes(found) != wanted)
    if isinstance(wanted, list):
        return len(found) != len(wanted) or any(map(differs, found, wanted))
    return bool(found != wanted)


def count_bytes(values: Any) -> int:
    """Bytes of values, about."""
    if isinstance(values, np.ndarray | np.generic):
        return int(values.nbytes)
    return sum(len(value) if isinstance(value, bytes | str) else 8 for value in values)


def ruin(values: Any) -> None:
    """Overwrite a batch's values, as their owner may."""
    if isinstance(values, torch.Tensor) and values.is_contiguous():
        values.view(torch.uint8).fill_(RUINED)
    elif isinstance(values, torch.Tensor | np.ndarray):
        values[...] = 0
    elif isinstance(values, ByteViews):
        values.gather().data.zero_()
    elif isinstance(values, dict):
        values.clear()
    elif isinstance(values, list):
        for value in values:
            ruin(value)
        values.clear()


RUINED = 0xEE
