"""A worker's batches: leased, read on a thread of its own ahead of need, in the order of their leases."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ...storage.threads.interruptible import Condition, Thread
from ..errors import TrainerError
from ..server.leases import Lease
from ..server.services import Begun, Services


@dataclass(frozen=True, kw_only=True)
class LeasedBatch:
    """A batch of a lease, and its number through all epochs; ``place`` is that in its epoch."""

    unit: int
    place: int
    lease: Lease
    batch: Any


class LeasedBatches:
    """Batches of leases, the first of which is given; the next lease is read while this one trains.

    ``next`` and ``peek`` are for the training loop's thread. The loader is used by the reading thread alone, until
    ``close``. All mutable state, under one lock: batches that are read, whether there are no more, and an error.
    """

    def __init__(self, loader: Any, services: Services, worker: str, begun: Begun, first: Lease, *, ahead: int) -> None:
        self._loader, self._services, self._worker, self._begun = loader, services, worker, begun
        self._ahead = max(2, ahead)
        self._read: deque[LeasedBatch] = deque()
        self._changed = Condition()
        self._is_over = self._is_closed = False
        self._error: BaseException | None = None
        self._at: tuple[int, int] | None = None
        self._iterator: Iterator[Any] = iter(())
        self._thread = Thread(target=self._run, args=(first,), name=f"batches of {worker}")
        self._thread.start()

    def next(self) -> LeasedBatch | None:
        """Wait for the next batch, and take it; None once no lease was to be had.

        Raises:
            LeaseError: the worker was given up; what was read is no longer its own.
            Exception: what the loader raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._read or self._is_over)
            if self._read:
                found = self._read.popleft()
                self._changed.notify_all()
                return found
            if self._error is not None:
                raise self._error
            return None

    def peek(self, ahead: int = 0) -> LeasedBatch | None:
        """Look at the next batch, or one ``ahead`` of it, if it is read by now."""
        with self._changed:
            return self._read[ahead] if len(self._read) > ahead else None

    def close(self) -> None:
        """End the reading thread; the loader may be used again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, lease: Lease | None) -> None:
        try:
            while lease is not None and self._read_lease(lease):
                lease = self._services.lease(self._worker, self._begun.incarnation, lease.number)
        except BaseException as exc:  # noqa: BLE001 - raised where batches are taken
            self._error = exc
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _read_lease(self, lease: Lease) -> bool:
        """Read the batches of a lease; False if this is closed meanwhile."""
        for place in range(lease.done, lease.stop):
            if self._at != (lease.epoch, place):
                self._iterator = seek(self._loader, lease.epoch, place)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise TrainerError(
                    f"data.use makes a {type(self._loader).__name__} that has no batch {place} in epoch {lease.epoch}, "
                    f"of {self._begun.plan.batches} that it told of"
                ) from None
            self._at = lease.epoch, place + 1
            unit = lease.epoch * self._begun.plan.batches + place
            with self._changed:
                self._changed.wait_for(lambda: len(self._read) < self._ahead or self._is_closed)
                if self._is_closed:
                    return False
                self._read.append(LeasedBatch(unit=unit, place=place, lease=lease, batch=batch))
                self._changed.notify_all()
        return True


def seek(loader: Any, epoch: int, place: int) -> Iterator[Any]:
    """Iterate over a loader's batches from one of an epoch on."""
    if hasattr(loader, "seek"):
        loader.seek(epoch, place)
        return iter(loader)
    return (loader[index] for index in range(place, len(loader)))
