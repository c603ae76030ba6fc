"""Modules by stage: cut by name, or into stages of about equal parameters or measured times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from ....storage.suggestions import list_some
from ...errors import TrainerConfigError
from ...options import suggest

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The stages of a model.

    ``begins`` has the name of the module that each stage after the first begins with: what is computed before it is
    called belongs to stages before. ``units`` has the stage of each module that is whole on one stage, in the order of
    the model's modules, outer modules only; ``parameters`` that of each parameter by name, also of those that lie in
    modules around several stages.
    """

    stages: int
    begins: tuple[str, ...]
    units: Mapping[str, int]
    parameters: Mapping[str, int]

    def describe(self, stage: int) -> str:
        """The stage's modules in words."""
        names = [name for name, its in self.units.items() if its == stage]
        if len(names) > _SHOWN:
            return f"{names[0]}, {names[1]} ... {names[-1]}"
        return ", ".join(names)


def cut_model(model: nn.Module, stages: Sequence[str | Sequence[str]], count: int) -> Cut:
    """Cut into ``count`` stages, as ``stages`` says.

    Names are those of the modules with which each stage after the first begins; or ``stages`` has for each stage the
    names of all its modules, and of parameters outside of modules; or it is empty, and stages have about equally many
    parameters.

    Raises:
        TrainerConfigError: names of modules that are not there, that leave a module out, or have it twice.
    """
    if not stages:
        return _cut_at(model, split_evenly(model, count))
    kinds = {isinstance(one, str) for one in stages}
    if len(kinds) == 2:
        raise TrainerConfigError(
            "parallel.stages mixes names and lists of names; give the name of the module that each stage after the "
            "first begins with, or for each stage the list of all its modules"
        )
    return _cut_at(model, [str(one) for one in stages]) if True in kinds else _cut_by_lists(model, stages)


def split_evenly(model: nn.Module, count: int) -> list[str]:
    """Names of the modules that stages after the first begin with, such that the largest has fewest parameters.

    A cut is possible before each item of the outermost lists and sequences of modules, and before what comes after
    these.
    """
    candidates = list_units(model)
    modules = dict(model.named_modules())
    sizes = [sum(one.numel() for one in modules[name].parameters()) for name in candidates]
    if len(candidates) < count:
        raise TrainerConfigError(
            f"parallel.pp: the model has {len(candidates)} modules in a row that could be stages, and {count} stages "
            "are asked for; use fewer, or name modules with parallel.stages"
        )
    sums = [0, *accumulate(sizes)]
    # least[k][n]: the size of the largest of k stages over the first n modules, and where the last of them begins
    least = [[(total, 0) for total in sums]]
    for stage in range(1, count):
        row = [(sums[-1] + 1, 0)] * len(sums)
        for stop in range(stage + 1, len(sums)):
            row[stop] = min((max(least[-1][at][0], sums[stop] - sums[at]), at) for at in range(stage, stop))
        least.append(row)
    begins: list[int] = []
    stop = len(candidates)
    for stage in range(count - 1, 0, -1):
        stop = least[stage][stop][1]
        begins.insert(0, stop)
    return [candidates[at] for at in begins]


def list_units(model: nn.Module) -> list[str]:
    """Names of modules at which a model may be cut: items of its outermost lists of modules, and what lies beside."""
    return [name for name, _ in _walk(model, "")]


def _walk(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if (isinstance(child, nn.ModuleList | nn.Sequential) and len(child)) or (
            any(isinstance(one, nn.ModuleList) for one in child.modules()) and not isinstance(module, nn.ModuleList)
        ):
            yield from _walk(child, f"{path}.")
        else:
            yield path, child


def _cut_at(model: nn.Module, begins: Sequence[str]) -> Cut:
    """Cut where the named modules begin; modules belong to stages in the order in which the model has them."""
    modules = dict(model.named_modules())
    for name in begins:
        if name not in modules or not name:
            raise TrainerConfigError(
                f"parallel.stages names {name!r}, no module of the model; {suggest(name, modules)}"
            )
    if len(set(begins)) < len(begins):
        twice = next(name for name in begins if list(begins).count(name) > 1)
        raise TrainerConfigError(f"parallel.stages names {twice!r} twice; a module begins one stage")
    order = {name: at for at, name in enumerate(modules)}
    if sorted(begins, key=order.__getitem__) != list(begins):
        raise TrainerConfigError(
            f"parallel.stages names modules in the order {', '.join(begins)}, and the model has them in another; "
            "name them in the model's order, or give for each stage the list of all its modules"
        )
    for outer in begins:
        inner = next((one for one in begins if one.startswith(f"{outer}.")), None)
        if inner is not None:
            raise TrainerConfigError(
                f"parallel.stages names {outer!r} and {inner!r}, which is a part of it; a stage begins with one of them"
            )
    spanning = {""} | {name[:at] for name in begins for at, letter in enumerate(name) if letter == "."}
    units: dict[str, int] = {}
    stage = 0
    for name in modules:
        if name in spanning or any(name.startswith(f"{outer}.") for outer in units):
            continue
        stage += name in begins
        units[name] = stage
    parameters = {name: _stage_of(name, units, 0) for name, _ in model.named_parameters(remove_duplicate=False)}
    return Cut(stages=len(begins) + 1, begins=tuple(begins), units=units, parameters=parameters)


def _cut_by_lists(model: nn.Module, stages: Sequence[Sequence[str]]) -> Cut:
    modules = dict(model.named_modules())
    own = dict(model.named_parameters(remove_duplicate=False))
    listed: dict[str, int] = {}
    for stage, names in enumerate(stages):
        if not names or names[0] not in modules:
            raise TrainerConfigError(
                f"parallel.stages[{stage}] must begin with the name of a module, and has "
                f"{', '.join(names) or 'nothing'}"
            )
        for name in names:
            if name not in modules and name not in own:
                near = suggest(name, {*modules, *own} - {""})
                raise TrainerConfigError(f"parallel.stages[{stage}] names {name!r}, no module of the model; {near}")
            if name in listed:
                raise TrainerConfigError(
                    f"parallel.stages names {name!r} twice, for stages {listed[name]} and {stage}; a module is on one"
                )
            listed[name] = stage
    for name, stage in listed.items():
        outer = next((one for one in listed if name != one and name.startswith(f"{one}.")), None)
        if outer is not None:
            raise TrainerConfigError(
                f"parallel.stages names {outer!r} for stage {listed[outer]} and a part of it, {name!r}, for stage "
                f"{stage}, so that it is on two; name one of them, or all parts of {outer!r}"
            )
    left = [name for name in own if _stage_of(name, listed, -1) < 0]
    if left:
        raise TrainerConfigError(
            f"parallel.stages leaves out {list_some(left, _SHOWN)}; name each, or its module, for one stage"
        )
    units = {name: listed[name] for name in modules if name in listed}
    inside = {name: _stage_of(name, listed, 0) for name in own}
    begins = tuple(names[0] for names in stages[1:])
    return Cut(stages=len(stages), begins=begins, units=units, parameters=inside)


def _stage_of(name: str, units: Mapping[str, int], otherwise: int) -> int:
    """The stage of what has this name: that of the unit in which it lies."""
    while name:
        if name in units:
            return units[name]
        name = name.rpartition(".")[0]
    return otherwise
