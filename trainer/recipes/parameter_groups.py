"""Groups of parameters by the patterns of their names: settings of their own, or frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...storage.suggestions import list_some
from ..errors import RecipeError

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters whose names fit one of the patterns ``match`` (``*`` and ``?``, as for files), and what they get.

    ``settings`` are keyword arguments of the optimizer for these parameters alone, such as ``lr`` or ``weight_decay``;
    ``freeze`` takes the parameters out of training. Of several groups that fit, the first counts.
    """

    key: str
    match: tuple[str, ...]
    freeze: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.match)

    def describe(self) -> dict[str, Any]:
        """Plain data, as in the TOML file."""
        return {"match": list(self.match), **({"freeze": True} if self.freeze else {}), **self.settings}


def read_groups(key: str, tables: Any) -> tuple[ParameterGroup, ...]:
    """Read ``[[optimizer.groups]]``.

    Raises:
        RecipeError: naming key, value and cure.
    """
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise RecipeError(f"{key}={tables!r} is not a list of tables; write [[{key}]] above each group's keys")
    return tuple(_read_group(f"{key}[{index}]", table) for index, table in enumerate(tables))


def freeze_parameters(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Take the parameters of frozen groups out of training, before the model is spread over the ranks.

    Raises:
        RecipeError: a pattern that fits no parameter, or groups that freeze all of them.
    """
    if not groups or not isinstance(model, nn.Module):  # what is no module is refused by the trainer
        return
    names = [name for name, _ in model.named_parameters()]
    for group in groups:
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise RecipeError(
                    f"{group.key}.match={pattern!r} fits no parameter of {type(model).__name__}; it has "
                    f"{list_some(names, _SHOWN)}"
                )
    for name, parameter in model.named_parameters():
        found = _group_of(name, groups)
        if found is not None and found.freeze:
            parameter.requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        keys = ", ".join(group.key for group in groups if group.freeze)
        raise RecipeError(f"{keys} freeze every parameter of {type(model).__name__}; leave some to train")


def split_parameters(model: nn.Module, groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: what fits no group first, then each group that is not frozen and not empty."""
    trained: Iterable[tuple[str, nn.Parameter]] = (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )
    members: dict[int, list[nn.Parameter]] = {}
    for name, parameter in trained:
        group = _group_of(name, groups)
        members.setdefault(-1 if group is None else groups.index(group), []).append(parameter)
    return [{"params": members[index], **({} if index < 0 else groups[index].settings)} for index in sorted(members)]


def _group_of(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    return next((group for group in groups if group.fits(name)), None)


def _read_group(key: str, table: Mapping[str, Any]) -> ParameterGroup:
    match = table.get("match")
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, list) or not patterns or not all(isinstance(one, str) and one for one in patterns):
        raise RecipeError(f"{key}.match={match!r} is no pattern of names; write one, as match = '*.bias', or a list")
    freeze = table.get("freeze", False)
    if not isinstance(freeze, bool):
        raise RecipeError(f"{key}.freeze={freeze!r} must be true or false")
    settings = {name: value for name, value in table.items() if name not in ("match", "freeze")}
    if freeze and settings:
        raise RecipeError(f"{key} freezes its parameters and gives {', '.join(settings)}; leave one of them out")
    if not freeze and not settings:
        raise RecipeError(f"{key} has no settings for its parameters; add freeze = true, or settings such as lr = 1e-4")
    return ParameterGroup(key=key, match=tuple(patterns), freeze=freeze, settings=settings)
