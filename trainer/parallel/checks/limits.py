"""Refuse by name, before the first step, what torch's engines cannot take; and keep ties across blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ...errors import TrainerConfigError
from ...ranks.world import World
from ..buffers import distinct
from .attributes import check_replaceable

# Of all others, gloo or NCCL has none.
_EXCHANGED = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
_NOT_ON_SHARDS = (torch.optim.Adafactor, torch.optim.Rprop)


def check_trainable(model: nn.Module) -> None:
    """Refuse what is not a model, or has nothing to train."""
    if not isinstance(model, nn.Module):
        raise TrainerConfigError(f"model is a {type(model).__name__}, not a torch.nn.Module; give one")
    wrapped = [name for name, one in model.named_modules() if isinstance(one, DistributedDataParallel)]
    if wrapped:
        what = f"module {wrapped[0]!r} of model={type(model).__name__}" if wrapped[0] else "model"
        raise TrainerConfigError(
            f"{what} is wrapped in DistributedDataParallel already, and the trainer exchanges gradients itself; give "
            "the bare module"
        )
    lazy = [name for name, one in model.named_parameters() if isinstance(one, UninitializedParameter)]
    if lazy:
        raise TrainerConfigError(
            f"the parameters {', '.join(lazy)} have no shape yet; run model={type(model).__name__} once on a batch "
            "before the optimizer is built"
        )
    if not any(True for _ in model.parameters()):
        raise TrainerConfigError(
            f"model={type(model).__name__} has no parameters; give one that has (are its layers attributes of the "
            "module, or in a ModuleList rather than a list?)"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainerConfigError(
            f"model={type(model).__name__} has no parameter with requires_grad=True; unfreeze the part to train"
        )


def list_sparse(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of embeddings with sparse gradients, by the name of the embedding."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    }


def check_exchangeable(model: nn.Module, zero: int, scheme: str, world: World) -> None:
    """Refuse parameters that cannot be sharded, or whose gradients cannot be compressed, as this run would do it."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TrainerConfigError(
            f"model={type(model).__name__} lies in shards already, by a trainer before this one or by fully_shard; "
            "build it anew for each trainer, and give init_from or the checkpoint folder to go on from its weights"
        )
    if zero:
        check_replaceable(model, zero)
    key = f"parallel.zero={zero}" if zero else f"compression.scheme={scheme!r}"
    for name in list_sparse(model):
        if zero or (scheme != "none" and world.world_size > 1):
            cure = "parallel.zero=0" if zero else "compression.scheme='none'"
            raise TrainerConfigError(
                f"{key} cannot exchange the sparse gradients of embedding {name!r}; build it with sparse=False, or use "
                f"{cure}"
            )
    for name, parameter in model.named_parameters():
        if zero and not parameter.ndim:
            raise TrainerConfigError(
                f"{key}: parameter {name!r} has no dimension to shard; give it shape (1,), as torch.ones(1), or use "
                "parallel.zero=0"
            )
        if zero and not parameter.is_contiguous():
            raise TrainerConfigError(
                f"{key}: parameter {name!r} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, as "
                "torch.channels_last, a transposition or a slice make them, and only contiguous ones can be sharded; "
                "make it contiguous, or use parallel.zero=0"
            )
        if zero and not parameter.numel() and parameter.requires_grad:
            raise TrainerConfigError(
                f"{key}: parameter {name!r} of shape {tuple(parameter.shape)} has no elements to shard; leave it out, "
                "freeze it with requires_grad_(False), or use parallel.zero=0"
            )


def check_optimizer(optimizer: torch.optim.Optimizer, key: str) -> None:
    """Refuse optimizers that are known not to work, with shards or at all.

    ``key`` is the option, with its value, that keeps weights in shards; empty where they are whole.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainerConfigError(
            f"optimizer={name} evaluates the loss several times in a step, and the trainer does so once; use another, "
            "such as AdamW"
        )
    if key and isinstance(optimizer, _NOT_ON_SHARDS):
        raise TrainerConfigError(
            f"optimizer={name} cannot update the shards that {key} keeps; use another, such as AdamW, "
            f"or {_without(key)}"
        )
    if key and isinstance(optimizer, torch.optim.SparseAdam):
        raise TrainerConfigError(
            f"optimizer={name} takes sparse gradients only, and {key} makes dense ones; use AdamW, or {_without(key)}"
        )


def _without(key: str) -> str:
    name = key.partition("=")[0]
    return f"{name}=0" if name == "parallel.zero" else f"{name}=1"


@contextmanager
def updating_alike(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an update take parameters one by one in groups where some are cut, or cut otherwise than others.

    On CUDA optimizers take several at once by default, and torch's operations for that take one kind of tensor only.
    """
    changed = []
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            meshes = {one.device_mesh if isinstance(one, DTensor) else None for one in group["params"]}
            if len(meshes) > 1:
                group["foreach"] = False
                changed.append(group)
    try:
        yield
    finally:
        for group in changed:
            group["foreach"] = None


@contextmanager
def named_if_it_fails(optimizer: torch.optim.Optimizer, key: str) -> Iterator[None]:
    """Turn torch's error about an operation that shards do not have into one that names the optimizer.

    ``key`` is as for ``check_optimizer``.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as exc:
        if not key or not any(sign in str(exc) for sign in ("Sharding propagation", "DTensor", "sharding strategy")):
            raise
        several = ", as foreach=True or fused=True has it" if "mixed torch.Tensor and DTensor" in str(exc) else ""
        raise TrainerConfigError(
            f"optimizer={type(optimizer).__name__} does what torch cannot do with the shards that {key} "
            f"keeps{several}; use another, such as AdamW, or {_without(key)}. Torch says: {str(exc).splitlines()[0]}"
        ) from exc


@contextmanager
def named_if_formats_differ(model: nn.Module, zero: int) -> Iterator[None]:
    """Turn torch's error about a sharded module whose parameters have several formats into one that names them."""
    try:
        yield
    except AssertionError as exc:
        if "uniform original parameter dtype" not in str(exc):
            raise
        first: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            first.setdefault(str(parameter.dtype).removeprefix("torch."), name)
        found = ", ".join(f"{name!r} is {dtype}" for dtype, name in first.items())
        raise TrainerConfigError(
            f"parallel.zero={zero} shards a module's parameters together, which must be of one format: {found}; put "
            "those of another format into modules of their own and name these with parallel.blocks, or use "
            "parallel.zero=0"
        ) from exc


@contextmanager
def named_if_not_replicated(model: nn.Module) -> Iterator[None]:
    """Turn torch's errors about tensors that DDP cannot copy from rank to rank into ones that name them."""
    try:
        yield
    except RuntimeError as exc:
        if "single memory location" in str(exc):
            found = [name for name, one in model.named_parameters() if distinct(one).numel() < one.numel()]
            cure = "give them memory of their own with .clone(), or keep what was expanded and expand it in forward"
            what = "were expanded, so that several of their elements are one"
        elif "Invalid scalar type" in str(exc):
            tensors = (*model.named_parameters(), *model.named_buffers())
            found = [f"{name} ({one.dtype})" for name, one in tensors if one.dtype not in _EXCHANGED]
            cure = "make them int32, int64 or float32, or use parallel.zero=1"
            what = "are of formats that the ranks cannot exchange"
        else:
            raise
        if not found:
            raise
        raise TrainerConfigError(f"parallel.zero=0 on several ranks: {', '.join(found)} {what}; {cure}") from exc


def keep_ties(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that can be sharded one by one: without those that share a weight with what is outside of them.

    A weight can be in one shard only, so such blocks are sharded with what surrounds them.
    """
    kept = list(dict.fromkeys(blocks))
    while True:
        owners: dict[nn.Parameter, dict[int, nn.Module]] = {}
        _collect_owners(model, model, {id(block) for block in kept}, owners)
        tied = {key for found in owners.values() if len(found) > 1 for key in found}
        remaining = [block for block in kept if id(block) not in tied]
        if len(remaining) == len(kept):
            return kept
        kept = remaining


def keep_shared(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that can be made one by one: without those of which a buffer is another module's outside, too."""
    owners: dict[int, set[int]] = {}
    inside = {id(module): id(block) for block in blocks for module in block.modules()}
    for module in model.modules():
        for one in module.buffers(recurse=False):
            owners.setdefault(id(one), set()).add(inside.get(id(module), id(model)))
    shared = {owner for found in owners.values() if len(found) > 1 for owner in found}
    return [block for block in blocks if id(block) not in shared]


def _collect_owners(
    module: nn.Module, owner: nn.Module, blocks: set[int], owners: dict[nn.Parameter, dict[int, nn.Module]]
) -> None:
    owner = module if id(module) in blocks else owner
    for parameter in module.parameters(recurse=False):
        owners.setdefault(parameter, {})[id(owner)] = owner
    for child in module.children():
        _collect_owners(child, owner, blocks, owners)
