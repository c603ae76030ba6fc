"""The part of a model that lies on one rank: it runs whole programmes of the user's, of which only its stages are real.

A stage runs the user's loss, and in it the whole forward. Modules of other stages return ghosts. Where a stage begins,
the arguments of its first module that are ghosts are exchanged for what the stage before has sent; where the next one
begins, what it is called with is taken down for it. So whatever is computed between modules is computed on one stage,
and every stage takes of the batch what it needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ...errors import TrainerConfigError
from .cut import Cut
from .ghosts import Ghost, all_elsewhere, find_elsewhere, ghost_of, is_elsewhere

Forward = Callable[..., Any]


class _ForwardIsOver(BaseException):
    """The stage has what the next one needs: the rest of the loss is that one's."""


@dataclass(frozen=True)
class Crossing:
    """Values that cross into a stage: leaves of its first module's arguments by place, and which have gradients."""

    places: tuple[int, ...] = ()
    have_gradients: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Shape, strides and dtype of a tensor that is sent."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass
class Rehearsal:
    """Actions of a stage on batches of some shapes, found without computing.

    ``received`` has the leaves of the first module's arguments that come from the stage before, by place; ``sent`` all
    tensors among those that the next stage's first module is called with, by place, None for those that are elsewhere;
    ``draws`` are random operators outside of its modules.
    """

    outputs: dict[tuple[str, int], Any] = field(default_factory=dict)
    received: dict[int, Layout] = field(default_factory=dict)
    sent: dict[int, tuple[Layout, bool] | None] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)


@dataclass
class _Run:
    """One programme under way on one stage."""

    stage: int
    rehearsal: Rehearsal
    incoming: Sequence[Tensor] | None  # None in a rehearsal
    crossing: Crossing
    leaving: Crossing
    have_gradients: bool = True
    calls: dict[str, int] = field(default_factory=dict)
    begun: bool = False
    is_refused: bool = False
    inside: str = ""
    outgoing: list[Any] | None = None


class StagedModel:
    """Keeps the modules of some stages of ``model``, which it changes in place, and runs them.

    Made before weights are cut, sharded or wrapped, and before blocks recompute or are compiled, with a model that may
    be on the meta device. Mutable state: the run under way.
    """

    def __init__(self, model: nn.Module, cut: Cut, device: torch.device) -> None:
        self.model = model
        self.cut = cut
        self._modules = dict(model.named_modules())
        self._gated = _find_gated(self._modules, cut)
        self._shadow = _copy_without_values(model, cut, self._gated, device)
        self._shadows = dict(self._shadow.named_modules())
        self._stages_of = _stages_of_ghosts(self._shadow, cut)
        self._run: _Run | None = None
        self._hooks_are_there = False
        self._forwards = {name: module.forward for name, module in self._shadows.items() if name in self._gated}
        for name, module in self._shadows.items():
            if name in self._gated:
                module.forward = _Gate(self, name, self._forwards[name], is_shadow=True)
        self._listen(self._shadow, self._shadows)

    def keep(self, own: Sequence[int], modules: Collection[nn.Module] | None = None) -> None:
        """Take the parameters and buffers of all but these stages away from ``modules``; None: from all."""
        self._modules = dict(self.model.named_modules())  # some may have been exchanged since
        within = None if modules is None else set(map(id, modules))
        for name, module in self._modules.items():
            if within is not None and id(module) not in within:
                continue
            unit = self._unit_of(name)
            for key, value in list(module._parameters.items()):
                path = f"{name}.{key}" if name else key
                if value is not None and self.cut.parameters.get(path) not in own:
                    del module._parameters[key]
                    object.__setattr__(module, key, ghost_of(value, path))
            if unit is None or unit not in self._gated or self._gated[unit] in own:
                continue
            for key, buffer in list(module._buffers.items()):
                if buffer is not None:
                    del module._buffers[key]
                    object.__setattr__(module, key, ghost_of(buffer, f"{name}.{key}"))
            module._compiled_call_impl = None

    def gate(self) -> None:
        """Have the model's own modules ask which stage runs; after its blocks were made to recompute."""
        for name in self._gated:
            module = self._modules[name]
            module.forward = _Gate(self, name, module.forward, is_shadow=False)

    def stage_of(self, name: str) -> int:
        """The stage of a module that has weights, or is in one that has; -1 elsewhere."""
        unit = self._unit_of(name)
        return -1 if unit is None else self._gated.get(unit, -1)

    def change_shapes(self, changes: Mapping[str, Callable[[Forward], Forward]]) -> None:
        """Let rehearsals use changed forwards of modules by name, as where their weights or activations are cut.

        Raises:
            TrainerConfigError: a module around stages, or one without weights that every stage runs.
        """
        for name, change in changes.items():
            if self.stage_of(name) < 0:
                raise TrainerConfigError(
                    f"parallel.plan names {name!r}, which lies on several stages, or has no weights and runs on all; "
                    "with parallel.pp name modules of one stage, as those in it"
                )
            shadow = self._shadows[name]
            if name in self._gated:
                self._forwards[name] = change(self._forwards[name])
                shadow.forward = _Gate(self, name, self._forwards[name], is_shadow=True)
            else:
                shadow.forward = change(shadow.forward)

    @contextmanager
    def passing_ghosts(self) -> Iterator[None]:
        """Let hooks that are added to modules within be passed by where another stage runs."""
        tables = [
            table
            for name in self._gated
            for table in (self._modules[name]._forward_pre_hooks, self._modules[name]._forward_hooks)
        ]
        before = [set(table) for table in tables]
        yield
        for table, known in zip(tables, before, strict=True):
            for key in table.keys() - known:
                table[key] = _UnlessGhosts(table[key])

    def run(
        self,
        stage: int,
        programme: Callable[[nn.Module], Any],
        module: nn.Module,
        rehearsal: Rehearsal,
        incoming: Sequence[Tensor],
        *,
        crossing: Crossing,
        leaving: Crossing,
    ) -> tuple[Any, list[Tensor]]:
        """Run ``programme(module)`` on one stage: what it returns on the last one, and what leaves for the next.

        Raises:
            TrainerConfigError: it needs what is on another stage.
        """
        if not self._hooks_are_there:  # after those of fully_shard, which must see what has come, not ghosts
            self._listen(self.model, self._modules)
            self._hooks_are_there = True
        run = _Run(stage, rehearsal, incoming, crossing, leaving)
        returned = self._perform(run, programme, module)
        if run.outgoing is None:
            return returned, []
        return None, [
            self._checked(run, place, flag) for place, flag in zip(leaving.places, leaving.have_gradients, strict=True)
        ]

    def rehearse(self, stage: int, programme: Callable[[nn.Module], Any], *, have_gradients: bool = True) -> Rehearsal:
        """Find what ``programme`` does on a stage, without computing. ``have_gradients``: what comes in has.

        Raises:
            TrainerConfigError: it needs what is on another stage.
        """
        self._refresh(stage)
        run = _Run(stage, Rehearsal(), None, Crossing(), Crossing(), have_gradients)
        with _Draws(run):
            self._perform(run, programme, self._shadow)
        found = run.rehearsal
        if run.outgoing is not None:
            for place, leaf in enumerate(run.outgoing):
                if isinstance(leaf, Tensor):
                    there = not is_elsewhere(leaf)
                    found.sent[place] = (Layout.of(leaf), leaf.requires_grad) if there else None
        return found

    @property
    def shadow(self) -> nn.Module:
        """The model that a rehearsal gives to the programme."""
        return self._shadow

    def _perform(self, run: _Run, programme: Callable[[nn.Module], Any], module: nn.Module) -> Any:
        last = self.cut.stages - 1
        returned = None
        self._run = run
        try:
            returned = programme(module)
        except _ForwardIsOver:
            pass
        except TrainerConfigError:
            if run.is_refused or run.stage == last or run.outgoing is None:
                raise  # what comes after is another stage's
        finally:
            self._run = None
        if run.stage and not run.begun:
            self._refuse_uncalled(self.cut.begins[run.stage - 1], run.stage)
        if run.stage < last:
            if run.outgoing is None:
                self._refuse_uncalled(self.cut.begins[run.stage], run.stage + 1)
            return None
        ghost = find_elsewhere(returned)
        if ghost is not None:
            raise TrainerConfigError(
                f"parallel.pp: what the loss or the metrics return is made from {ghost.origin}, which is on another "
                f"stage than the last one, {last}: only what the first module of a stage is called with comes from the "
                "stage before; leave such terms out, pass the value on from module to module, or choose other "
                "parallel.stages"
            )
        return returned

    def _refuse_uncalled(self, name: str, stage: int) -> None:
        raise TrainerConfigError(
            f"parallel.stages: stage {stage} begins with {name!r}, and forward does not call it, or not on its way to "
            "the loss; choose a module that each forward calls once"
        )

    def _checked(self, run: _Run, place: int, has_gradient: bool) -> Tensor:
        assert run.outgoing is not None
        leaf = run.outgoing[place]
        name = self.cut.begins[run.stage]
        if not isinstance(leaf, Tensor) or is_elsewhere(leaf):
            origin = leaf.origin if isinstance(leaf, Ghost) else "no tensor now"
            raise TrainerConfigError(
                f"parallel.stages: an argument of {name!r}, with which stage {run.stage + 1} begins, comes from "
                f"{origin}, not from stage {run.stage}; choose other parallel.stages"
            )
        if torch.is_grad_enabled() and leaf.requires_grad != has_gradient:
            raise TrainerConfigError(
                f"parallel.pp: what {name!r} is called with has {'a' if leaf.requires_grad else 'no'} gradient now, "
                f"and had {'none' if leaf.requires_grad else 'one'} in the first step: weights were frozen or unfrozen "
                "since; do that before the trainer is made"
            )
        return leaf

    def _listen(self, root: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        for stage, name in enumerate(self.cut.begins, start=1):
            modules[name].register_forward_pre_hook(_Border(self, stage, name), with_kwargs=True, prepend=True)
        root.register_forward_hook(self._end_forward)

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        run = self._run
        if run is not None and run.stage < self.cut.stages - 1 and run.outgoing is not None:
            raise _ForwardIsOver

    def _unit_of(self, name: str) -> str | None:
        while name:
            if name in self.cut.units:
                return name
            name = name.rpartition(".")[0]
        return None

    def _refresh(self, stage: int) -> None:
        """Let the shadow have the modes of the model, the buffers that are on all stages, and one stage's weights."""
        for name, shadow in self._shadows.items():
            module = self._modules[name]
            shadow.training = module.training
            unit = self._unit_of(name)
            if unit is None or unit not in self._gated:
                for key, buffer in module._buffers.items():
                    if key in shadow._buffers:
                        shadow._buffers[key] = buffer
        for ghost, stages in self._stages_of:
            ghost.is_elsewhere = stage not in stages

    def pass_border(self, stage: int, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Exchange the arguments of a stage's first module, or take them down; None leaves them."""
        run = self._run
        if run is None or run.stage not in (stage, stage - 1):
            return None
        if run.begun if run.stage == stage else run.outgoing is not None:
            run.is_refused = True
            raise TrainerConfigError(
                f"parallel.stages: stage {stage} begins with {name!r}, and a loss calls it twice; let each stage begin "
                "with a module that a loss calls once"
            )
        leaves, spec = tree_flatten((args, kwargs))
        if run.stage == stage - 1:
            run.outgoing = leaves
            return tree_map(_hide(name), (args, kwargs))  # type: ignore[no-any-return]
        run.begun = True
        ghosts = [place for place, one in enumerate(leaves) if is_elsewhere(one)]
        if run.incoming is None:
            for place in ghosts:
                run.rehearsal.received[place] = Layout.of(leaves[place])
                leaves[place] = ghost_of(leaves[place], name, is_elsewhere=False)
                if leaves[place].is_floating_point() or leaves[place].is_complex():
                    leaves[place].requires_grad_(run.have_gradients and torch.is_grad_enabled())
        else:
            if tuple(ghosts) != run.crossing.places:
                raise TrainerConfigError(
                    f"parallel.stages: {name!r}, with which stage {stage} begins, is called with other values of "
                    "stages before than in the first step; let forward do the same for each batch"
                )
            for place, tensor in zip(ghosts, run.incoming, strict=True):
                leaves[place] = tensor
        return tree_unflatten(leaves, spec)  # type: ignore[no-any-return]

    def call_unit(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, *, is_shadow: bool) -> Any:
        """The unit's outputs: its own where it is of the stage that runs, and ghosts elsewhere."""
        run = self._run
        if run is None:
            raise TrainerConfigError(
                f"{name!r} lies on stage {self._gated[name]} of a pipeline, and the model is called outside of a loss "
                "or of metrics; with parallel.pp only these can run it"
            )
        if self._gated[name] == run.stage:
            outer, run.inside = run.inside, name
            try:
                return forward(*args, **kwargs)
            finally:
                run.inside = outer
        at = run.calls.get(name, 0)
        run.calls[name] = at + 1
        known = run.rehearsal.outputs
        if is_shadow or (name, at) not in known:
            outer, run.inside = run.inside, name
            with torch.no_grad():
                hidden = all_elsewhere((args, kwargs), name)
                found = self._forwards[name](*hidden[0], **hidden[1])
                known[name, at] = tree_map(lambda one: ghost_of(one, name) if isinstance(one, Tensor) else one, found)
            run.inside = outer
        return known[name, at]


class _Gate:
    """A unit's forward."""

    def __init__(self, staged: StagedModel, name: str, forward: Callable[..., Any], *, is_shadow: bool) -> None:
        self._staged, self._name, self._forward, self._is_shadow = staged, name, forward, is_shadow

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._staged.call_unit(self._name, self._forward, args, kwargs, is_shadow=self._is_shadow)


class _UnlessGhosts:
    """A hook that is not called with ghosts."""

    def __init__(self, hook: Forward) -> None:
        self._hook = hook

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        return None if find_elsewhere(values) is not None else self._hook(module, *values)


class _Border:
    """A hook before the module with which a stage begins."""

    def __init__(self, staged: StagedModel, stage: int, name: str) -> None:
        self._staged, self._stage, self._name = staged, stage, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return self._staged.pass_border(self._stage, self._name, args, kwargs)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes random operators outside of a stage's modules, which other stages may run, too, and draw others."""

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not self._noted.inside and find_elsewhere(found) is None:
            self._noted.rehearsal.draws.append(str(func))
        return found


def _hide(name: str) -> Callable[[Any], Any]:
    def hide(one: Any) -> Any:
        return ghost_of(one, name) if isinstance(one, Tensor) and not is_elsewhere(one) else one

    return hide


def _find_gated(modules: Mapping[str, nn.Module], cut: Cut) -> dict[str, int]:
    """Units that only their stage runs, by name: those with weights or buffers that are saved, and first modules."""
    gated = {}
    for name, stage in cut.units.items():
        module = modules[name]
        has_state = any(True for _ in module.parameters()) or any(
            key not in one._non_persistent_buffers_set for one in module.modules() for key in one._buffers
        )
        if has_state or name in cut.begins:
            gated[name] = stage
    return gated


def _copy_without_values(model: nn.Module, cut: Cut, gated: Mapping[str, int], device: torch.device) -> nn.Module:
    """A copy of the model whose weights, and buffers of gated units, are ghosts."""
    memo: dict[int, Any] = {}
    for name, one in model.named_parameters():
        ghost = Ghost(torch.empty_like(one, device="meta").detach(), device, name, is_elsewhere=False)
        memo[id(one)] = ghost.requires_grad_(one.requires_grad)
    for name, module in model.named_modules():
        is_gated = any(name == unit or name.startswith(f"{unit}.") for unit in gated)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                path = f"{name}.{key}"
                meta = torch.empty_like(buffer, device="meta")
                memo[id(buffer)] = Ghost(meta, device, path, is_elsewhere=False) if is_gated else buffer
    try:
        return copy.deepcopy(model, memo)
    except Exception as exc:
        raise TrainerConfigError(
            f"parallel.pp: model={type(model).__name__} cannot be copied, as a pipeline's rehearsal needs ({exc}); "
            "leave out what cannot be copied, or use parallel.pp=1"
        ) from exc


def _stages_of_ghosts(shadow: nn.Module, cut: Cut) -> list[tuple[Ghost, set[int]]]:
    """The weights of a shadow, each with the stages that have it."""
    found: dict[int, tuple[Ghost, set[int]]] = {}
    for name, module in shadow.named_modules():
        for key, one in module._parameters.items():
            if isinstance(one, Ghost):
                path = f"{name}.{key}" if name else key
                found.setdefault(id(one), (one, set()))[1].add(cut.parameters[path])
    return list(found.values())
