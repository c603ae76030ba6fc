"""Trading time for memory: activation checkpointing (Chen et al. 2016), torch.compile, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import TrainerConfigError
from ..options import check_range
from ..ranks.world import World
from .blocks import find_blocks
from .model import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Which blocks recompute their activations in backward."""

    every: int = 0
    """Recompute every k-th block; 0: none, 1: all."""

    blocks: tuple[str, ...] = ()
    """Class names of the modules that are blocks; none: the items of each ModuleList."""

    def __post_init__(self) -> None:
        check_range("activation.every", self.every, low=0)
        if self.blocks and not self.every:
            raise TrainerConfigError(
                f"activation.blocks={self.blocks!r} names blocks, and activation.every=0 recomputes none; "
                "set activation.every=1, or leave activation.blocks out"
            )


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Whether the model is compiled."""

    enabled: bool = False
    """Compile the model, block by block where it has blocks."""

    backend: str = "inductor"
    """Backend of torch.compile."""

    cuda_graphs: bool = False
    """Replay the compiled blocks as CUDA graphs."""

    timeout_s: float = 1800.0
    """Longest that one compilation may take; the time-out of stalls begins after it."""

    def __post_init__(self) -> None:
        check_range("compile.timeout_s", self.timeout_s, low=0.0)
        if self.cuda_graphs and not self.enabled:
            raise TrainerConfigError(
                "compile.cuda_graphs=True records what torch.compile makes, and compile.enabled=False; "
                "set compile.enabled=True too"
            )
        if self.cuda_graphs and self.backend != "inductor":
            raise TrainerConfigError(
                f"compile.cuda_graphs=True needs inductor, and compile.backend={self.backend!r}; "
                "use compile.backend='inductor'"
            )


def recompute_activations(model: nn.Module, config: ActivationConfig) -> int:
    """Make every k-th block recompute its activations, and return how many do. Parameter names stay the same."""
    chosen = _find_recomputed(model, config)
    for block in chosen:
        block.forward = _recomputed(block)
    return len(chosen)


def compile_model(
    model: nn.Module, config: CompileConfig, parallel: ParallelConfig, world: World, activation: ActivationConfig
) -> None:
    """Compile the model in place, before its blocks recompute activations and before it is spread over the ranks.

    Raises:
        TrainerConfigError: CUDA graphs where they cannot work.
    """
    if not config.enabled:
        return
    if config.cuda_graphs:
        _refuse_graphs(parallel, world, activation)
    arguments: dict[str, Any] = {"backend": config.backend}
    if config.cuda_graphs:
        arguments["mode"] = "reduce-overhead"
    recomputed = _find_recomputed(model, activation)
    for module in find_blocks(model, parallel.blocks, "parallel.blocks") or [model]:
        if any(module is one for one in recomputed):
            # torch.compile sees nothing inside of a checkpoint, so the checkpoint goes around what is compiled.
            module.forward = torch.compile(module.forward, **arguments)
        else:
            module.compile(**arguments)


def _find_recomputed(model: nn.Module, config: ActivationConfig) -> list[nn.Module]:
    if not config.every:
        return []
    blocks = find_blocks(model, config.blocks, "activation.blocks")
    if not blocks:
        raise TrainerConfigError(
            f"activation.every={config.every}: the model has no ModuleList to find blocks in; "
            "name their classes with activation.blocks"
        )
    return blocks[:: config.every]


def _refuse_graphs(parallel: ParallelConfig, world: World, activation: ActivationConfig) -> None:
    if world.device.type != "cuda":
        raise TrainerConfigError(
            f"compile.cuda_graphs=True needs a CUDA device, and this is {world.device}; leave it out here"
        )
    if parallel.zero:
        raise TrainerConfigError(
            f"compile.cuda_graphs=True replays fixed addresses, and parallel.zero={parallel.zero} frees and "
            "gathers the weights in each step; use parallel.zero=0"
        )
    if activation.every:
        raise TrainerConfigError(
            f"compile.cuda_graphs=True replays fixed addresses, and activation.every={activation.every} runs blocks "
            "again in backward, while those are in use; use activation.every=0, or compile.cuda_graphs=False"
        )


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    forward, contexts = block.forward, partial(_keep_buffers, block)

    def run(*inputs: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # which takes contexts of another kind alone
            return checkpoint(forward, *inputs, use_reentrant=False, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

    return run


def _keep_buffers(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of forward and of its recomputation, which sees the buffers as forward did and changes none.

    Else a batch norm would count each batch twice. Only buffers that forward changes are kept, until backward.
    """
    before: list[tuple[nn.Module, str, Tensor]] = []
    return _forward(block, before), _again(before)


@contextmanager
def _forward(block: nn.Module, before: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    if not torch.is_grad_enabled():
        yield
        return
    held = [
        (module, name, buffer, buffer._version, buffer.detach().clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for module, name, buffer, version, copy in held:
        # Norms write to their statistics without a new version of them.
        writes = module.training and isinstance(module, nn.modules.batchnorm._NormBase)
        if writes or module._buffers.get(name) is not buffer or buffer._version != version:
            before.append((module, name, copy))


@contextmanager
def _again(before: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    # Exchanged rather than written to: a backward may have saved the tensors themselves. Each copy is copied again
    # because a graph that is kept is recomputed again.
    now = [(module, name, module._buffers[name]) for module, name, _ in before]
    for module, name, copy in before:
        module._buffers[name] = copy.clone()
    try:
        yield
    finally:
        for module, name, buffer in now:
            module._buffers[name] = buffer
