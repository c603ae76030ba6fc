"""Recipes: TOML files that name model, optimizer, loss, data and evaluation by import path. Pure except for imports."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...storage.errors import PenstockError
from ..config import TrainerConfig
from ..errors import RecipeError, TrainerConfigError
from ..imports import describe_error, import_name
from ..options import build_config, suggest
from ..parallel.meta import build_on_meta
from .parameter_groups import ParameterGroup, read_groups, split_parameters

SHIPPED = Path(__file__).parent
SECTIONS = ("model", "optimizer", "loss", "data", "evaluation", "trainer")


@dataclass(frozen=True, kw_only=True)
class Component:
    """Something to import and call: ``use`` is its import path, ``args`` its keyword arguments.

    An argument, at any depth, may itself be named: ``{ use = "package.module:name" }`` is the object of that name, and
    with ``args``, even empty ones, what it returns when called with them. ``prepare``, for data only, is called once
    per node before the data is opened.
    """

    key: str
    use: str
    args: Mapping[str, Any] = field(default_factory=dict)
    prepare: Component | None = None

    def check(self, given: int = 0) -> Callable[..., Any]:
        """Import what ``use`` names, check that it takes ``given`` arguments and then ``args``, and return it.

        Raises:
            RecipeError: an import path does not exist or names something that cannot be called, or the arguments do
                not fit.
        """
        found = _import(self.key, self.use)
        if not callable(found):
            raise RecipeError(
                f"{self.key}.use={self.use!r} is a {type(found).__name__} and not callable; name a class or function"
            )
        self._check_arguments(found, given)
        for name, value in self.args.items():
            _check_value(f"{self.key}.args.{name}", value)
        if self.prepare is not None:
            self.prepare.check()
        return found

    def resolve(self, given: int = 0) -> Callable[..., Any]:
        """The callable with its arguments made and bound, except for the first ``given`` ones.

        Raises:
            RecipeError: as ``check``.
        """
        found = self.check(given)
        made = {name: _make_value(f"{self.key}.args.{name}", value) for name, value in self.args.items()}
        return partial(found, **made)

    def describe(self) -> dict[str, Any]:
        """Nested plain data, as in the TOML file."""
        table: dict[str, Any] = {"use": self.use, "args": dict(self.args)}
        return table if self.prepare is None else {**table, "prepare": self.prepare.describe()}

    def make(self, *given: Any) -> Any:
        """The result of the callable for ``given`` and its arguments.

        Raises:
            RecipeError: the arguments do not fit, or the callable raised an error; the message says where.
        """
        call = self.resolve(len(given))
        try:
            return call(*given)
        except PenstockError:
            raise
        except Exception as exc:
            args = f" with {self.key}.args={dict(self.args)!r}" if self.args else ""
            raise RecipeError(f"{self.key}.use={self.use!r}{args} raised {describe_error(exc)}") from exc

    def takes(self, name: str) -> bool:
        """Return whether the callable has an argument of this name."""
        try:
            return name in inspect.signature(self.check()).parameters
        except (TypeError, ValueError):
            return False

    def _check_arguments(self, found: Callable[..., Any], given: int) -> None:
        try:
            signature = inspect.signature(found)
        except (TypeError, ValueError):  # some C functions have no signature; the call itself will fail
            return
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for name, value in self.args.items():
            if name not in names and not takes_any:
                raise RecipeError(
                    f"{self.key}.args.{name}={value!r} is not an argument of {self.use}; {suggest(name, names)}"
                )
        try:
            signature.bind(*[None] * given, **self.args)
        except TypeError as exc:
            raise RecipeError(f"{self.key}.args do not fit {self.use}{signature}: {exc}") from exc


@contextmanager
def opened(source: Any) -> Iterator[Any]:
    """Close what a component made in the end, if it can be closed."""
    try:
        yield source
    finally:
        if hasattr(source, "close"):
            source.close()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run, resolved: every option has its value."""

    model: Component
    meta: bool = False
    initialise: Component | None = None
    optimizer: Component
    groups: tuple[ParameterGroup, ...] = ()
    loss: Component
    data: Component
    evaluation: Component | None
    evaluation_data: Component | None
    trainer: TrainerConfig

    def check(self) -> None:
        """Import everything that the recipe names and check that arguments fit, without calling anything."""
        for component, given in (
            (self.model, 0),
            (self.initialise, 2),
            (self.optimizer, 1),
            (self.loss, 2),
            (self.data, 0),
            (self.evaluation, 2),
            (self.evaluation_data, 0),
        ):
            if component is not None:
                component.check(given)
        for group in self.groups:
            # The group's settings go to the optimizer beside the recipe's arguments for it.
            replace(self.optimizer, key=group.key, args={**self.optimizer.args, **group.settings}).check(1)

    def make_model(self) -> Any:
        """The model; with ``meta`` it has shapes alone, and the trainer gives it memory."""
        return build_on_meta(self.model.make) if self.meta else self.model.make()

    def make_optimizer(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over the parameters of a model that is spread over the ranks already.

        Raises:
            RecipeError: the arguments do not fit, or the optimizer raised an error; the message says where.
        """
        given = split_parameters(model, self.groups) if self.groups else parameters
        made: torch.optim.Optimizer = self.optimizer.make(given)
        return made

    def describe(self) -> dict[str, Any]:
        """Nested plain data, as in the TOML file."""
        tables: dict[str, Any] = {
            name: component.describe()
            for name, component in (
                ("model", self.model),
                ("optimizer", self.optimizer),
                ("loss", self.loss),
                ("data", self.data),
                ("evaluation", self.evaluation),
            )
            if component is not None
        }
        if self.meta:
            tables["model"]["meta"] = True
        if self.initialise is not None:
            tables["model"]["init"] = self.initialise.describe()
        if self.groups:
            tables["optimizer"]["groups"] = [group.describe() for group in self.groups]
        if self.evaluation_data is not None:
            tables["evaluation"]["data"] = self.evaluation_data.describe()
        tables["trainer"] = asdict(self.trainer)
        return tables


def shipped_recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read_tables(source: str) -> dict[str, Any]:
    """Read the tables of a recipe from a file, or of a shipped recipe by its name.

    Raises:
        RecipeError: there is no such recipe, or it is not TOML.
    """
    path = Path(source)
    if not path.is_file() and source in shipped_recipes():  # a run may have left a folder of that name
        path = SHIPPED / f"{source}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(
            f"recipe {source!r} is neither a file nor a shipped recipe; {suggest(source, shipped_recipes())}"
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise RecipeError(f"recipe {source!r} cannot be read: {exc}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise RecipeError(f"recipe {source!r} is not TOML: {exc}") from exc


def build_recipe(tables: Mapping[str, Any]) -> Recipe:
    """Build a recipe from nested mappings; ``trainer`` may be a config already.

    Raises:
        RecipeError, TrainerConfigError: naming key, value and cure.
    """
    for key in tables:
        if key not in SECTIONS:
            raise RecipeError(f"{key} is not a section of a recipe; {suggest(key, SECTIONS)}")
    evaluation = tables.get("evaluation")
    evaluation_data: Component | None = None
    if evaluation is not None:
        evaluation = dict(as_table("evaluation", evaluation))
        if "data" not in evaluation:
            raise RecipeError("evaluation has no data; add [evaluation.data] with use and args")
        evaluation_data = _data_component("evaluation.data", evaluation.pop("data"))
    for key in ("model", "optimizer", "loss", "data", "trainer"):
        if key not in tables:
            raise RecipeError(f"the recipe has no section [{key}]; add it")
    optimizer = dict(as_table("optimizer", tables["optimizer"]))
    groups = read_groups("optimizer.groups", optimizer.pop("groups", []))
    model, meta, initialise = _read_model(tables["model"])
    trainer = tables["trainer"]
    if not isinstance(trainer, TrainerConfig):
        trainer = build_config(TrainerConfig, as_table("trainer", trainer), "trainer.")
    return Recipe(
        model=model,
        meta=meta,
        initialise=initialise,
        optimizer=_component("optimizer", optimizer),
        groups=groups,
        loss=_component("loss", tables["loss"]),
        data=_data_component("data", tables["data"]),
        evaluation=None if evaluation is None else _component("evaluation", evaluation),
        evaluation_data=evaluation_data,
        trainer=trainer,
    )


def format_toml(tables: Mapping[str, Any], prefix: str = "") -> str:
    """Nested plain data as TOML; an option that is not set (None) is shown as a comment."""
    lines: list[str] = []
    for key, value in tables.items():
        if value is None:
            lines.append(f"# {key} is not set")
        elif not isinstance(value, Mapping):
            lines.append(f"{_format_key(key)} = {format_value(value)}")
    text = "\n".join(lines) + "\n" if lines else ""
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            inner = format_toml(value, f"{prefix}{key}.")
            text += f"\n[{prefix}{key}]\n{inner}" if not inner.startswith("\n") else inner
    return text


def _component(key: str, table: Any) -> Component:
    table = as_table(key, table)
    for name, value in table.items():
        if name not in ("use", "args"):
            raise RecipeError(
                f"{key}.{name}={value!r} is not a key of [{key}]; it has use and args: write {key}.args.{name}"
            )
    if not isinstance(table.get("use"), str):
        raise RecipeError(f"{key}.use={table.get('use')!r} is not an import path; give {key}.use='package.module:name'")
    return Component(key=key, use=table["use"], args=dict(as_table(f"{key}.args", table.get("args", {}))))


def _read_model(table: Any) -> tuple[Component, bool, Component | None]:
    """The model, whether it is built on the meta device, and what then initialises its modules."""
    table = dict(as_table("model", table))
    meta, initialise = table.pop("meta", False), table.pop("init", None)
    if not isinstance(meta, bool):
        raise RecipeError(f"model.meta={meta!r} must be true or false")
    if initialise is not None and not meta:
        raise RecipeError("model.init is for models on the meta device; add meta = true to [model], or leave it out")
    return _component("model", table), meta, None if initialise is None else _component("model.init", initialise)


def _data_component(key: str, table: Any) -> Component:
    """Data may be prepared; ``target_url`` is by default the ``source`` that is read afterwards."""
    table = dict(as_table(key, table))
    prepare = table.pop("prepare", None)
    data = _component(key, table)
    if prepare is None:
        return data
    step = _component(f"{key}.prepare", prepare)
    target = {"target_url": data.args["source"]} if "source" in data.args else {}
    return replace(data, prepare=replace(step, args={**target, **step.args}))


def _named(key: str, value: Any) -> Component | None:
    return _component(key, value) if isinstance(value, Mapping) and "use" in value else None


def _check_value(key: str, value: Any) -> None:
    named = _named(key, value)
    if named is not None and "args" in value:
        named.check()
    elif named is not None:
        _import(key, named.use)
    else:
        for inner, item in _items(key, value):
            _check_value(inner, item)


def _make_value(key: str, value: Any) -> Any:
    named = _named(key, value)
    if named is not None:
        return named.resolve()() if "args" in value else _import(key, named.use)
    made = [_make_value(inner, item) for inner, item in _items(key, value)]
    if isinstance(value, Mapping):
        return dict(zip(value, made, strict=True))
    return made if isinstance(value, list) else value


def _items(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{key}.{name}", item) for name, item in value.items()]
    return [(f"{key}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else []


def _import(key: str, path: str) -> object:
    try:
        return import_name(f"{key}.use", path)
    except TrainerConfigError as exc:
        raise RecipeError(str(exc)) from exc


def as_table(key: str, value: Any) -> Mapping[str, Any]:
    """The value of a key that must be a table; raises a RecipeError if it is not one."""
    if not isinstance(value, Mapping):
        raise RecipeError(f"{key}={value!r} is not a table; write [{key}] and its keys below")
    return value


def _format_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key)


def format_value(value: Any) -> str:
    """A value as TOML, in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_format_key(key)} = {format_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
