"""A worker process: receives rows from its parent, decodes and transforms them, and ends when its parent does."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from typing import TYPE_CHECKING, Any

from ....storage.threads.interruptible import Thread
from ..row_work import RowError, RowResults, RowTask, RowWork, Step, Values
from .channel import Channel, pack

if TYPE_CHECKING:
    from ...columns import AnyArray, IntArray
    from ..decode import FieldDecoder

_LOOK_S = 1.0  # how often a worker checks that its parent is still the process that started it
_GRACE_S = 0.5  # for a worker to exit after its parent has gone
_NICER = 10  # so that the training loop, where it wants a core, need not wait for a worker's slice to end

# Set while a worker runs the user's script to find the functions in it: a loader made then would start workers, which
# would start more.
is_importing_main = False


@dataclass(frozen=True, slots=True)
class Code:
    """A worker's first message: the module search path, and the pickled RowWork. ``main`` is for ``spawn.prepare``.

    ``default_dtype`` is the name of torch's for new tensors, "" for its own, so that torch is imported only if needed.
    """

    main: Mapping[str, Any]
    work: bytes
    default_dtype: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """Rows to work on. Each decoder comes pickled with the first job of a worker that needs it."""

    epoch: int
    first_row: int
    ids: IntArray
    fields: Mapping[str, Values]
    encoded: tuple[str, ...]
    new_decoders: Mapping[str, bytes]
    keys: AnyArray | None = None
    avoided: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Failed:
    """A row that failed: ``cause`` is its pickled exception, None if it cannot be pickled; ``text`` describes it."""

    row: int
    step: Step
    cause: bytes | None
    text: str
    trace: str


@dataclass(frozen=True, slots=True)
class Done:
    """The results of a job, and the seconds it took. ``failed``: its bad samples, whose errors may not be sendable.

    ``ended``: the row that ended it, where one did; the results are those of the rows before it.
    """

    results: RowResults
    busy_s: float
    failed: tuple[Failed, ...] = ()
    ended: Failed | None = None


@dataclass(frozen=True, slots=True)
class Unusable:
    """The reason that the worker cannot work: its functions cannot be found or unpickled here."""

    text: str


def main(descriptor: int) -> None:
    """Work until the parent closes its end."""
    begin_work(descriptor)
    end = socket.socket(fileno=descriptor)
    channel = Channel(end)
    try:
        work = load_code(channel.receive())
        channel.send(work if isinstance(work, Unusable) else None)
        if isinstance(work, RowWork):
            _serve(channel, work)
    except (EOFError, ConnectionError):
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S)  # the parent is gone, or needs no more
    finally:
        end.detach()  # without a ResourceWarning; the process's end closes it, until when the thread waits on it


def begin_work(descriptor: int) -> None:
    """Prepare this process: its parent, at the other end of the channel, decides when it ends, and no signal to all."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with suppress(OSError):  # where the system forbids it
        os.nice(_NICER)
    Thread(target=_end_with_parent, args=(descriptor, os.getppid()), name="penstock-parent").start()


def load_code(code: Code) -> Any:
    """Load the work that the parent sent; ``Unusable`` where its functions cannot be found here."""
    global is_importing_main
    try:
        is_importing_main = True
        spawn.prepare(code.main)
        is_importing_main = False
        if code.default_dtype:
            import torch

            torch.set_default_dtype(getattr(torch, code.default_dtype))
        return pickle.loads(code.work)
    except BaseException as exc:  # noqa: BLE001 - sent to the parent, which raises it
        return Unusable(f"{type(exc).__name__}: {exc}\n{traceback.format_exc()}")


def _serve(channel: Channel, work: RowWork) -> None:
    decoders: dict[str, FieldDecoder] = {}
    while True:
        job: Job = channel.receive()
        try:
            decoders.update({name: pickle.loads(data) for name, data in job.new_decoders.items()})
        except BaseException as exc:  # noqa: BLE001 - sent to the parent, which raises it
            channel.send(Unusable(f"decode=: {type(exc).__name__}: {exc}"))
            return
        channel.send_packed(*_work(work, job, decoders))


def _work(work: RowWork, job: Job, decoders: Mapping[str, FieldDecoder]) -> tuple[bytes, list[memoryview]]:
    started = time.perf_counter()
    encoded = {name: decoders[name] for name in job.encoded}
    task = RowTask(job.epoch, job.first_row, job.ids, job.fields, encoded, job.keys, job.avoided)
    out = work.allocate(task)
    ended = None
    try:
        work.run(task, out, 0, len(task.ids), lambda: False)
    except RowError as exc:
        ended = _describe(exc)

    def pack_done() -> tuple[bytes, list[memoryview]]:
        rows = len(task.ids) if ended is None else ended.row - job.first_row
        values: dict[str, Any] = {} if work.transform is not None else {name: out.values[name] for name in job.encoded}
        if ended is not None:
            values = {name: of_field[:rows] for name, of_field in values.items()}
        failed = tuple(_describe(error) for error in out.failed if error.row < job.first_row + rows)
        return pack(Done(RowResults(values, out.samples[:rows]), time.perf_counter() - started, failed, ended))

    try:
        return pack_done()
    except Exception as exc:  # noqa: BLE001 - sent to the parent, which raises it
        row = job.first_row + _first_unsendable(out)
        ended = Failed(row, "result", None, f"the result cannot be sent between processes: {exc}", "")
        return pack_done()


def _first_unsendable(out: RowResults) -> int:
    """Find the first row whose result cannot be pickled."""
    for row, values in enumerate(out.samples or zip(*out.values.values(), strict=True)):
        try:
            pack(values)
        except Exception:  # noqa: BLE001 - whatever it is, this is the row
            return row
    return 0


def _describe(error: RowError) -> Failed:
    cause = error.cause
    text = f"{type(cause).__name__}: {cause}"
    trace = "".join(traceback.format_exception(cause)) if error.step == "transform" else ""
    data: bytes | None
    try:
        data = pickle.dumps(cause)
        pickle.loads(data)  # some can be pickled but not unpickled
    except Exception:  # noqa: BLE001 - the text is enough
        data = None
    return Failed(error.row, error.step, data, text, trace)


def _end_with_parent(descriptor: int, parent: int) -> None:
    """End this process when the parent's end is closed: at once if idle, otherwise after a short grace period.

    The parent's id is checked too: its end stays open if a process that it forked holds a copy.
    """
    poll = select.poll()
    poll.register(descriptor, 0)
    while not poll.poll(_LOOK_S * 1000) and os.getppid() == parent:
        pass
    signal.setitimer(signal.ITIMER_REAL, _GRACE_S)  # ends the process even if it holds the GIL or is exiting
    time.sleep(_GRACE_S)
    os._exit(0)
