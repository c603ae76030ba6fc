"""Hugging Face datasets: Arrow files, mapped into memory where they are local, streamed where they are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from ...loader.errors import ConfigError
from ..harness.job import Job
from ..harness.layout import Layout
from ..harness.peer_decode import SampleDecoder, collate, collate_wide, make_decoder
from ..stores.s3 import aws_environment

_BUFFER = 1000
_SHARDS = 16
_PART = 4096  # samples that are objects at a time


def convert(
    samples: Iterable[dict[str, Any]], layout: Layout, folder: Path, shard_bytes: int, blocks: bool
) -> dict[str, Any]:
    """Write Arrow files with ``save_to_disk``."""
    features = datasets.Features({name: _feature(name, field) for name, field in layout.items()})
    parts, samples = [], iter(samples)
    while part := list(itertools.islice(samples, _PART)):
        parts.append(datasets.Dataset.from_list(part, features=features))
    made = datasets.concatenate_datasets(parts)
    made.save_to_disk(str(folder), num_shards=min(_SHARDS, len(made)))
    return {"names": sorted(path.name for path in folder.glob("data-*.arrow"))}


def _feature(name: str, field: dict[str, Any]) -> Any:
    if field["kind"] in ("bytes", "text"):
        return datasets.Value("binary" if field["kind"] == "bytes" else "string")
    if field["kind"] == "vector":
        return datasets.List(datasets.Value(field["dtype"]))
    if field["kind"] != "array" or len(field["shape"]) > 1:
        raise ConfigError(f"no column of datasets is used here for the values of field {name!r}")
    value = datasets.Value(field["dtype"])
    return datasets.List(value, length=field["shape"][0]) if field["shape"] else value


class _Collate:
    """Decodes and collates in the workers."""

    def __init__(self, decoder: SampleDecoder | None, collation: Callable[[Sequence[Any]], Any]) -> None:
        self._decoder, self._collation = decoder, collation

    def __call__(self, samples: Sequence[Any]) -> Any:
        return self._collation(samples if self._decoder is None else [self._decoder(sample) for sample in samples])


class HuggingFace:
    def __init__(self, job: Job) -> None:
        assert isinstance(job.url, str)
        self._job, self._epoch = job, 0
        self._remote = "://" in job.url
        self._workers = job.workers
        dataset: Any = self._open_remote() if self._remote else datasets.load_from_disk(job.url)
        dataset = dataset.with_format("torch") if _has_numbers(job.fields) else dataset
        if job.world_size > 1:
            dataset = split_dataset_by_node(dataset, rank=job.rank, world_size=job.world_size)
        self._dataset = dataset
        decoder = make_decoder(job.fields, job.decode, job.peer_decode)
        more: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if self._workers else {}
        if not self._remote:
            more["shuffle"] = True
        if job.device is not None:
            more["pin_memory"] = True
        self._loader: Any = DataLoader(
            dataset,
            batch_size=job.batch_size,
            num_workers=self._workers,
            collate_fn=_Collate(decoder, collate if job.decode == "none" else collate_wide),
            **more,
        )

    def _open_remote(self) -> Any:
        job = self._job
        known = aws_environment(job.storage_options)
        options = {
            "key": known.get("AWS_ACCESS_KEY_ID"),
            "secret": known.get("AWS_SECRET_ACCESS_KEY"),
            "client_kwargs": {"region_name": known.get("AWS_DEFAULT_REGION", "us-east-1")},
        }
        if "AWS_ENDPOINT_URL" in known:
            options["endpoint_url"] = known["AWS_ENDPOINT_URL"]
        files = [f"{job.url}/{name}" for name in job.shape["names"]]
        assert isinstance(job.url, str)
        assert urlsplit(job.url).scheme == "s3"
        dataset: Any = datasets.load_dataset(
            "arrow", data_files=files, split="train", streaming=True, storage_options=options, cache_dir=job.scratch
        )
        self._workers = min(self._workers, len(files))
        return dataset.shuffle(seed=17, buffer_size=_BUFFER)

    def epoch(self) -> Iterator[Any]:
        if self._remote:
            self._dataset.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._loader)

    def state(self) -> Any:
        return None

    def report(self) -> dict[str, Any]:
        reads = "Arrow streamed by s3fs" if self._remote else "Arrow mapped into memory"
        return {"settings": {"workers": self._workers, "reads": reads}}

    def close(self) -> None:
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        del self._loader


def _has_numbers(layout: Layout) -> bool:
    return any(field["kind"] in ("array", "vector") for field in layout.values())


def open_contender(job: Job) -> HuggingFace:
    return HuggingFace(job)
