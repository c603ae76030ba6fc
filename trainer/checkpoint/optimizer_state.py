"""An optimizer's state by the names of its parameters: described as it is saved, and given back as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from ...storage.suggestions import list_some
from ..parallel.precision import local_part

OPTIMIZER = "optimizer"
_NAMED = 3


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict by parameter name; one that has not stepped yet is described by zeros, and left so."""
    if optimizer.state:
        return dict(get_optimizer_state_dict(model, optimizer))
    settings = [{key: deepcopy(group[key]) for key in group if key != "params"} for group in optimizer.param_groups]
    with _weights_kept(optimizer):
        described: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    for described_group, kept in zip(described["param_groups"], settings, strict=True):
        described_group.update(deepcopy(kept))
    _zero_state(described["state"])
    optimizer.state.clear()
    return described


def drop_unsaved(optimizer_state: dict[str, Any], saved: Collection[str]) -> dict[str, Any]:
    """Remove, zero and return the state of parameters that had none when the checkpoint was saved.

    They were frozen, or had no gradient yet. ``saved`` are those that had a state; without any, the optimizer is
    another one, and nothing is removed.
    """
    state = optimizer_state["state"]
    lacking = [parameter for parameter in state if parameter not in saved] if saved else []
    never_stepped = {parameter: state.pop(parameter) for parameter in lacking}
    _zero_state(never_stepped)
    return never_stepped


def find_frozen(optimizer: Optimizer, optimizer_state: Mapping[str, Any], saved: Collection[str]) -> list[str]:
    """The parameters whose state was ``saved`` and that are not trained any more."""
    trained = {
        name
        for group, described in zip(optimizer.param_groups, optimizer_state["param_groups"], strict=True)
        for parameter, name in zip(group["params"], described["params"], strict=True)
        if parameter.requires_grad
    }
    return [name for name in saved if name not in trained]


def describe_frozen(frozen: Sequence[str], new: Sequence[str]) -> list[str]:
    """Sentences on the parameters whose state is dropped, and on those that the optimizer did not have then."""
    notes = []
    if frozen:
        notes.append(f"the optimizer state of what is no longer trained is dropped: {list_some(frozen, _NAMED)}")
    if new:
        notes.append(f"what is newly trained starts without optimizer state: {list_some(new, _NAMED)}")
    return notes


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    described: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    never_stepped: Mapping[str, Any],
) -> None:
    """Give the optimizer what was read into ``described``; ``names`` are those of its parameters now, by group.

    Parameters that had ``never_stepped`` have no state afterwards: an optimizer makes it with their first gradient, and
    not always of zeros. Tensors keep their format, which torch would make that of the parameter, and text stays text.
    Settings that were not read stay.
    """
    state = {**described["state"], **never_stepped}
    settings = [dict(group) for group in optimizer.param_groups]
    with _weights_kept(optimizer), _without_empty_groups(optimizer):
        # Torch takes a group without parameters for another one.
        groups = [group for group in described["param_groups"] if group["params"]]
        set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups})
    for group, group_names, own in zip(optimizer.param_groups, names, settings, strict=True):
        for name, value in own.items():
            group.setdefault(name, value)
        for parameter, name in zip(group["params"], group_names, strict=True):
            if name in never_stepped:
                optimizer.state.pop(parameter, None)
                continue
            loaded = optimizer.state.get(parameter, {})
            loaded.update({key: value for key, value in state.get(name, {}).items() if _differs(loaded[key], value)})


def _differs(loaded: object, value: object) -> bool:
    if isinstance(loaded, Tensor) and isinstance(value, Tensor):
        return loaded.dtype != value.dtype
    return isinstance(value, str)


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    whole = optimizer.param_groups
    if all(group["params"] for group in whole):
        yield
        return
    optimizer.param_groups = [group for group in whole if group["params"]]
    try:
        yield
    finally:
        loaded = iter(optimizer.param_groups)  # torch makes new ones
        optimizer.param_groups = [next(loaded) if group["params"] else group for group in whole]


@contextmanager
def _weights_kept(optimizer: Optimizer) -> Iterator[None]:
    """Undo what torch does to weights where it makes an empty optimizer's state by a step.

    Its rate is 0 then and its gradients are zeros, but not every optimizer leaves weights alone at that.
    """
    weights = [local_part(weight.detach()) for group in optimizer.param_groups for weight in group["params"]]
    before = [] if optimizer.state else [weight.clone() for weight in weights]
    with ExitStack() as stack:
        known = signature(optimizer.step).parameters
        if "closure" not in known and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            stepped = optimizer.step  # torch gives a closure, None, by name
            vars(optimizer)["step"] = lambda closure=None: stepped()
            stack.callback(vars(optimizer).pop, "step")
        yield
    for weight, kept in zip(weights, before, strict=False):
        weight.copy_(kept)


def _zero_state(state: Mapping[str, Any]) -> None:
    for values in state.values():
        for name, value in values.items():
            if isinstance(value, Tensor):
                value.zero_()
            elif isinstance(value, int | float) and not isinstance(value, bool):
                values[name] = type(value)(0)
