"""Models built on torch's meta device: made real one sharded module at a time, so that no rank ever holds a whole one.

Each module's tensors are initialised by its own ``reset_parameters``, as its constructor does, and then by the user's
function if there is one. The generators are seeded by (seed, module name) before each module and rank 0's values go to
all ranks, so initial weights depend on neither the number of ranks nor the zero stage.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from ...storage.suggestions import list_some
from ..errors import TrainerConfigError
from ..ranks.world import World
from .meta import RESETS, is_on_meta, join_name, lost_values, own_tensors, writers_of_tied
from .precision import local_part

Initialiser = Callable[[str, nn.Module], None]
"""Takes a module's name ("" for the model) and the module, and writes the initial values of its own tensors."""

_SHOWN = 8


class Materialiser:
    """Gives memory and initial values to what a model has on the meta device.

    ``uninitialised`` is why a tensor has no initial value of its own, by name, with all names of a tied one; whoever
    loads weights takes their names away, and ``refuse`` raises for what is left. Besides, the mutable state is which
    modules are done.

    Raises:
        TrainerConfigError: there is an ``initialise`` and nothing on the meta device; or a tensor that is neither
            parameter nor buffer is on it.
    """

    def __init__(self, model: nn.Module, world: World, *, seed: int, initialise: Initialiser | None) -> None:
        self.is_needed = is_on_meta(model)
        if initialise is not None and not self.is_needed:
            raise TrainerConfigError(
                "initialise= is for models on the meta device, and this one has its values; build it with "
                "build_on_meta, or leave initialise out"
            )
        self._model, self._world = model, world
        self._seed, self._initialise = seed, initialise
        self._done: set[int] = set()
        self._kept: list[Tensor] = []
        self.uninitialised: dict[str, str] = {}
        if not self.is_needed:
            return
        names: dict[int, list[str]] = {}
        for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
            for name, tensor in named:
                names.setdefault(id(tensor), []).append(name)
        self._aliases = {group[0]: group for group in names.values()}
        self._writers = writers_of_tied(model)
        if initialise is None:
            for name, why in lost_values(model).items():
                self._mark(name, why)

    def materialise(self, part: nn.Module) -> None:
        """Make what is still on the meta device inside ``part`` real and initialise it; a collective."""
        if not self.is_needed:
            return
        modules = [one for one in self._modules_within(part) if id(one[1]) not in self._done]
        self._done.update(id(module) for _, module in modules)
        made = self._allocate(modules)
        inside = {id(tensor) for _, module in modules for tensor in own_tensors(module).values()}
        elsewhere = [one for one in self._model.parameters() if not one.is_meta and id(one) not in inside]
        before = _versions(elsewhere)
        with _own_generators(self._world.device):
            for name, module in modules:
                self._initialise_module(name, module, made)
        if _versions(elsewhere) != before:
            raise TrainerConfigError(
                f"initialising {type(part).__name__} changes weights outside of it, which may be in shards already; "
                "let reset_parameters and initialise write the tensors of the module that they are called for"
            )
        for name, module in modules:
            self._check(name, module, made)
        if made and self._world.world_size > 1:
            tensors = {id(one): one for _, module in modules for one in own_tensors(module).values()}
            with torch.no_grad():
                for tensor in tensors.values():
                    if not tensor.is_meta:
                        dist.broadcast(tensor, src=0)

    def loaded(self, names: frozenset[str]) -> None:
        """Take in which names have got values from a file."""
        for name in names:
            self.uninitialised.pop(name, None)

    def refuse(self) -> None:
        """Raise a TrainerConfigError where memory would be used as it was found, naming the tensors and why."""
        if self.uninitialised:
            named = [f"{name} ({why})" for name, why in self.uninitialised.items()]
            raise TrainerConfigError(
                "the model was built on the meta device, and these have no initial values: "
                f"{list_some(named, _SHOWN)}; give DistributedTrainer(initialise=...) (recipes: [model.init]), give "
                "their module a reset_parameters that writes them, or load them (init_from)"
            )

    def _allocate(self, modules: Sequence[tuple[str, nn.Module]]) -> set[int]:
        """Replace meta tensors by memory full of a value that tells unwritten ones; returns the ids of the new."""
        replaced: dict[int, Tensor] = {}  # a tied tensor stays one
        for _, module in modules:
            for held in (module._parameters, module._buffers):
                for key, old in held.items():
                    if old is not None and old.is_meta:
                        if id(old) not in replaced:
                            replaced[id(old)] = _real_like(old, self._world.device)
                            self._kept.append(old)  # so that its id stays its own
                        held[key] = replaced[id(old)]  # type: ignore[assignment]
            for key, value in vars(module).items():
                if id(value) in replaced:  # another name for a buffer
                    object.__setattr__(module, key, replaced[id(value)])
        return {id(new) for new in replaced.values()}

    def _initialise_module(self, name: str, module: nn.Module, made: set[int]) -> None:
        own, kind = own_tensors(module), type(module).__name__
        if own and not made & {id(tensor) for tensor in own.values()}:
            return  # it was built with values
        _seed_generators(self._seed, name, self._world.device)
        reset = _find_reset(module)
        try:
            with torch.no_grad():
                if reset is not None and own:
                    others = [one for key, one in own.items() if self._writers.get(join_name(name, key), name) != name]
                    kept = [one.clone() for one in others]
                    reset()
                    for one, before in zip(others, kept, strict=True):
                        one.copy_(before)
                if self._initialise is not None:
                    self._initialise(name, module)
        except Exception as exc:
            raise TrainerConfigError(
                f"initialising {name or 'the model'} ({kind}) raised {type(exc).__name__}: {exc}"
            ) from exc
        if reset is not None and not own and self._initialise is None:
            for key, _ in module.named_parameters():
                self._mark(join_name(name, key), f"{kind}.{reset.__name__} initialises what is below it")

    def _check(self, name: str, module: nn.Module, made: set[int]) -> None:
        _refuse_plain_tensors(name, module)
        kind = type(module).__name__
        for key, tensor in own_tensors(module).items():
            if tensor.is_meta:
                self._mark(join_name(name, key), "left on the meta device")
            elif id(tensor) in made and _is_unwritten(tensor):
                why = (
                    f"{kind}.reset_parameters leaves it out"
                    if _find_reset(module)
                    else f"{kind} has no reset_parameters"
                )
                self._mark(join_name(name, key), why)
            elif key in module._buffers:  # which may have been assigned anew
                module._buffers[key] = tensor.to(self._world.device)

    def _modules_within(self, part: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules of ``part`` by their names in the model, those inside before those around them."""
        inside = set(map(id, part.modules()))
        named = [(name, module) for name, module in self._model.named_modules() if id(module) in inside]
        return sorted(named, key=lambda one: -(one[0].count(".") + 1 if one[0] else 0))

    def _mark(self, name: str, why: str) -> None:
        for alias in next((group for group in self._aliases.values() if name in group), [name]):
            self.uninitialised.setdefault(alias, why)


def _find_reset(module: nn.Module) -> Callable[[], None] | None:
    found = (getattr(module, word, None) for word in RESETS)
    return next((reset for reset in found if callable(reset)), None)


@torch.no_grad()
def _versions(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(tensor._version, local_part(tensor)._version) for tensor in tensors]


def _real_like(old: Tensor, device: torch.device) -> Tensor:
    """Memory full of the unwritten value, with what is known of the meta tensor."""
    real = torch.empty_like(old, device=device, requires_grad=False)
    unwritten = _unwritten_value(real.dtype)
    if unwritten is not None:
        real.fill_(unwritten)
    if not isinstance(old, nn.Parameter):
        return real
    new = nn.Parameter(real, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _unwritten_value(dtype: torch.dtype) -> float | int | None:
    """Value that no initialisation writes; None for booleans, of which both values are usual."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    if dtype == torch.bool:
        return None
    return torch.iinfo(dtype).min or 0xA5


def _is_unwritten(tensor: Tensor) -> bool:
    """Return whether any element is unwritten; for booleans and small integers, whether all are."""
    if not tensor.numel():
        return False
    unwritten = _unwritten_value(tensor.dtype)
    if unwritten is None:
        return tensor._version == 0
    if unwritten != unwritten:
        return bool(tensor.isnan().any())
    same = tensor == unwritten
    return bool(same.any() if tensor.itemsize >= 4 else same.all())


def _refuse_plain_tensors(name: str, module: nn.Module) -> None:
    for key, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise TrainerConfigError(
                f"{join_name(name, key)} is a tensor on the meta device that is neither parameter nor buffer, and its "
                "values are lost; register it with register_buffer, or compute it in forward"
            )


@contextmanager
def _own_generators(device: torch.device) -> Iterator[None]:
    """Leave torch's, NumPy's and Python's generators as they were."""
    states = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    np.random.set_state(states[0])
    random.setstate(states[1])


def _seed_generators(seed: int, name: str, device: torch.device) -> None:
    mixed = xxhash.xxh3_64_intdigest(f"initial weights {seed} {name}".encode()) & 0x7FFFFFFFFFFFFFFF
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)
