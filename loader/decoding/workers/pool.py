"""Worker processes for decoding and transforms that hold the GIL. A small pool of our own: ready-made ones fork, leave
semaphores behind, or report a killed worker late.

Each process has a thread here that feeds it and waits for it over a socket pair. The death of either end closes the
pair, so a killed worker is an error at once, and a killed parent ends its workers.
"""

from __future__ import annotations

import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....storage.threads.interruptible import Future, Thread
from ...errors import ConfigError, DecodeError, WorkerError
from ..row_work import RowError, RowResults, RowTask, RowWork
from . import main as worker_main
from .main import Code, Done, Failed, Job, Unusable
from .process import Worker, start_process

if TYPE_CHECKING:
    from ..decode import DecodeChoice, FieldDecoder

_ENDING_S = 0.3  # for workers to exit before they are killed
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class _Submitted:
    task: RowTask
    place: Callable[[RowResults, float], None]
    future: Future[None]
    is_stopped: Callable[[], bool]


class WorkerPool:
    """``processes`` workers that do ``work`` on rows. Mutable state: the workers and the first error, under a lock.

    Raises:
        ConfigError: ``work``'s transform, or a decoder that ``decode`` names, cannot be sent to another process.
    """

    def __init__(
        self,
        work: RowWork,
        decode: DecodeChoice,
        processes: int,
        *,
        cure: str = "use fewer processes= or smaller batches",
    ) -> None:
        self._work = _pickle("transform=", work.transform, work)
        choices = decode if isinstance(decode, Mapping) else {}
        self._needs_main = any(
            is_of_main(data)
            for data in (self._work, *(_pickle(f"decode[{name!r}]", choices[name], choices[name]) for name in choices))
        )
        self.processes = processes
        self._cure = cure
        self._decoders: dict[str, bytes] = {}
        self._jobs: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._threads: list[Thread] = []
        self._greeted = 0
        self._is_whole = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._changing = threading.RLock()  # held while workers start or end

    def start(self) -> None:
        """Start the processes, unless they are running, or the pool is closed. Any thread may call."""
        with self._changing:
            if self._is_whole or self._is_closed():
                return
            self._undo_start()  # of one that was interrupted, and so was its end
            code = make_code(self._work, needs_main=self._needs_main)
            try:
                for number in range(self.processes):
                    self._start_worker(number, code)
                self._is_whole = True
            except BaseException:  # an interrupt, too: half of a pool is not taken for a whole one
                self._undo_start()
                raise
            if self._is_closed():  # by a signal's handler, between two workers
                self._end()

    def _is_closed(self) -> bool:
        return isinstance(self._error, CancelledError)

    def _start_worker(self, number: int, code: Code) -> None:
        worker = start_process()
        self._workers.append(worker)
        # A daemon, so that the interpreter's exit does not wait for it: a transform may take long.
        thread = Thread(target=self._feed, args=(worker, code), name=f"penstock-worker-{number}")
        self._threads.append(thread)
        thread.start()

    def _undo_start(self) -> None:
        """End the processes of an incomplete pool, and forget their errors."""
        self._end()
        self._jobs = queue.SimpleQueue()
        with self._lock:
            if not self._is_closed():
                self._error = None

    def submit(
        self, task: RowTask, place: Callable[[RowResults, float], None], is_stopped: Callable[[], bool]
    ) -> Future[None]:
        """Queue a task; a thread of the pool calls ``place`` with its results and the seconds they took.

        If a row failed, they are those of the rows before it.

        The future ends in RowError if a row failed, in WorkerError if a process ended, in CancelledError if the pool
        was closed.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._error is None:
                self._jobs.put(_Submitted(task, place, future, is_stopped))
            else:
                future.set_exception(self._error)
        return future

    @property
    def is_ready(self) -> bool:
        """Return whether all processes are up and initialised. Called by any thread."""
        return self._greeted == self.processes

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for all processes. Raises a process's error, and WorkerError if they take too long."""
        until = time.monotonic() + timeout_s
        while not self.is_ready:
            if self._error is not None:
                raise self._error
            if time.monotonic() > until:
                raise WorkerError(f"{self.processes} worker processes were not ready after {timeout_s:.0f} s")
            time.sleep(_LOOK_S)

    @property
    def stopped(self) -> list[int]:
        """List the ids of processes that are suspended by a signal. Called by any thread."""
        return [worker.process.pid for worker in list(self._workers) if worker.is_stopped]

    def let_go(self) -> None:
        """In a forked child: close its copies of the connections, and leave the processes to the parent."""
        for worker in self._workers:
            worker.channel.let_go()
            worker.process.returncode = 0  # this process must not wait for it

    def close(self) -> None:
        """End all processes and threads at once, whatever they are doing."""
        self._fail(CancelledError())
        with self._changing:
            self._end()

    def _end(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for worker in self._workers:
            worker.channel.close()
        for worker in self._workers:
            try:
                worker.process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join()
        self._workers.clear()
        self._threads.clear()
        self._greeted = 0

    def _fail(self, error: BaseException) -> None:
        """Fail everything submitted, now and later, with ``error``, unless it failed before."""
        with self._lock:
            if self._error is None or isinstance(error, CancelledError):
                self._error = error
            while True:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is not None and job.future.set_running_or_notify_cancel():
                    job.future.set_exception(self._error)
            for _ in self._threads:
                self._jobs.put(None)

    # -- the threads, one per worker ------------------------------------------------------------------------------

    def _feed(self, worker: Worker, code: Code) -> None:
        try:
            self._greet(worker, code)
            with self._lock:
                self._greeted += 1
            while (job := self._jobs.get()) is not None:
                if job.is_stopped():
                    job.future.cancel()
                if job.future.set_running_or_notify_cancel():
                    self._settle(worker, job)
                del job  # while this waits for another it keeps no batch
        except BaseException as exc:  # noqa: BLE001 - raised where batches are waited for
            self._fail(exc)

    def _greet(self, worker: Worker, code: Code) -> None:
        try:
            worker.channel.send(code)
            answer = worker.channel.receive()
        except (OSError, EOFError) as exc:
            raise WorkerError(f"{worker.how_it_ended(exc)} while it started; its messages are above") from exc
        if isinstance(answer, Unusable):
            raise ConfigError(_unusable(answer))

    def _settle(self, worker: Worker, job: _Submitted) -> None:
        try:
            answer = self._ask(worker, job.task)
            answer.results.failed.extend(map(_row_error, answer.failed))
            job.place(answer.results, answer.busy_s)
        except BaseException as exc:
            self._fail(exc)
            job.future.set_exception(self._error or exc)
            raise
        if answer.ended is not None:
            job.future.set_exception(_row_error(answer.ended))
        else:
            job.future.set_result(None)

    def _ask(self, worker: Worker, task: RowTask) -> Done:
        new = {name: decoder for name, decoder in task.encoded.items() if name not in worker.decoders}
        job = Job(
            epoch=task.epoch,
            first_row=task.first_row,
            ids=task.ids,
            fields={name: _sendable(values, is_encoded=name in task.encoded) for name, values in task.fields.items()},
            encoded=tuple(task.encoded),
            new_decoders={name: self._pickled_decoder(name, decoder) for name, decoder in new.items()},
            keys=task.keys,
            avoided=task.avoided,
        )
        worker.decoders.update(new)
        try:
            worker.channel.send(job)
            answer = worker.channel.receive()
        except (OSError, EOFError) as exc:
            first, last = int(task.ids.min()), int(task.ids.max())
            raise WorkerError(
                f"{worker.how_it_ended(exc)} while it worked on {len(task.ids)} samples "
                f"from {first} to {last}; if memory ran out, {self._cure}"
            ) from exc
        if isinstance(answer, Unusable):
            raise ConfigError(_unusable(answer))
        assert isinstance(answer, Done)
        return answer

    def _pickled_decoder(self, name: str, decoder: FieldDecoder) -> bytes:
        if name not in self._decoders:
            self._decoders[name] = _pickle(f"the decoder of field {name!r}", decoder, decoder)
        return self._decoders[name]


def is_of_main(pickled: bytes) -> bool:
    """Return whether a pickle refers to the user's script, by the name that it has here or in a process of ours."""
    return b"__main__" in pickled or b"__mp_main__" in pickled


def make_code(work: bytes, *, needs_main: bool) -> Code:
    """Make the first message of a process that is to do the pickled ``work``, as this process would do it."""
    dtype = torch.get_default_dtype()
    return Code(_prepare_main(needs_main=needs_main), work, "" if dtype == torch.float32 else str(dtype).split(".")[1])


def _prepare_main(*, needs_main: bool) -> dict[str, Any]:
    """Make the argument of ``multiprocessing.spawn.prepare``, so that workers find the modules that this process found.

    The user's script is run, under another name, only if a function is defined in it: its imports take time.
    """
    if worker_main.is_importing_main:
        raise ConfigError(
            "a loader with processes= or place= was created while a process of such a loader imports the script; put "
            "the script's actions under `if __name__ == '__main__':`, or define the loader's functions in a module of "
            "their own"
        )
    data: dict[str, Any] = {"sys_argv": sys.argv, "dir": str(Path.cwd())}
    if not needs_main:
        return data
    script = sys.modules["__main__"]
    name = getattr(script.__spec__, "name", None)
    path = getattr(script, "__file__", None)
    if name is not None:
        return {**data, "init_main_from_name": name}
    script_path = None if path is None else Path(process.ORIGINAL_DIR) / path  # type: ignore[attr-defined]
    if script_path is None or not script_path.exists():
        where = "an interactive session" if path is None else path
        raise ConfigError(
            f"a function of the loader is defined in {where}, where another process cannot find it; define it in a "
            "module, or use processes=0 and place='threads'"
        )
    return {**data, "init_main_from_path": str(script_path)}


def _pickle(what: str, named: Any, value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as exc:
        raise ConfigError(
            f"{what}{named!r} cannot be sent to worker processes ({exc}); define it at the top level of a module, "
            "or use processes=0"
        ) from exc


def _unusable(answer: Unusable) -> str:
    return (
        "worker processes cannot load the transform= or decode= functions that they were sent; define them at the top "
        f"level of a module that can be imported, or use processes=0. In the worker: {answer.text}"
    )


def _sendable(values: Any, *, is_encoded: bool) -> Any:
    """Let encoded bytes travel beside the pickle, unchanged.

    The buffers are those of the bytes, not of the views on them: if an error's traceback makes a cycle of both, the
    garbage collector of CPython 3.11 clears the view first, and releasing it again by the PickleBuffer crashes.
    """
    if not is_encoded:
        return values
    return [pickle.PickleBuffer(value.obj) if isinstance(value, memoryview) else value for value in values]


def _row_error(failed: Failed) -> RowError:
    cause: Exception = DecodeError(failed.text)
    if failed.cause is not None:
        with suppress(Exception):  # it could be unpickled in the worker but not here: the text is enough
            cause = pickle.loads(failed.cause)
    if failed.trace:
        cause.add_note(f"in a worker process:\n{failed.trace.rstrip()}")
    return RowError(failed.row, failed.step, cause)
