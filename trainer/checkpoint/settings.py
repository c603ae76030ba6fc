"""Settings of an optimizer over restarts: which a run was given, and which a checkpoint brings back."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Settings = Sequence[Mapping[str, Any]]
"""By group, its values by name: the optimizer's ``defaults``, and what else of it is plain."""

_PARAMETERS = ("params", "param_names")


def copy_settings(optimizer: Optimizer) -> Settings:
    """Copy the groups' current settings, tensors included, because a checkpoint is read into them."""
    return [
        {
            name: _copy(value)
            for name, value in group.items()
            if name in optimizer.defaults or (name not in _PARAMETERS and is_plain(value))
        }
        for group in optimizer.param_groups
    ]


def pack_settings(settings: Settings) -> bytes:
    """As one value, whose structure no reader needs to know beforehand."""
    held = io.BytesIO()
    torch.save([dict(group) for group in settings], held)
    return held.getvalue()


def unpack_settings(packed: bytes) -> Settings | None:
    """Undo ``pack_settings``; tensors are on the CPU. None where a value is more than tensors, numbers and text.

    What a checkpoint holds is data: no function that it names is called.
    """
    try:
        found: Settings = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return None
    return found


def settle_settings(
    optimizer: Optimizer,
    before: Settings,
    given: Settings | None = None,
    given_then: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Decide whose settings stay once a checkpoint was read into the groups; returns what it had otherwise.

    Some optimizers keep state among their settings (Prodigy's ``d``, ScheduleFree's ``k``), so that one which this run
    was ``given`` as the run that saved was ``given_then``, group by group, stays as the checkpoint has it, and one that
    is given anew replaces it. Rates are those of ``before`` the reading: the schedule sets them. So are all
    ``defaults`` of the optimizer, where it is not known what was given; what else the groups have is then the
    checkpoint's.
    """
    changed = []
    for number, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        now, then = ({}, {}) if given is None or given_then is None else (given[number], given_then[number])
        for name, value in old.items():
            if name != "lr":
                is_known = name in now and name in then
                if not is_known and name not in optimizer.defaults:
                    continue
                value = _copy(now.get(name, value))
                if is_known and is_same(then[name], value):
                    continue
            saved, group[name] = group[name], value
            if name != "lr" and not is_same(saved, value):
                changed.append(f"optimizer group {number}: {name}={value!r}; the checkpoint had {saved!r}")
    return changed


def is_plain(value: object) -> bool:
    """Return whether a value is a number, text, a tensor or nothing, or a list or tuple of such."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, Tensor | int | float | str)


def is_same(one: object, other: object) -> bool:
    """Return whether two values of a setting are equal; tensors by shape and elements."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    return bool(one == other)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)
