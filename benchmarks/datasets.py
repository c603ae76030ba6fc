"""Generated data sets for the four cases that loaders are compared on: raw images, tokens, click-log rows, images.

The same bytes for the same size every time. What is compressed compresses as real data does: pictures are smoothed
noise at several scales, categories of the click log follow a power law.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..loader.errors import ConfigError
from ..loader.tools.pack import pack
from ..storage import open_store
from .job import Decode, PeerLayout

_DISTINCT = 400  # pictures; a data set repeats them, and nothing in its way could profit from that
_SEQ_LEN = 2048
_ROWS_IN_SHARD, _ROWS_IN_GROUP = 62_500, 62_500
_DENSE, _CATEGORIES = 13, 26


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: a data set of ``samples`` at scale 1, how it is read, and the ratio to the best peer to reach.

    Cases of one ``data`` share a data set.
    """

    name: str
    title: str
    samples: int
    batch_size: int
    decode: Decode
    target: float
    write: Callable[[str, int], None]
    data: str
    peer_layout: PeerLayout = "plain"


def write_thumbnails(folder: str, samples: int) -> None:
    """Tar shards of JPEGs of about 10 KB, each with a class."""
    pictures = make_pictures(_DISTINCT, 160, 208, quality=84)
    shard_bytes = _shard_bytes(samples * sum(map(len, pictures)) // len(pictures))
    pack(_labelled(pictures, samples), folder, format="tar", shard_bytes=shard_bytes, progress=False)


def write_photos(folder: str, samples: int) -> None:
    """Tar shards of JPEGs of about 500 x 375 pixels, each with a class."""
    pictures = make_pictures(_DISTINCT, 375, 500, quality=90)
    shard_bytes = _shard_bytes(samples * sum(map(len, pictures)) // len(pictures))
    pack(_labelled(pictures, samples), folder, format="tar", shard_bytes=shard_bytes, progress=False)


def _shard_bytes(total: int) -> int:
    """At least 16 shards, so that even small data sets have a shard for each worker of a peer; none above 64 MiB."""
    return max(1 << 18, min(64 << 20, total // 16))


def _labelled(pictures: list[bytes], samples: int) -> Iterator[dict[str, Any]]:
    for i in range(samples):
        yield {"__key__": f"{i:09d}", "jpg": pictures[i % len(pictures)], "cls": i % 1000}


def make_pictures(count: int, height: int, width: int, *, quality: int) -> list[bytes]:
    """JPEGs whose spectrum falls off like a photograph's, some in portrait and some in landscape format.

    Raises:
        ConfigError: OpenCV is not installed.
    """
    try:
        import cv2
    except ImportError as exc:
        raise ConfigError("generating images needs OpenCV; pip install 'penstock[images]'") from exc
    rng = np.random.default_rng(0)
    encoded = []
    for number in range(count):
        tall, wide = (width, height) if number % 4 == 3 else (height, width)
        pixels = np.zeros((tall, wide, 3), np.float32)
        for scale in (2, 4, 8, 16, 32, 64):
            noise = rng.standard_normal((-(-tall // scale) + 1, -(-wide // scale) + 1, 3)).astype(np.float32)
            pixels += cv2.resize(noise, (wide, tall), interpolation=cv2.INTER_CUBIC) * scale**0.8
        pixels = 128 + 48 * (pixels - pixels.mean()) / pixels.std()
        _, data = cv2.imencode(".jpg", np.clip(pixels, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, quality])
        encoded.append(data.tobytes())
    return encoded


def write_tokens(folder: str, samples: int) -> None:
    """Token files of sequences of 2,048 uint16."""
    rng = np.random.default_rng(0)
    sequences: Any = (rng.integers(0, 50_257, _SEQ_LEN, dtype=np.uint16) for _ in range(samples))
    shard_bytes = _shard_bytes(samples * _SEQ_LEN * 2)
    pack(sequences, folder, format="tokens", seq_len=_SEQ_LEN, shard_bytes=shard_bytes, progress=False)


def write_clicks(folder: str, samples: int) -> None:
    """Parquet files of a label, 13 float32 and 26 int32 categories, in row groups of about 10 MB, snappy."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    store = open_store(folder)
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, samples, _ROWS_IN_SHARD)):
        rows = min(_ROWS_IN_SHARD, samples - start)
        columns: dict[str, Any] = {"label": rng.integers(0, 2, rows, dtype=np.int32)}
        for i in range(_DENSE):
            columns[f"dense_{i}"] = rng.lognormal(size=rows).astype(np.float32)
        for i in range(_CATEGORIES):
            columns[f"category_{i}"] = (rng.zipf(1.3, rows) % (1 << 24)).astype(np.int32)
        file = io.BytesIO()
        pq.write_table(pa.table(columns), file, row_group_size=_ROWS_IN_GROUP, compression="snappy")
        store.put(f"clicks-{number:05d}.parquet", file.getvalue())


CASES = {
    case.name: case
    for case in (
        Case(
            name="raw",
            title="small JPEGs, raw bytes",
            samples=100_000,
            batch_size=256,
            decode="none",
            target=2.0,
            write=write_thumbnails,
            data="thumbnails",
        ),
        Case(
            name="tokens",
            title="tokens, 2,048 a sample",
            samples=160_000,
            batch_size=64,
            decode="none",
            target=3.0,
            write=write_tokens,
            data="tokens",
        ),
        Case(
            name="rows",
            title="click-log rows, parquet",
            samples=1_000_000,
            batch_size=2048,
            decode="none",
            target=20.0,
            write=write_clicks,
            data="clicks",
        ),
        Case(
            name="rows-packed",
            title="the same, packed by hand for peers",
            samples=1_000_000,
            batch_size=2048,
            decode="none",
            target=1.0,
            write=write_clicks,
            data="clicks",
            peer_layout="packed",
        ),
        Case(
            name="images",
            title="photos, decoded to 224 px",
            samples=12_000,
            batch_size=64,
            decode="224",
            target=1.0,
            write=write_photos,
            data="photos",
        ),
    )
}


def make_case(case: Case, root: Path, scale: float) -> Path:
    """The folder of a case's data set at a given scale; generated if it does not exist."""
    samples = max(64, int(case.samples * scale))
    folder = root / f"{case.data}-{samples}"
    done = folder.with_suffix(".done")
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        case.write(str(folder), samples)
        done.touch()
    return folder
