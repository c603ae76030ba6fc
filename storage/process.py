"""Begin and end of a process: outputs that its starter closed, and connections to break off at an interrupt."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from pathlib import Path

_STANDARD = 2  # standard input, output and error may be connections too, and printed text must arrive
_DISCARD = struct.pack("ii", 1, 0)  # SO_LINGER of no time: unsent data is dropped, and the peer gets a reset


def replace_closed_outputs() -> None:
    """Discard output to a closed stream, for the rest of the process; called by entry points.

    Python sets such an output to None, on which libraries that print fail.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - for the whole process


def abort_connections() -> None:
    """Have all TCP connections of this process reset when it ends, which it should do right after this.

    Otherwise the system would still send what uploads have handed to it, however slow the line, and an object that was
    given up would appear after the process has ended. An upload that the server already has in full stays. Nothing is
    done where the system does not list a process's descriptors.
    """
    try:
        numbers = [int(path.name) for path in Path("/dev/fd").iterdir() if int(path.name) > _STANDARD]
    except (OSError, ValueError):
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)
