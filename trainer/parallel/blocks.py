"""Find a model's blocks, which are sharded, recomputed or compiled one by one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import TrainerConfigError
from ..options import suggest


def find_blocks(model: nn.Module, names: tuple[str, ...], key: str) -> list[nn.Module]:
    """The modules whose class is named, outer before inner; with no names, the items of the outermost ``ModuleList``s.

    Of an item without a forward, such as a list in a list, the modules in it. Lists inside blocks (of experts, of
    heads) are left whole: their items may run on some ranks and not on others.

    Raises:
        TrainerConfigError: a name that no module of the model has; the message names ``key``.
    """
    if not names:
        return list(_outermost_items(model))
    known = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in known:
            raise TrainerConfigError(f"{key}={name!r} is not a module class of the model; {suggest(name, known)}")
    return [module for module in model.modules() if type(module).__name__ in names]


def _outermost_items(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, ParametrizationList):
            continue  # what makes a weight, as a weight norm, is no part of what the model computes one by one
        if isinstance(child, nn.ModuleList):
            yield from _runnable(child)
        else:
            yield from _outermost_items(child)


def _runnable(container: nn.Module) -> Iterator[nn.Module]:
    """The modules in a container, and instead of those that have no forward (lists in a list) the modules in them."""
    for item in container.children():
        if type(item).forward is nn.Module.forward and "forward" not in vars(item):
            yield from _runnable(item)
        else:
            yield item
