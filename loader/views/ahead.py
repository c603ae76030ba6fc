"""Chunks loaded by a few threads, in order, ahead of the one being viewed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ...storage.threads.daemon_pool import DaemonPool

if TYPE_CHECKING:
    from ..columns import Block

_THREADS = 8
_MOST_BYTES = 256 << 20
_INTERRUPTED_S = 1.0


def load_ahead(
    load: Callable[[int], Block], reserve: Callable[[int], int], chunks: Iterable[int]
) -> Iterator[tuple[int, Block | Exception]]:
    """Yield each chunk with the result or error of ``load``, in the order of ``chunks``.

    A few are loaded at once, beyond the first no more than 256 MiB of them, by what ``reserve`` says of each.
    No thread outlives the iterator, unless it is interrupted: then requests in flight are waited for one second.
    """
    pool = DaemonPool("penstock-look", _THREADS)
    waiting: deque[tuple[int, Future[Block]]] = deque()
    held = 0
    patience_s: float | None = None
    try:
        for chunk in chunks:
            while waiting and (len(waiting) > _THREADS or held + reserve(chunk) > _MOST_BYTES):
                held -= reserve(waiting[0][0])
                yield _finished(*waiting.popleft())
            held += reserve(chunk)
            waiting.append((chunk, pool.submit(load, chunk)))
        while waiting:
            yield _finished(*waiting.popleft())
    except KeyboardInterrupt:
        patience_s = _INTERRUPTED_S
        raise
    finally:
        for _, future in waiting:
            future.cancel()
        pool.close(patience_s)


def _finished(chunk: int, future: Future[Block]) -> tuple[int, Block | Exception]:
    try:
        return chunk, future.result()
    except Exception as exc:  # noqa: BLE001 - the caller decides how to treat a bad chunk
        return chunk, exc
