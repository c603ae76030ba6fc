"""Arguments of processes that a benchmark starts for itself; one started by hand names the command to run instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn


def take_arguments(names: str, command: str, *, variable: str | None = None) -> list[str]:
    """The process's arguments, one for each of ``names`` (separated by spaces), of which the first is no option.

    Where they are others, or the environment lacks ``variable``, it prints one sentence to standard error that names
    ``command``, whose part the process is, and ends the process with exit code 2. Imports next to nothing, as the
    memory of some of these processes is measured.
    """
    given = sys.argv[1:]
    are_expected = len(given) == len(names.split()) and not any(word.startswith("-") for word in given[:1])
    if not are_expected or not (variable is None or variable in os.environ):
        refuse(command)
    return given


def take_mode(
    mode: str, readers: Collection[Callable[[str], Any]], command: str, *, variable: str | None = None
) -> list[Any] | None:
    """The values behind the option ``mode``, with which a benchmark starts itself; None where it is run by hand.

    ``readers`` make one value each of its text, with ValueError or TypeError where it is none. Where the texts are not
    these values, or the environment lacks ``variable``, the process ends as in ``take_arguments``.
    """
    if sys.argv[1:2] != [mode]:
        return None
    given = sys.argv[2:]
    if len(given) != len(readers) or not (variable is None or variable in os.environ):
        refuse(command)
    try:
        return [read(text) for read, text in zip(readers, given, strict=True)]
    except (TypeError, ValueError):
        refuse(command)


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """A reader for ``take_mode`` of a text that must be one of ``known``."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(text)
        return text

    return read


def refuse(command: str) -> NoReturn:
    """End a process that ``command`` starts for itself, and that was started otherwise: a sentence, exit code 2."""
    print(f"This process is a part of `{command}`, which starts it: run that command instead.", file=sys.stderr)
    sys.exit(2)
