"""Report and end a rank that fails, even with a full disk or a closed terminal."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


def write_stderr(text: str) -> None:
    """Write to the standard error, if that can be written."""
    with suppress(OSError, ValueError):  # ValueError: it is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def write_report(text: str, doing: str, folder: Path | None, rank: int) -> None:
    """Tell, and write the same with what this rank is ``doing`` and its stacks to the folder, if there is one."""
    write_stderr(text)
    if folder is None:
        return
    path = folder / f"stall-rank-{rank}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write(f"{text}This rank: {doing}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as exc:
        write_stderr(f"the report could not be written to {path}: {exc}\n")


def leave_to_launcher(text: str) -> bool:
    """Write why this process ends where torchrun looks for it, for its summary; returns whether there is a torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError:
        return False
    return True


def end_process(code: int) -> NoReturn:
    """End the process at once, with what was printed so far."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
