"""Trading time for memory: activation checkpointing (Chen et al. 2016), torch.compile, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import TrainerConfigError
from ..options import check_range
from ..ranks.world import World
from ..reproducibility import Generator, GeneratorStates, find_generators
from .blocks import find_blocks
from .config import ParallelConfig
from .context import ContextCut, active_cut

Named = Sequence[tuple[Mapping[str, Any], str]]
"""Globals of functions: the dict that holds one, and its name there."""

_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


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
    chosen = find_recomputed(model, config)
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
    compiled = find_blocks(model, parallel.blocks, "parallel.blocks") or [model]
    recomputed = {id(block): block for block in find_recomputed(model, activation)}
    for module in compiled:
        if id(module) not in recomputed:
            module.compile(**arguments)
    # A checkpoint goes around what is compiled, and compiled code that comes to one leaves it to Python.
    inside = {id(one) for module in compiled for one in module.modules()}
    for block in (block for number, block in recomputed.items() if number in inside):
        block.forward = torch.compile(block.forward, **arguments)


def find_recomputed(model: nn.Module, config: ActivationConfig) -> list[nn.Module]:
    """The blocks that recompute their activations."""
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
    forward, contexts = block.forward, partial(_keep_state, block, _named_globals(block))

    def run(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

    return torch._dynamo.disable(run)  # type: ignore[no-any-return, no-untyped-call]


class _Before:
    """State at the start of a block's forward: buffers that it changes, and the generators that it draws from."""

    def __init__(self) -> None:
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        self.generators: GeneratorStates | None = None


def _keep_state(block: nn.Module, named: Named) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of forward and of its recomputation, which sees and draws what forward did, and changes nothing.

    Else a batch norm would count each batch twice, and masks would be others in backward. Torch's own generators are
    torch's matter. Only what forward changes is kept, until backward.
    """
    before = _Before()
    return _forward(block, named, before), _again(before, active_cut())


@contextmanager
def _forward(block: nn.Module, named: Named, before: _Before) -> Iterator[None]:
    if not torch.is_grad_enabled():
        yield
        return
    modules = list(block.modules())
    held = [
        (module, name, buffer, buffer._version, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    generators = GeneratorStates(_held_generators(modules, named))
    yield
    generators.forget_unused()
    before.generators = generators
    for module, name, buffer, version, copy in held:
        # Norms write to their statistics without a new version of them.
        writes = module.training and isinstance(module, nn.modules.batchnorm._NormBase)
        if writes or module._buffers.get(name) is not buffer or buffer._version != version:
            before.buffers.append((module, name, copy))


@contextmanager
def _again(before: _Before, cut: ContextCut | None) -> Iterator[None]:
    # Exchanged rather than written to: a backward may have saved the tensors themselves. Each copy is copied again
    # because a graph that is kept is recomputed again.
    now = [(module, name, module._buffers[name]) for module, name, _ in before.buffers]
    for module, name, copy in before.buffers:
        module._buffers[name] = copy.clone()
    try:
        with (
            nullcontext() if before.generators is None else before.generators.again(),
            nullcontext() if cut is None else cut.again(),  # modes are of a thread, and backward may have its own
        ):
            yield
    finally:
        for module, name, buffer in now:
            module._buffers[name] = buffer


def _held_generators(modules: Iterable[nn.Module], named: Named) -> list[Generator]:
    """Generators that are attributes of ``modules``, and the globals that are ``named``."""
    own = (
        value
        for module in modules
        if not _is_torchs(type(module))
        for name, value in vars(module).items()
        if name not in _OWN_ATTRIBUTES
    )
    return list(find_generators(chain(own, (held.get(name) for held, name in named))))


def _named_globals(block: nn.Module) -> Named:
    """The globals, as a dict and a name, that methods of the block's modules name, and what those enclose."""
    kinds = {kind for module in block.modules() for kind in type(module).__mro__}
    found: list[tuple[Mapping[str, Any], str]] = []
    for kind in kinds:
        if _is_torchs(kind):
            continue
        for function in vars(kind).values():
            if isinstance(function, FunctionType):
                found += [(function.__globals__, name) for name in function.__code__.co_names]
                enclosed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                found += [({name: cell.cell_contents}, name) for name, cell in enclosed if cell != CellType()]
    return [(held, name) for held, name in found if name in held]


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")
