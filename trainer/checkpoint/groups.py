"""An optimizer's parameter groups in a checkpoint: their order and number may change, so each is found by its names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from .optimizer_state import OPTIMIZER
from .settings import Settings, is_plain, is_same

_GROUPS = "param_groups"
_NAMES = "params"
_LACKING = object()


@dataclass(frozen=True, kw_only=True)
class Found:
    """Match of a group in a checkpoint: the ``numbers`` of the saved groups that hold its parameters, and settings.

    A setting whose value differs between those groups is in ``differing`` with its values, and nowhere else.
    """

    numbers: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    differing: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def describe_saved_groups(metadata: Metadata, names: Collection[str]) -> dict[str, Any]:
    """Describe targets to read the checkpoint's groups into, by number: parameters, and settings of these ``names``."""
    tree: dict[str, Any] = {}
    for key, path in _paths(metadata):
        if path[3] not in (*names, _NAMES):
            continue
        kind, place = metadata.state_dict_metadata[key], tree
        for part in path[2:-1]:
            place = place.setdefault(str(part), {})
        place[str(path[-1])] = (
            torch.empty(kind.size, dtype=kind.properties.dtype) if isinstance(kind, TensorStorageMetadata) else None
        )
    return tree


def collect_groups(tree: Mapping[str, Any], metadata: Metadata) -> list[dict[str, Any]]:
    """The checkpoint's groups, once ``tree`` was read."""
    values = []
    for _, path in _paths(metadata):
        value: Any = tree
        for part in map(str, path[2:]):
            value = value.get(part, _LACKING) if isinstance(value, Mapping) else _LACKING
        if value is not _LACKING:
            values.append((path[2:], value))
    found = _nested(values)
    return [found[number] for number in range(len(found))] if isinstance(found, list) else []


def find_group(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]], given: Settings | None) -> Found:
    """Find in a checkpoint a group of an optimizer, whose ``params`` are names; of settings, those of the same form.

    ``given`` are the settings that the groups of the run that saved were given.
    """
    there = {name: number for number, one in enumerate(saved) for name in one[_NAMES]}
    numbers = tuple(dict.fromkeys(there[name] for name in group[_NAMES] if name in there))
    settings, differing = _agree([saved[number] for number in numbers])
    given_then = _agree([given[number] for number in numbers])[0] if given else {}

    own = {name: value for name, value in group.items() if name != _NAMES}
    return Found(
        numbers=numbers,
        settings={
            name: settings[name].to(value.device) if isinstance(value, Tensor) else settings[name]
            for name, value in own.items()
            if name in settings and isinstance(value, Tensor) == isinstance(settings[name], Tensor)
        },
        given=given_then,
        differing={name: differing[name] for name in own if name in differing},
    )


def describe_differing(groups: Sequence[Found], optimizer: Optimizer) -> list[str]:
    """A sentence for each setting that groups of the checkpoint which are one now had otherwise from each other."""
    return [
        f"optimizer group {number}: {name}={group[name]!r}; the checkpoint had {' and '.join(map(repr, values))}"
        for number, (group, found) in enumerate(zip(optimizer.param_groups, groups, strict=True))
        for name, values in found.differing.items()
        if name != "lr" and any(not (is_plain(one) and is_same(one, group[name])) for one in values)
    ]


def _agree(groups: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The settings that all ``groups`` have alike, and the values of the others."""
    if len(groups) <= 1:
        return (dict(groups[0]) if groups else {}), {}
    alike, differing = {}, {}
    for name in dict.fromkeys(name for group in groups for name in group):
        values = [group[name] for group in groups if name in group]
        if len(values) == len(groups) and all(map(is_plain, values)) and all(is_same(values[0], one) for one in values):
            alike[name] = values[0]
        else:
            differing[name] = values
    return alike, differing


def _paths(metadata: Metadata) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """The keys of groups' values, with where each value is: (OPTIMIZER, "param_groups", group, setting, ...)."""
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    return [(key, path) for key, path in paths.items() if path[:2] == (OPTIMIZER, _GROUPS)]


def _nested(values: Sequence[tuple[tuple[Any, ...], Any]]) -> Any:
    """Lists and dicts of values that lie at these paths."""
    if len(values) == 1 and not values[0][0]:
        return values[0][1]
    parts: dict[Any, list[tuple[tuple[Any, ...], Any]]] = {}
    for path, value in values:
        parts.setdefault(path[0], []).append((path[1:], value))
    built = {part: _nested(inner) for part, inner in parts.items()}
    return [built[part] for part in sorted(built)] if all(isinstance(part, int) for part in built) else built
