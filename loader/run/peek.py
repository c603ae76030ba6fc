"""The first batch of a pass, made by the loader's assembler with a reader that reads only what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ...storage.threads.daemon_pool import DaemonPool
from ...storage.threads.interruptible import Event
from ..counters import Counters
from ..decoding.batch import BatchMaker
from ..errors import ConfigError, LoaderClosedError
from ..pipeline.assembler import Equipment
from ..pipeline.device import DeviceFeeder
from .assembly import make_assembler

if TYPE_CHECKING:
    from ..columns import Block
    from ..pipeline.delivery_queue import Delivery
    from ..reading.chunk_source import ChunkSource
    from .run import Run

_THREADS = 8
_MOST_BYTES = 256 << 20
_INTERRUPTED_S = 1.0


def peek(run: Run) -> Any:
    """Make the first batch of a pass that would begin now, for the caller's stream. Used by the training loop's thread.

    Shares nothing that changes with a running pipeline, and ends every thread that it starts. Decoding and transform
    run on threads here, where the loader has worker processes too.

    Raises:
        ConfigError: several ranks drop or pack samples, and would have to look at the same time.
    """
    run.resources.check_open()
    run.check_rank()
    if run.sources.has_streams and run.share.world_size > 1:
        raise ConfigError(
            f"peek() of a loader that drops or packs samples, with world_size={run.share.world_size}: what is "
            "left is known to all ranks together; look with a loader of rank=0, world_size=1"
        )
    reading, options, stopping = run.reading.apart(), run.tune(), Event()
    delivered: list[Delivery] = []

    def deliver(item: Delivery) -> bool:
        if item.is_end:
            return True
        if not delivered:
            delivered.append(item)
        else:
            item.batch.cancel()
        stopping.set()
        return True

    pool = DaemonPool("penstock-look", options.decode_threads)
    reader = DirectReader(reading.sources.chunks, ahead_bytes=_MOST_BYTES if run.sources.has_streams else 0)
    patience_s: float | None = None
    try:
        maker = BatchMaker(
            options=run.batch_options,
            decoders=reading.kinds[0].decoders,
            manifest=run.sources.manifest,
            pool=pool,
            workers=None,
            counters=Counters(),
            stopping=Event(),
            replacer=reading.sources.make_replacer(counts=False),
        )
        equipment = Equipment(
            source=reading.sources.chunks,
            reader=reader,
            maker=maker,
            leases=None,
            options=options,
            counters=maker.counters,
            stopping=stopping,
            deliver=deliver,
            is_short=lambda: False,
        )
        start = run.start(*run.sampler.pass_start)
        try:
            make_assembler(run.config, run.sampler, reading, equipment, start).run()
        except LoaderClosedError:  # it waited for what comes after the batch
            if not delivered:
                raise
        batch = delivered[0].batch.result()
    except KeyboardInterrupt:
        patience_s = _INTERRUPTED_S
        raise
    finally:
        reader.close(patience_s)
        pool.close()
    if options.device is None:
        return batch
    feeder = DeviceFeeder(options.device, slots=1)
    try:
        return feeder.stage(batch).take()
    finally:
        feeder.close()


class DirectReader:
    """Reads the chunks that are taken, and no others unless ``ahead_bytes`` of those requested may be read before.

    Used by one thread. Blocks are kept until they are released.
    """

    needs_requests = False
    keeps_unused = False

    def __init__(self, chunks: ChunkSource, *, ahead_bytes: int) -> None:
        self._chunks = chunks
        self._ahead_bytes = ahead_bytes
        self._pool = DaemonPool("penstock-look", _THREADS)
        self._loading: dict[int, Future[Block]] = {}

    @property
    def has_room(self) -> bool:
        return self._held_bytes < self._ahead_bytes

    @property
    def _held_bytes(self) -> int:
        return sum(map(self._chunks.reserve, self._loading))

    def request(self, chunks: Sequence[int], *, at_once: bool = False) -> None:
        for chunk in chunks:
            if at_once or self.has_room:
                self._begin(chunk)

    def _begin(self, chunk: int) -> None:
        if chunk not in self._loading:
            self._loading[chunk] = self._pool.submit(self._chunks.load, chunk)

    def release(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._loading.pop(chunk, None)

    def take(self, chunks: Sequence[int]) -> Iterator[tuple[int, Block | BaseException]]:
        for place, chunk in enumerate(chunks):
            for coming in chunks[place : place + _THREADS]:
                if coming == chunk or self._held_bytes < _MOST_BYTES:
                    self._begin(coming)
            loaded: Block | BaseException
            try:
                loaded = self._loading[chunk].result()
            except Exception as exc:  # noqa: BLE001 - the caller decides how to treat a bad chunk
                loaded = exc
            yield chunk, loaded

    def close(self, patience_s: float | None) -> None:
        for loading in self._loading.values():
            loading.cancel()
        self._pool.close(patience_s)
