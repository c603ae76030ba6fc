"""Functions as users write them for samples, and what becomes of a value by each."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

Sample = dict[str, Any]

_MORE = -77
_KEPT = 400


def change_in_place(sample: Sample) -> Sample:
    """Change arrays, lists and dicts in place, as many users do."""
    for value in sample.values():
        if isinstance(value, np.ndarray):
            value += 1
        elif isinstance(value, list):
            value.append(_MORE)
        elif isinstance(value, dict):
            value["more"] = len(value["list"]) + value.get("more", 0)
    return sample


def changed(value: Any) -> Any:
    """Value that ``change_in_place`` makes of this one."""
    if isinstance(value, np.ndarray):
        return value + value.dtype.type(1)
    if isinstance(value, list):
        return [*value, _MORE]
    return {**value, "more": len(value["list"]) + value.get("more", 0)} if isinstance(value, dict) else value


def fail_for_some(sample: Sample) -> Sample:
    """Change a sample, and then fail for one in fifty."""
    change_in_place(sample)
    if _number_of(sample) % 50 == 7:
        raise ValueError("of no use")
    return sample


def drop_some(sample: Sample) -> Sample | None:
    """Change a sample, and drop one in five."""
    change_in_place(sample)
    return None if _number_of(sample) % 5 == 2 else sample


def join_in_place(samples: list[Sample]) -> dict[str, Any]:
    """A collation that changes its samples."""
    joined: dict[str, Any] = {"__id__": torch.tensor([sample.pop("__id__") for sample in samples])}
    for sample in samples:
        change_in_place(sample)
    for name in samples[0] if samples else ():
        values = [sample[name] for sample in samples]
        kinds = {(value.shape, value.dtype) if isinstance(value, np.ndarray) else None for value in values}
        is_one = len(kinds) == 1 and None not in kinds
        joined[name] = torch.from_numpy(np.stack(values)) if is_one else values
    return joined


class KeepInput:
    """A transform that keeps what it is given, and hands on copies."""

    def __init__(self) -> None:
        self.kept: list[Sample] = []

    def __call__(self, sample: Sample) -> Sample:
        if len(self.kept) < _KEPT:
            self.kept.append(dict(sample))
        return {name: v if isinstance(v, memoryview) else copy.deepcopy(v) for name, v in sample.items()}


def keep_most(sample: Sample) -> bool:
    """For ``keep=``: all but one in nine, about."""
    return not str(next(iter(sample.values()))).endswith("7")


def _number_of(sample: Sample) -> int:
    """A number that its values decide."""
    value = next(value for value in sample.values() if isinstance(value, np.ndarray | list) and len(value))
    return int(np.asarray(value).reshape(-1)[0])
