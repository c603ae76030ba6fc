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
    "index": "find the samples of a data set and store the index beside it",
    "pack": "write a data set, a folder or a table as shards, anywhere",
    "inspect": "show the format, fields, sizes and first samples of a data set",
    "verify": "read and check all data, and list every bad shard",
    "plan": "predict batches, reads and memory of a run, without reading data",
    "bench": "measure how fast a data set is read, alone or against others",
    "export": "write the weights of a training run as safetensors",
    "audit": "prove that every sample of a run was delivered exactly once",
    "state": "show where a saved state of a loader stands, or move it on",
    "top": "show a training run's ranks live: rates, waits, what to change",
    "report": "draw a training run as one HTML page, also while it runs",
}

OK, FOUND_BAD, USAGE, INTERRUPTED = 0, 1, 2, 130


def main() -> None:
    """The entry point. After Ctrl-C the process exits at once, and breaks off requests in flight."""
    code = run(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code == INTERRUPTED:
        from ..storage.hang_up import hang_up

        hang_up()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command. Returns its exit code: 0 success, 1 bad data found, 2 wrong usage or an error, 130 Ctrl-C."""
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
        from .words import did_you_mean

        meant = did_you_mean(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        print(f"penstock: unknown command {name!r}{meant}", file=sys.stderr)
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
        from .common import in_option_words
        from .screen import shown

        print(f"penstock {name}: {shown(in_option_words(str(exc)))}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader closed the pipe (``| head``): nothing may be written to it any more, not at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        print(f"\npenstock {name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a message, without the line of source code."""
    from .screen import shown

    print(f"penstock: warning: {shown(str(message))}", file=sys.stderr)


def _print_overview() -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Text("penstock: sharded data from object storage to the accelerators", style="bold"))
    console.print()
    console.print("usage: penstock COMMAND [ARGUMENTS]", markup=False)
    console.print()
    width = max(map(len, COMMANDS)) + 2
    for name, summary in COMMANDS.items():
        console.print(Text.assemble("  ", (name.ljust(width), "cyan"), summary))
    console.print()
    console.print("Run `penstock COMMAND --help` for the options of a command and an example.", markup=False)
