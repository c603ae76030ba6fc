"""Check that the model still has the parameters that the trainer was made for: new ones would silently not train."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import methodcaller

from torch import nn

from ..errors import TrainerConfigError

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
            found = [f"{_some(new)} came"] * bool(new) + [f"{_some(gone)} went"] * bool(gone)
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


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
