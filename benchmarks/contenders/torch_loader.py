"""torch's DataLoader over one memory-mapped file of records: the map-style data set that its manual describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..harness.job import Job
from ..harness.layout import Layout
from ..harness.peer_decode import SampleDecoder, collate, collate_wide, make_decoder
from .records import RecordCodec

_RECORDS, _OFFSETS = "records.bin", "offsets.npy"


def convert(
    samples: Iterable[dict[str, Any]], layout: Layout, folder: Path, shard_bytes: int, blocks: bool
) -> dict[str, Any]:
    """Write all records after one another, and where each begins."""
    codec, offsets, at = RecordCodec(layout), [0], 0
    with folder.joinpath(_RECORDS).open("wb") as file:
        for sample in samples:
            at += file.write(codec.encode(sample))
            offsets.append(at)
    np.save(folder / _OFFSETS, np.array(offsets, np.int64))
    return {}


class _Records(Dataset[dict[str, Any]]):
    """Samples by number, or a batch of them by its numbers, which torch asks for where it can."""

    def __init__(self, folder: Path, layout: Layout, decoder: SampleDecoder | None) -> None:
        self._bytes: Any = np.memmap(folder / _RECORDS, np.uint8, "r")
        self._offsets = np.load(folder / _OFFSETS, allow_pickle=False)
        self._codec = RecordCodec(layout)
        self._decoder = decoder

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        start, stop = self._offsets[number : number + 2].tolist()
        sample = self._codec.decode(self._bytes[start:stop].data)
        return sample if self._decoder is None else self._decoder(sample)

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [self[number] for number in numbers]


class TorchLoader:
    def __init__(self, job: Job) -> None:
        assert isinstance(job.url, str)
        self._workers, self._epoch = job.workers, 0
        dataset = _Records(Path(job.url), job.fields, make_decoder(job.fields, job.decode, job.peer_decode))
        self._sampler: DistributedSampler[Any] | None = None
        if job.world_size > 1:
            self._sampler = DistributedSampler(dataset, num_replicas=job.world_size, rank=job.rank, shuffle=True)
        more: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if self._workers else {}
        if job.device is not None:
            more["pin_memory"] = True
        self._loader = DataLoader(
            dataset,
            batch_size=job.batch_size,
            shuffle=self._sampler is None,
            sampler=self._sampler,
            num_workers=self._workers,
            collate_fn=collate if job.decode == "none" else collate_wide,
            **more,
        )

    def epoch(self) -> Iterator[Any]:
        if self._sampler is not None:
            self._sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._loader)

    def state(self) -> Any:
        return None

    def report(self) -> dict[str, Any]:
        return {"settings": {"workers": self._workers, "reads": "records in one memory-mapped file"}}

    def close(self) -> None:
        iterator: Any = self._loader._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        del self._loader


def open_contender(job: Job) -> TorchLoader:
    return TorchLoader(job)
