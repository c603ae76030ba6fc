"""spdl: a pipeline of threads that reads whole shards, takes them apart and batches what is inside.

It has no format of its own: samples are tar members, and numbers alone are one array a field and shard.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import spdl.io
import torch
from spdl.pipeline import PipelineBuilder

from ...loader.errors import ConfigError
from ...storage import open_store
from ..harness.job import Job
from ..harness.layout import Layout
from ..harness.peer_decode import SampleDecoder, collate, collate_wide, make_decoder

_READS = 8  # shards in flight
_LIKE_RAW = ("bytes", "text", "array")


def convert(
    samples: Iterable[dict[str, Any]], layout: Layout, folder: Path, shard_bytes: int, blocks: bool
) -> dict[str, Any]:
    """Write tar shards, a member a field; of numbers alone a .npy file a field and shard instead."""
    unfit = [name for name, field in layout.items() if field["kind"] not in _LIKE_RAW]
    if unfit:
        raise ConfigError(f"tar members are bytes, text and numbers here, and not the values of the fields {unfit}")
    numbers = all(field["kind"] == "array" for field in layout.values())
    write = _write_arrays if numbers else _write_tar
    names: list[list[str]] = []
    part: list[dict[str, Any]] = []
    row_bytes = 1 + sum(field["mean_bytes"] for field in layout.values())
    for sample in samples:
        part.append(sample)
        if len(part) * row_bytes >= shard_bytes:
            names.append(write(part, layout, folder, len(names)))
            part = []
    if part:
        names.append(write(part, layout, folder, len(names)))
    return {"names": names, "numbers": numbers}


def _write_arrays(part: list[dict[str, Any]], layout: Layout, folder: Path, number: int) -> list[str]:
    names = [f"shard-{number:06d}.{place}.npy" for place in range(len(layout))]
    for name, (field, of) in zip(names, layout.items(), strict=True):
        np.save(folder / name, np.stack([sample[field] for sample in part]).astype(of["dtype"]))
    return names


def _write_tar(part: list[dict[str, Any]], layout: Layout, folder: Path, number: int) -> list[str]:
    name = f"shard-{number:06d}.tar"
    with tarfile.open(folder / name, "w", format=tarfile.USTAR_FORMAT) as tar:
        for place, sample in enumerate(part):
            for field, value in sample.items():
                if value is None or field not in layout:
                    continue
                data = value.encode() if isinstance(value, str) else value
                data = data if isinstance(data, bytes) else np.asarray(data, layout[field]["dtype"]).tobytes()
                member = tarfile.TarInfo(f"{place:09d}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return [name]


class _TakeApart:
    """Yields a shard's samples in shuffled batches, not yet decoded."""

    def __init__(self, job: Job) -> None:
        self._layout, self._rows, self._rng = job.fields, job.batch_size, np.random.default_rng(17)
        self._is_numbers = job.shape["numbers"]

    def __call__(self, parts: list[bytes]) -> Iterator[Any]:
        if self._is_numbers:
            columns = [spdl.io.load_npy(part) for part in parts]
            order = self._rng.permutation(len(columns[0]))
            for start in range(0, len(order), self._rows):
                rows = order[start : start + self._rows]
                yield dict(zip(self._layout, (column[rows] for column in columns), strict=True))
            return
        samples: dict[str, dict[str, Any]] = {}
        for name, view in spdl.io.iter_tarfile(parts[0]):
            key, _, field = name.partition(".")
            samples.setdefault(key, {})[field] = view
        listed = list(samples.values())
        order = self._rng.permutation(len(listed))
        for start in range(0, len(order), self._rows):
            yield [listed[row] for row in order[start : start + self._rows]]


class _Finish:
    """Turns what a shard gave into a batch, decoded."""

    def __init__(self, job: Job) -> None:
        self._decoder: SampleDecoder | None = make_decoder(job.fields, job.decode, job.peer_decode)
        self._collate: Callable[[Any], Any] = collate if job.decode == "none" else collate_wide
        self._layout = job.fields
        self._widen = job.decode != "none"
        self._take: Callable[[memoryview], Any] = memoryview if job.contender == "spdl-view" else bytes

    def __call__(self, rows: Any) -> Any:
        if isinstance(rows, dict):
            return {name: self._tensor(column) for name, column in rows.items()}
        samples = [self._values(row) for row in rows]
        return self._collate(samples if self._decoder is None else [self._decoder(sample) for sample in samples])

    def _tensor(self, column: Any) -> torch.Tensor:
        tensor = torch.from_numpy(column)
        wide = self._widen and tensor.dtype in (torch.uint16, torch.uint32)
        return tensor.to(torch.int64) if wide else tensor

    def _values(self, row: Mapping[str, memoryview]) -> dict[str, Any]:
        return {name: self._value(row.get(name), field) for name, field in self._layout.items()}

    def _value(self, view: memoryview | None, field: Mapping[str, Any]) -> Any:
        if view is None:
            return None
        if field["kind"] == "array":
            values = np.frombuffer(view, field["dtype"])
            return values.reshape(field["shape"]) if field["shape"] else values[0]
        return str(view, "utf-8") if field["kind"] == "text" else self._take(view)


class Spdl:
    def __init__(self, job: Job) -> None:
        assert isinstance(job.url, str)
        self._job, self._epoch = job, 0
        self._store = open_store(job.url, storage_options=job.storage_options or None) if "://" in job.url else None
        self._names = job.shape["names"][job.rank :: job.world_size]
        self._threads = max(1, job.workers)
        self._pipeline: Any = None

    def _read(self, names: list[str]) -> list[bytes]:
        if self._store is not None:
            return [bytes(self._store.get(name)) for name in names]
        return [Path(str(self._job.url), name).read_bytes() for name in names]

    def epoch(self) -> Iterator[Any]:
        order = np.random.default_rng(self._epoch).permutation(len(self._names))
        self._epoch += 1
        self._pipeline = (
            PipelineBuilder()
            .add_source([self._names[place] for place in order])
            .pipe(self._read, concurrency=_READS if self._store is not None else 2)
            .pipe(_TakeApart(self._job), concurrency=2)
            .pipe(_Finish(self._job), concurrency=self._threads)
            .add_sink(4)
            .build(num_threads=self._threads + _READS)
        )
        with self._pipeline.auto_stop():
            yield from self._pipeline.get_iterator()

    def state(self) -> Any:
        return None

    def report(self) -> dict[str, Any]:
        reads = "arrays of a shard" if self._job.shape["numbers"] else "tar shards by iter_tarfile"
        return {"settings": {"threads": self._threads, "reads": reads}}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def open_contender(job: Job) -> Spdl:
    return Spdl(job)
