"""The command line: a recipe, and options laid over it.

Options of [trainer] are flags that tyro makes from the config's dataclasses, with the recipe's values as defaults. The
other sections have the arguments of whatever they name, so their options are TOML values by dotted key.
"""

from __future__ import annotations

import os
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from shutil import get_terminal_size
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ..config import TrainerConfig
from ..errors import RecipeError
from ..options import build_config
from ..parallel.config import PlanSource
from .recipe import SECTIONS, Recipe, as_table, build_recipe, format_value, read_tables, shipped_recipes

_DESCRIPTION = """
Train what a recipe describes, on the ranks that torchrun starts, or on one.

  example:  torchrun --nproc-per-node=2 -m penstock.trainer digits
  example:  python -m penstock.trainer my.toml --dry-run --model.args.width=64

RECIPE is a TOML file, or the name of a recipe that ships: {shipped}. Its sections [model], [optimizer], [loss], [data]
and, if wanted, [evaluation] and [evaluation.data] each have `use`, what to call, as "package.module:name", and `args`,
a table of keyword arguments for it:

  model(**args) -> torch.nn.Module
  optimizer(parameters, **args) -> torch.optim.Optimizer
  loss(model, batch, **args) -> (sum of losses, count of samples or tokens)
  data(**args) -> iterable of this rank's batches; evaluation.data likewise
  evaluation(model, batch, **args) -> {{name: (sum, count)}}

An argument may itself be named: {{ use = "package.module:name" }} is the object of that name, and with args what it
returns when called with them. [data.prepare] and [evaluation.data.prepare] also have use and args: one rank of each
node calls it before the data is opened, with target_url=..., by default the source of the data.

With meta = true in [model] the model is built without memory, and each rank makes its part; what the modules'
reset_parameters do not initialise, [model.init] does: init(name, module, **args).

Any key can be overridden. [trainer] has the options below, whose defaults are the recipe's values. Keys of the other
sections take a TOML value, or plain text: --optimizer.args.lr=1e-4 --data.args.source=s3://bucket/train
"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that was typed: a recipe with what was laid over it, and what to do with it."""

    recipe: Recipe
    dry_run: bool
    plan: bool = False
    ranks: int = 1
    memory: str | None = None
    workers: int = 1
    shards: int = 1
    ray: bool = False
    address: str | None = None

    def check(self) -> None:
        """Check the recipe, as ``Recipe.check`` does, and options that are of no use with it or without one another.

        Raises:
            RecipeError: names the options, and what to add or to leave out.
        """
        self.recipe.check()
        parallel = self.recipe.trainer.parallel
        if not self.plan and (self.ranks != 1 or self.memory is not None):
            raise RecipeError("--ranks and --memory say what --plan plans for; add --plan, or leave them out")
        if not parallel.uses_servers and (self.workers, self.shards) != (1, 1):
            raise RecipeError(
                "--workers and --shards are of parallel.mode='parameter_server'; set that, or leave them out"
            )
        if self.plan and parallel.uses_servers and parallel.mode == "diloco":
            raise RecipeError(
                "--plan plans for the ranks of a launcher, and with parallel.diloco.over='server' learners are "
                "started; plan one learner, with parallel.mode='allreduce' and --ranks of its ranks"
            )
        if self.address is not None and not self.ray:
            raise RecipeError("--address without --ray, which it is for; add that")
        if not parallel.uses_servers and self.ray:
            raise RecipeError(
                "--ray is for parallel.mode='parameter_server'; add --trainer.parallel.mode=parameter_server, or "
                "leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """The flags that tyro reads: ``--dry-run`` takes no value, those of the trainer take one, as in TOML."""

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="")]
    """TOML file, or the name of a recipe that ships."""

    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="dry-run", help_behavior_hint="")] = False
    """Print the resolved recipe as TOML, with every import checked, and stop."""

    plan: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="plan", help_behavior_hint="")] = False
    """Print what the layout costs each rank, in memory and on the wire, and stop; needs no devices and no data."""

    ranks: Annotated[int, tyro.conf.arg(name="ranks")] = 1
    """With --plan, the ranks that there will be."""

    memory: Annotated[str | None, tyro.conf.arg(name="memory", metavar="SIZE", help_behavior_hint="")] = None
    """With --plan, the memory of a rank, as 80GiB: also prints the layouts that fit, best first."""

    workers: Annotated[int, tyro.conf.arg(name="workers")] = 1
    """With parallel.mode=parameter_server, the workers that there are at first."""

    shards: Annotated[int, tyro.conf.arg(name="shards")] = 1
    """With parallel.mode=parameter_server, the shards that parameters lie on."""

    ray: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="ray", help_behavior_hint="")] = False
    """With parallel.mode=parameter_server, workers and shards are processes on a Ray cluster, replaced if they die."""

    address: Annotated[str | None, tyro.conf.arg(name="address", metavar="HOST:PORT|auto", help_behavior_hint="")] = (
        None
    )
    """With --ray, the cluster; without it one is started on this machine."""

    trainer: tyro.conf.FlagConversionOff[TrainerConfig]


def read_command(words: Sequence[str]) -> Command:
    """Read the recipe that the command line names and lay the other words over it.

    ``--help`` and wrong flags end the process, with 0 and 2.

    Raises:
        RecipeError, TrainerConfigError: naming key, value and cure.
    """
    overrides, flags = split_overrides(words)
    source = flags[0] if flags and not flags[0].startswith("-") else None
    tables = {"trainer": {}} if source is None else read_tables(source)
    for key, value in overrides:
        _override(tables, key, value)
    wants_help = "-h" in flags or "--help" in flags
    # What the flags may yet complete or correct is checked with them; what only the file says, on its own.
    is_draft = source is None or wants_help or any(word.startswith("--trainer.") for word in flags)
    trainer = as_table("trainer", tables.get("trainer", {}))
    draft = build_config(TrainerConfig, trainer, "trainer.", check=not is_draft)
    # Every rank reads the same words; what is wrong with them is said once.
    is_first = os.environ.get("RANK", "0") == "0"
    with nullcontext() if is_first else redirect_stderr(StringIO()):
        given = tyro.cli(
            TrainArguments,
            prog="python -m penstock.trainer",
            description=_describe(),
            args=flags[1:] if source is not None and wants_help else flags,  # help leaves out a positional that it read
            default=TrainArguments(recipe=tyro.MISSING if source is None else source, trainer=draft),
            use_underscores=True,
            console_outputs=is_first,
            registry=_toml_values(),
        )
    return Command(
        recipe=build_recipe({**tables, "trainer": given.trainer}),
        dry_run=given.dry_run,
        plan=given.plan,
        ranks=given.ranks,
        memory=given.memory,
        workers=given.workers,
        shards=given.shards,
        ray=given.ray,
        address=given.address,
    )


def _describe() -> str:
    """The text above the flags, as wide as the terminal: tyro keeps a line's break where the next one is indented."""
    paragraphs = _DESCRIPTION.format(shipped=", ".join(shipped_recipes())).strip("\n").split("\n\n")
    wrap = textwrap.TextWrapper(get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False)
    return "".join(
        f"\n{textwrap.indent(text, '  ')}" if text.startswith(" ") else f"\n\n{wrap.fill(' '.join(text.split()))}"
        for text in paragraphs
    ).strip("\n")


def split_overrides(words: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Divide words into overrides of sections other than [trainer], as (key, value), and the rest."""
    overrides: list[tuple[str, Any]] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        section = key.partition(".")[0]
        if not word.startswith("--") or section == "trainer" or section not in SECTIONS:
            others.append(word)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise RecipeError(f"--{key} has no value; write --{key}=value, as --model.args.width=64")
            text = rest.pop(0)
        overrides.append((key, _parse_value(text)))
    return overrides, others


def _override(tables: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    if not path or not all((*path, last)):
        raise RecipeError(f"--{key} does not name an option; write the whole key, as --model.args.width")
    into = tables
    for depth, part in enumerate(path):
        into = into.setdefault(part, {})
        if not isinstance(into, dict):
            raise RecipeError(f"--{key}: {'.'.join(path[: depth + 1])} is a value, not a table of options")
    into[last] = value


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _toml_values() -> ConstructorRegistry:
    """Flags take true, false and none, and lists of names also as TOML or with commas, as recipes write them."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def read_bool(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool] | None:
        if info.type is not bool:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{true,false}",
            choices=("true", "false"),
            instance_from_str=lambda words: words[0] == "true",
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [str(value).lower()],
        )

    @registry.primitive_rule
    def read_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
        if info.type is not type(None):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="none",
            choices=("none",),
            instance_from_str=lambda words: None,
            is_instance=lambda value: value is None,
            str_from_instance=lambda value: ["none"],
        )

    @registry.primitive_rule
    def read_names(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[str, ...]] | None:
        if info.type != tuple[str, ...]:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="none|NAME,...",
            instance_from_str=lambda words: () if words[0] == "none" else _split_names(words[0]),
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda value: [",".join(value) or "none"],
        )

    @registry.primitive_rule
    def read_stages(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[Any, ...]] | None:
        if info.type != tuple[str | tuple[str, ...], ...]:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="none|NAME,...",
            instance_from_str=lambda words: () if words[0] == "none" else _split_stages(words[0]),
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda value: [format_value(value) if value else "none"],
        )

    @registry.primitive_rule
    def read_plan(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type != PlanSource | None:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="none|TABLE",
            instance_from_str=lambda words: None if words[0] == "none" else _read_table("parallel.plan", words[0]),
            is_instance=lambda value: value is None or isinstance(value, Mapping) or callable(value),
            str_from_instance=lambda value: [
                "none" if value is None else format_value(value) if isinstance(value, Mapping) else repr(value)
            ],
        )

    return registry


def _read_table(key: str, text: str) -> Mapping[str, Any]:
    return as_table(key, _parse_value(text))


def _split_stages(text: str) -> tuple[str | tuple[str, ...], ...]:
    value = _parse_value(text)
    if not isinstance(value, list):
        return _split_names(text)
    return tuple(tuple(map(str, one)) if isinstance(one, list) else str(one) for one in value)


def _split_names(text: str) -> tuple[str, ...]:
    value = _parse_value(text)
    names = value if isinstance(value, list) else text.split(",")
    return tuple(str(name).strip() for name in names if name)
