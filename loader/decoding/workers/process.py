"""One worker process as its parent sees it: its start, whether it is suspended, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from multiprocessing import process

from ...errors import WorkerError
from .channel import LOOK_S, Channel

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from penstock.loader.{} import main; main(*map(int, sys.argv[1].split(',')))"
)
# A worker ends when its parent says so, whatever signals the group receives.
_HELD_BACK = (signal.SIGINT, signal.SIGTERM)
# A process that was stopped, as by SIGSTOP, is waited for this long, as it may be continued. Work has no limit.
STOPPED_S = 60.0


@dataclass(slots=True)
class Worker:
    """One process, and the decoders that it has been sent. Used by its own thread; killed by any."""

    process: subprocess.Popen[bytes]
    end: InitVar[socket.socket]
    channel: Channel = field(init=False)
    decoders: set[str] = field(default_factory=set)
    title: str = "worker process"
    _stopped_s: float = 0.0

    def __post_init__(self, end: socket.socket) -> None:
        self.channel = Channel(end, self.look)

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is suspended by a signal, and will do nothing until it is continued."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False

    def look(self) -> None:
        """Check the process, each second that its thread waits. A pause of this program does not count.

        Raises TimeoutError where it stays suspended, and EOFError where it has ended: a child that was forked meanwhile
        may hold a copy of its end.
        """
        if self.process.poll() is not None:
            raise EOFError("it has ended")
        self._stopped_s = self._stopped_s + LOOK_S if self.is_stopped else 0.0
        if self._stopped_s >= STOPPED_S:
            raise TimeoutError

    def how_it_ended(self, cause: Exception) -> str:
        """Describe its end: "worker process 4711 was killed by SIGKILL"."""
        named = f"{self.title} {self.process.pid}"
        if isinstance(cause, TimeoutError):
            return f"{named} has been stopped for {STOPPED_S:.0f} s, as by SIGSTOP, and nobody continued it,"
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"{named} closed its connection"
        if code >= 0:
            return f"{named} ended with exit code {code}"
        return f"{named} was killed by {signal.Signals(-code).name}"


def start_process(
    module: str = "decoding.workers.main",
    descriptors: Sequence[int] = (),
    *,
    title: str = "worker process",
    cure: str = "use fewer processes=, or 0",
) -> Worker:
    """Start a process that runs ``main`` of a module of the loader's with its end of the channel and ``descriptors``.

    Raises:
        WorkerError: the machine has no room for it; ``cure`` says what to do then.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as exc:
        raise WorkerError(f"a {title} cannot be started: {exc}; {cure}") from exc
    # The flags of `python` itself, so that warnings and -O are the same in the worker.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    passed = [theirs.fileno(), *descriptors]
    numbers = ",".join(map(str, passed))
    command = [sys.executable, *flags, "-c", _BOOTSTRAP.format(module), numbers, json.dumps(_module_path())]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # A signal that is blocked here is blocked in the child from its first instruction on.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)  # which raises what came just before
        started = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
    except BaseException as exc:
        ours.close()
        if not isinstance(exc, OSError):
            raise
        raise WorkerError(f"a {title} cannot be started: {exc}; {cure}") from exc
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Worker(started, ours, title=title)


def _module_path() -> list[str]:
    return [entry or process.ORIGINAL_DIR for entry in sys.path]  # type: ignore[attr-defined]
