"""litdata: its own optimized chunks, mapped into memory where they are local, fetched ahead where they are not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")  # it would ask the package index at every start

from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming import downloader
from litdata.streaming.cache import Cache

from ...loader.errors import ConfigError
from ..harness.job import Job
from ..harness.layout import Layout
from ..harness.peer_decode import collate, collate_wide, make_decoder
from ..stores.s3 import aws_environment


def convert(
    samples: Iterable[dict[str, Any]], layout: Layout, folder: Path, shard_bytes: int, blocks: bool
) -> dict[str, Any]:
    """Write optimized chunks: of token sequences by its loader for tokens, of anything else as trees of values."""
    unfit = [name for name, field in layout.items() if field["kind"] == "object"]
    if unfit:
        raise ConfigError(f"litdata's chunks cannot hold the values of the fields {unfit}")
    block = _token_block(layout)
    loader = None if block is None else TokensLoader(block_size=block)
    cache = Cache(str(folder), chunk_bytes=shard_bytes, item_loader=loader)
    [name] = list(layout) if block is not None else [""]
    for number, sample in enumerate(samples):
        cache._add_item(number, sample if block is None else np.ascontiguousarray(sample[name]))
    cache.done()
    cache.merge()
    return {"block": block, "field": name}


def _token_block(layout: Layout) -> int | None:
    """The length of the token sequences, where these are all that a sample is."""
    if len(layout) != 1:
        return None
    [field] = layout.values()
    is_tokens = field["kind"] == "array" and len(field["shape"]) == 1 and np.dtype(field["dtype"]).kind in "iu"
    return int(field["shape"][0]) if is_tokens else None


class _Naming:
    """Its loader for tokens gives bare sequences; ours and the others name the field."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, value: Any) -> dict[str, Any]:
        return {self._name: value}


class Litdata:
    def __init__(self, job: Job) -> None:
        assert isinstance(job.url, str)
        self._workers = job.workers
        remote = "://" in job.url
        block = job.shape["block"]
        decoder: Any = make_decoder(job.fields, job.decode, job.peer_decode)
        if block is not None:
            decoder = _Naming(job.shape["field"])
        dataset = StreamingDataset(
            job.url,
            cache_dir=str(Path(job.scratch, "chunks")) if remote else None,
            item_loader=None if block is None else TokensLoader(block_size=block),
            shuffle=True,
            drop_last=False,
            storage_options=_storage_options(job.storage_options) if remote else None,
            max_pre_download=4,
            transform=decoder,
            force_override_state_dict=True,  # each run has a cache folder of its own, which states name
        )
        more = {"persistent_workers": True, "prefetch_factor": 4} if self._workers else {}
        if job.device is not None:
            more["pin_memory"] = True
        self._loader = StreamingDataLoader(
            dataset,
            batch_size=job.batch_size,
            num_workers=self._workers,
            collate_fn=collate if job.decode == "none" else collate_wide,
            **more,
        )
        if job.state is not None:
            self._loader.load_state_dict(job.state)

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def report(self) -> dict[str, Any]:
        return {"settings": {"workers": self._workers, "max_pre_download": 4, "reads": "optimized chunks"}}

    def close(self) -> None:
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        del self._loader


_WORDS = {
    "aws_access_key_id": "AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "aws_session_token": "AWS_SESSION_TOKEN",
    "endpoint_url": "AWS_ENDPOINT_URL",
}


def _storage_options(options: dict[str, str]) -> dict[str, str]:
    environment = aws_environment(options)
    os.environ.update(environment)
    if environment.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        # Its faster client, obstore, is built with these options alone, which refuse a test server without TLS.
        cast(dict[str, Any], downloader._OBSTORE_CLIENT_OPTIONS)["allow_http"] = True
    return {word: environment[name] for word, name in _WORDS.items() if name in environment}


def open_contender(job: Job) -> Litdata:
    return Litdata(job)
