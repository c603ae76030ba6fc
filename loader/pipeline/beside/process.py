"""The loader's process as the training process sees it: its start, its messages, and its end."""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ....storage.observability.counts import StoreCounts, add_counts
from ...decoding.workers.main import Unusable
from ...decoding.workers.process import Worker, start_process
from ...errors import ConfigError, LoaderClosedError, WorkerError
from .board import Board, Report
from .failures import Failure, make_error
from .frames import read_frame
from .pinning import PinnedSlots
from .requests import (
    BATCH,
    BROKEN,
    FAILED,
    FREE,
    GONE,
    MESSAGE,
    MOST_BROKEN_BYTES,
    NEW,
    Begin,
    End,
    Known,
    News,
    Request,
    Trace,
    Warned,
)
from .slots import Slot, Slots

if TYPE_CHECKING:
    from ...counters import Counters
    from ...decoding.workers.main import Code
    from ...reading.bad.chunks import BadChunk
    from ...reading.bad.samples import BadNews
    from ..tuning import PipelineOptions

logger = logging.getLogger(__name__)

_MODULE = "run.loader_process"
TITLE = "loader process"
_CURE = "use place='threads'"
_ENDING_S = 2.0  # for it to end by itself before it is killed
_LOOK_MS = 1000
_FEED_BYTES = 1 << 20


class LoaderProcess:
    """One process beside this one, for all pipelines of a loader, one after another.

    What it does is added to ``counters``: of the loader, and then of what is packed of each source. ``absorb`` gets
    what is bad.

    ``start``, ``begin``, ``end`` and ``receive`` are for the training loop's thread; any may call all else. If the
    process dies, ``start`` starts another. Mutable state: the process and what leads to it, the slots, the number of
    the pipeline, and the last report that was added to the counters.
    """

    def __init__(
        self,
        code: Callable[[], Code],
        counters: Sequence[Counters],
        pinned: PinnedSlots,
        absorb: Callable[[Sequence[BadNews], Sequence[BadChunk]], None],
    ) -> None:
        self._code = code
        self._absorb = absorb
        self._counters = counters
        self._pinned = pinned
        self._worker: Worker | None = None
        self._feed: socket.socket | None = None
        self._board: Board | None = None
        self._slots = Slots(0, pinned.prepare)
        self._poll = select.poll()
        self._pidfd = -1
        self._wake = -1
        self._generation = 0
        self._received = 0  # deliveries and failures of this pipeline
        self._is_dead = False
        self._is_closed = False
        self._has_said = False
        self._seen = Report()
        self._store = StoreCounts()  # of processes that are gone
        self._calling = threading.RLock()
        self._counting = threading.Lock()

    # -- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            WorkerError: it cannot be started, or ended at once.
            ConfigError: it cannot find the functions that it was sent.
        """
        with self._calling:
            if self._worker is not None and not self._is_dead:
                return
            self._drop()
            if self._is_closed:
                raise LoaderClosedError("the loader is closed; make a new one")
            try:
                self._start()
            except BaseException as exc:  # an interrupt, too: half of a process is not taken for a whole one
                self._drop()
                if isinstance(exc, WorkerError) and self._was_closed():
                    raise LoaderClosedError("the loader was closed while its process started") from exc
                raise

    def _was_closed(self) -> bool:
        return self._is_closed  # perhaps by another thread, or a signal's handler, meanwhile

    def _start(self) -> None:
        code = self._code()
        try:
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._board = Board()
            self._feed, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as exc:
            raise WorkerError(f"a {TITLE} cannot be started: {exc}; {_CURE}") from exc
        with theirs:
            self._feed.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _FEED_BYTES)
            descriptors = [theirs.fileno(), self._board.descriptor]
            self._worker = worker = start_process(_MODULE, descriptors, title=TITLE, cure=_CURE)
        self._slots = Slots(0, self._pinned.prepare)
        self._is_dead = False
        self._poll = select.poll()
        self._poll.register(self._feed, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        with suppress(OSError, AttributeError):  # an old kernel: its end is then seen within a second
            self._pidfd = os.pidfd_open(worker.process.pid)
            self._poll.register(self._pidfd, select.POLLIN)
        try:
            worker.channel.send(code)
            answer = worker.channel.receive()
        except (OSError, EOFError) as exc:
            raise WorkerError(f"{worker.how_it_ended(exc)} while it started; its messages are above") from exc
        if isinstance(answer, Unusable):
            raise ConfigError(
                "the loader's process cannot load the transform=, decode= or collate= functions that it was sent; "
                f"define them at the top level of a module that can be imported, or {_CURE}. There: {answer.text}"
            )
        _raise_failure(answer)

    @property
    def pid(self) -> int:
        """Its number; 0 where it does not run."""
        worker = self._worker
        return 0 if worker is None or self._is_dead else worker.process.pid

    @property
    def is_stopped(self) -> bool:
        """Return whether it is suspended by a signal. Called by any thread."""
        worker = self._worker
        return worker is not None and worker.is_stopped

    def let_go(self) -> None:
        """In a forked child: close its copies of the connections, and leave the process to the parent."""
        worker, feed = self._worker, self._feed
        if worker is not None:
            worker.channel.let_go()
            worker.process.returncode = 0  # this process must not wait for it
        if feed is not None:
            feed.close()

    def retire(self) -> None:
        """Before a fork: leave what is lent to the child, too."""
        self._slots.retire()

    def close(self) -> None:
        """End the process at once, whatever it is doing."""
        self._is_closed = True
        self.wake()
        worker = self._worker
        if worker is not None:
            worker.channel.close()  # ends a call that another thread waits for
        with self._calling:
            self._drop()
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _drop(self) -> None:
        """End the process, and forget all that leads to it."""
        worker, feed, board = self._worker, self._feed, self._board
        if worker is not None:
            worker.channel.close()
            if feed is not None:
                feed.close()
            try:
                worker.process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        if board is not None:
            self.count()
            with self._counting:
                self._store = add_counts(self._store, self._seen.store)
                self._seen = Report()
                self._board = None
            board.close()
        if feed is not None:
            feed.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._slots.close()
        self._worker = self._feed = None

    # -- calls, each with an answer -----------------------------------------------------------------------------------

    def begin(self, request: Request, known: Known, options: PipelineOptions, most_bytes: int) -> int:
        """Begin a pipeline in the process, and return its number. Raises what it raised there."""
        with self._calling:
            self._slots.limit(most_bytes)
            # Each slot once: what is free is named in the call, and not in a message that the other end may read later;
            # what is new is either named in the call, or free when it arrives.
            self._give_back()
            self._generation += 1
            self._received = 0
            self._add()
            begin = Begin(
                generation=self._generation,
                request=request,
                known=known,
                options=options,
                slots=self._slots.find_free(),
                is_traced=self._counters[0].timeline is not None,
            )
            self._call(begin)
            return self._generation

    def end(self) -> None:
        """End the pipeline in the process, and take in the news that its unread deliveries bring.

        Raises nothing where the process is gone.
        """
        with self._calling:
            if self._worker is not None and not self._is_dead and not self._is_closed:
                with suppress(WorkerError, LoaderClosedError):
                    unread: list[News] = self._call(End(self._received))
                    self._received = 0
                    for news in unread:
                        with suppress(Warning):  # which users have made errors
                            self._take_in(news)

    def trace(self, *, is_on: bool) -> list[tuple[int, str, str, float, float]]:
        """Begin to record its threads' spans, or end that and return them."""
        with self._calling:
            if self._worker is None or self._is_dead or self._is_closed:
                return []
            try:
                spans = self._call(Trace(is_on))
            except (WorkerError, LoaderClosedError):
                return []
        return spans or []

    def _call(self, question: Any) -> Any:
        worker = self._worker
        if worker is None:
            raise LoaderClosedError("the loader was closed while it waited for a batch")
        try:
            worker.channel.send(question)
            answer = worker.channel.receive()
        except (OSError, EOFError, TimeoutError) as exc:
            raise self._died(exc) from exc
        except BaseException:  # an interrupt: the answer would be taken for that to the next question
            self._is_dead = True
            worker.process.kill()
            raise
        _raise_failure(answer)
        return answer

    # -- messages -----------------------------------------------------------------------------------------------------

    def receive(self, check: Callable[[], None]) -> tuple[Any, Any]:
        """Wait for the next delivery of the running pipeline: what it is about, and its batch.

        ``check`` is called after each ``wake``, and may raise. Raises the error at this point of the order, and
        WorkerError where the process died.
        """
        while True:
            check()
            message = self._look(_LOOK_MS)
            if message is not None:
                found = self._open(*message)
                if found is not None:
                    return found

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Return whether these bytes of a slot are page-locked."""
        return self._pinned.are_pinned(address, nbytes)

    @property
    def has_message(self) -> bool:
        """Return whether a delivery is there. Called by any thread."""
        feed = self._feed
        if feed is None:
            return False
        ready = select.poll()
        with suppress(OSError, ValueError):
            ready.register(feed, select.POLLIN)
            return bool(ready.poll(0))
        return False

    def _look(self, patience_ms: int) -> tuple[int, ...] | None:
        self._give_back()
        self._add()
        worker, feed = self._worker, self._feed
        if worker is None or feed is None:
            raise LoaderClosedError("the loader was closed while it waited for a batch")
        found = dict(self._poll.poll(patience_ms))
        if not found:
            try:
                worker.look()
            except (EOFError, TimeoutError) as exc:
                raise self._died(exc) from exc
            return None
        if found.pop(self._wake, 0):
            with suppress(OSError):
                os.eventfd_read(self._wake)
            if not found:
                return None
        try:
            data = feed.recv(MESSAGE.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            data = b""
        except OSError as exc:
            raise self._died(exc) from exc
        if not data:
            raise self._died(EOFError("it has ended"))
        return MESSAGE.unpack(data)

    def _open(self, kind: int, generation: int, number: int, nbytes: int, used: int) -> tuple[Any, Any] | None:
        broken = self._receive_broken() if kind == BROKEN else None
        if generation != self._generation:
            return None  # of a pipeline that was ended meanwhile
        if broken is not None:
            raise make_error(broken)
        try:
            memory, is_lent = self._slots.take(number, nbytes, used)
        except OSError as exc:
            raise _no_memory(exc) from exc
        if not is_lent:
            self._say_that_batches_are_kept()
            self._send(FREE, number)
        (about, news), batch = read_frame(memory)
        self._received += 1
        for counters, amounts in zip(self._counters, news.packed, strict=False):
            counters.absorb(amounts)
        self._take_in(news)
        if kind == FAILED:
            assert isinstance(about, Failure)
            raise make_error(about)
        assert kind == BATCH
        return about, batch

    def _take_in(self, news: News) -> None:
        self._absorb(news.bad, news.bad_chunks)
        for one in news.warned:
            _warn(one)

    def _receive_broken(self) -> Failure:
        assert self._feed is not None
        failure: Failure = pickle.loads(self._feed.recv(MOST_BROKEN_BYTES))
        return failure

    def _say_that_batches_are_kept(self) -> None:
        if not self._has_said and self._slots.is_full:
            self._has_said = True
            logger.warning(
                "the training loop keeps so many batches that the %s's share of memory_limit= is used up by them; from "
                "now on each is copied out of shared memory, which takes the loop's time: drop batches, or %s",
                TITLE,
                _CURE,
            )

    def _give_back(self) -> None:
        """Give slots back that nothing refers to."""
        for slot in self._slots.settle():
            self._send(GONE if slot.is_retired else FREE, slot.number)

    def _add(self) -> None:
        """Add slots where too many are lent."""
        try:
            for slot in self._slots.add():
                self._send_new(slot)
        except OSError as exc:
            raise _no_memory(exc) from exc

    def _send(self, kind: int, number: int) -> None:
        feed = self._feed
        if feed is not None:
            with suppress(OSError):  # it is gone, which the next look says
                feed.send(MESSAGE.pack(kind, self._generation, number, 0, 0))

    def _send_new(self, slot: Slot) -> None:
        feed = self._feed
        if feed is not None:
            slot.is_sent = True
            with suppress(BrokenPipeError, ConnectionResetError):
                message = MESSAGE.pack(NEW, self._generation, slot.number, 0, 0)
                socket.send_fds(feed, [message], [slot.descriptor])

    def wake(self) -> None:
        """Have ``receive`` call its ``check``. Called by any thread, and by signal handlers."""
        if self._wake >= 0:
            with suppress(OSError):
                os.eventfd_write(self._wake, 1)

    def _died(self, exc: BaseException) -> Exception:
        """Describe its end, from now on that of this object's process; LoaderClosedError where it was wanted."""
        worker = self._worker
        if self._is_closed or worker is None:
            return LoaderClosedError("the loader was closed while it waited for a batch")
        self._is_dead = True
        doing = self.report().activity.get("waiting_for")
        how = worker.how_it_ended(exc if isinstance(exc, Exception) else EOFError(str(exc)))
        return WorkerError(
            f"{how}{' while it was busy with ' + str(doing) if doing else ''}; the next pass or batch begins another. "
            f"If memory ran out, use smaller batches or a lower memory_limit=, or {_CURE}"
        )

    # -- reports ------------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Read its newest report. Called by any thread."""
        with self._counting:
            return Report() if self._board is None else self._board.read()

    def count(self) -> None:
        """Add what the process has done since the last time to the counters. Called by any thread."""
        with self._counting:
            board = self._board
            if board is None:
                return
            report = board.read()
            if report is not self._seen:
                before = self._seen.totals
                change = {name: amount - before.get(name, 0) for name, amount in report.totals.items()}
                self._counters[0].absorb({name: amount for name, amount in change.items() if amount})
                self._seen = report

    def count_store(self) -> StoreCounts:
        """Count the requests of its store, and those of the processes before it."""
        with self._counting:
            if self._board is None:
                return self._store
            return add_counts(self._store, self._board.read().store)

    def write_waits(self, waited_s: float, since: float | None) -> None:
        """Tell it how long the loop has waited, for its tuning."""
        board = self._board
        if board is not None:
            board.write_waits(waited_s, since)


def _no_memory(exc: OSError) -> WorkerError:
    return WorkerError(
        f"no shared memory for batches of the {TITLE}: {exc}; keep fewer batches, raise the limit of descriptors "
        f"(ulimit -n), or {_CURE}"
    )


def _raise_failure(answer: Any) -> None:
    if isinstance(answer, Failure):
        raise make_error(answer)


def _warn(warned: Warned) -> None:
    with suppress(pickle.UnpicklingError, AttributeError, ImportError):
        warning = pickle.loads(warned.warning)
        warnings.warn_explicit(warning, type(warning), warned.path, warned.line)
