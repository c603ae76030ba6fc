"""Parts of a run on a parameter server, made from its recipe: data, schema, the optimizers of shards."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..data.batches import count_rows
from ..diloco.served import make_outer
from ..errors import RecipeError, TrainerConfigError
from ..ranks.world import World
from ..recipes.parameter_groups import freeze_parameters
from ..recipes.recipe import Component, Recipe, opened
from ..reproducibility import seed_all
from ..server.embedding import find_tables
from ..server.optimizers import Adagrad, AdamW, Optimizer, Sgd
from ..server.schema import Schema, TensorSpec
from ..server.services import DataPlan
from ..server.shard import ServerConfig

_BUILDING = threading.Lock()  # seeds are the process's
_NEUTRAL = ("maximize", "amsgrad", "differentiable", "dampening", "lr_decay")  # what servers have no twin of, if set
_SHARES = ("rank", "world_size", "mesh", "data_dims")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings that the servers and the coordinator of a run are made from."""

    server: ServerConfig
    plan: DataPlan


def prepare_run(
    recipe: Recipe, workers: int, *, run: str | None = None, saved: Mapping[str, Any] | None = None
) -> Setup:
    """Check a recipe, and make what its servers and its coordinator need; ``saved`` is the plan of a run to resume.

    Raises:
        TrainerConfigError: something of the recipe has no part in asynchronous training; names key and cure.
    """
    if workers < 1:
        raise TrainerConfigError(f"--workers={workers} must be 1 or more")
    model = build_model(recipe)
    server = make_server_config(recipe, model, run=secrets.token_hex(8) if run is None else run)
    rows = _find_rows(recipe.data, workers) if saved is None else saved["rows"]
    with opened(_data_of_worker(recipe.data, rows, is_logged=False).make()) as loader:
        batches = _count_batches(loader)
        rows = rows or getattr(loader, "batch_size", None) or _count_rows(loader)
    return Setup(server=server, plan=_make_plan(recipe, workers, batches, rows, saved))


def _count_rows(batches: Any) -> int:
    """Count the samples of the first of a list of batches; 1 of anything else."""
    return int(count_rows(batches[0])) if isinstance(batches, Sequence) and batches else 1


def build_model(recipe: Recipe) -> nn.Module:
    """Build the recipe's model with the weights that each worker begins with, in one thread after another.

    Raises:
        TrainerConfigError: it keeps statistics of its batches, of which each worker would have its own.
    """
    if recipe.meta:
        raise TrainerConfigError(
            f"model.meta=true builds a model without memory, and with parallel.mode={recipe.trainer.parallel.mode!r} "
            "each worker holds a whole one; leave model.meta out"
        )
    with _BUILDING:
        seed_all(recipe.trainer.seed)
        model = recipe.make_model()
    freeze_parameters(model, recipe.groups)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise TrainerConfigError(
                f"{name} is a {type(module).__name__}, whose running statistics each worker would have of its own "
                "batches, and servers hold parameters alone; use GroupNorm or LayerNorm, or parallel.mode='allreduce'"
            )
    return model  # type: ignore[no-any-return]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; a tied one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_schema(model: nn.Module) -> Schema:
    """Describe what servers hold for a model: its trained parameters, and its tables."""
    parameters = trained_parameters(model)
    return Schema(
        [TensorSpec(name=name, shape=tuple(parameter.shape)) for name, parameter in parameters.items()],
        [table.spec for table in find_tables(model).values()],
    )


def make_server_config(recipe: Recipe, model: nn.Module, *, run: str) -> ServerConfig:
    """Make what the shards of a run agree on."""
    options = recipe.trainer.server
    is_learned = recipe.trainer.parallel.mode == "diloco"
    if is_learned and find_tables(model):
        raise TrainerConfigError(
            "ServerEmbedding has its rows on the servers, and with parallel.diloco.over='server' learners step whole "
            "models by themselves; use nn.Embedding, or parallel.mode='parameter_server'"
        )
    for group in () if is_learned else recipe.groups:
        if not group.freeze:
            raise TrainerConfigError(
                f"{group.key} gives some parameters settings of their own, and servers step all of them alike; leave "
                "it out, or use parallel.mode='allreduce'"
            )
    if recipe.trainer.export is not None and find_tables(model):
        raise TrainerConfigError(
            f"export={recipe.trainer.export!r} writes parameters, and rows of a ServerEmbedding are none; leave export "
            "out: checkpoints have them"
        )
    if is_learned:
        dense = rows = make_outer(recipe.trainer.parallel.diloco, options)
    else:
        dense, rows = find_optimizers(make_optimizer(recipe, model))
    return ServerConfig(
        run=run,
        schema=make_schema(model),
        policy=options.rule,
        dense=dense,
        rows=rows,
        scales_by_staleness=options.scales_by_staleness,
    )


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Make the recipe's optimizer, which tells the servers theirs and the rates, and never steps."""
    parameters = list(trained_parameters(model).values()) or [nn.Parameter(torch.zeros(1))]  # all may lie in tables
    made: torch.optim.Optimizer = recipe.optimizer.make(parameters)
    return made


def find_optimizers(optimizer: torch.optim.Optimizer) -> tuple[Optimizer, Optimizer]:
    """Find the servers' optimizers for dense tensors and for rows that step as torch's; rows know no weight decay.

    Raises:
        TrainerConfigError: it is of a class that servers have no twin of, or has a setting that they have not.
    """
    kind, group = type(optimizer), optimizer.param_groups[0]
    for name in _NEUTRAL:
        if group.get(name):
            raise TrainerConfigError(
                f"optimizer.args.{name}={group[name]!r} of {kind.__name__} is not among what servers do; leave it out, "
                "or use parallel.mode='allreduce'"
            )
    rate = float(group["lr"])
    decay = float(group.get("weight_decay", 0.0))
    if kind is torch.optim.SGD:
        sgd = Sgd(rate=rate, momentum=group["momentum"], weight_decay=decay, nesterov=group["nesterov"])
        return sgd, replace(sgd, weight_decay=0.0)
    if kind is torch.optim.AdamW or (kind is torch.optim.Adam and (decay == 0 or group.get("decoupled_weight_decay"))):
        adam = AdamW(rate=rate, betas=tuple(group["betas"]), eps=group["eps"], weight_decay=decay)
        return adam, replace(adam, weight_decay=0.0)
    if kind is torch.optim.Adam:
        raise TrainerConfigError(
            f"optimizer.args.weight_decay={decay} of Adam is not among what servers do; use torch.optim:AdamW"
        )
    if kind is torch.optim.Adagrad:
        initial = float(group["initial_accumulator_value"])
        adagrad = Adagrad(rate=rate, eps=group["eps"], weight_decay=decay, initial=initial)
        return adagrad, replace(adagrad, weight_decay=0.0)
    raise TrainerConfigError(
        f"optimizer.use names {kind.__name__}, of which servers have no twin; with parallel.mode='parameter_server' "
        "there are torch.optim:SGD, Adam, AdamW and Adagrad"
    )


def open_worker_data(recipe: Recipe, plan: DataPlan) -> Any:
    """Open the recipe's data as one worker reads it: alone, in batches of the plan."""
    return _data_of_worker(recipe.data, plan.rows, is_logged=True).make()


def open_learner_data(recipe: Recipe, plan: DataPlan, world: World) -> Any:
    """Open the recipe's data as a rank of a learner reads it: its part of each batch of the plan.

    Raises:
        TrainerConfigError: the batches cannot be shared out among so many ranks.
    """
    ranks = world.world_size
    if ranks == 1:
        return open_worker_data(recipe, plan)
    alone = _data_of_worker(recipe.data, plan.rows // ranks, is_logged=True)
    if plan.rows % ranks or not {"rank", "world_size", "batch_size"} <= alone.args.keys():
        why = (
            f"its batches of {plan.rows} samples cannot be cut into equal parts"
            if plan.rows % ranks
            else "its data take no rank, world_size and batch_size or global_batch_size"
        )
        raise TrainerConfigError(
            f"parallel.diloco.ranks={ranks} shares each batch of a learner out among its ranks, and {why}; use "
            "parallel.diloco.ranks=1, or other data.args"
        )
    return replace(alone, args={**alone.args, "rank": world.rank, "world_size": ranks}).make()


def open_evaluation_data(recipe: Recipe) -> Any:
    """Open the evaluation's data whole."""
    assert recipe.evaluation_data is not None
    return _alone(recipe.evaluation_data).make()


def _find_rows(data: Component, workers: int) -> int:
    """The samples of a worker's batch; 0 where the data do not say."""
    whole, own = data.args.get("global_batch_size"), data.args.get("batch_size")
    if isinstance(whole, int):
        if whole % workers:
            raise TrainerConfigError(
                f"data.args.global_batch_size={whole} is not a multiple of --workers={workers}; use "
                f"{-(-whole // workers) * workers}, or another number of workers"
            )
        return whole // workers
    return own if isinstance(own, int) else 0


def _alone(data: Component) -> Component:
    given = sorted(data.args.keys() & set(_SHARES))
    if given:
        raise RecipeError(
            f"{data.key}.args.{given[0]} gives a rank its share, and with parallel.mode='parameter_server' workers "
            "lease their batches; leave it out"
        )
    share = {"rank": 0, "world_size": 1}
    return replace(data, args={**data.args, **share}) if all(map(data.takes, share)) else data


def _data_of_worker(data: Component, rows: int, *, is_logged: bool) -> Component:
    alone = _alone(data)
    args = {name: value for name, value in alone.args.items() if is_logged or name != "audit_dir"}
    if "global_batch_size" in args or "batch_size" in args:
        args = {name: value for name, value in args.items() if name not in ("global_batch_size", "batch_size")}
        args["batch_size"] = rows
    return replace(alone, args=args)


def _count_batches(loader: Any) -> int:
    """Count the batches of an epoch, of data whose batches can be sought.

    Raises:
        TrainerConfigError: they cannot be, or epochs differ.
    """
    if not hasattr(loader, "seek") and not (hasattr(loader, "__getitem__") and hasattr(loader, "__len__")):
        raise TrainerConfigError(
            f"data.use makes a {type(loader).__name__}, of which no batch can be had by its number, and workers lease "
            "batches; use penstock:DistributedDataLoader, or a list of batches"
        )
    if getattr(loader, "is_batched_by_tokens", False):
        raise TrainerConfigError(
            "data.args.batch_tokens gives each epoch another number of batches, and workers lease them by number; give "
            "batch_size"
        )
    try:
        return len(loader)
    except TypeError as exc:
        raise TrainerConfigError(
            f"data.use makes a {type(loader).__name__} that knows no number of batches, and workers lease them by "
            "number; give data that neither drop nor pack samples, and that end"
        ) from exc


def _make_plan(recipe: Recipe, workers: int, batches: int, rows: int, saved: Mapping[str, Any] | None) -> DataPlan:
    trainer = recipe.trainer
    in_rounds = trainer.server.rule.merges == "by clock"
    span = 1 if in_rounds else trainer.server.lease
    if trainer.parallel.mode == "diloco":
        span = trainer.parallel.diloco.every
    given = {"batches": batches, "rows": rows, "workers": workers, "span": span}
    if saved is not None and trainer.parallel.mode == "diloco" and saved["span"] != span:
        raise TrainerConfigError(
            f"parallel.diloco.every={span}, and the run began with {saved['span']}, by which its batches are leased; "
            f"give parallel.diloco.every={saved['span']}, or another output_dir"
        )
    if saved is not None:
        given |= {name: saved[name] for name in ("workers", "span", "rows")}
    has_tasks = recipe.evaluation is not None or trainer.export is not None
    units = [] if trainer.epochs is None else [trainer.epochs * batches]
    units += [] if trainer.steps is None else [trainer.steps * given["workers"]]
    plan = DataPlan(**given, units=min(units), deals_in_rounds=in_rounds, evaluates=has_tasks)
    if trainer.schedule.warmup_steps > plan.steps:
        raise TrainerConfigError(
            f"schedule.warmup_steps={trainer.schedule.warmup_steps} is more than the {plan.steps} steps of the run; "
            f"give schedule.warmup_steps={plan.steps} at most, or train longer"
        )
    return plan
