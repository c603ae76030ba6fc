"""Options: frozen dataclasses filled from TOML tables, with errors that name key, value and cure."""

from __future__ import annotations

import types
from collections import abc
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..storage.suggestions import did_you_mean, nearest, unknown_choice
from .errors import TrainerConfigError

Config = TypeVar("Config")


def build_config(config: type[Config], values: Mapping[str, Any], where: str = "", *, check: bool = True) -> Config:
    """Fill a config from nested mappings, as TOML reads them.

    Without ``check`` the result is a draft that the config itself has not checked: command-line options are laid over
    it, and may complete what is missing.

    Raises:
        TrainerConfigError: an unknown key, a value of another type than the option's, or what the config itself
            refuses; the message gives the dotted key.
    """
    hints = get_type_hints(config)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{where}{key}"
        if key not in hints:
            raise TrainerConfigError(f"{dotted}={value!r} is not an option; {suggest(key, hints)}")
        kind = hints[key]
        if is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise TrainerConfigError(f"{dotted}={value!r} is not a table; write its options as {dotted}.NAME = ...")
            assert isinstance(kind, type)
            arguments[key] = build_config(kind, value, f"{dotted}.", check=check)
        else:
            arguments[key] = _convert(dotted, value, kind)
    if check:
        return config(**arguments)
    draft = object.__new__(config)
    for entry in fields(config):  # type: ignore[arg-type]
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        object.__setattr__(draft, entry.name, arguments.get(entry.name, default))
    return draft


def suggest(word: str, known: Collection[str]) -> str:
    """The end of an error about an unknown word: what was probably meant, or all known words."""
    near = nearest(word, known)
    return f"did you mean {near!r}?" if near is not None else f"known are {', '.join(sorted(known))}"


def check_choice(key: str, value: Any, choices: Collection[Any]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise TrainerConfigError(unknown_choice(key, value, choices))


def check_range(key: str, value: float | None, *, low: float, above: bool = False, high: float | None = None) -> None:
    """Refuse a number below ``low`` (or at it, with ``above``) or past ``high``; None means the option is off."""
    if value is None:
        return
    wrong = not (value > low if above else value >= low) or (high is not None and value > high)
    if wrong:
        limits = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high is not None else "")
        raise TrainerConfigError(f"{key}={value!r} is out of range; give a number {limits}")


def _convert(key: str, value: Any, kind: Any) -> Any:
    origin = get_origin(kind)
    if origin is Literal:
        check_choice(key, value, get_args(kind))
        return value
    if origin in (types.UnionType, Union):
        inner = [k for k in get_args(kind) if k is not type(None)]
        if value is None:
            return None
        for k in inner:
            try:
                return _convert(key, value, k)
            except TrainerConfigError:
                continue
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_convert(key, item, get_args(kind)[0]) for item in value)
    elif origin in (abc.Mapping, abc.Callable):
        if isinstance(value, origin):
            return value
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif kind in (int, bool, str) and type(value) is kind:
        return value
    words = [choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal for choice in get_args(part)]
    if isinstance(value, str) and words:
        raise TrainerConfigError(f"{key}={value!r} is not known; give {_describe(kind)}{did_you_mean(value, words)}")
    raise TrainerConfigError(f"{key}={value!r} is a {type(value).__name__}; give {_describe(kind)}")


def _describe(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    if origin in (types.UnionType, Union):
        return "|".join(_describe(k) for k in get_args(kind))
    if origin is tuple:
        return f"{_describe(get_args(kind)[0])},..."
    if origin in (abc.Mapping, abc.Callable):
        return "a table" if origin is abc.Mapping else "a function"
    return "none" if kind is type(None) else getattr(kind, "__name__", str(kind))
