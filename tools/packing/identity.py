"""Identity of a user's function, so that an interrupted pack resumes only with the same one."""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

_NAMED_ALONE = type, BuiltinFunctionType
_PLAIN = type(None), bool, int, float, complex, str, bytes


class _UnknownError(Exception):
    """A value that has no description."""


def describe_function(function: Callable[..., Any]) -> list[Any] | None:
    """Describe a function for JSON: its name, the hash of its file, and the values that it finds elsewhere.

    The values are its defaults and the module's globals that it, or functions of the module that it uses, names. None
    if one of them is no constant, module, class or function, or if the callable is no plain function: it cannot be
    told from another then.
    """
    try:
        file = inspect.getsourcefile(function)
        text = Path(file).read_bytes() if file else None
        if text is None or not inspect.isfunction(function):
            return None
        return [*_name(function), hashlib.sha256(text).hexdigest(), _values_of(function, set())]
    except (TypeError, OSError, _UnknownError):
        return None


def _values_of(function: FunctionType, seen: set[FunctionType]) -> list[Any]:
    """The defaults and the globals of a function, and of those of its module that it uses; each function once."""
    if function.__closure__:
        raise _UnknownError
    seen.add(function)
    values: list[Any] = [_describe(function.__defaults__), _describe(function.__kwdefaults__)]
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names})
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, FunctionType):
            inside = value.__globals__ is function.__globals__ and value not in seen
            values.append([name, *_name(value), _values_of(value, seen) if inside else None])
        else:
            values.append([name, _describe(value)])
    return values


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _name(value: Any) -> list[str]:
    return [str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", value))]


def _describe(value: Any) -> Any:
    """A value as text that is alike for alike values, in other processes too. Raises _UnknownError."""
    if isinstance(value, _PLAIN):
        return [type(value).__name__, repr(value)]
    if isinstance(value, logging.Logger):
        return ["by name", value.name]
    if isinstance(value, ModuleType):
        return ["by name", value.__name__]
    if isinstance(value, _NAMED_ALONE):
        return ["by name", *_name(value)]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if isinstance(value, re.Pattern):
        return ["pattern", repr(value.pattern), value.flags]
    if isinstance(value, Mapping):
        return ["mapping", [[_describe(key), _describe(each)] for key, each in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_describe(each) for each in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted((_describe(each) for each in value), key=repr)]
    raise _UnknownError
