"""``--plan``: what a recipe's layout costs, and which layouts fit, told without devices and without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ...storage.sizes import read_size
from ..errors import RecipeError, TrainerConfigError
from ..parallel.meta import build_on_meta
from ..parallel.planned_parts import Work
from ..parallel.planner import WIRE, Plan, plan_layout, propose_layouts
from ..parallel.trace import Record, trace_forward, trace_optimizer
from .parameter_groups import freeze_parameters
from .recipe import Recipe

_FIELDS = ("tokens", "position_ids", "document_ids", "loss_mask")


def read_memory(text: str) -> float:
    """Bytes of a text such as 80GiB or 512MB.

    Raises:
        RecipeError: it is no size.
    """
    size = read_size(text)
    if not size:
        raise RecipeError(f"--memory={text!r} is not a size; write a number with its unit, as --memory=80GiB")
    return size


def print_plan(recipe: Recipe, *, ranks: int, memory: str | None) -> None:
    """Print the table of the recipe's layout on so many ranks, and with ``memory`` of each rank the layouts that fit.

    Raises:
        RecipeError, TrainerConfigError: the layout cannot be; naming key, value and cure.
    """
    if ranks < 1:
        raise RecipeError(f"--ranks={ranks} must be at least 1")
    limit = None if memory is None else read_memory(memory)
    recipe.trainer.parallel.fill(ranks)
    work, notes = read_work(recipe)
    console = Console(highlight=False, soft_wrap=True)
    try:
        plan = plan_layout(work, recipe.trainer.parallel, ranks)
    except TrainerConfigError as exc:
        if limit is None:
            raise
        console.print(f"The recipe's layout cannot be: {exc}", markup=False)
    else:
        console.print(_draw_plan(plan, limit))
        notes += plan.notes
    for note in notes:
        console.print(f"- {note}", markup=False)
    if limit is not None:
        found = propose_layouts(work, recipe.trainer.parallel, ranks, limit)
        if not found:
            console.print(
                f"\nNo layout of {ranks} ranks fits {memory}; give more ranks, activation.every=1, or a smaller batch",
                markup=False,
            )
            return
        table = Table(title=f"Layouts of {ranks} ranks that fit {memory}, best first", title_justify="left")
        for name in ("layout", "a rank", "on the wire", "bubble", "reason"):
            table.add_column(name, justify="left" if name in ("layout", "reason") else "right")
        for one in found:
            table.add_row(
                _describe(one.plan),
                _format(one.plan.worst.total),
                _format(sum(one.plan.wire.values())),
                f"{one.plan.bubble:.1%}",
                one.reason,
            )
        console.print()
        console.print(table)
        console.print("- The order is that of a nominal device and network: measure the first few.", markup=False)


def read_work(recipe: Recipe) -> tuple[Work, tuple[str, ...]]:
    """The computation of a step of the recipe, from shapes; and notes on what is not known."""
    model = build_on_meta(recipe.model.make)
    freeze_parameters(model, recipe.groups)
    notes: list[str] = []
    records: list[Record] = []
    try:
        prepared = recipe.data.prepare.args if recipe.data.prepare is not None else {}
        length = _find_length({**recipe.data.args, "prepare": prepared})
        loss = recipe.loss.resolve(2)
        records = trace_forward(model, loss, lambda rows: _make_batch(rows, length), recipe.trainer.precision)
    except (RecipeError, TrainerConfigError) as exc:
        notes.append(f"No activations: {exc}")
    try:
        state = trace_optimizer(model, lambda parameters: recipe.make_optimizer(model, parameters))
    except TrainerConfigError as exc:
        notes.append(f"No optimizer state: {exc}")
        state = {}
    trainer = recipe.trainer
    work = Work(
        model=model,
        records=records,
        optimizer=state,
        precision=trainer.precision,
        activation=trainer.activation,
        rows=lambda replicas: _share_rows(recipe.data.args, replicas),
        accumulate=trainer.step.accumulate,
        microbatch=trainer.step.microbatch,
    )
    return work, tuple(notes)


def _find_length(data: Mapping[str, Any]) -> int:
    """The tokens of a sample, from the first ``seq_len`` of the data's arguments."""
    for key, value in data.items():
        if key == "seq_len" and isinstance(value, int):
            return value
        if isinstance(value, Mapping):
            try:
                return _find_length(value)
            except RecipeError:
                continue
    raise RecipeError("data.args has no seq_len, from which the shape of a batch could be told")


def _make_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return dict.fromkeys(_FIELDS[:3], tokens) | {_FIELDS[3]: torch.ones(rows, length, dtype=torch.bool)}


def _share_rows(data: Mapping[str, Any], replicas: int) -> int:
    if isinstance(data.get("batch_size"), int):
        return int(data["batch_size"])
    whole = data.get("global_batch_size")
    if not isinstance(whole, int):
        return 1
    if whole % replicas:
        raise TrainerConfigError(
            f"data.args.global_batch_size={whole} is not a multiple of the {replicas} replicas; use "
            f"{-(-whole // replicas) * replicas}, or fewer replicas"
        )
    return whole // replicas


def _draw_plan(plan: Plan, limit: float | None) -> Table:
    table = Table(title=f"{_describe(plan)}: {plan.rows} rows a replica and batch", title_justify="left")
    table.add_column("a rank")
    shown = plan.ranks if len(plan.ranks) <= 8 else (plan.worst,)
    for place in range(len(shown)):
        table.add_column(f"pp {place}" if len(shown) > 1 else "largest", justify="right")
    table.add_row("parameters", *(f"{one.parameters:,}" for one in shown))
    for key in ("weights", "gradients", "optimizer", "activations", "buffers", "total"):
        name = "optimizer state" if key == "optimizer" else key
        table.add_row(name, *(_format(getattr(one, key)) for one in shown), end_section=key == "total")
    for name in WIRE:
        if getattr(plan.sizes, name) > 1:
            table.add_row(f"sent a step, {name}", *([_format(plan.wire[name])] + [""] * (len(shown) - 1)))
    table.add_row("bubble", *([f"{plan.bubble:.1%}"] + [""] * (len(shown) - 1)))
    if limit is not None:
        table.add_row("fits", *("yes" if one.total <= limit else "no" for one in shown))
    return table


def _describe(plan: Plan) -> str:
    sizes = " ".join(f"{name}={getattr(plan.sizes, name)}" for name in ("pp", "dp", "cp", "tp", "ep"))
    kept = [one for one in sizes.split() if not one.endswith("=1") or one.startswith("dp")]
    return f"{' '.join(kept)} zero={plan.config.zero}"


def _format(amount: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
