"""Copies of samples that come more than once, so that a function that changes one in place changes no other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def copy_value(value: Any) -> Any:
    """Copy an array, a tensor, or a list, tuple, dict, set or bytearray, with all of these in it; others stay."""
    torch = sys.modules.get("torch")  # who has no tensors need not wait for it
    if isinstance(value, np.ndarray):
        return value.copy()
    if torch is not None and isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(copy_value, value))
    if type(value) is dict:
        return copy_sample(value)
    return type(value)(value) if type(value) in (set, bytearray) else value


def copy_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a sample by ``copy_value`` of each field."""
    return {name: copy_value(value) for name, value in sample.items()}
