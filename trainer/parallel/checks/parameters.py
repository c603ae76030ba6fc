"""Check that all ranks have one model, and that it keeps the parameters that the trainer was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import chain
from operator import methodcaller

import torch.distributed as dist
from torch import nn

from ....storage.suggestions import list_some
from ...errors import TrainerConfigError
from ...ranks.world import World

_SHOWN = 5
_values = methodcaller("values")  # of hundreds of modules before each step: no loop of Python's own


class KnownParameters:
    """The parameters of a model as it is now; ``check`` finds those that come later, and trained ones that go.

    ``whole`` has the whole parameters of a sharded model by name, which lie in the model while it computes. Frozen
    ones may come, as a teacher's that the first forward makes, but not where the model ``is_saved``: the next trainer's
    lacks them when it loads. Mutable state: what each module held at the last look, and the frozen ones that came.
    """

    def __init__(self, model: nn.Module, whole: Mapping[str, nn.Parameter], *, is_saved: bool) -> None:
        self._model = model
        self._is_saved = is_saved
        own = dict(model.named_parameters())
        self._kept = [*own.values(), *whole.values()]  # a freed one's id could be another's
        self._names = {id(one): name for name, one in (*whole.items(), *own.items())}
        self._trained = [name for name, one in own.items() if one.requires_grad]
        self._late: dict[str, nn.Parameter] = {}
        self._look()

    def check(self) -> None:
        """To be called before each step, and before weights are evaluated or saved; costs less than a walk.

        Raises:
            TrainerConfigError: the model has a parameter that it had not and may not get, or lacks one that is trained.
        """
        if self._list_held() == self._seen and not any(one.requires_grad for one in self._late.values()):
            return
        own = dict(self._model.named_parameters())
        late = {name: one for name, one in own.items() if id(one) not in self._names}
        new = [name for name, one in late.items() if one.requires_grad or self._is_saved]
        there = {self._names.get(id(one)) for one in own.values()}
        gone = [name for name in self._trained if name not in there]
        if new or gone:
            found = [f"{list_some(new, _SHOWN)} came"] * bool(new) + [f"{list_some(gone, _SHOWN)} went"] * bool(gone)
            raise TrainerConfigError(
                f"the model was changed after the trainer was made: of its parameters, {' and '.join(found)}. The "
                "optimizer and the other ranks know nothing of that, so what came would stay untrained, and "
                "checkpoints with it could not be resumed; change the model before the trainer is made, or make a new "
                "trainer, on all ranks"
            )
        self._late = late
        self._look()

    def _look(self) -> None:
        self._modules = list(self._model.modules())
        self._held = [there for module in self._modules for there in (module._parameters, module._modules)]
        self._seen = self._list_held()

    def _list_held(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(_values, self._held))))


def check_same_model(model: nn.Module, world: World) -> None:
    """Compare names, order, shapes and formats of all parameters and buffers; a collective.

    Raises:
        TrainerConfigError: on every rank, if a rank's differ from rank 0's; it names the first that does.
    """
    if world.world_size == 1:
        return
    own = _list_lines(model)
    digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
    digests = [""] * world.world_size
    dist.all_gather_object(digests, digest)
    other = next((rank for rank, its in enumerate(digests) if its != digests[0]), None)
    if other is None:
        return
    everywhere: list[list[str]] = [[] for _ in range(world.world_size)]
    dist.all_gather_object(everywhere, own)
    first, second = everywhere[0], everywhere[other]
    at = next((i for i, (one, its) in enumerate(zip(first, second, strict=False)) if one != its), None)
    at = min(len(first), len(second)) if at is None else at
    here, there = (lines[at] if at < len(lines) else "nothing more" for lines in (first, second))
    raise TrainerConfigError(
        f"model={type(model).__name__} is not the same on all ranks: in order of parameters and buffers, rank 0 has "
        f"{here} where rank {other} has {there}; build the same model on every rank"
    )


def _list_lines(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer, tied ones under each of their names, in their order."""
    tied: dict[nn.Parameter, str] = {}
    lines = []
    for name, one in model.named_parameters(remove_duplicate=False):
        first = tied.setdefault(one, name)
        trained = "" if one.requires_grad else ", frozen"
        lines.append(f"parameter {name!r} of {one.dtype}, shape {tuple(one.shape)}{trained}")
        if first != name:
            lines[-1] += f", tied to {first!r}"
    for name, buffer in model.named_buffers():
        lines.append(f"buffer {name!r} of {buffer.dtype}, shape {tuple(buffer.shape)}")
    return lines
