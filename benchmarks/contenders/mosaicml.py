"""mosaicml-streaming: MDS shards, downloaded to the local disk as they are needed, read by DataLoader workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ...loader.errors import ConfigError
from ..harness.job import Job
from ..harness.layout import Layout
from ..harness.peer_decode import SampleDecoder, collate, collate_wide, make_decoder
from ..stores.s3 import aws_environment

# Its ready-made vision data sets import torchvision, which fails where that was built for another torch. Unused here.
sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402


def convert(
    samples: Iterable[dict[str, Any]], layout: Layout, folder: Path, shard_bytes: int, blocks: bool
) -> dict[str, Any]:
    """Write MDS shards without compression, which would only cost time."""
    columns = {name: _encoding(name, field) for name, field in layout.items()}
    with MDSWriter(out=str(folder), columns=columns, size_limit=shard_bytes) as writer:
        for sample in samples:
            writer.write(sample)
    return {"columns": columns}


def _encoding(name: str, field: dict[str, Any]) -> str:
    if field["kind"] == "array":
        shape = ",".join(map(str, field["shape"]))
        return f"ndarray:{field['dtype']}:{shape}" if shape else str(field["dtype"])
    if field["kind"] == "vector":
        return f"ndarray:{field['dtype']}"
    kinds = {"bytes": "bytes", "text": "str"}
    if field["kind"] not in kinds:
        raise ConfigError(f"MDS has no column type for the values of field {name!r}: {', '.join(field['types'])}")
    return kinds[field["kind"]]


class _Dataset(StreamingDataset):
    """mosaicml-streaming transforms samples by overriding ``__getitem__``."""

    decoder: SampleDecoder | None = None

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return sample if self.decoder is None else self.decoder(sample)


class Mosaicml:
    def __init__(self, job: Job) -> None:
        assert isinstance(job.url, str)
        self._workers = job.workers
        place: dict[str, Any] = {"local": job.url}
        if "://" in job.url:
            environment = aws_environment(job.storage_options)
            os.environ.update(environment)
            if "AWS_ENDPOINT_URL" in environment:
                os.environ["S3_ENDPOINT_URL"] = environment["AWS_ENDPOINT_URL"]
            place = {"remote": job.url, "local": str(Path(job.scratch, "mds"))}
        dataset = _Dataset(**place, shuffle=True, batch_size=job.batch_size, num_canonical_nodes=1)
        dataset.decoder = make_decoder(job.fields, job.decode, job.peer_decode)
        more = {"persistent_workers": True, "prefetch_factor": 4} if self._workers else {}
        if job.device is not None:
            more["pin_memory"] = True
        self._loader = StreamingDataLoader(
            dataset,
            batch_size=job.batch_size,
            num_workers=self._workers,
            collate_fn=collate if job.decode == "none" else collate_wide,
            drop_last=False,
            **more,
        )
        if job.state is not None:
            self._loader.load_state_dict(job.state)

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def state(self) -> Any:
        return _plain(self._loader.state_dict())

    def report(self) -> dict[str, Any]:
        return {"settings": {"workers": self._workers, "shuffle_algo": "py1e", "reads": "MDS shards, uncompressed"}}

    def close(self) -> None:
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()
        del self._loader


def _plain(state: Any) -> Any:
    """The state with Python numbers in place of numpy's, for JSON."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.item() if isinstance(state, np.generic) else state


def open_contender(job: Job) -> Mosaicml:
    return Mosaicml(job)
