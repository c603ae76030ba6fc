"""Sharded parameters and modules that only some ranks use in a step: made right where possible, else refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ....storage.suggestions import list_some
from ...errors import TrainerConfigError, TrainerError
from ...ranks.mesh import Mesh
from .attributes import carry_attributes
from .forward import HIDDEN_OUTPUT

_HASH_BITS = 20  # squares of hashes, added over all ranks, stay exact in float64


class ParameterUsage:
    """Use of a sharded model's parameters: which got a gradient on this rank in the current step.

    ``fully_shard`` reduces the gradients of a group of parameters together, so all ranks must bring one for the same
    parameters: this class has it add zeros for those that a rank did not use. A parameter that no rank used then has
    zeros where an unsharded model has no gradient, and decay or momentum would move it; ``drop_unused`` takes these
    away. ``whole`` has the parameters by name as forward sees them. Mutable state: a flag for each parameter, which
    autograd's threads set.
    """

    def __init__(self, root: nn.Module, modules: Sequence[FSDPModule]) -> None:
        # Torch before 2.13 cannot: there every rank must use the same parameters.
        self._fills = all(hasattr(module, "set_reduce_scatter_unused_params") for module in modules)
        for module in modules if self._fills else ():
            module.set_reduce_scatter_unused_params(True, recurse=False)
        shards = dict(root.named_parameters())
        self._sharded = {name: one for name, one in shards.items() if one.requires_grad}
        self._flags = dict.fromkeys(self._sharded, False)
        self.whole: dict[str, nn.Parameter] = {}
        for module in modules:
            # Backward sees the whole parameters, which torch makes once; they must be there to be listened to.
            module.unshard()
            for name, whole in root.named_parameters():
                if whole is not shards[name]:
                    self.whole[name] = whole
                    carry_attributes([(shards[name], whole)])  # forward may read them
                if name in self._sharded and whole is not self._sharded[name]:
                    whole.register_hook(self._listener(name))  # type: ignore[no-untyped-call]
            module.reshard()

    def begin_step(self) -> None:
        self._flags = dict.fromkeys(self._sharded, False)

    @property
    def uses_all(self) -> bool:
        """Return whether this rank has used every parameter in this step."""
        return all(self._flags.values())

    @property
    def uses_any(self) -> bool:
        """Return whether this rank has used a parameter in this step."""
        return any(self._flags.values())

    def flags(self, device: torch.device) -> Tensor:
        """(parameters,) float64: 1 for each that was used here; their sum over all ranks is for ``drop_unused``."""
        if self.uses_all:  # made on the device: nothing is copied there
            return torch.ones(len(self._flags), dtype=torch.float64, device=device)
        return torch.tensor(list(self._flags.values()), dtype=torch.float64, device=device)

    def check_reduced(self) -> None:
        """To be called after the last backward of a step, before the update.

        Raises:
            TrainerConfigError: a gradient of this rank was not reduced.
        """
        lost = [name for name, used in self._flags.items() if used and self._sharded[name].grad is None]
        if lost:
            raise TrainerConfigError(
                f"the gradients of {list_some(lost, 5)} were not exchanged, because {HIDDEN_OUTPUT}"
            )

    def drop_unused(self, used_anywhere: Iterable[float]) -> None:
        """Let parameters that no rank used have no gradient, as if the model were not sharded.

        Raises:
            TrainerError: another rank used one that this rank did not, and this torch cannot make that right.
        """
        for name, used in zip(self._sharded, used_anywhere, strict=True):
            if not used:
                self._sharded[name].grad = None
            elif not self._flags[name] and not self._fills:
                raise TrainerError(
                    f"{name} has a gradient on another rank and none here, and torch {torch.__version__} would mix up "
                    "sharded gradients; update torch to 2.13 or newer, or use parallel.zero=0 with "
                    "parallel.unused_parameters=True"
                )

    def _listener(self, name: str) -> Callable[[Tensor], None]:
        def listen(gradient: Tensor) -> None:
            self._flags[name] = True

        return listen


class ModuleOrder:
    """Sees to it that every rank of a stage runs the same sharded modules in the same order.

    Each gathers its weights from all ranks when it runs, so a rank that runs another one would wait for ever, or take
    weights for what they are not. In the first forward each module asks all ranks before it gathers; from then on the
    ranks compare their order after the last forward, before any weight is changed. Mutable state: the order so far.
    """

    def __init__(self, model: nn.Module, modules: Sequence[FSDPModule], mesh: Mesh) -> None:
        names = {module: name for name, module in model.named_modules() if module is not model}
        self._mesh = mesh
        self._hash = 0
        self._asks = bool(modules) and mesh.stage_ranks > 1
        self._listens = False
        self.running = ""
        for module in modules:
            if isinstance(module, nn.Module) and module in names:
                hook = self._hook(f"{names[module]} ({type(module).__name__.removeprefix('FSDP')})")
                module.register_forward_pre_hook(hook, prepend=True)

    def begin_step(self) -> None:
        self._hash = 0

    def begin_forward(self) -> None:
        self._listens = True

    def end_forward(self) -> None:
        """Stop listening, before backward runs modules again for their activations."""
        if self._asks:
            self._ask("the end of forward")
        self._asks = self._listens = False
        self.running = ""

    def marks(self) -> tuple[float, float]:
        """This rank's order as two numbers, to be added over the ranks of its stage for ``check``."""
        return float(self._hash), float(self._hash * self._hash)

    def check(self, stages: Iterable[tuple[float, float]]) -> None:
        """Raise a TrainerError where a stage's orders differ: then the squares add up to more than equals would.

        ``stages`` has the sums of both marks over each.
        """
        if any(squares * self._mesh.stage_ranks != total * total for total, squares in stages):
            raise TrainerError(
                "ranks ran different sharded modules in this step, or in another order, and no weight was changed. "
                + _CURE
            )

    def _hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any) -> None:
            if not self._listens:
                return
            self.running = name
            self._hash = zlib.crc32(name.encode(), self._hash) & ((1 << _HASH_BITS) - 1)
            if self._asks:
                self._ask(name)

        return torch._dynamo.disable(note)  # type: ignore[no-any-return, no-untyped-call]

    def _ask(self, name: str) -> None:
        names = [""] * self._mesh.stage_ranks
        dist.all_gather_object(names, name, group=self._mesh.stage_group)
        other = next((place for place, its in enumerate(names) if its != names[0]), None)
        if other is not None:
            first, second = (self._mesh.describe(self._mesh.rank_in_stage(place)) for place in (0, other))
            raise TrainerConfigError(
                f"{first} comes to {names[0]} where {second} comes to {names[other]}, and each sharded module "
                "gathers its weights from all ranks. " + _CURE
            )


_CURE = (
    "Every rank must run the same of them in the same order: name the modules around the branch with parallel.blocks, "
    "or use parallel.zero=0 with parallel.unused_parameters=True"
)
