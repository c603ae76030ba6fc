"""Places of data sets: a folder, or a real S3 server behind a proxy that spoils some of its answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.benchmarks.stores.server import make_bucket, serve_s3
from penstock.loader import Manifest, open_manifest
from penstock.loader.reading.checksum import sum_chunks
from penstock.storage import open_store

from ..faults.faults import Answer, Corrupt, Delay, Drip, Fault, Reset, Silence, Truncate
from ..faults.proxy import FaultProxy, Request
from .data import Known, write_known

_SHARES = (0.0, 0.02, 0.1, 0.25)  # of answers that are spoiled
_STARTS = (0, 1, 100, 10_000, 300_000, 1_000_000)  # bytes of a body before it is


class Place:
    """A folder of data sets."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.known = {name: write_known(name, folder) for name in names}
        self._folder = folder

    def arguments(self, known: Known, draw: random.Random) -> dict[str, Any]:
        """The loader's ``source``, and what goes with it."""
        return {"source": str(self._folder / known.name), "format": known.shard_format}


class Bucket(Place):
    """The same data sets in a bucket, with checksums, since a path may damage what it carries."""

    def __init__(self, folder: Path, names: Sequence[str], options: Mapping[str, str], proxy: FaultProxy) -> None:
        super().__init__(folder, names)
        self._options = {**options, "endpoint": proxy.url}
        self._proxy = proxy
        bucket = f"penstock-reuse-{uuid4().hex[:8]}"
        make_bucket(bucket, options)
        store = open_store(f"s3://{bucket}", storage_options=options)
        for name in names:
            for path in sorted((folder / name).iterdir()):
                store.put(f"{name}/{path.name}", path.read_bytes())
        store.close()
        self._manifests = {name: self._index(f"s3://{bucket}/{name}", self.known[name]) for name in names}

    def _index(self, url: str, known: Known) -> Manifest:
        given: dict[str, Any] = {"storage_options": self._options, "progress": False}
        return sum_chunks(open_manifest(url, format=known.shard_format, **given), **given)

    def arguments(self, known: Known, draw: random.Random) -> dict[str, Any]:
        self._proxy.choose(_Spoiler(draw.choice(_SHARES), random.Random(draw.random())))
        options: dict[str, Any] = dict(self._options)
        if draw.random() < 0.2:
            options["direct_reads"] = False
        if draw.random() < 0.5:
            options["read_timeout"] = "1s"
        return {"source": self._manifests[known.name], "storage_options": options}


class _Spoiler:
    """Chooses what is wrong with answers to GETs."""

    def __init__(self, share: float, draw: random.Random) -> None:
        self._share, self._draw = share, draw

    def __call__(self, request: Request) -> Fault | None:
        draw = self._draw
        if request.method != "GET" or draw.random() >= self._share:
            return None
        start = draw.choice(_STARTS)
        faults = [
            Answer(status=503),
            Corrupt(after_bytes=start),
            Delay(seconds=2 * draw.random()),
            Drip(after_bytes=start, bytes_per_s=400_000),
            Reset(after_bytes=start),
            Truncate(after_bytes=start),
            Silence(after_bytes=start) if draw.random() < 0.2 else Truncate(after_bytes=start),
        ]
        return draw.choice(faults)


@contextmanager
def open_place(folder: Path, names: Sequence[str], *, is_s3: bool) -> Iterator[Place]:
    """The folder itself, or the server, which is started if the environment names none."""
    if not is_s3:
        yield Place(folder, names)
        return
    with serve_s3(plain_http=True) as options, FaultProxy(options["endpoint"]) as proxy:
        yield Bucket(folder, names, options, proxy)
