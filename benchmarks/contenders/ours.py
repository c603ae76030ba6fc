"""penstock's own loader, as its users call it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...loader import ByteViews, DecodeChoice, DistributedDataLoader
from ...loader.dataset.index import open_manifest
from ...loader.dataset.manifest import Manifest
from ...loader.formats.detect import make_format
from ...loader.formats.shard import ShardFormat
from ..harness.job import Job
from ..harness.layout import image_fields
from . import GATHER, UNCHECKED, WITHOUT_OBJECTS


class Ours:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._loader = DistributedDataLoader(
            _without_checksums(job) if job.contender == UNCHECKED else job.url,
            batch_size=job.batch_size,
            last_batch="partial",
            decode=choose_decode(job),
            raw="view" if job.contender in WITHOUT_OBJECTS else "bytes",
            threads=job.workers or "auto",
            cache_dir=job.cache_dir,
            storage_options=_storage_options(job) or None,
            format=None if job.contender == UNCHECKED else _format(job),
            device=job.device,
            rank=job.rank,
            world_size=job.world_size,
        )
        if job.state is not None:
            self._loader.load_state_dict(job.state)

    def epoch(self) -> Iterator[Any]:
        return map(_gather, self._loader) if self._job.contender == GATHER else iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def report(self) -> dict[str, Any]:
        metrics = self._loader.metrics().to_dict()
        order = self._loader.order
        return {
            "settings": {"threads": self._job.workers or "auto", "lanes": order.lanes, "window": order.window},
            "bottleneck": metrics.pop("bottleneck"),
            "stages": metrics,
        }

    def close(self) -> None:
        self._loader.close()


def _format(job: Job) -> ShardFormat | None:
    return None if job.format is None else make_format(job.format, job.format_config)


def _without_checksums(job: Job) -> Manifest:
    """The data set as ``penstock index --no-checksums`` leaves it."""
    manifest = open_manifest(job.url, storage_options=job.storage_options or None, format=_format(job))
    return replace(manifest, checksums=None, parts=None)


def _storage_options(job: Job) -> dict[str, Any]:
    """Add the option that maps local files, for users who ask for views, as other loaders map theirs."""
    maps = job.contender in WITHOUT_OBJECTS and isinstance(job.url, str) and "://" not in job.url
    return {**job.storage_options, **({"mapped_reads": "views"} if maps else {})}


def _gather(batch: Any) -> dict[str, Any]:
    """Take the batch as users do who want tensors: all bytes of a field in one, and the start of each value."""
    return {name: values.gather() if isinstance(values, ByteViews) else values for name, values in batch.items()}


def choose_decode(job: Job) -> DecodeChoice:
    """The loader's ``decode=`` for the tool's ``--decode``."""
    if job.decode == "none":
        return None
    if job.decode == "auto":
        return "auto"
    from ...loader import ImageDecoder

    image = ImageDecoder(size=224, crop="random", flip=0.5)
    return dict.fromkeys(image_fields(job.fields), image)


def open_contender(job: Job) -> Ours:
    return Ours(job)
