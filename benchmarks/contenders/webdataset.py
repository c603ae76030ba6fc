"""webdataset: tar shards read in sequence by DataLoader workers, shuffled in a buffer, batched in the workers.

Tars are read as they are. Samples of numbers alone, for which it has no format, become one tar member each, which is
read in the least time that its model of samples allows; "packed", a member holds many, taken apart after reading.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds

from ...loader.errors import ConfigError
from ..harness.job import Job
from ..harness.layout import Layout
from ..harness.peer_decode import collate, collate_wide, make_decoder
from ..stores.s3 import sign_urls

_BLOCK_BYTES = 1 << 20
_BUFFER = 1000  # samples that its manual's examples shuffle among
_BUFFER_ROWS = 10_000


def convert(
    samples: Iterable[dict[str, Any]], layout: Layout, folder: Path, shard_bytes: int, blocks: bool
) -> dict[str, Any]:
    """Write tar shards; numbers alone as one tar member for each sample, or, with ``blocks``, for many.

    Gives the shards' keys and the fields in such members.
    """
    numbers = all(field["kind"] == "array" for field in layout.values())
    if numbers:
        row_bytes = sum(field["mean_bytes"] for field in layout.values())
        rows = max(1, int(_BLOCK_BYTES // max(1.0, row_bytes))) if blocks else 1
        members: Iterable[dict[str, Any]] = _make_blocks(samples, list(layout), rows)
    else:
        members = ({name: _encode(value) for name, value in sample.items()} for sample in samples)
    pattern = str(folder / "shard-%06d.tar")
    with wds.ShardWriter(pattern, maxsize=shard_bytes, maxcount=1 << 40, encoder=False, verbose=0) as writer:
        for number, sample in enumerate(members):
            writer.write({"__key__": f"{number:09d}", **sample})
    keys = sorted(path.name for path in folder.glob("*.tar"))
    encoded = {name: field["kind"] for name, field in layout.items() if field["kind"] != "bytes"}
    return {"keys": keys, "rows": layout if numbers else None, "encoded": {} if numbers else encoded}


def _make_blocks(samples: Iterable[dict[str, Any]], names: list[str], rows: int) -> Iterator[dict[str, bytes]]:
    """Members of ``rows`` samples, one field after the other."""
    block: list[dict[str, Any]] = []
    for sample in samples:
        block.append(sample)
        if len(block) == rows:
            yield _make_block(block, names)
            block = []
    if block:
        yield _make_block(block, names)


def _make_block(block: list[dict[str, Any]], names: list[str]) -> dict[str, bytes]:
    return {"bin": b"".join(np.stack([each[name] for each in block]).tobytes() for name in names)}


def _encode(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray | np.generic):
        return wds.numpy_dumps(np.asarray(value))  # type: ignore[no-any-return]
    return json.dumps(value).encode()


class _Decode:
    """Turns the members that ``convert`` encoded back into values, as its users do with its decoders."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {name: self._decode(name, value) for name, value in sample.items()}

    def _decode(self, name: str, value: Any) -> Any:
        kind = self._kinds.get(name)
        if kind in ("array", "vector"):
            return np.load(io.BytesIO(value), allow_pickle=False)
        if kind == "text":
            return value.decode()
        return json.loads(value) if kind == "object" else value


class _TakeApart:
    """Yields the rows of members, as views."""

    def __init__(self, layout: Layout) -> None:
        self._names = list(layout)
        self._kinds = [
            (np.dtype((np.dtype(field["dtype"]), tuple(field["shape"]))), int(field["mean_bytes"]))
            for field in layout.values()
        ]
        self._row_bytes = sum(size for _, size in self._kinds)

    def __call__(self, members: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for member in members:
            data = member["bin"]
            rows = len(data) // self._row_bytes
            columns, start = [], 0
            for dtype, size in self._kinds:
                columns.append(np.frombuffer(data, dtype, count=rows, offset=start))
                start += rows * size
            for row in zip(*columns, strict=True):
                yield dict(zip(self._names, row, strict=True))


class WebDataset:
    def __init__(self, job: Job) -> None:
        keys, rows = job.shape["keys"], job.shape.get("rows")
        assert isinstance(job.url, str)
        urls = (
            [str(Path(job.url, key)) for key in keys]
            if "://" not in job.url
            else [f"pipe:curl -sfL --retry 3 '{url}'" for url in sign_urls(job.url, keys, job.storage_options)]
        )
        if any(url.startswith("pipe:") and url.count("'") != 2 for url in urls):
            raise ConfigError("webdataset's pipe: cannot take URLs with quotes")
        self._workers = min(job.workers, len(urls) // job.world_size)
        split = wds.split_by_node if job.world_size > 1 else wds.single_node_only
        dataset = wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False, nodesplitter=split)
        if rows is not None:
            dataset = dataset.compose(_TakeApart(rows))
        if job.shape.get("encoded"):
            dataset = dataset.map(_Decode(job.shape["encoded"]))
        dataset = dataset.shuffle(_BUFFER if rows is None else _BUFFER_ROWS)
        decoder = make_decoder(job.fields, job.decode, job.peer_decode)
        if decoder is not None:
            dataset = dataset.map(decoder)
        collation = collate if job.decode == "none" else collate_wide
        dataset = dataset.batched(job.batch_size, collation_fn=collation, partial=True)
        more = {"persistent_workers": True, "prefetch_factor": 4} if self._workers else {}
        if job.device is not None:
            more["pin_memory"] = True
        self._loader = wds.WebLoader(dataset, batch_size=None, num_workers=self._workers, **more)

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def state(self) -> Any:
        return None

    def report(self) -> dict[str, Any]:
        return {"settings": {"workers": self._workers, "reads": "tar shards, by curl where they are in S3"}}

    def close(self) -> None:
        del self._loader


def open_contender(job: Job) -> WebDataset:
    return WebDataset(job)
