"""What a loader owns and must release, however it ends: its pipeline, worker processes, store and delivery log."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Self

from .decoding.worker_pool import WorkerPool
from .errors import LoaderClosedError
from .pipeline.delivery_log import DeliveryLog
from .pipeline.pipeline import Pipeline


class Resources:
    """Kept apart from the loader so that the loader's finalizer can hold it. ``close`` may be called by any thread."""

    def __init__(self) -> None:
        self.store: Any = None
        self.pipeline: Pipeline | None = None
        self.workers: WorkerPool | None = None
        self.log: DeliveryLog | None = None
        self._is_closed = False
        self._closing = threading.RLock()

    def check_open(self) -> None:
        """Raise LoaderClosedError after ``close``."""
        if self._is_closed:
            raise LoaderClosedError("the loader is closed; make a new one")

    def stop_pipeline(self) -> None:
        """End the pipeline, if there is one, and drop what it read ahead."""
        pipeline = self.pipeline
        if pipeline is not None:
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
            threading.Thread(target=self.close, name="penstock-close", daemon=True).start()
        else:
            self.close()

    def close(self) -> None:
        """Release everything; safe at any time, and twice. Waits where another thread is closing."""
        self._is_closed = True
        with self._closing:
            if self.pipeline is not None:
                self.pipeline.stop()
            for owned in (self.workers, self.store):  # before the pipeline's threads, which wait for these two
                if owned is not None:
                    owned.close()
            self.stop_pipeline()
            if self.log is not None:
                self.log.close()
            self.workers = self.log = self.store = None


class Owner:
    """Whoever holds resources: closed by a call, as a context manager, or with its last reference."""

    def __init__(self) -> None:
        self._resources = Resources()
        self._finalizer = weakref.finalize(self, self._resources.abandon)

    def close(self) -> None:
        """Stop all threads and processes, and close the store; the loader cannot be used again.

        Safe at any time, and twice.
        """
        self._finalizer()
        self._resources.close()  # waits where another thread is closing it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
