"""The resources that a loader must release, however it ends: its pipeline, processes, stores and delivery log."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...storage.observability.counts import StoreCounts, add_counts, count_running, count_store
from ...storage.observability.process_usage import resident_bytes
from ...storage.threads.interruptible import Thread
from ..counters import Levels
from ..errors import ForkedLoaderError, LoaderClosedError
from ..ranks.detect import refuse_worker

if TYPE_CHECKING:
    from ..decoding.workers.images import ImageProcesses
    from ..decoding.workers.pool import WorkerPool
    from ..pipeline.beside.process import LoaderProcess
    from ..pipeline.beside.remote import RemotePipeline
    from ..pipeline.delivery_log import DeliveryLog
    from ..pipeline.pipeline import Pipeline
    from ..ranks.calls import Calls
    from ..ranks.peers import PeerWatch
    from ..sources.sources import Sources

_process = os.getpid()  # this one's number: asking the kernel for each batch takes longer than all else about it


class Resources:
    """Kept apart from the loader so that the loader's finalizer can hold it. ``close`` may be called by any thread.

    All of it belongs to the process that made it. In a forked child, which has none of the threads and copies of locks
    that they may hold, using it is an error, and closing it does nothing.
    """

    def __init__(self) -> None:
        self.sources: Sources | None = None
        self.pipeline: Pipeline | RemotePipeline | None = None
        self.process: LoaderProcess | None = None
        self.workers: WorkerPool | None = None
        self.images: ImageProcesses | None = None
        self.log: DeliveryLog | None = None
        self.peers: PeerWatch | None = None
        self.names: tuple[str, ...] = ()  # by which other ranks know the loader
        self.calls: Calls | None = None  # which are compared with those of the other ranks
        self.others: list[Any] = []  # what its users want closed with it
        self._counts = StoreCounts()  # of the stores, once they are closed
        self._is_closed = False
        self._closing = threading.RLock()
        self._process = _process
        _ALL.add(self)

    def check_open(self) -> None:
        """Raise LoaderClosedError after ``close``, and ForkedLoaderError in a forked child."""
        self.check_process()
        if self._is_closed:
            raise LoaderClosedError("the loader is closed; make a new one")

    def check_process(self) -> None:
        """Raise ForkedLoaderError in a process that was forked from the owner."""
        if not self._is_ours:
            refuse_worker()  # a worker of a torch DataLoader is a fork too, and has a cure of its own
            raise ForkedLoaderError(
                f"the loader was made in process {self._process}, from which this one, {_process}, was forked: its "
                "threads and connections stayed there. Start processes with the method spawn or forkserver, and make a "
                "loader in each"
            )

    def running(self) -> Pipeline | RemotePipeline | None:
        """Get the pipeline, if there is one. Raises ForkedLoaderError."""
        self.check_process()
        return self.pipeline

    def activity(self) -> dict[str, Any]:
        """Describe what the next batch waits for; see ``Pipeline.activity``. Raises ForkedLoaderError."""
        pipeline = self.running()
        return {} if pipeline is None else pipeline.activity()

    def levels(self) -> Levels:
        """Measure how full everything is now; any thread may ask, and after ``close``. Raises ForkedLoaderError."""
        pipeline = self.running()
        levels = Levels() if pipeline is None else pipeline.levels()
        process = self.process
        if process is not None:
            process.count()
            levels = replace(levels, loader_process=process.pid)
        running, limit = count_running(self.sources)
        taken = resident_bytes() or 0
        return replace(levels, running_requests=running, request_limit=limit, process_bytes=taken)

    def count_store(self) -> StoreCounts:
        """Count the requests to all stores so far; after ``close``, until then."""
        sources, process = self.sources, self.process
        counts = self._counts if sources is None else count_store(sources)
        return counts if process is None or sources is None else add_counts(counts, process.count_store())

    @property
    def _is_ours(self) -> bool:
        return self._process == _process

    def join_peers(self) -> None:
        """Receive errors of other ranks from now on, until ``close``."""
        from ..ranks.peers import join_peers

        me = weakref.ref(self)

        def interrupt(error: BaseException | None) -> None:
            resources = me()
            pipeline = None if resources is None else resources.pipeline
            if pipeline is not None:
                pipeline.interrupt(error)

        self.peers = join_peers(self, self.names, interrupt, self.calls)

    def check_peers(self) -> None:
        """Raise RankStoppedError where this loader failed on another rank, once for each such error."""
        if self.peers is not None:
            self.peers.check(self)

    def tell_peers(self, error: BaseException) -> None:
        """Post an error that ends this rank's pass to the other ranks, except interrupts and a closed loader's."""
        is_own_doing = isinstance(error, (LoaderClosedError, ForkedLoaderError)) or not isinstance(error, Exception)
        if self.peers is not None and not is_own_doing:
            self.peers.tell(self, error)

    def stop_pipeline(self) -> None:
        """End the pipeline, if there is one, and drop its read-ahead."""
        pipeline = self.pipeline
        if pipeline is not None and self._is_ours:
            try:
                pipeline.close()
            except BaseException:  # an interrupt: what is closed already is passed over
                pipeline.close()
                raise
            finally:
                self.pipeline = None

    def abandon(self) -> None:
        """Release everything, when the loader's last reference is gone.

        The garbage collector runs in whichever thread allocates. One of the loader's own, which cannot wait for itself
        and may hold a lock that closing needs, leaves it to a thread that ends with it.
        """
        if threading.current_thread().name.startswith("penstock-"):
            self._close_elsewhere()
            return
        try:
            self.close()
        except BaseException:  # an interrupt, which is lost: it is raised in a finalizer
            self._close_elsewhere()
            raise

    def _close_elsewhere(self) -> None:
        Thread(target=self.close, name="penstock-close").start()

    def close_if_closed(self) -> None:
        """Release resources that were made while another thread closed all, which may have missed them."""
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Release everything; safe at any time, and twice. Waits where another thread is closing."""
        if not self._is_ours:
            return
        self._is_closed = True
        with self._closing:
            if self.pipeline is not None:
                self.pipeline.stop()
            while self.others:
                self.others.pop().close()
            if self.process is not None:
                self.process.close()
            self._counts = self.count_store()
            # Before the pipeline's threads, which wait for these.
            for owned in (self.workers, self.images, self.sources):
                if owned is not None:
                    owned.close()
            self.stop_pipeline()
            if self.peers is not None:
                self.peers.leave(self)
            if self.log is not None:
                self.log.close()
            self.workers = self.images = self.process = self.log = self.sources = self.peers = None


_ALL: weakref.WeakSet[Resources] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close a child's copies of the workers' connections, which would keep the workers after the parent's death."""
    global _process
    _process = os.getpid()
    for resources in list(_ALL):
        for processes in (resources.workers, resources.images, resources.process):
            if processes is not None:
                processes.let_go()


def _retire_before_fork() -> None:
    """Leave memory that is lent to the child, too, which may read from it whenever it likes."""
    for resources in list(_ALL):
        if resources.process is not None:
            resources.process.retire()


os.register_at_fork(before=_retire_before_fork, after_in_child=_let_go_in_child)
