"""One worker process as its parent sees it: how it is started, and how it ended."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from multiprocessing import process

from ..errors import WorkerError
from .worker_channel import Channel

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from penstock.loader.decoding.worker_main import main; main(int(sys.argv[1]))"
)
# A worker ends when its parent says so, whatever signals the group receives.
_HELD_BACK = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Worker:
    """One process, and the decoders that it has been sent. Used by its own thread; killed by any."""

    process: subprocess.Popen[bytes]
    channel: Channel
    decoders: set[str] = field(default_factory=set)

    def how_it_ended(self) -> str:
        """How a process ended that closed its end of the pair: "worker process 4711 was killed by SIGKILL"."""
        named = f"worker process {self.process.pid}"
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"{named} closed its connection"
        if code >= 0:
            return f"{named} ended with exit code {code}"
        return f"{named} was killed by {signal.Signals(-code).name}"


def start_process() -> Worker:
    """Start one. Raises WorkerError where the machine has no room for it."""
    ours, theirs = socket.socketpair()
    # The flags of `python` itself, so that warnings and -O are the same in the worker.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", _BOOTSTRAP, str(theirs.fileno()), json.dumps(_module_path())]
    # A signal that is blocked here is blocked in the child from its first instruction on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        started = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    except OSError as exc:
        ours.close()
        raise WorkerError(f"a worker process cannot be started: {exc}; use fewer processes=, or 0") from exc
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Worker(started, Channel(ours))


def _module_path() -> list[str]:
    return [entry or process.ORIGINAL_DIR for entry in sys.path]  # type: ignore[attr-defined]
