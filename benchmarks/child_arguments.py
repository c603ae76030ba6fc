"""Arguments of processes that a benchmark starts for itself; who starts one by hand is told which command to run."""

from __future__ import annotations

import os
import sys


def take_arguments(names: str, command: str, *, variable: str | None = None) -> list[str]:
    """The process's arguments, one for each of ``names`` (separated by spaces), of which the first is no option.

    Where they are others, or the environment lacks ``variable``, it prints one sentence to standard error that names
    ``command``, whose part the process is, and ends the process with exit code 2. Imports next to nothing, as the
    memory of some of these processes is measured.
    """
    given = sys.argv[1:]
    are_expected = len(given) == len(names.split()) and not any(word.startswith("-") for word in given[:1])
    if are_expected and (variable is None or variable in os.environ):
        return given
    print(f"This process is a part of `{command}`, which starts it: run that command instead.", file=sys.stderr)
    sys.exit(2)
