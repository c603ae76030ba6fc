"""Tensor parallelism (Shoeybi et al. 2019): weights of layers are cut over the ranks of a replica, as a plan says.

A plan maps names of modules, with wildcards, to torch's ``ParallelStyle``s or to words of ``STYLES``. The parameters
that a style cuts, or lays on all ranks, become DTensors of the ``tp`` dimension under the names that they had; all
others are plain, equal on all ranks, and so must their gradients be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils.parametrize import is_parametrized

from ..errors import TrainerConfigError
from ..imports import describe_error, import_name
from ..options import suggest
from .config import ParallelConfig
from .sequence_shapes import SEQUENCE, ShapeChange, check_length, find_shape_change

Styles = Mapping[str, ParallelStyle | str]
"""Names of modules, with wildcards, to how each is cut."""


class LossParallel(ColwiseParallel):
    """The matrix of the scores, cut by classes; while gradients are taken its scores stay so, for the loss to sum.

    Of such scores, a DTensor, ``F.cross_entropy`` is computed without any rank holding all. Without gradients, as
    in evaluation, they are whole.
    """

    def __init__(self, *, input_layouts: Replicate | Shard | None = None) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=Shard(-1), use_local_output=False)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        if torch.is_grad_enabled():
            return ColwiseParallel._prepare_output_fn(  # type: ignore[no-untyped-call]
                output_layouts, use_local_output, mod, outputs, device_mesh
            )
        return outputs.full_tensor()


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gathered": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_of_sequence": partial(ColwiseParallel, input_layouts=Shard(SEQUENCE)),
    "colwise_of_sequence_gathered": partial(ColwiseParallel, input_layouts=Shard(SEQUENCE), output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_of_whole": partial(RowwiseParallel, input_layouts=Replicate()),
    "rowwise_to_sequence": partial(RowwiseParallel, output_layouts=Shard(SEQUENCE)),
    "embedding": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_to_sequence": partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)),
    "sequence": SequenceParallel,
    "loss": LossParallel,
    "loss_of_sequence": partial(LossParallel, input_layouts=Shard(SEQUENCE)),
}
"""Words for styles. An embedding is cut by its rows, which are tokens; "sequence" is for norms on cut sequences."""


class TensorPlan:
    """Styles of a model's modules, checked against their sizes; constant, but for what has been cut.

    Raises:
        TrainerConfigError: there is no plan; a name that no module has, or two that one has; a style that is none, or
            for modules of another class; sizes that ``tp`` does not divide; tied weights in different styles.
    """

    def __init__(self, model: nn.Module, config: ParallelConfig) -> None:
        self._model = model
        self._tp = config.tp
        self._where = f"parallel.tp={config.tp}"
        self._styles: dict[str, tuple[nn.Module, ParallelStyle]] = {}
        named_by: dict[str, str] = {}
        names = dict(model.named_modules())
        for pattern, given in _read_plan(model, config).items():
            style = _read_style(pattern, given)
            found = [name for name in names if _matches(name, pattern)]
            if not found:
                raise TrainerConfigError(
                    f"parallel.plan names {pattern!r}, which no module of {type(model).__name__} is called; "
                    f"{suggest(pattern, [name for name in names if name])}"
                )
            for name in found:
                if name in named_by:
                    raise TrainerConfigError(
                        f"parallel.plan names the module {name!r} twice, by {named_by[name]!r} and by {pattern!r}; "
                        "name each module once"
                    )
                named_by[name] = pattern
                self._styles[name] = names[name], style
        for name, (module, style) in self._styles.items():
            self._check(name, module, style)
        self._ties = [ties for ties in _tied(model) if any(self._has_style(one) for one in ties)]
        self._check_ties()

    @property
    def cuts_losses(self) -> bool:
        """Return whether scores come to the loss cut by classes."""
        return any(isinstance(style, LossParallel) for _, style in self._styles.values())

    @property
    def styles(self) -> Mapping[str, ParallelStyle]:
        """The style of each module that the plan names, by the module's name."""
        return {name: style for name, (_, style) in self._styles.items()}

    def shape_changes(self) -> dict[str, ShapeChange]:
        """By name of a module, how the shapes of what goes in and out change; columns count as whole ones.

        Raises:
            TrainerConfigError: a style of which that is not known.
        """
        return {name: find_shape_change(name, style, self._tp) for name, (_, style) in self._styles.items()}

    def cut(
        self,
        mesh: DeviceMesh,
        is_here: Callable[[str], bool] | None = None,
        *,
        modules: Collection[nn.Module] | None = None,
    ) -> None:
        """Cut the weights along ``mesh``, of one dimension; they must be the same on all of its ranks. No collective.

        Those of ``modules``, the model last; or of all. Modules that were taken out of the model since are left as
        they are, and so are those that ``is_here`` says are not.
        """
        there = {id(module) for module in (self._model.modules() if modules is None else modules)}
        for name, (module, style) in self._styles.items():
            if id(module) not in there or not (is_here is None or is_here(name)):
                continue
            frozen = {key for key, one in module.named_parameters() if not one.requires_grad}
            parallelize_module(module, mesh, style, src_data_rank=None)
            for key, one in module.named_parameters():
                one.requires_grad_(key not in frozen)  # SequenceParallel forgets it
                _check_even(f"{name}.{key}", one, self._where)
            if _gives_sequence(style):
                module.register_forward_pre_hook(partial(check_length, name, self._tp))
        for ties in self._ties if id(self._model) in there else ():
            held = [(self._model.get_submodule(name), key) for name, key in ties if _holds(self._model, name, key)]
            placed = [getattr(module._parameters[key], "placements", None) for module, key in held]
            if any(one != placed[0] for one in placed):
                raise self._refuse_ties(ties)
            for module, key in held[1:]:
                module.register_parameter(key, held[0][0]._parameters[held[0][1]])

    def _has_style(self, tie: tuple[str, str]) -> bool:
        return tie[0] in self._styles

    def _check(self, name: str, module: nn.Module, style: ParallelStyle) -> None:
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            return
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise TrainerConfigError(
                f"parallel.plan cuts {name!r} by {type(style).__name__}, which is for linear layers and embeddings, "
                f"and that is a {type(module).__name__}; name the linear layers in it"
            )
        if is_parametrized(module):
            raise TrainerConfigError(
                f"parallel.plan cuts {name!r}, whose weight is made from others by a parametrization, and those would "
                "stay whole; take the parametrization out, or leave the module out of the plan"
            )
        is_linear = isinstance(module, nn.Linear)
        dim = int(is_linear != isinstance(style, ColwiseParallel))
        what = {(True, 0): "outputs", (True, 1): "inputs", (False, 0): "rows", (False, 1): "columns"}[is_linear, dim]
        size = module.weight.shape[dim]
        if size % self._tp:
            raise TrainerConfigError(
                f"{self._where} does not divide the {size} {what} of {name!r}; use a divisor of {size}, or leave the "
                "module out of parallel.plan"
            )
        width = self._head_width(name)
        if is_linear and width and size % width == 0 and (size // width) % self._tp:
            raise TrainerConfigError(
                f"{self._where} does not divide the {size // width} heads, {width} wide each, of {name!r}; use a "
                f"divisor of {size // width}, or leave the modules of that attention out of parallel.plan"
            )

    def _head_width(self, name: str) -> int:
        """The width of a head as the module around tells it, which is what attention is cut by; 0 if it does not."""
        around = self._model.get_submodule(name.rpartition(".")[0])
        widths = (getattr(around, key, None) for key in ("head_dim", "head_width"))
        return next((one for one in widths if isinstance(one, int)), 0)

    def _check_ties(self) -> None:
        for ties in self._ties:
            if not all(self._has_style(one) for one in ties):
                raise self._refuse_ties(ties)

    def _refuse_ties(self, ties: list[tuple[str, str]]) -> TrainerConfigError:
        styles = ", ".join(
            f"{name}.{key} ({self._styles[name][1] if name in self._styles else 'not in the plan'})"
            for name, key in ties
        )
        return TrainerConfigError(
            f"parallel.plan cuts one weight, which modules share, in different ways: {styles}; give them styles that "
            'cut it alike, as "embedding" and "colwise_gathered" cut tokens, or build the model with a weight for each'
        )


def spread_losses(plan: TensorPlan | None) -> AbstractContextManager[None]:
    """The context in which a loss, and its backward, take scores as the plan leaves them."""
    return loss_parallel() if plan is not None and plan.cuts_losses else nullcontext()


def _read_plan(model: nn.Module, config: ParallelConfig) -> Styles:
    """The plan that the config names, or the model's own."""
    given: Any = config.plan
    key = "parallel.plan"
    if given is None:
        given = getattr(model, "parallelize_plan", None)
        key = f"{type(model).__name__}.parallelize_plan"
        if given is None:
            raise TrainerConfigError(
                f"parallel.tp={config.tp} cuts the modules that a plan names, and there is none; give "
                "parallel.plan={ use = 'package.module:plan' }, a mapping from names of modules to styles, or a model "
                "with a parallelize_plan"
            )
    if isinstance(given, Mapping) and isinstance(given.get("use"), str) and ":" in given["use"]:
        arguments = {name: value for name, value in given.items() if name != "use"}
        given, key = import_name("parallel.plan.use", given["use"]), f"parallel.plan.use={given['use']!r}"
        named = arguments.pop("args", {})
        if arguments or not isinstance(named, Mapping):
            raise TrainerConfigError(f"parallel.plan={config.plan!r} has other keys than use and args; leave them out")
        if callable(given):
            given = partial(given, **named)
        elif named:
            raise TrainerConfigError(f"{key} is no function, and parallel.plan.args={named!r} are for one")
    if callable(given):
        takes_model = config.plan is not None
        try:
            given = given(model) if takes_model else given()
        except TrainerConfigError:
            raise
        except Exception as exc:
            raise TrainerConfigError(f"{key} raised {describe_error(exc)}") from exc
    if not isinstance(given, Mapping) or not given:
        raise TrainerConfigError(
            f"{key} gives {given!r:.80}; it must be a mapping from names of modules, such as "
            "'layers.*.feed.0', to styles"
        )
    return given


def _read_style(pattern: str, given: object) -> ParallelStyle:
    if isinstance(given, ParallelStyle):
        return given
    if isinstance(given, str) and given in STYLES:
        return STYLES[given]()
    what = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
    raise TrainerConfigError(
        f"parallel.plan has {what} for {pattern!r}, which is no style; {suggest(str(given), STYLES)}, or give a "
        "ParallelStyle of torch.distributed.tensor.parallel"
    )


def _matches(name: str, pattern: str) -> bool:
    """Return whether each part of a name, between dots, is that of the pattern, in which it may be a wildcard."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _tied(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """The names, of module and parameter, of each weight that has several."""
    names: dict[int, list[tuple[str, str]]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        module, _, key = name.rpartition(".")
        names.setdefault(id(one), []).append((module, key))
    return (ties for ties in names.values() if len(ties) > 1)


def _holds(model: nn.Module, name: str, key: str) -> bool:
    """Return whether a module is still there, and has the parameter."""
    return any(name == one and key in module._parameters for one, module in model.named_modules())


def _check_even(name: str, parameter: Tensor, where: str) -> None:
    if not isinstance(parameter, DTensor):
        return
    for placement in parameter.placements:
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % parameter.device_mesh.size():
            raise TrainerConfigError(
                f"{where} does not divide dimension {placement.dim} of {name!r}, of shape {tuple(parameter.shape)}; "
                "use a divisor of its size, or leave the module out of parallel.plan"
            )


def _gives_sequence(style: ParallelStyle) -> bool:
    return Shard(SEQUENCE) in getattr(style, "output_layouts", ())
