"""The main function of a loader's process: it runs the pipelines that the training process asks for, one at a time."""

from __future__ import annotations

import errno
import os
import pickle
import queue
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...storage.observability.counts import count_running, count_store
from ...storage.observability.timeline import Timeline
from ...storage.threads.interruptible import Thread
from ..counters import PACKED, Counters
from ..decoding.workers.channel import Channel
from ..decoding.workers.main import Unusable, begin_work, load_code
from ..errors import ConfigError, LoaderClosedError, WorkerError
from ..pipeline.beside.board import Board, Report
from ..pipeline.beside.failures import describe_failure
from ..pipeline.beside.frames import Frame
from ..pipeline.beside.requests import BATCH, BROKEN, FAILED, GONE, MESSAGE, NEW, Begin, End, News, Trace, Warned
from ..pipeline.beside.slots import FilledSlot
from ..sources.opening import open_sources
from .assembly import make_sampler
from .place import Work
from .resources import Resources
from .run import Run

if TYPE_CHECKING:
    from ..pipeline.delivery_queue import Delivery
    from ..pipeline.pipeline import Pipeline

_REPORT_S = 0.05
_PATIENCE_S = 0.5  # for a batch that is being made when the pipeline ends
_MOST_WARNINGS = 100
_MOST_UNREAD = 128  # more than there are slots
_BY_THE_LOOP = ("batches", "samples", "first_batch_s", "consumer_wait_s", "consumer_busy_s")  # counts them itself


def main(descriptor: int, feed: int, board: int) -> None:
    """Answer calls until the parent closes its end. The parent decides when this ends, whatever signals come."""
    begin_work(descriptor)
    end = socket.socket(fileno=descriptor)
    channel = Channel(end)
    server: Server | None = None
    with suppress(EOFError, ConnectionError):
        work = load_code(channel.receive())
        if not isinstance(work, Unusable):
            try:
                server = Server(work, socket.socket(fileno=feed), Board(board))
            except Exception as exc:  # noqa: BLE001 - raised where the loop waits for its first batch
                work = describe_failure(exc)
        channel.send(None if server is not None else work)
        while server is not None:
            channel.send(server.answer(channel.receive()))
    # The parent is gone or needs no more: a thread of ``begin_work`` gives half a second for what follows.
    if server is not None:
        with suppress(Exception):
            server.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


class Server:
    """Answers a training process. Its main thread answers calls; others take slots, fill them, and report.

    Mutable state: the run with its pipeline, its slots and which of them are free, what was sent of which pipeline, and
    the warnings that are to be sent.
    """

    def __init__(self, work: Work, feed: socket.socket, board: Board) -> None:
        config, counters, resources = work.config, Counters(), Resources()
        sources = resources.sources = open_sources(config, counters)
        self._run = run = Run(config, sources, make_sampler(config, sources), resources, counters)
        self._packing = [counters, *run.reading.counts] if config.packs else []
        self._packed = [dict.fromkeys(PACKED, 0) for _ in self._packing]
        for bad in filter(None, run.reading.bad):
            bad.take_news()  # from now on
        self._work = work.digest
        self._feed = feed
        self._board = board
        self._slots: dict[int, FilledSlot] = {}
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._generation = 0
        self._sent = 0
        self._brought: deque[tuple[int, News]] = deque(maxlen=_MOST_UNREAD)  # by the delivery that brings it, from 1
        self._warned: list[Warned] = []
        self._sender: Thread | None = None
        self._changing = threading.Lock()
        self._filling = threading.Lock()  # held while a slot is filled, and before the other
        warnings.simplefilter("default")
        warnings.showwarning = self._keep_warning  # type: ignore[assignment]
        Thread(target=self._take_slots, name="penstock-slots").start()
        Thread(target=self._report_on, name="penstock-report").start()

    # -- calls --------------------------------------------------------------------------------------------------------

    def answer(self, question: Any) -> Any:
        """Answer a call; an error is an answer, too."""
        try:
            if isinstance(question, Begin):
                return self._begin(question)
            if isinstance(question, Trace):
                return self._trace(is_on=question.is_on)
            assert isinstance(question, End)
            self._end()
            return self._list_unread(question.received)
        except BaseException as exc:  # noqa: BLE001 - raised in the training process
            return describe_failure(exc)

    def _begin(self, begin: Begin) -> None:
        self._end()
        request, run = begin.request, self._run
        if request.work != self._work:
            raise ConfigError("the loader's process was asked for batches that other functions make than its own")
        if begin.is_traced and run.counters.timeline is None:
            self._trace(is_on=True)
        sampler = run.sampler
        sampler.load(sampler.check_state(request.order))
        size, weights = request.global_batch_size, request.weights
        share = replace(sampler.share, global_batch_size=size, weights=weights)
        if share != sampler.share:
            sampler.schedule.set_share(share, (request.epoch, request.position))
        run.reading.learn(begin.known)
        start = run.start(request.epoch, request.position)
        with self._filling, self._changing:
            self._generation, self._sent = begin.generation, 0
            self._free = queue.SimpleQueue()
            for number in begin.slots:
                if number in self._slots:
                    self._free.put(number)
        if run.resources.workers is not None:
            run.resources.workers.start()
        pipeline = run.resources.pipeline = run.make_pipeline(start, begin.options, self._board.read_waits)
        pipeline.start()
        self._sender = Thread(target=self._send, args=(pipeline, self._free), name="penstock-send")
        self._sender.start()

    def _end(self) -> None:
        pipeline, sender = self._run.resources.pipeline, self._sender
        with self._filling:  # a sender that is kept by a function of the user's fills no slot when that is over
            ended, self._free = self._free, queue.SimpleQueue()
        ended.put(None)
        if pipeline is not None:
            pipeline.stop()
        if sender is not None:
            sender.join(_PATIENCE_S)
        self._run.resources.stop_pipeline()
        self._sender = None

    def _list_unread(self, received: int) -> list[News]:
        """List the news that deliveries after the first ``received`` bring, and what no delivery brings yet.

        The training process forgets those deliveries, and what is known here is no news when it is met again.
        """
        with self._filling:
            unread = [news for number, news in self._brought if number > received]
            self._brought.clear()
            return [*unread, self._take_news()]

    def _trace(self, *, is_on: bool) -> list[tuple[int, str, str, float, float]]:
        before = self._run.counters.timeline
        self._run.counters.timeline = Timeline() if is_on else None
        return [] if before is None else before.spans()

    def close(self) -> None:
        """End the pipeline and release what the loader holds."""
        self._free.put(None)
        self._run.resources.close()

    # -- slots --------------------------------------------------------------------------------------------------------

    def _take_slots(self) -> None:
        """Receive slots, and learn which are free again, until the other end is closed."""
        with suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._feed, MESSAGE.size, 1)
                if not data:
                    return
                kind, generation, number, _, _ = MESSAGE.unpack(data)
                if kind == NEW and not descriptors:
                    with self._filling:
                        self._send_broken(_no_room(0, OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
                    continue
                with self._changing:
                    if kind == NEW:
                        self._slots[number] = FilledSlot(number, descriptors[0])
                    if kind == GONE:
                        self._slots.pop(number).close()
                    elif generation == self._generation:
                        self._free.put(number)

    # -- batches ------------------------------------------------------------------------------------------------------

    def _send(self, pipeline: Pipeline, free: queue.SimpleQueue[int | None]) -> None:
        """Put deliveries into free slots, in order, until the pipeline ends or fails."""
        while (number := free.get()) is not None:
            news: News | None = None
            try:
                item = pipeline.get()
                with self._filling:
                    if free is not self._free:
                        return
                    item = self._follow(item)
                    news = self._bring_news()
                frame = self._frame_of(item, news)
                kind = BATCH
                if not item.is_end:
                    self._run.counters.add(batches=1, samples=len(item.ids))
            except BaseException as exc:  # noqa: BLE001 - raised where the loop waits for this batch
                if isinstance(exc, LoaderClosedError) and pipeline.is_stopped:
                    return
                with self._filling:
                    if free is not self._free:
                        return
                    news = self._bring_news() if news is None else news
                frame, kind = Frame((describe_failure(exc), news), None), FAILED
            with self._filling:
                if free is not self._free:
                    return
                try:
                    slot = self._slots[number]
                    frame.write(slot.fit(frame.nbytes))
                except Exception as exc:  # noqa: BLE001 - raised where the loop waits for this batch
                    self._send_broken(_no_room(frame.nbytes, exc))
                    return
                self._sent += 1
                self._report()
                with suppress(OSError):  # the other end is closed, and this process ends
                    self._feed.send(MESSAGE.pack(kind, self._generation, number, slot.nbytes, frame.nbytes))
            if kind == FAILED:
                return
            del item, frame  # while this waits for another it keeps no batch

    def _send_broken(self, error: WorkerError) -> None:
        data = pickle.dumps(describe_failure(error), pickle.HIGHEST_PROTOCOL)
        with suppress(OSError):
            self._feed.send(MESSAGE.pack(BROKEN, self._generation, -1, 0, 0))
            self._feed.send(data)

    def _follow(self, item: Delivery) -> Delivery:
        """Note that a delivery is on its way, and tell what a state after it needs of what was read."""
        sampler = self._run.sampler
        sampler.take(item)
        unsized = sampler.schedule.unsized
        return item if unsized is None else replace(item, cursors=unsized.cursors_after(item))

    def _bring_news(self) -> News:
        """Take the news for the next delivery, and keep them until that is known to be read. Holds the lock."""
        news = self._take_news()
        if news.warned or any(news.bad):
            self._brought.append((self._sent + 1, news))
        return news

    def _frame_of(self, item: Delivery, news: News) -> Frame:
        try:
            return Frame((replace(item, batch=None), news), item.batch)
        except MemoryError as exc:
            raise _no_room(item.nbytes, exc) from exc
        except Exception as exc:
            raise ConfigError(
                f"a batch cannot be sent from the loader's process to the training process ({exc}); have transform= "
                "and collate= return tensors, arrays and objects that can be pickled, or use place='threads'"
            ) from exc

    # -- reports ------------------------------------------------------------------------------------------------------

    def _keep_warning(self, message: Warning | str, category: Any, path: str, line: int, *_: Any) -> None:
        with suppress(Exception):
            warning = message if isinstance(message, Warning) else category(message)
            if len(self._warned) < _MOST_WARNINGS:
                self._warned.append(Warned(pickle.dumps(warning), path, line))

    def _take_news(self) -> News:
        warned, self._warned = self._warned, []
        reading = self._run.reading
        bad = [bad.take_news() for bad in reading.bad if bad is not None]
        return News(warned, bad, reading.quarantine.records, self._count_packed())

    def _count_packed(self) -> list[dict[str, int]]:
        """Count what was packed since the last time: batches are counted where they are made, one after another."""
        before, totals = self._packed, [each.totals() for each in self._packing]
        self._packed = [{name: getattr(each, name) for name in PACKED} for each in totals]
        return [
            {name: now[name] - then[name] for name in PACKED} for now, then in zip(self._packed, before, strict=True)
        ]

    def _report_on(self) -> None:
        while True:
            time.sleep(_REPORT_S)
            self._report()

    def _estimate(self) -> Mapping[int, float]:
        unsized = self._run.sampler.schedule.unsized
        if unsized is None or not unsized.is_mixed:
            return {}
        found = {k: unsized.estimate(k) for k, kind in enumerate(unsized.kinds) if kind}
        return {number: whole for number, whole in found.items() if whole is not None}

    def _report(self) -> None:
        run = self._run
        pipeline, sources = run.resources.pipeline, run.resources.sources
        totals = run.counters.totals().to_dict()
        for name in (*_BY_THE_LOOP, *PACKED):
            del totals[name]
        levels: Mapping[str, Any] = {}
        activity: Mapping[str, Any] = {}
        if pipeline is not None and not pipeline.is_stopped:
            levels, activity = asdict(pipeline.levels()), pipeline.activity()
            running, limit = count_running(sources)
            levels |= {"running_requests": running, "request_limit": limit}
        with self._changing:
            report = Report(
                generation=self._generation,
                sent=self._sent,
                totals=totals,
                estimates=self._estimate(),
                store=count_store(sources),
                levels=levels,
                activity=activity,
            )
            self._board.write(report)


def _no_room(nbytes: int, cause: Exception) -> WorkerError:
    """Make the error of a process without memory or descriptors for a batch of ``nbytes``."""
    size = f" of {nbytes:,} bytes" if nbytes else ""
    return WorkerError(
        f"loader process {os.getpid()} has no room for a batch{size}: {cause}; use smaller batches, raise the limits "
        "of memory (ulimit -v) or descriptors (ulimit -n), or use place='threads'"
    )
