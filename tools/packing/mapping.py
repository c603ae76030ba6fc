"""Transform samples between source and writer by a user's function or a tokenizer, in one process or several."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeAlias

import pyarrow as pa

from ...loader.columns import KEY_COLUMN
from ...loader.decoding.row_work import RowError
from ...loader.errors import ConfigError, DatasetError, WorkerError
from ...storage.errors import PenstockError
from ...storage.threads.interruptible import Thread
from .samples import Batch
from .spread import in_cluster
from .tokens import Tokenize
from .values import read_member, rows_of

_ROWS = 64  # items that a process gets at a time

MapFunction = Callable[[dict[str, Any]], Any]
Items: TypeAlias = "Sequence[Any] | pa.RecordBatch"


@dataclass(frozen=True, slots=True)
class Mapped:
    """The items that became of ``rows`` items of a source: part ``number`` of its ``piece``."""

    piece: int
    number: int
    rows: int
    items: Items


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """``function`` turns a sample into one, several or None; ``tokenize`` a sample into tokens.

    ``keeps_batches``: the writer takes record batches; ``reads_members``: fields are files' bytes, whose labels and
    texts the writer wants as int and str.
    """

    function: MapFunction | None = None
    tokenize: Tokenize | None = None
    keeps_batches: bool = False
    reads_members: bool = False

    @property
    def is_work(self) -> bool:
        """Return whether there is work that processes could share."""
        return self.function is not None or self.tokenize is not None

    def __call__(self, items: Items, first: int) -> Items:
        """The items' successors. ``first`` is the ordinal of the first one, for messages."""
        if isinstance(items, pa.RecordBatch):
            if self.keeps_batches and not self.is_work:
                return items
            items = list(rows_of(items))
        if not self.is_work and not self.reads_members:
            return items
        found: list[Any] = []
        ordinals: list[int] = []
        for ordinal, item in enumerate(items, start=first):
            samples = [item] if self.function is None else _called(self.function, item, ordinal)
            found += [self._finished(sample, ordinal) for sample in samples]
            ordinals += [ordinal] * len(samples)
        return self._tokenized(found, ordinals) if self._encodes_many else found

    @property
    def _encodes_many(self) -> bool:
        return self.tokenize is not None and self.tokenize.takes_many

    def _tokenized(self, values: list[Any], ordinals: Sequence[int]) -> list[Any]:
        """The tokens of texts, encoded together, and of what are tokens already."""
        assert self.tokenize is not None
        places = [place for place, value in enumerate(values) if isinstance(value, str)]
        try:
            encoded = self.tokenize.encode_all([values[place] for place in places])
        except RowError as exc:
            raise DatasetError(f"sample {ordinals[places[exc.row]]}: {exc.cause}") from exc
        for place, tokens in zip(places, encoded, strict=True):
            values[place] = tokens
        return values

    def _finished(self, sample: Any, ordinal: int) -> Any:
        if self.tokenize is not None:
            step = self.tokenize.read if self._encodes_many else self.tokenize
            return _guarded("tokenizer", step, sample, ordinal)
        if not self.reads_members or not isinstance(sample, Mapping):
            return sample
        try:
            return {name: read_member(name, value, parse=False) for name, value in sample.items()}
        except ValueError as exc:
            raise DatasetError(f"{_name(sample, ordinal)}: {exc}") from exc


def _called(function: MapFunction, item: Any, ordinal: int) -> Sequence[Any]:
    result = _guarded("map", function, item, ordinal)
    if result is None:
        return ()
    if isinstance(result, Mapping):
        return (result,)
    if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
        raise DatasetError(
            f"{_name(item, ordinal)}: the function given as map= returned a {type(result).__name__}; it must return a "
            "dict, several of them, or None to drop the sample"
        )
    samples = _guarded("map", list, result, ordinal)
    wrong = next((each for each in samples if not isinstance(each, Mapping)), None)
    if wrong is not None:
        raise DatasetError(
            f"{_name(item, ordinal)}: the function given as map= returned a {type(wrong).__name__} among its samples; "
            "each must be a dict"
        )
    return samples  # type: ignore[no-any-return]


def _guarded(name: str, function: Callable[[Any], Any], item: Any, ordinal: int) -> Any:
    try:
        return function(item)
    except DatasetError as exc:
        raise DatasetError(f"{_name(item, ordinal)}: {exc}") from exc
    except PenstockError:
        raise
    except Exception as exc:
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        raise DatasetError(
            f"{_name(item, ordinal)}: the function given as {name}= failed with {type(exc).__name__}: {exc} "
            f"({frame.filename}, line {frame.lineno})"
        ) from exc


def _name(item: Any, ordinal: int) -> str:
    key = item.get(KEY_COLUMN) if isinstance(item, Mapping) else None
    return f"sample {ordinal}" + (f" ({key!r})" if key is not None else "")


def transformed(
    batches: Iterable[Batch],
    transform: Transform,
    processes: int,
    *,
    first: int = 0,
    begin: tuple[int, int] = (-1, 0),
    cluster: str | None = None,
) -> Generator[Mapped, None, None]:
    """Transform every batch, in order. With ``processes``, in that many processes; the results are the same.

    With ``cluster``, by tasks on that Ray cluster, as ``spread.in_cluster`` says. ``first`` is the ordinal of the first
    sample; parts before ``begin``, a (piece, number), are left out.

    Raises:
        ConfigError: the function cannot be sent to a process.
        DatasetError: the function failed; names the sample.
        WorkerError: a process died.
    """
    parts = _parts(batches, transform, first, begin)
    if cluster is not None and transform.is_work:
        for piece, number, rows, items in in_cluster(parts, transform, cluster):
            yield Mapped(piece, number, rows, items)
        return
    if processes < 1 or not transform.is_work:
        for piece, number, ordinal, items in parts:
            yield Mapped(piece, number, len(items), transform(items, ordinal))
        return
    yield from _in_processes(parts, transform, processes)


def _parts(
    batches: Iterable[Batch], transform: Transform, first: int, begin: tuple[int, int]
) -> Iterator[tuple[int, int, int, Items]]:
    """(piece, part of the piece, ordinal of the first item, items), small where there is work to share."""
    last, number = -1, 0
    for batch in batches:
        rows = _ROWS if transform.is_work else max(1, len(batch))
        for start in range(0, len(batch), rows):
            items = batch.items
            part = items.slice(start, rows) if isinstance(items, pa.RecordBatch) else items[start : start + rows]
            number = number + 1 if batch.piece == last else 0
            last = batch.piece
            if (last, number) >= begin:
                yield batch.piece, number, first, part
            first += len(part)


def _in_processes(
    parts: Iterator[tuple[int, int, int, Items]], transform: Transform, processes: int
) -> Iterator[Mapped]:
    try:
        pickle.dumps(transform)
    except Exception as exc:
        raise ConfigError(
            f"the functions given as map= and tokenizer= cannot be sent to processes ({exc}); define them at the top "
            "of a module, or use processes=0"
        ) from exc
    running: deque[tuple[int, int, int, Future[Items]]] = deque()
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(transform,))
    try:
        for piece, number, ordinal, items in parts:
            if len(running) >= 2 * processes + 2:
                yield _result(*running.popleft())
            with _ctrl_c_held_back():
                done = pool.submit(_work, items, ordinal)
            running.append((piece, number, len(items), done))
        while running:
            yield _result(*running.popleft())
    except BrokenProcessPool as exc:
        raise WorkerError(
            f"one of the {processes} processes ended by itself, perhaps for want of memory, or because the function "
            "given as map= or tokenizer= cannot be imported there; try with fewer processes="
        ) from exc
    except BaseException:  # Ctrl-C, too: their results are no longer wanted
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """From processes that are started meanwhile, and not yet able to ignore it: they would tell of it, each of them.

    The mask, which they inherit, is the thread's. What another thread gets interrupts the main thread all the same, in
    the middle of a start; so that waits until it is over.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if handler is not None:
            signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _result(piece: int, number: int, rows: int, done: Future[Items]) -> Mapped:
    return Mapped(piece, number, rows, done.result())


_transform = Transform()


def _start(transform: Transform) -> None:
    """In a new process: keep the work, leave Ctrl-C to the parent, and end when the parent does, however it ends."""
    global _transform
    _transform = transform
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes share out the cores already
    parent = parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent.sentinel,), name="penstock-parent").start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _work(items: Items, first: int) -> Items:
    return _transform(items, first)
