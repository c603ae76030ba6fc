"""Carry over attributes of a model's parameters, which sharding replaces, or refuse them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ...errors import TrainerConfigError
from ..meta import join_name


def check_replaceable(model: nn.Module, zero: int) -> None:
    """Refuse hooks of parameters, and parameters that modules hold outside of registration: shards have neither.

    Such a hook would never be called, and such a parameter keep its initial values.
    """
    names = {id(one): name for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        for key, call in (("_backward_hooks", "hook"), ("_post_accumulate_grad_hooks", "post_accumulate_grad_hook")):
            if getattr(one, key, None):
                raise TrainerConfigError(
                    f"parallel.zero={zero} puts shards in the place of parameters, and {name!r} has a hook by "
                    f"register_{call}, which would never be called; do what it does in forward, in the loss or in the "
                    "optimizer's step, or use parallel.zero=0"
                )
    for where, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_modules") or (key == "_flat_weights" and isinstance(module, nn.RNNBase)):
                continue  # torch's own, which follow
            for found in _parameters_in(value, set()):
                if id(found) in names:
                    raise TrainerConfigError(
                        f"parallel.zero={zero} puts shards in the place of parameters, and {join_name(where, key)} of "
                        f"{type(model).__name__} holds the parameter {names[id(found)]!r} itself, which would keep its "
                        "initial values; hold its module and take the parameter of that in forward, or use "
                        "parallel.zero=0"
                    )


def carry_attributes(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Give parameters the Python attributes of those in whose place they are, as ``_no_weight_decay``.

    ``pairs`` has each old one with the new one.
    """
    for old, new in pairs:
        if new is not old:
            for key, value in vars(old).items():
                vars(new).setdefault(key, value)


def _parameters_in(value: object, seen: set[int]) -> Iterator[nn.Parameter]:
    """The parameters in lists, tuples, sets and dicts, of any depth."""
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, list | tuple | set | frozenset | dict) and id(value) not in seen:
        seen.add(id(value))
        for one in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(one, seen)
