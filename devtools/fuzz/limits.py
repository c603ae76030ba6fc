"""Limits of a parser on any bytes: its time, its memory, and the errors it may end in."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import mmap
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from penstock.storage import PenstockError

CASE_CPU_S = 10.0
CASE_WALL_S = 120.0
# Beyond what is mapped some cases before; a chunk may take 64 MiB, and is held twice while it is opened.
MEMORY_BYTES = 1 << 30
_ROOT = str(Path(__file__).parents[2])
_OWN = str(Path(__file__).parent)


def limit_process(log: IO[str] | None = None) -> None:
    """Bound this process's memory from now on; have crashes and time-outs write a traceback to ``log``."""
    limit_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    if log is None:
        return
    faulthandler.enable(log, all_threads=False)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        faulthandler.register(number, log, all_threads=False, chain=True)


def limit_memory() -> None:
    """Bound this process's memory beyond its present mappings."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, resource.RLIM_INFINITY))


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Have this process killed where the block takes longer than a case may."""
    signal.setitimer(signal.ITIMER_PROF, CASE_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, CASE_WALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def judge(run: Callable[[bytes], object], data: bytes) -> str | None:
    """Judge a parser's behaviour on some bytes: a line that is the same for the same fault; None if it is right.

    It may return, or raise an error of ours that no failed allocation caused.
    """
    try:
        run(data)
    except PenstockError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                return f"allocation beyond {MEMORY_BYTES >> 20} MiB {_place(cause.__traceback__)}"
            cause = cause.__cause__
    except MemoryError as error:
        return f"allocation beyond {MEMORY_BYTES >> 20} MiB {_place(error.__traceback__)}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - finding these is what this is for; panics of Rust are no Exception
        return f"{type(error).__name__} {_place(error.__traceback__)}"
    return None


def _place(at: TracebackType | None) -> str:
    """Find the innermost function of ours that an error passed through."""
    frames = [f for f in traceback.extract_tb(at) if f.filename.startswith(_ROOT) and not f.filename.startswith(_OWN)]
    if not frames:
        return "in the bench"
    return f"in {Path(frames[-1].filename).relative_to(_ROOT)} {frames[-1].name}"


def place_of_crash(log: str) -> str:
    """Find the innermost function of ours in faulthandler's last traceback."""
    for line in log.rpartition("(most recent call first)")[2].splitlines():
        file, _, rest = line.strip().removeprefix('File "').partition('", line ')
        if rest and file.startswith(_ROOT) and not file.startswith(_OWN):
            return f"in {Path(file).relative_to(_ROOT)} {rest.partition(' in ')[2]}"
    return "in the bench"


def name_of_case(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def describe_exit(code: int, log: str) -> str:
    """Describe a child's exit by a signal, as a fault of its running case."""
    kind = signal.Signals(-code).name if code < 0 else f"exit {code}"
    what = "hang" if -code in (signal.SIGPROF, signal.SIGALRM) else f"crash ({kind})"
    return f"{what} {place_of_crash(log)}"
