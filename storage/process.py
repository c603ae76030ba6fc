"""Begin and end of a process: outputs that its starter closed, and connections to break off at an interrupt."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from pathlib import Path

_STANDARD = 2  # standard input, output and error, which may be connections too: what was printed shall arrive
_DISCARD = struct.pack("ii", 1, 0)  # SO_LINGER of no time: what is not sent yet is dropped, and the peer told


def replace_closed_outputs() -> None:
    """Let what is printed to a closed output go nowhere, for the rest of the process; called by entry points.

    Python sets such an output to None, on which libraries that print fail.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - for the whole process


def abort_connections() -> None:
    """Let all TCP connections of this process break when it ends, right after this, instead of sending on.

    Else the system goes on to send what uploads have handed to it, for as long as a slow line takes: an object that was
    given up would appear after the process has ended. What a server has in full already cannot be taken back. Where the
    system does not list a process's descriptors, nothing is done.
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
