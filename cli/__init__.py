"""The console script ``penstock``: one subcommand a file, imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

# A command is a module of this folder with ``run(arguments) -> exit code``; the text is its line in the overview.
COMMANDS = {
    "index": "find the samples of a data set, and keep what was found beside the data",
    "pack": "write a folder, a table or text as shards, in any store",
    "inspect": "show what a data set is made of: format, fields, sizes, its first sample",
    "verify": "read and check everything, and name every bad shard",
    "plan": "tell what a run will be like, on any number of ranks, without reading data",
    "bench": "measure how fast a data set is read, alone or against other loaders",
    "audit": "prove that every sample of a run was delivered exactly once",
}

OK, FOUND_BAD, USAGE, INTERRUPTED = 0, 1, 2, 130


def main() -> None:
    """The entry point. After Ctrl-C the process leaves at once, whatever requests are still under way."""
    code = run(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code == INTERRUPTED:
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command; gives its exit code: 0 fine, 1 bad data found, 2 a wrong call or an error told, 130 Ctrl-C."""
    given = list(arguments)
    if given[:1] in (["--version"], ["-V"]):
        from .. import __version__

        print(f"penstock {__version__}")
        return OK
    if not given or given[0] in ("-h", "--help", "help"):
        _print_overview()
        return OK if given else USAGE
    name, *rest = given
    if name not in COMMANDS:
        print(f"penstock: there is no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE
    return _run_command(name, rest)


def _run_command(name: str, rest: list[str]) -> int:
    from ..storage.errors import PenstockError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            code = importlib.import_module(f".{name}", __name__).run(rest)
        sys.stdout.flush()
        return int(code)
    except PenstockError as exc:
        print(f"penstock {name}: {exc}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader of our output has seen enough (``| head``); nothing may be written to it any more, at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        print(f"\npenstock {name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning reads as a message, not as a line of source code."""
    print(f"penstock: warning: {message}", file=sys.stderr)


def _print_overview() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text("penstock: sharded data from object storage to the accelerators", style="bold"))
    console.print()
    console.print("usage: penstock COMMAND [ARGUMENTS]", markup=False)
    console.print()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, summary in COMMANDS.items():
        table.add_row(name, summary)
    console.print(table)
    console.print()
    console.print("`penstock COMMAND --help` explains a command, with an example.", markup=False)
