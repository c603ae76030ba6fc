"""What a rank that ends says, and its end, neither of which a full disk or a closed terminal may prevent."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn


def tell(text: str) -> None:
    """Write to the standard error, if that can be written."""
    with suppress(OSError, ValueError):  # ValueError: it is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def end_process(code: int) -> NoReturn:
    """End the process at once, with what was printed so far."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
