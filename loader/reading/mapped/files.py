"""Files that chunks are mapped from: whenever values are copied, they must be those that were indexed."""

from __future__ import annotations

import resource
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ....storage import LocalStore

# Values a decision: it does not pay if more than a quarter of them were copied in vain.
_TRIALS = 256


class Looks:
    """Decision whether copying from mapped files pays, beside reading them. Any thread may call.

    Mutable state: how many values were copied of late, how many of them in vain, and whether it still pays. An update
    that is lost between two threads does no harm.
    """

    def __init__(self) -> None:
        self.pay = True
        self._count = self._in_vain = 0

    def note(self, values: int, in_vain: int) -> None:
        """Count a copy of ``values``; those ``in_vain`` waited for the disk: pages are not kept until they are due."""
        self._count += values
        self._in_vain += in_vain
        if self._count >= _TRIALS:
            self.pay = self.pay and 4 * self._in_vain <= self._count
            self._count = self._in_vain = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MappedFile:
    """A file, as it was when it was indexed. There is one of these for each file, as long as it is needed."""

    store: LocalStore
    key: str
    etag: str
    looks: Looks

    def check(self) -> None:
        """Raise ObjectChangedError where the file is another one now, NotFoundError where there is none."""
        self.store.check_unchanged(self.key, self.etag)


@contextmanager
def looking_at(files: Collection[MappedFile], values: int, *, in_vain: int = 0) -> Iterator[None]:
    """Guard a copy of values from the pages of files: before and after it, the files are as they were indexed.

    ``in_vain`` of the ``values`` would take less time if they were read, as do those that wait for the disk.

    Raises:
        ObjectChangedError, NotFoundError: one of the files is not.
    """
    for file in files:
        file.check()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    yield
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before
    for file in files:
        file.check()
    for looks in {file.looks for file in files}:
        looks.note(values, max(in_vain, min(waits, values)))
