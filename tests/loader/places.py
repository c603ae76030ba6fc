"""The tests of this folder with the loaders' pipelines in processes of their own: those of ``PENSTOCK_TEST_PLACE``.

``PENSTOCK_TEST_PLACE=process pytest tests/loader`` runs them so. What a process cannot do is done by threads, as under
"auto". Processes are forked from one that has imported torch, which takes a hundredth of the time of a start.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import DistributedDataLoader
from penstock.loader.decoding.workers.process import Worker
from penstock.loader.errors import ConfigError
from penstock.loader.pipeline.beside import pinning
from penstock.loader.pipeline.beside import process as loader_process
from penstock.loader.run import place as places

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

PLACE = os.environ.get("PENSTOCK_TEST_PLACE", "threads")
_NAME, _REAPS_ORPHANS = 15, 36  # PR_SET_NAME, PR_SET_CHILD_SUBREAPER
FORKED = "penstock-forked"


@contextmanager
def pipelines_in(place: str) -> Iterator[list[str]]:
    """Have loaders that do not say where their pipeline runs have it in ``place``; where that cannot be, in threads.

    Yields the reasons why it could not be, as they are given.
    """
    init, choose, reasons = DistributedDataLoader.__init__, places.choose_place, list[str]()

    def made(self: DistributedDataLoader[Any], *args: Any, **options: Any) -> None:
        init(self, *args, **{"place": place} | options)

    def chosen(config: Any, sources: Any) -> Any:
        try:
            return choose(config, sources)
        except ConfigError as exc:
            if not str(exc).startswith("place='process': "):
                raise
            reasons.append(str(exc))
            return places.Place(str(exc))

    with pytest.MonkeyPatch.context() as patched:
        if not torch.cuda.is_available():  # for tests with a made-up device
            patched.setattr(pinning, "CudaLocks", Locks)
        patched.setattr(DistributedDataLoader, "__init__", made)
        patched.setattr(places, "choose_place", chosen)
        if cloudpickle is not None:  # so that functions that tests define inside others can be sent
            by_value = SimpleNamespace(dumps=cloudpickle.dumps, HIGHEST_PROTOCOL=cloudpickle.DEFAULT_PROTOCOL)
            patched.setattr(places, "pickle", by_value)
        yield reasons


class Locks:
    """Tells that memory is locked, which a made-up device need not have."""

    def __init__(self, device: Any) -> None:
        pass

    def lock(self, address: int, nbytes: int) -> bool:
        return True

    def unlock(self, address: int) -> None:
        pass


class Forked:
    """A process that is a child by adoption, with the part of ``Popen`` that workers use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self.pid, 0
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (3600 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked", timeout or 0)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """A process with one thread that has imported what loaders' processes need, and forks them."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()

    def start(
        self, module: str = "", descriptors: Sequence[int] = (), *, title: str = "worker process", cure: str = ""
    ) -> Worker:
        ours, theirs = socket.socketpair()
        request = json.dumps(
            [[entry or str(Path.cwd()) for entry in sys.path], str(Path.cwd()), dict(os.environ)]
        ).encode()
        with theirs, self._asking:
            passed = array.array("i", [theirs.fileno(), *descriptors, 1, 2])
            _adopt_orphans(is_on=True)
            self._end.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            pid = int(self._end.recv(64))
            while int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid():
                time.sleep(0.001)
            _adopt_orphans(is_on=False)
        forked: Any = Forked(pid)
        return Worker(forked, ours, title=title)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Fork the loaders' processes here; others, such as ``processes=``, start as ever."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loader_process, "start_process", self.start)
            yield

    def close(self) -> None:
        self._end.close()
        self._process.wait()


def _adopt_orphans(*, is_on: bool) -> None:
    ctypes.CDLL(None).prctl(_REAPS_ORPHANS, int(is_on), 0, 0, 0)


def _nurse(descriptor: int) -> None:
    from penstock.loader.run.loader_process import main

    end = socket.socket(fileno=descriptor)
    while True:
        request, descriptors, _, _ = socket.recv_fds(end, 1 << 20, 8)
        if not request:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for one in descriptors:
                os.close(one)
            continue
        between = os.getpid()
        pid = os.fork()
        if pid:
            end.send(str(pid).encode())
            os._exit(0)
        end.close()
        ctypes.CDLL(None).prctl(_NAME, FORKED.encode(), 0, 0, 0)
        while os.getppid() == between:  # until it is adopted
            time.sleep(0.001)
        sys.path[:], folder, environment = json.loads(request)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        *passed, out, err = descriptors
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        main(*passed)


if __name__ == "__main__":
    _nurse(int(sys.argv[1]))
