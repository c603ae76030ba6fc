"""``metrics.jsonl``: one JSON object a line, which a full disk interrupts and does not end."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from pathlib import Path

from ..errors import TrainerError
from .records import TemporaryObserverError, Values

logger = logging.getLogger(__name__)

_CURE = "give each run an output_dir of its own"
_ENDING_S = 1.0  # a run that is ending has closed the file by then
_LOOK_S = 0.05


class JsonLines:
    """One JSON object per line, appended to a file and written at once; NaN and infinity become null.

    While the file cannot be written records are lost, and each next one tries again; the first that succeeds is
    preceded by a note of how many were lost. A line that was cut off, now or by a kill before, is ended first. Where
    another process has the file open as its own, a note before the first record says so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lost = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._fd).st_size
            self._is_cut = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"
            self._is_shared = _is_of_another_process(self._fd)
        except OSError as exc:
            raise TrainerError(
                f"output_dir={str(path.parent)!r} cannot be written ({exc.strerror}); give a folder that can"
            ) from exc

    def record(self, kind: str, step: int, values: Values) -> None:
        text = format_line(kind, step, values)
        if self._is_shared:
            self._is_shared = False
            note = f"another run writes to {self._path}, too: its records and this run's are mixed; {_CURE}"
            logger.warning("%s", note)
            text = format_line("note", step, {"note": note}) + text
        if self._lost:
            text = (
                format_line("note", step, {"note": f"{self._lost} records are missing here: they could not be written"})
                + text
            )
        try:
            self._write(text.encode())
        except OSError as exc:
            self._lost += 1
            if self._lost == 1:
                raise TemporaryObserverError(
                    f"{self._path} cannot be written ({exc.strerror}); the next record tries again"
                ) from exc
        else:
            self._lost = 0

    def close(self) -> None:
        os.close(self._fd)
        if self._lost:
            raise TrainerError(f"the last {self._lost} records could not be written to {self._path}")

    def _write(self, data: bytes) -> None:
        left = memoryview(b"\n" + data if self._is_cut else data)
        while left:
            done = os.write(self._fd, left)
            left = left[done:]
            self._is_cut = bool(left)


def _is_of_another_process(fd: int) -> bool:
    """Return whether another process holds a lock on the file; if not, this one takes it until it ends or closes."""
    deadline_s = time.monotonic() + _ENDING_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return True
            time.sleep(_LOOK_S)
        except OSError:
            return False  # a file system without locks
        else:
            return False


def format_line(kind: str, step: int, values: Values) -> str:
    """The line of one record, with the time in seconds since the epoch."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **plain}) + "\n"
