"""grain: ArrayRecord files, shuffled globally, read by threads in worker processes, batched there."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter
from grain.sources import ArrayRecordDataSource

from ..harness.job import Job
from ..harness.layout import Layout
from ..harness.peer_decode import SampleDecoder, collate, make_decoder
from .records import RecordCodec

_SEED = 17
_THREADS = 16  # its default
_KILL_AFTER_S = 1.0


def convert(
    samples: Iterable[dict[str, Any]], layout: Layout, folder: Path, shard_bytes: int, blocks: bool
) -> dict[str, Any]:
    """Write ArrayRecord files, uncompressed and with a record a group, as its manual advises for random access."""
    codec = RecordCodec(layout)
    names: list[str] = []
    writer, written = None, shard_bytes
    for sample in samples:
        if written >= shard_bytes:
            if writer is not None:
                writer.close()
            names.append(f"shard-{len(names):06d}.array_record")
            writer, written = ArrayRecordWriter(str(folder / names[-1]), "group_size:1,uncompressed"), 0
        record = codec.encode(sample)
        writer.write(record)  # type: ignore[union-attr]
        written += len(record)
    if writer is not None:
        writer.close()
    return {"names": names}


class _Parse:
    """A record's sample, decoded; in grain's threads."""

    def __init__(self, layout: Layout, decoder: SampleDecoder | None) -> None:
        self._codec, self._decoder = RecordCodec(layout), decoder

    def __call__(self, record: bytes) -> dict[str, Any]:
        sample = self._codec.decode(record)
        return sample if self._decoder is None else self._decoder(sample)


class _Arrays:
    """Collate to arrays, which Grain's worker processes hand over in shared memory.

    Torch's tensors would travel as file descriptors, and be lost with the worker that ends first.
    """

    def __init__(self, *, widen: bool) -> None:
        self._widen = widen

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(samples, widen=self._widen)
        return {name: each.numpy() if isinstance(each, torch.Tensor) else each for name, each in batch.items()}


def _tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in batch.items()}


class Grain:
    def __init__(self, job: Job) -> None:
        assert isinstance(job.url, str)
        self._workers, self._job = job.workers, job
        source = ArrayRecordDataSource([str(Path(job.url, name)) for name in job.shape["names"]])
        dataset = grain.MapDataset.source(source).seed(_SEED).shuffle()
        decoder = make_decoder(job.fields, job.decode, job.peer_decode)
        dataset = dataset[job.rank :: job.world_size].map(_Parse(job.fields, decoder))
        dataset = dataset.batch(job.batch_size, drop_remainder=False, batch_fn=_Arrays(widen=job.decode != "none"))
        self._batches = len(dataset)
        dataset = dataset if job.epochs == 1 else dataset.repeat()
        # Its 500 elements ahead are meant for samples; here an element is a batch.
        ahead = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_THREADS)
        batches = dataset.to_iter_dataset(ahead)
        if self._workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=self._workers))
        self._dataset = batches
        self._iterator: Any = None
        self._loaded = None if job.state is None else job.state

    def epoch(self) -> Iterator[Any]:
        """Iterate over one pass; the iterator continues over repetitions, so that its processes live on."""
        job = self._job
        if self._iterator is None:
            self._iterator = iter(self._dataset)
            if self._loaded is not None:
                state: Any = self._loaded
                self._iterator.set_state(
                    base64.b64decode(state["bytes"]) if isinstance(state, dict) and "bytes" in state else state
                )
        if job.epochs == 1:
            yield from map(_tensors, self._iterator)
            return
        for _ in range(self._batches):
            yield _tensors(next(self._iterator))

    def state(self) -> Any:
        state = self._iterator.get_state()
        if isinstance(state, bytes):
            return {"bytes": base64.b64encode(state).decode()}
        return json.loads(json.dumps(state))

    def report(self) -> dict[str, Any]:
        return {"settings": {"workers": self._workers, "threads": _THREADS, "reads": "ArrayRecord, group_size 1"}}

    def close(self) -> None:
        """Its workers wait for a reader of their last batches: for 25 s each, one after another, if it could choose."""
        with contextlib.suppress(ImportError):
            prefetch: Any = importlib.import_module("grain._src.python.dataset.transformations.process_prefetch")
            prefetch._PROCESS_KILL_TIMEOUT_S = _KILL_AFTER_S
        if self._iterator is not None:
            self._iterator.close()
        for process in multiprocessing.active_children():
            process.join()  # whose CPU time is then known


def open_contender(job: Job) -> Grain:
    return Grain(job)
