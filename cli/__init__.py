"""The console script ``penstock``: one subcommand a file, imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ..storage.process import replace_closed_outputs

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
    "doctor": "check a machine, a store and the network of ranks; say what to mend",
    "top": "show a training run's ranks live: rates, waits, what to change",
    "scale": "give a running parameter server more or fewer workers and shards",
    "report": "draw a training run as one HTML page, also while it runs",
}

OK, FOUND_BAD, USAGE, INTERRUPTED = 0, 1, 2, 130


def main() -> None:
    """The entry point. After Ctrl-C the process exits at once, and breaks off requests in flight."""
    replace_closed_outputs()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal of Latin-1 or ASCII has no sign for some that are printed; names of files may be no Unicode.
        sys.stdout.reconfigure(errors="backslashreplace" if sys.stdout.encoding.lower() == "utf-8" else "replace")
    code = run(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code == INTERRUPTED:
        from ..storage.process import abort_connections

        abort_connections()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command. Returns its exit code: 0 success, 1 bad data found, 2 wrong usage or an error, 130 Ctrl-C."""
    given = list(arguments)
    name = " ".join(["penstock", *(word for word in given[:1] if word in COMMANDS)])
    try:
        code = _run_command(given[0], given[1:]) if given and given[0] in COMMANDS else _run_overview(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader closed the pipe (``| head``): nothing may be written to it any more, not at exit either.
        _drop_output()
        return OK
    except OSError as exc:  # the user's files: a folder that is a file, a full disk, which may be that of the output
        _drop_output()
        where = f"{os.fsdecode(exc.filename)}: " if isinstance(exc.filename, str | bytes) else ""
        return _tell_error(name, f"{where}{exc.strerror or exc}")
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run_overview(given: list[str]) -> int:
    if given[:1] in (["--version"], ["-V"]):
        from .. import __version__

        print(f"penstock {__version__}")
        return OK
    if not given or given[0] in ("-h", "--help", "help"):
        _print_overview()
        return OK if given else USAGE
    from ..storage.suggestions import did_you_mean

    meant = did_you_mean(given[0], COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
    return _tell_error("penstock", f"unknown command {given[0]!r}{meant}")


def _run_command(name: str, rest: list[str]) -> int:
    from ..storage.errors import PenstockError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            return int(importlib.import_module(f".{name}", __name__).run(rest))
    except PenstockError as exc:
        from .common import in_option_words

        return _tell_error(f"penstock {name}", in_option_words(str(exc)))


def _tell_error(name: str, problem: str) -> int:
    from .screen import shown

    with contextlib.suppress(OSError):  # the exit code tells it as well
        print(f"{name}: {shown(problem)}", file=sys.stderr)
    return USAGE


def _drop_output() -> None:
    """Discard pending output that cannot be written; it would fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a message, without the line of source code."""
    from .screen import shown

    print(f"penstock: warning: {shown(str(message))}", file=sys.stderr)


def _print_overview() -> None:
    from rich.text import Text

    from .screen import Screen

    console = Screen()
    console.print(Text("penstock: sharded data from object storage to the accelerators", style="bold"))
    console.print()
    console.print("usage: penstock COMMAND [ARGUMENTS]")
    console.print()
    width = max(map(len, COMMANDS)) + 2
    for name, summary in COMMANDS.items():
        console.print(Text.assemble("  ", (name.ljust(width), "cyan"), summary))
    console.print()
    console.print("Run `penstock COMMAND --help` for the options of a command and an example.")
