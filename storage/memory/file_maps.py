"""Whole files mapped once, for those who copy from many parts of them, and again in the next epoch.

A part that is mapped by itself has its pages put into the process's page table each time, and whoever drops the last
reference to it unmaps it, for which he waits until no other thread brings pages in. So parts of a file share a mapping,
released ones keep their pages up to a limit, and the threads that map the next ones drop those of others.
"""

from __future__ import annotations

import resource
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import libc
from .mapped import map_range, view_pages

# Pages that the kernel may take at any time, though they are counted as the process's. Until a pipeline sets its limit.
_MOST_BYTES = 1 << 30
# The tables of pages take a 512th of what was ever touched, and are freed with the mapping.
_MOST_MAPPED_BYTES = 64 << 30

_Identity = tuple[int, ...]
_Part = tuple[int, int]  # of a file: the first byte, and how many


class FileMaps:
    """Parts of files, mapped read-only; a file is known by its ``identity``. Any thread may call.

    Mutable state, under a lock: the mapped files, and which of their parts are kept without readers.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES, most_mapped_bytes: int = _MOST_MAPPED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._most_mapped_bytes = most_mapped_bytes
        self._lock = threading.Lock()
        self._files: dict[_Identity, _MappedFile] = {}
        self._kept: OrderedDict[tuple[_MappedFile, _Part], None] = OrderedDict()  # in the order in which they were left
        self._mapped_bytes = 0  # of files
        self._bytes = 0  # of parts that are in use or kept
        self._released = _Released()

    def limit(self, nbytes: int) -> None:
        """Keep no part from now on that makes more than this together with those that are in use."""
        self._most_bytes = nbytes

    def map(self, fd: int, identity: _Identity, size: int, start: int, nbytes: int) -> memoryview | None:
        """Bytes of a file of ``size`` bytes; as `penstock.storage.memory.mapped.map_range`.

        Raises:
            OSError: there is no memory, the range ends behind the file's last page, or the disk fails.
        """
        self._let_go()
        file, part = self._find(fd, identity, size), (start, nbytes)
        if file is None:
            return map_range(fd, start, nbytes)
        with self._lock:
            if identity not in self._files:
                self._files[identity] = file
                self._mapped_bytes += size
            file = self._files[identity]
            self._forget(file, part)
            if not file.in_use[part]:
                self._bytes += nbytes
            file.in_use[part] += 1
            released = self._released
        return view_pages(file.address, start, nbytes, released.put, file, part)

    def close(self) -> None:
        """Keep nothing: each file is unmapped once no part of it has a reader."""
        with self._lock:
            self._released.close()
            self._released = _Released()
            self._files.clear()
            self._kept.clear()
            self._mapped_bytes = self._bytes = 0

    def _find(self, fd: int, identity: _Identity, size: int) -> _MappedFile | None:
        """The mapped file; None where parts of it are to be mapped by themselves."""
        with self._lock:
            file = self._files.get(identity)
            is_too_much = self._mapped_bytes + size > self._most_mapped_bytes
        if file is not None or is_too_much:
            return file
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:  # what is left is for others' memory
            return None
        try:
            return _MappedFile(identity, libc.map_pages(fd, 0, size), size)
        except OSError:  # the kernel may refuse what is so large
            return None

    def _let_go(self) -> None:
        """Keep the parts that were left since the last call, and drop the pages of those that are too many."""
        dropped: list[tuple[_MappedFile, _Part]] = []
        with self._lock:
            for file, part in self._released.take():
                file.in_use[part] -= 1
                if not file.in_use[part]:
                    del file.in_use[part]
                    self._kept[file, part] = None
                    file.kept += 1
            while self._kept and self._bytes > self._most_bytes:
                file, part = next(iter(self._kept))
                self._forget(file, part)
                dropped.append((file, part))
                if not file.in_use and not file.kept:
                    del self._files[file.identity]  # which unmaps it, at the end of this call
                    self._mapped_bytes -= file.size
        for file, (start, nbytes) in dropped:
            if file.in_use or file.kept:
                libc.drop_pages(file.address + start, nbytes)

    def _forget(self, file: _MappedFile, part: _Part) -> None:
        """Keep a part no longer, where it is kept."""
        if (file, part) in self._kept:
            del self._kept[file, part]
            self._bytes -= part[1]
            file.kept -= 1


@dataclass(eq=False, slots=True, weakref_slot=True)
class _MappedFile:
    """A file that stays mapped while this is referenced. ``in_use``: the number of readers of each part.

    ``kept``: the number of parts that are kept without readers.
    """

    identity: _Identity
    address: int
    size: int
    in_use: Counter[_Part] = field(default_factory=Counter)
    kept: int = 0

    def __post_init__(self) -> None:
        weakref.finalize(self, libc.unmap_pages, self.address, self.size).atexit = False


class _Released:
    """Parts without readers, until a thread takes them. It has no lock: garbage is collected anywhere."""

    def __init__(self) -> None:
        self._parts: deque[tuple[_MappedFile, _Part]] = deque()
        self._is_closed = False

    def put(self, file: _MappedFile, part: _Part) -> None:
        if not self._is_closed:
            self._parts.append((file, part))
        if self._is_closed:  # maybe since a moment ago
            self._parts.clear()

    def take(self) -> Iterator[tuple[_MappedFile, _Part]]:
        while self._parts:
            yield self._parts.popleft()

    def close(self) -> None:
        self._is_closed = True
        self._parts.clear()
