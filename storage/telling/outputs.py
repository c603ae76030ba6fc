"""The process's standard outputs, which whoever started it may have closed, as ``>&-`` does."""

from __future__ import annotations

import os
import sys


def replace_closed_outputs() -> None:
    """Let what is printed to a closed output go nowhere, for the rest of the process; called by entry points.

    Python sets such an output to None, on which libraries that print fail.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - for the whole process
