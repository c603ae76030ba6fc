"""Tensors whose values are on another stage: shape, dtype and device are right, and what is made from one is another.

A stage runs the whole of the user's loss and forward, where the modules of other stages return ghosts. So a program
needs no analysis: what may not come from elsewhere (a loss, an argument of a module, a branch) shows in itself, at each
microbatch, and is refused by name, while shapes, which every stage knows, may be used freely.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import TrainerConfigError

_LIKE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Operators that use nothing of a tensor but its shape, dtype and device."""


class Ghost(Tensor):
    """A tensor without values. ``origin`` says in words what it was made from.

    ``is_elsewhere``: its values are on another stage. Without, it stands for values that this stage will have, in a
    rehearsal that computes nothing; what is made from both is elsewhere.
    """

    _meta: Tensor
    origin: str
    is_elsewhere: bool

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, origin: str, is_elsewhere: bool = True) -> Ghost:
        made: Ghost = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=False
        )
        made._meta, made.origin, made.is_elsewhere = meta, origin, is_elsewhere
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Ghost({tuple(self.shape)}, {self.dtype}, of {self.origin})"

    def tolist(self) -> NoReturn:
        # Torch refuses this for any tensor of its own form, and names nothing.
        why = "they are on another stage" if self.is_elsewhere else "a stage is gone through by shapes alone at first"
        raise TrainerConfigError(
            f"parallel.pp: the values of what {self.origin} returned are needed by tolist(), and {why}; let no branch "
            "and no size depend on values, as those of a mixture of experts do"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def ghost_of(tensor: Tensor, origin: str, *, is_elsewhere: bool = True) -> Ghost:
    """A ghost of the tensor's shape, strides, dtype and device."""
    return Ghost(_to_meta(tensor), tensor.device, origin, is_elsewhere)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values that decide what is computed: no ghost, fake, or one on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, Ghost | FakeTensor))


def is_elsewhere(value: object) -> bool:
    """Return whether this is a tensor whose values are on another stage."""
    return isinstance(value, Ghost) and value.is_elsewhere


def all_elsewhere(tree: Any, origin: str) -> Any:
    """The tree with each tensor as a ghost; those that are elsewhere already keep their origin."""
    return tree_map(
        lambda one: ghost_of(one, origin) if isinstance(one, Tensor) and not is_elsewhere(one) else one, tree
    )


def find_elsewhere(tree: Any) -> Ghost | None:
    """The first ghost of a tree whose values are on another stage."""
    return next((one for one in tree_leaves(tree) if is_elsewhere(one)), None)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    ghosts = [one for one in tensors if isinstance(one, Ghost)]
    source = next((one for one in ghosts if one.is_elsewhere), ghosts[0])
    if func.overloadpacket in _LIKE and len(tensors) == 1:
        size = [source.shape, source.stride()]
        plain = torch.empty_strided(*size, dtype=source.dtype, device=source.device)
        return func(plain, *args[1:], **kwargs)
    if func.overloadpacket is torch.ops.aten._local_scalar_dense and not source.is_elsewhere:
        return torch.ones((), dtype=source.dtype).item()  # this stage will have it: a loss may be written to a log
    written = _written(func, args, kwargs)
    if source.is_elsewhere:
        for one in written:
            if not isinstance(one, Ghost):
                raise TrainerConfigError(
                    f"parallel.pp: forward writes by {func} into a tensor of this stage what {source.origin} returned, "
                    "which is on another stage; write out of place, or choose other parallel.stages"
                )
    known = {}
    device = kwargs.get("device") or source.device

    def enter(value: Any) -> Any:
        if isinstance(value, Tensor):
            meta = _to_meta(value)
            known[id(meta)] = value
            return meta
        return value

    meta_args, meta_kwargs = tree_map(enter, args), tree_map(enter, kwargs)
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    try:
        result = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError) as exc:
        if not source.is_elsewhere or not _needs_values(func):
            raise
        raise TrainerConfigError(
            f"parallel.pp: the values of what {source.origin} returned are needed by {func}, and they are on another "
            "stage; let no branch and no size depend on them outside of the modules of their stage, or choose other "
            "parallel.stages"
        ) from exc

    def leave(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return Ghost(value, torch.device(device), source.origin, source.is_elsewhere)

    return tree_map(leave, result)


def _to_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Ghost):
        return tensor._meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operator changes."""
    if not func._schema.is_mutable:
        return []
    named = list(func._schema.arguments)
    values = [*args, *(kwargs.get(one.name) for one in named[len(args) :])]
    found = [
        value
        for one, value in zip(named, values, strict=False)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    return [one for one in tree_leaves(found) if isinstance(one, Tensor)]


def _needs_values(func: Any) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(tags & set(func.tags)) or func.overloadpacket in (
        torch.ops.aten._local_scalar_dense,
        torch.ops.aten.equal,
        torch.ops.aten.nonzero,
    )
