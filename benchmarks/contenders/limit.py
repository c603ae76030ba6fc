"""The limit: a bare loop that reads the data set's own shards with as many threads as cores, and makes batches.

No loader: no shuffling, no positions, nothing held back for memory's sake. Shards are read whole, ahead of need by a
few, from a store by many, and taken apart by the same libraries that loaders use. The distance to it is what loaders
cost.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...loader import ImageDecoder
from ...loader.errors import ConfigError
from ...storage import open_client
from ..harness.job import Job
from ..harness.layout import image_fields

_BLOCK = 512
_REMOTE_READS = 16  # shards in flight from a store, whose requests wait more than they work


class Limit:
    def __init__(self, job: Job) -> None:
        self._job, self._threads = job, max(1, job.workers)
        self._client = open_client(str(job.url), storage_options=job.storage_options or None)
        self._parse = _parser(job)
        keys = sorted(info.key for info in self._client.list() if info.key.endswith(_SUFFIXES[job.source_format]))
        self._keys = keys[job.rank :: job.world_size]
        remote = isinstance(job.url, str) and "://" in job.url
        self._ahead = max(2 * self._threads, _REMOTE_READS if remote else 0)
        self._reads = ThreadPoolExecutor(self._ahead if remote else self._threads, "limit-read")
        self._pool = ThreadPoolExecutor(self._threads, "limit")
        self._decoders = ThreadPoolExecutor(self._threads, "limit-decode")

    def _fetch(self, key: str) -> Any:
        job = self._job
        if isinstance(job.url, str) and "://" not in job.url:
            return Path(job.url, key).read_bytes()
        return self._client.get(key)

    def epoch(self) -> Iterator[Any]:
        fetched: deque[Future[Any]] = deque()
        parsed: deque[Future[list[Any]]] = deque()
        waiting = iter(self._keys)
        while True:
            fetched.extend(
                self._reads.submit(self._fetch, key) for key in islice(waiting, self._ahead + 1 - len(fetched))
            )
            while fetched and len(parsed) <= self._threads:
                parsed.append(self._pool.submit(self._take_apart, fetched.popleft()))
            if not parsed:
                return
            yield from self._finish(parsed.popleft().result())

    def _take_apart(self, data: Future[Any]) -> list[Any]:
        return self._parse(data.result())

    def _finish(self, batches: list[Any]) -> Iterator[Any]:
        if self._job.decode != "224":
            yield from batches
            return
        [field, *_] = image_fields(self._job.fields)
        image = ImageDecoder(size=224, crop="random", flip=0.5)
        for batch in batches:
            numbered = enumerate(batch[field])
            pixels = self._decoders.map(lambda each: image(each[1], np.random.default_rng(each[0])), numbered)
            yield batch | {field: torch.from_numpy(np.stack(list(pixels)))}

    def state(self) -> Any:
        return None

    def report(self) -> dict[str, Any]:
        return {"settings": {"threads": self._threads, "reads": "whole shards, in order"}}

    def close(self) -> None:
        self._reads.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        self._decoders.shutdown(cancel_futures=True)
        self._client.close()


_SUFFIXES = {"tar": ".tar", "tokens": ".bin", "parquet": ".parquet", "jsonl": ".jsonl"}


def _parser(job: Job) -> Callable[[Any], list[Any]]:
    """The function from a shard's bytes to its batches."""
    rows = job.batch_size
    if job.source_format == "tar":
        return lambda data: _tar_batches(data, rows)
    if job.source_format == "tokens":
        [(name, field)] = job.fields.items()
        length, wide = int(field["shape"][0]), job.decode != "none"
        return lambda data: _token_batches(data, name, length, field["dtype"], rows, wide)
    if job.source_format == "parquet":
        return lambda data: _table_batches(_read_parquet(data), rows)
    if job.source_format == "jsonl":
        return lambda data: _table_batches(_read_json(data), rows)
    raise ConfigError(f"there is no bare loop for {job.source_format}")


def _tar_batches(data: Any, rows: int) -> list[dict[str, list[bytes]]]:
    """Members grouped by key, from their headers alone: plain ustar, as generated data sets are."""
    raw, at, samples = bytes(data), 0, list[dict[str, bytes]]()
    last = ""
    while at + _BLOCK <= len(raw) and raw[at]:
        name = raw[at : at + 100].split(b"\0", 1)[0].decode()
        size = int(raw[at + 124 : at + 135], 8)
        at += _BLOCK
        key, _, field = name.partition(".")
        if key != last:
            samples.append({})
            last = key
        samples[-1][field] = raw[at : at + size]
        at += -(-size // _BLOCK) * _BLOCK
    fields = list(samples[0])
    parts = (samples[start : start + rows] for start in range(0, len(samples), rows))
    return [{field: [sample[field] for sample in part] for field in fields} for part in parts]


def _token_batches(data: Any, name: str, length: int, dtype: str, rows: int, wide: bool) -> list[dict[str, Any]]:
    tokens = np.frombuffer(data, dtype).reshape(-1, length)
    parts = (tokens[start : start + rows] for start in range(0, len(tokens), rows))
    return [{name: torch.from_numpy(part.astype(np.int64) if wide else part.copy())} for part in parts]


def _read_parquet(data: Any) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_table(pa.BufferReader(pa.py_buffer(data)), use_threads=False)


def _read_json(data: Any) -> Any:
    import pyarrow.json as pj

    return pj.read_json(io.BytesIO(bytes(data)), read_options=pj.ReadOptions(use_threads=False, block_size=4 << 20))


def _table_batches(table: Any, rows: int) -> list[dict[str, Any]]:
    columns = {name: _column(table.column(name)) for name in table.column_names}
    return [
        {name: column[start : start + rows] for name, column in columns.items()}
        for start in range(0, table.num_rows, rows)
    ]


def _column(column: Any) -> Any:
    import pyarrow as pa

    whole = column.combine_chunks()
    if pa.types.is_integer(whole.type) or pa.types.is_floating(whole.type):
        return torch.from_numpy(whole.to_numpy(zero_copy_only=False).copy())
    return whole.to_pylist()


def open_contender(job: Job) -> Limit:
    return Limit(job)
