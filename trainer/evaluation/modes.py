"""Switch modules between training and evaluation mode, and keep the user's choice of frozen ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def begin_training(model: nn.Module) -> None:
    """Put a model that is wholly in evaluation mode into training mode; leave one alone that trains in part.

    So modules that the user called ``.eval()`` on keep their statistics and drop nothing.
    """
    if not any(module.training for module in model.modules()):
        model.train()


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and each back into its own mode afterwards.

    A module whose ``train`` does more, as merging an adapter into the weights, is called to take that back.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # outer before inner, which they call
            is_behind = module.training != training or (module is model and training)
            if is_behind and _does_more(module):
                module.train(training)
        for module, training in modes:
            module.training = training


def _does_more(module: nn.Module) -> bool:
    return "train" in vars(module) or type(module).train is not nn.Module.train
